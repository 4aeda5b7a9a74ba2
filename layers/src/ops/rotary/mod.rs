//! Rotary encoding: pairs of features are rotated by an angle that depends on the position.
//!
//! | | |
//! | --- | --- |
//! | computes | `y[2i] = x[2i] c[2i] - x[2i+1] s[2i]`, `y[2i+1] = x[2i+1] c[2i+1] + x[2i] s[2i+1]` |
//! | keeps | the factors `c` and `s` (a handle), if `x` is tracked |
//! | backward | `dx[2i] = dy[2i] c[2i] + dy[2i+1] s[2i+1]`, `dx[2i+1] = dy[2i+1] c[2i+1] - dy[2i] s[2i]` |
//!
//! Here the pairs are [adjacent](Pairing::Adjacent) features of `x`, as in Burn. They may also be features `i` and `i + features / 2`
//! ([`Pairing::Halves`]); the factors are those of `2i` and `2i+1` as before.
//!
//! Stock Burn multiplies by a matrix of signs, and makes four intermediate tensors of twice the size of `x`.
use crate::backend::composing_backends;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, Slice};

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

extension! {
    /// Rotary encoding.
    pub trait RotaryOps(RotaryKernels) {
        /// `x` `[..., positions, features]` rotated by the constants `factors` `[positions, features, 2]`, the cosine and the sine of every
        /// feature, in the dtype of `x`, or in f32 if that is half precision.
        fn memsave_rotary(
            x: FloatTensor<Self>,
            factors: FloatTensor<Self>,
            pairing: Pairing,
        ) -> FloatTensor<Self> {
            let factors = Self::plain(factors);
            Self::run(Rotary::<<Self as Run>::Plain> { factors, pairing }, [Some(x)])
        }
    }
}

/// Which features of a row are a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairing {
    /// Features `2i` and `2i + 1`, as in Burn.
    Adjacent,
    /// Features `i` and `i + features / 2`, as in Hugging Face's `transformers`.
    Halves,
}

/// The rotation by these factors.
#[derive(Clone, Debug)]
struct Rotary<B: Backend> {
    factors: FloatTensor<B>,
    pairing: Pairing,
}

const X: usize = 0;

impl<B: RotaryKernels> Operation<B, 1> for Rotary<B> {
    const INPUTS: [&'static str; 1] = ["x"];
    /// The operation.
    type Saved = Self;

    fn name(&self) -> &'static str {
        "rotary_encoding"
    }

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing()
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::rotate(given(x), self.factors.clone(), self.pairing, false)
    }

    fn forward_saving(&self, x: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self) {
        let factors = recorder.report().tensor("factors", self.factors.clone(), "x is tracked");
        (self.forward(x), Self { factors, ..*self })
    }

    fn backward(Self { factors, pairing }: Self, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        pass.give(X, B::rotate(dy, factors, pairing, true));
    }
}

/// The kernel.
pub trait RotaryKernels: Backend {
    /// The pairs of `x` `[..., positions, features]` rotated by the cosines and sines `factors` `[positions, features, 2]`, or if
    /// `adjoint`, rotated back, as gradients are. In place if `x` is the only handle of its tensor. The factors are in the dtype of `x`, or
    /// in f32 if that is half precision.
    fn rotate(
        x: FloatTensor<Self>,
        factors: FloatTensor<Self>,
        pairing: Pairing,
        adjoint: bool,
    ) -> FloatTensor<Self> {
        let (shape, dtype) = (x.shape(), x.dtype());
        let [positions, features, _] = factors.shape().dims();
        let x = if factors.dtype() == dtype { x } else { Self::float_cast(x, factors.dtype().into()) };
        let repeats = shape.num_elements() / (positions * features).max(1);
        let x = match pairing {
            Pairing::Adjacent => Self::float_reshape(x, Shape::new([repeats, positions, features / 2, 2])),
            Pairing::Halves => {
                let halves = Self::float_reshape(x, Shape::new([repeats, positions, 2, features / 2]));
                Self::float_swap_dims(halves, 2, 3)
            }
        };
        let one = |x: &FloatTensor<Self>, at: usize| {
            let all = [0, 1, 2].map(|axis| Slice::from(0..x.shape()[axis]));
            let [repeats, positions, pairs] = all;
            Self::float_slice(x.clone(), &[repeats, positions, pairs, Slice::from(at..at + 1)])
        };
        let (a, b) = (one(&x, 0), one(&x, 1));
        let factors = Self::float_reshape(factors, Shape::new([1, positions, features / 2, 4]));
        let [cos_a, sin_a, cos_b, sin_b] = [0, 1, 2, 3].map(|at| one(&factors, at));
        let product = |x: &FloatTensor<Self>, factor: FloatTensor<Self>| Self::float_mul(x.clone(), factor);
        let rotated = match adjoint {
            false => [
                Self::float_sub(product(&a, cos_a), product(&b, sin_a)),
                Self::float_add(product(&b, cos_b), product(&a, sin_b)),
            ],
            true => [
                Self::float_add(product(&a, cos_a), product(&b, sin_b)),
                Self::float_sub(product(&b, cos_b), product(&a, sin_a)),
            ],
        };
        let rotated = Self::float_cat(rotated.to_vec(), 3);
        let rotated = match pairing {
            Pairing::Adjacent => rotated,
            Pairing::Halves => Self::float_swap_dims(rotated, 2, 3),
        };
        let rotated = Self::float_reshape(rotated, shape);
        if rotated.dtype() == dtype { rotated } else { Self::float_cast(rotated, dtype.into()) }
    }
}
composing_backends!(RotaryKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};
    use burn::tensor::DType;

    #[test]
    fn the_composed_rotation_equals_the_kernel() {
        for (pairing, adjoint) in
            [Pairing::Adjacent, Pairing::Halves].into_iter().flat_map(|p| [(p, false), (p, true)])
        {
            let (x, factors) = (random(&[2, 3, 5, 6]), random(&[5, 6, 2]));
            let rotated = Composed::rotate(composed(&x), composed(&factors), pairing, adjoint);
            assert_close("rotation", rotated, Flex::rotate(x.clone(), factors.clone(), pairing, adjoint));
            // Half precision and a table in f32. The numbers are so short that nothing is rounded.
            let [x, factors] = [x, factors].map(|x| Flex::float_round(Flex::float_mul_scalar(x, 4.0.into())));
            let x = Flex::float_cast(x, DType::F16.into());
            let rotated = Composed::rotate(composed(&x), composed(&factors), pairing, adjoint);
            assert_close("rotation in f16", rotated, Flex::rotate(x, factors, pairing, adjoint));
        }
    }
}
