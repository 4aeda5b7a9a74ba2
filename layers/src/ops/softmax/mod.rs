//! Softmax, log-softmax, softmin and quiet softmax.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)` along one axis, `f` a [`Softmax`] |
//! | keeps | `y` (a handle) |
//! | backward | `dx = y (dy - sum(y dy))`; for a log-softmax `dx = dy - exp(y) sum(dy)`; in place |
//!
//! Stock Burn records up to eight small operations, which keep several tensors of the size of `x`.
use crate::backend::device_backends;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{Backend, TensorMetadata, get_or_init_device_settings, tensor::FloatTensor};

#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(super) mod cpu;

/// A function along one axis; each variant is the function of the same name in [`burn::tensor::activation`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Softmax {
    /// `exp(x) / sum(exp(x))`
    Softmax,
    /// `x - log(sum(exp(x)))`
    LogSoftmax,
    /// `exp(-x) / sum(exp(-x))`
    Softmin,
    /// `exp(x) / (1 + sum(exp(x)))`
    QuietSoftmax,
}

extension! {
    /// Softmaxes.
    pub trait SoftmaxOps(SoftmaxKernels) {
        /// `f(x)` along axis `dim`.
        fn memsave_softmax(x: FloatTensor<Self>, f: Softmax, dim: usize) -> FloatTensor<Self> {
            Self::run(Along { f, dim }, [Some(x)])
        }
    }
}

const X: usize = 0;

/// A softmax along an axis.
#[derive(Clone, Copy, Debug)]
pub struct Along {
    f: Softmax,
    dim: usize,
}

impl<B: SoftmaxKernels> Operation<B, 1> for Along {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = SavedSoftmax<FloatTensor<B>>;

    fn name(&self) -> &'static str {
        match self.f {
            Softmax::Softmax => "softmax",
            Softmax::LogSoftmax => "log_softmax",
            Softmax::Softmin => "softmin",
            Softmax::QuietSoftmax => "quiet_softmax",
        }
    }

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing()
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::softmax_along(given(x), self.f, self.dim)
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self::Saved) {
        let y = Operation::<B, 1>::forward(self, inputs);
        let kept = recorder.report().tensor("y", y.clone(), "x is tracked");
        (y, SavedSoftmax { y: kept, along: *self })
    }

    fn backward(SavedSoftmax { y, along }: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        pass.give(X, B::softmax_along_backward(y, along.f, along.dim, dy));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct SavedSoftmax<T> {
    /// The output.
    y: T,
    along: Along,
}

/// The kernels.
pub trait SoftmaxKernels: Backend {
    /// `f(x)` along axis `dim`; in place if `x` is the only handle of its tensor.
    fn softmax_along(x: FloatTensor<Self>, f: Softmax, dim: usize) -> FloatTensor<Self> {
        match f {
            Softmax::Softmax => Self::softmax(x, dim),
            Softmax::LogSoftmax => Self::log_softmax(x, dim),
            Softmax::Softmin => Self::softmin(x, dim),
            Softmax::QuietSoftmax => {
                let max = Self::float_max_dim(x.clone(), dim);
                // A row without a finite element gives zeros, not NaN.
                let bools = get_or_init_device_settings::<Self>(&x.device()).bool_dtype;
                let masked = Self::float_equal_elem(max.clone(), f32::NEG_INFINITY.into(), bools);
                let max = Self::float_mask_fill(max, masked, 0.into());
                let exp = Self::float_exp(Self::float_sub(x, max.clone()));
                let sum = Self::float_sum_dim(exp.clone(), dim);
                Self::float_div(exp, Self::float_add(sum, Self::float_exp(Self::float_neg(max))))
            }
        }
    }

    /// Gradient of the input of [`softmax_along`](Self::softmax_along), from its output.
    fn softmax_along_backward(
        y: FloatTensor<Self>,
        f: Softmax,
        dim: usize,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        if f == Softmax::LogSoftmax {
            let sum = Self::float_sum_dim(dy.clone(), dim);
            return Self::float_sub(dy, Self::float_mul(Self::float_exp(y), sum));
        }
        let sum = Self::float_sum_dim(Self::float_mul(y.clone(), dy.clone()), dim);
        let dx = Self::float_mul(y, Self::float_sub(dy, sum));
        if f == Softmax::Softmin { Self::float_neg(dx) } else { dx }
    }
}
device_backends!(SoftmaxKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    #[test]
    fn default_bodies_equal_the_kernels() {
        for f in [Softmax::Softmax, Softmax::LogSoftmax, Softmax::Softmin, Softmax::QuietSoftmax] {
            for dim in 0..3 {
                let x = Flex::float_mul_scalar(random(&[4, 5, 19]), 3.0.into());
                let (y, dy) = (Flex::softmax_along(x.clone(), f, dim), random(&[4, 5, 19]));
                assert_close("y", Composed::softmax_along(composed(&x), f, dim), y.clone());
                let body = Composed::softmax_along_backward(composed(&y), f, dim, composed(&dy));
                assert_close("dx", body, Flex::softmax_along_backward(y, f, dim, dy));
            }
        }
    }
}
