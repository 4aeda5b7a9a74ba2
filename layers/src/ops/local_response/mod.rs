//! Local response normalization, over a window of channels.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x / s^beta`, `s = k + alpha / size * sum(x^2)` over the window of the channel |
//! | keeps | `x` (a handle) |
//! | backward | `dx = dy / s^beta - 2 alpha beta / size * x * sum(dy x / s^(beta + 1))`, summed over the windows with the channel |
//!
//! The backward pass recomputes the sums. The output is offered for [recomputation](crate::graph), so that the next layer need not keep it.
//!
//! Stock Burn records ten operations, which keep four tensors of the size of `x`.
use crate::backend::{composing_backends, widen};
use crate::burn_next::avg_pool;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{Backend, TensorMetadata, ops::PadMode, tensor::FloatTensor};
use burn::tensor::Shape;

#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(super) mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

/// A local response normalization: `x / (k + alpha / size * sum(x^2))^beta`, the sum over a window of channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalResponse {
    /// Channels in the window, at least one. Those beyond the first and the last channel count as zeros.
    pub size: usize,
    /// Scale of the mean square.
    pub alpha: f64,
    /// Exponent.
    pub beta: f64,
    /// Added to the scaled mean square.
    pub k: f64,
}

impl LocalResponse {
    /// How many channels of the window come before the channel at its center, and how many after.
    pub fn reach(&self) -> [usize; 2] {
        [(self.size - 1) / 2, self.size / 2]
    }
}

extension! {
    /// Local response normalization.
    pub trait LocalResponseOps(LocalResponseKernels) {
        /// `x`, `[batch, channels, ...]`, as `norm` says.
        fn memsave_local_response(x: FloatTensor<Self>, norm: LocalResponse) -> FloatTensor<Self> {
            Self::run(norm, [Some(x)])
        }
    }
}

const X: usize = 0;

impl<B: LocalResponseKernels> Operation<B, 1> for LocalResponse {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = LocalResponse;

    fn name(&self) -> &'static str {
        "local_response_norm"
    }

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing().keep_if(true, X, "x is tracked").offer_if(true)
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::local_response_norm(given(x), self)
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, _: &Recorder<1>) -> (FloatTensor<B>, LocalResponse) {
        (Operation::<B, 1>::forward(self, inputs), *self)
    }

    fn backward(norm: LocalResponse, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let x = given(pass.take(X));
        pass.give(X, B::local_response_norm_backward(x, &norm, dy));
    }
}

/// The kernels.
pub trait LocalResponseKernels: Backend {
    /// Local response normalization of `[batch, channels, ...]`.
    fn local_response_norm(x: FloatTensor<Self>, norm: &LocalResponse) -> FloatTensor<Self> {
        let (shape, dtype) = (x.shape(), x.dtype());
        let x = planes::<Self>(x);
        let power = Self::float_powf_scalar(scales::<Self>(x.clone(), norm), norm.beta.into());
        Self::float_reshape(Self::float_cast(Self::float_div(x, power), dtype.into()), shape)
    }

    /// Gradient of the input of [`local_response_norm`](Self::local_response_norm).
    fn local_response_norm_backward(
        x: FloatTensor<Self>,
        norm: &LocalResponse,
        dy: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (shape, dtype) = (x.shape(), x.dtype());
        let (x, dy) = (planes::<Self>(x), planes::<Self>(dy));
        let scales = scales::<Self>(x.clone(), norm);
        let scaled = Self::float_div(dy, Self::float_powf_scalar(scales.clone(), norm.beta.into()));
        let products = Self::float_div(Self::float_mul(scaled.clone(), x.clone()), scales);
        let [before, after] = norm.reach();
        let means = window_means::<Self>(products, [after, before]);
        let factor = -2.0 * norm.alpha * norm.beta;
        let dx = Self::float_add(scaled, Self::float_mul_scalar(Self::float_mul(x, means), factor.into()));
        Self::float_reshape(Self::float_cast(dx, dtype.into()), shape)
    }
}
composing_backends!(LocalResponseKernels);

/// The mean of the window around every channel, which extends by `reach` before and after it; x `[batch, channels, inner]`.
fn window_means<B: Backend>(x: FloatTensor<B>, reach: [usize; 2]) -> FloatTensor<B> {
    let [batch, channels, inner] = x.shape().dims();
    let [before, after] = reach;
    let rows = B::float_reshape(B::float_swap_dims(x, 1, 2), Shape::new([batch * inner, 1, channels]));
    let rows = B::float_pad(rows, &[(0, 0), (0, 0), (before, after)], PadMode::Constant(0.0));
    let means = avg_pool!(B::avg_pool1d(rows, before + after + 1, 1, 0; 1; true, false));
    B::float_swap_dims(B::float_reshape(means, Shape::new([batch, inner, channels])), 1, 2)
}

/// `[batch, channels, inner]`, in a type that can hold squares.
fn planes<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let shape = x.shape();
    let inner = shape[2..].iter().product();
    B::float_reshape(widen::<B>(x), Shape::new([shape[0], shape[1], inner]))
}

fn scales<B: Backend>(x: FloatTensor<B>, norm: &LocalResponse) -> FloatTensor<B> {
    let means = window_means::<B>(B::float_mul(x.clone(), x), norm.reach());
    B::float_add_scalar(B::float_mul_scalar(means, norm.alpha.into()), norm.k.into())
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::Flex;

    #[test]
    fn default_bodies_equal_the_kernels() {
        for (size, beta) in [(1, 0.75), (2, 0.5), (3, 1.0), (4, 1.3), (9, 0.75)] {
            let norm = LocalResponse { size, alpha: 0.4, beta, k: 0.7 };
            let [x, dy] = [(); 2].map(|()| random(&[2, 5, 3, 4]));
            let body = Composed::local_response_norm(composed(&x), &norm);
            assert_close("y", body, Flex::local_response_norm(x.clone(), &norm));
            let body = Composed::local_response_norm_backward(composed(&x), &norm, composed(&dy));
            assert_close("dx", body, Flex::local_response_norm_backward(x, &norm, dy));
        }
    }
}
