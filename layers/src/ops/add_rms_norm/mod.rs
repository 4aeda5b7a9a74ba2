//! A residual sum and its RMS normalization in one pass, as in every block of a language model.
//!
//! | | |
//! | --- | --- |
//! | computes | `s = x + residual` and `y = s / sqrt(mean(s^2) + epsilon) * gamma` over the last axis |
//! | keeps | `s` if `x`, `residual` or `gamma` is tracked; `gamma` (a handle) if `x` or `residual` is |
//! | backward | `ds += gradient of the norm`, see [`row_norm`](super::row_norm); `dx = dresidual = ds` |
//!
//! Both `s` and `y` are outputs, so there are two steps: the sum, which keeps nothing, and its norm. `s` is read once less than by two
//! separate operations, and takes the place of an input that is the only handle of its tensor. Stock Burn keeps two tensors of the size of
//! `s`. This follows Liger-Kernel's fused add and RMS norm, [arXiv 2410.10989](https://arxiv.org/abs/2410.10989).
use super::row_norm::{RowNorm, RowNormKernels};
use crate::backend::device_backends;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{Backend, ExtensionType, TensorMetadata, tensor::FloatTensor};
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;

/// What [`AddRmsNormOps::memsave_add_rms_norm`] returns.
#[derive(ExtensionType)]
pub struct SumAndNorm<B: Backend> {
    /// `x + residual`
    pub sum: FloatTensor<B>,
    /// Its norm.
    pub norm: FloatTensor<B>,
}

extension! {
    /// Residual sums with their RMS norms.
    pub trait AddRmsNormOps(AddRmsNormKernels) {
        /// `x` and `residual` of one shape, `[..., features]`; gamma `[features]`.
        fn memsave_add_rms_norm(
            x: FloatTensor<Self>,
            residual: FloatTensor<Self>,
            gamma: FloatTensor<Self>,
            epsilon: f64,
        ) -> SumAndNorm<Self> {
            let norm = RowNorm::over_last(gamma.shape()[0], false, epsilon);
            let y = Arc::default();
            let sum = ResidualSum { gamma: Self::primitive(&gamma), norm, y: Arc::clone(&y) };
            let sum = Self::run(sum, [Some(x), Some(residual)]);
            let y = y.lock().unwrap_or_else(PoisonError::into_inner).take();
            let norm = NormOfSum { y: y.expect("made with the sum"), norm };
            let norm = Self::run(norm, [Some(sum.clone()), Some(gamma), None]);
            SumAndNorm { sum, norm }
        }
    }
}

/// The sum. Its forward pass also computes the norm.
#[derive(Clone)]
pub struct ResidualSum<T> {
    gamma: T,
    norm: RowNorm,
    /// The norm, which the next step takes.
    y: Arc<Mutex<Option<T>>>,
}

impl<B: AddRmsNormKernels> Operation<B, 2> for ResidualSum<FloatTensor<B>> {
    const INPUTS: [&'static str; 2] = ["x", "residual"];
    type Saved = ();

    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn plan(&self, _: &Tracking<B, 2>) -> KeepPlan<2> {
        KeepPlan::nothing()
    }

    fn forward(&self, [x, residual]: Inputs<B, 2>) -> FloatTensor<B> {
        let [sum, y] = B::add_rms_norm(given(x), given(residual), self.gamma.clone(), &self.norm);
        *self.y.lock().unwrap_or_else(PoisonError::into_inner) = Some(y);
        sum
    }

    fn forward_saving(&self, inputs: Inputs<B, 2>, _: &Recorder<2>) -> (FloatTensor<B>, ()) {
        (Operation::<B, 2>::forward(self, inputs), ())
    }

    fn backward((): (), dy: FloatTensor<B>, pass: &mut BackwardPass<B, 2>) {
        pass.give_all([Some(dy.clone()), Some(dy)]);
    }
}

/// The norm of the sum. It is already known.
#[derive(Clone)]
pub struct NormOfSum<T> {
    y: T,
    norm: RowNorm,
}

impl<B: AddRmsNormKernels> Operation<B, 3> for NormOfSum<FloatTensor<B>> {
    const INPUTS: [&'static str; 3] = ["sum", "gamma", "beta"];
    const PARAMETERS: &'static [usize] = <RowNorm as Operation<B, 3>>::PARAMETERS;
    type Saved = RowNorm;

    fn name(&self) -> &'static str {
        "add_rms_norm"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> KeepPlan<3> {
        self.norm.plan(inputs)
    }

    fn forward(&self, _: Inputs<B, 3>) -> FloatTensor<B> {
        self.y.clone()
    }

    fn forward_saving(&self, _: Inputs<B, 3>, _: &Recorder<3>) -> (FloatTensor<B>, RowNorm) {
        (self.y.clone(), self.norm)
    }

    fn recompute(self, _: &RowNorm) -> impl Fn(Inputs<B, 3>) -> FloatTensor<B> + Send + 'static {
        move |inputs| Operation::<B, 3>::forward(&self.norm, inputs)
    }

    fn backward(norm: RowNorm, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        <RowNorm as Operation<B, 3>>::backward(norm, dy, pass);
    }
}

/// The kernels.
pub trait AddRmsNormKernels: RowNormKernels {
    /// `x + residual`, and its norm. The sum takes the place of an input that is the only handle of its tensor.
    fn add_rms_norm(
        x: FloatTensor<Self>,
        residual: FloatTensor<Self>,
        gamma: FloatTensor<Self>,
        norm: &RowNorm,
    ) -> [FloatTensor<Self>; 2] {
        let sum = Self::float_add(x, residual);
        let y = Self::row_norm(sum.clone(), Some(gamma), None, norm);
        [sum, y]
    }
}
device_backends!(AddRmsNormKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    #[test]
    fn default_bodies_equal_the_kernels() {
        for (rows, features) in [(1, 1), (5, 7), (600, 300)] {
            let norm = RowNorm::over_last(features, false, 1e-5);
            let [x, residual] = [(); 2].map(|()| random(&[2, rows, features]));
            let gamma = random(&[features]);
            let [c_x, c_residual, c_gamma] = [&x, &residual, &gamma].map(composed);
            let bodies = Composed::add_rms_norm(c_x, c_residual, c_gamma, &norm);
            // In place of neither input, of the first and of the second.
            let unique = |x: &FloatTensor<Flex>| Flex::float_mul_scalar(x.clone(), 1.0.into());
            for (x, residual) in [
                (x.clone(), residual.clone()),
                (unique(&x), residual.clone()),
                (x.clone(), unique(&residual)),
            ] {
                let kernels = Flex::add_rms_norm(x, residual, gamma.clone(), &norm);
                for (body, kernel) in bodies.iter().zip(kernels) {
                    assert_close("sum and norm", body.clone(), kernel);
                }
            }
        }
    }
}
