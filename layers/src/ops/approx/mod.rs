//! Activations with exact values, whose slopes in the backward pass are rounded to one of four.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)`, exactly |
//! | keeps | 2 bits per element if `x` is tracked, else nothing |
//! | backward | `dx = dy * slope`, with the slope of the piecewise linear function that is closest to `f` among those with corners at |
//! | | `-c`, 0 and `c`: 0 up to `-c`, then `s` up to 0, then `1 - s` up to `c`, then 1 |
//!
//! **Gradients are approximate.** Exact ones need `x`, which in f32 takes 16 times as many bits.
//!
//! The closest function is the one with the least integral of the squared difference, as in
//! [arXiv 2406.16282](https://arxiv.org/abs/2406.16282). The numbers there are nearly the same, but do not have the symmetry of both
//! activations, `f(x) - f(-x) = x`. A test checks that no numbers nearby are better.
use super::{
    piecewise_linear::{PiecewiseLinear, PiecewiseLinearKernels},
    smooth::{Smooth, SmoothKernels},
};
use crate::backend::device_backends;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{TensorMetadata, tensor::FloatTensor};

#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;

/// An activation, and its slopes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Approx {
    /// `x / 2 (1 + erf(x / sqrt(2)))`
    Gelu,
    /// `x sigmoid(x)`
    Silu,
}

impl Approx {
    fn exact(self) -> Smooth {
        match self {
            Self::Gelu => Smooth::Gelu,
            Self::Silu => Smooth::Silu,
        }
    }

    /// The outer corner `c`, and the slope `s` from `-c` to 0.
    fn corner_and_slope(self) -> (f64, f64) {
        match self {
            Self::Gelu => (3.1718, -0.049_551),
            Self::Silu => (6.3206, -0.040_513),
        }
    }
}

extension! {
    /// Activations with approximate gradients.
    pub trait ApproxOps(ApproxKernels) {
        /// `f(x)`, element by element; any shape.
        fn memsave_approx(x: FloatTensor<Self>, f: Approx) -> FloatTensor<Self> {
            Self::run(f, [Some(x)])
        }
    }
}

const X: usize = 0;

impl<B: ApproxKernels> Operation<B, 1> for Approx {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = Pieces<B::Mask>;

    fn name(&self) -> &'static str {
        match self {
            Self::Gelu => "approx_gelu",
            Self::Silu => "approx_silu",
        }
    }

    fn plan(&self, inputs: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing().offer_if(inputs.available(X))
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::smooth(given(x), self.exact())
    }

    fn forward_saving(&self, [x]: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self::Saved) {
        let x = given(x);
        let (corner, slope) = self.corner_and_slope();
        let pieces = [
            PiecewiseLinear::Threshold { threshold: 0.0, value: 0.0 },
            PiecewiseLinear::Clamp { min: -corner, max: corner }.with_ends_in(x.dtype()),
        ];
        let [positive, inner] =
            pieces.map(|f| recorder.report().state("mask", B::piecewise_mask(x.clone(), f), "x is tracked"));
        (B::smooth(x, self.exact()), Pieces { positive, inner, slope })
    }

    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        pass.give(X, B::approx_backward(dy, saved));
    }
}

/// The piece that every element is in, and the slope `s`.
#[derive(Clone, Debug)]
pub struct Pieces<M> {
    /// Whether the element is above 0.
    positive: M,
    /// Whether the element is between the outer corners.
    inner: M,
    slope: f64,
}

/// The kernels.
pub trait ApproxKernels: SmoothKernels + PiecewiseLinearKernels {
    /// `dy * slope`, in place if `dy` is the only handle of its tensor.
    fn approx_backward(dy: FloatTensor<Self>, pieces: Pieces<Self::Mask>) -> FloatTensor<Self> {
        let Pieces { positive, inner, slope } = pieces;
        let signed = Self::scale_by_mask(dy.clone(), &positive, [slope, -slope]);
        let bent = Self::scale_by_mask(signed, &inner, [0.0, 1.0]);
        Self::float_add(Self::scale_by_mask(dy, &positive, [0.0, 1.0]), bent)
    }
}
device_backends!(ApproxKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps, read_sync};

    #[test]
    fn the_default_body_equals_the_kernel() {
        for f in [Approx::Gelu, Approx::Silu] {
            let (x, dy) = (Flex::float_mul_scalar(random(&[5, 13]), 4.0.into()), random(&[5, 13]));
            let (corner, slope) = f.corner_and_slope();
            let threshold = PiecewiseLinear::Threshold { threshold: 0.0, value: 0.0 };
            let clamp = PiecewiseLinear::Clamp { min: -corner, max: corner };
            let of_cpu = [threshold, clamp].map(|f| Flex::piecewise_mask(x.clone(), f));
            let of_bodies = [threshold, clamp].map(|f| Composed::piecewise_mask(composed(&x), f));
            let [positive, inner] = of_cpu;
            let infinite = Flex::float_mul_scalar(dy.clone(), f64::INFINITY.into());
            let pieces = Pieces { positive: positive.clone(), inner: inner.clone(), slope };
            let of_infinite = Flex::approx_backward(infinite, pieces);
            let of_infinite = read_sync(Flex::float_into_data(of_infinite)).expect("a CPU tensor");
            assert!(of_infinite.iter::<f32>().all(|dx| dx == 0.0 || dx.is_infinite()));
            let dx = Flex::approx_backward(dy.clone(), Pieces { positive, inner, slope });
            let [positive, inner] = of_bodies;
            let body = Composed::approx_backward(composed(&dy), Pieces { positive, inner, slope });
            assert_close("dx", body, dx);
        }
    }

    /// The integral of the squared difference of the functions, up to a factor.
    fn difference(f: impl Fn(f64) -> f64, corner: f64, slope: f64) -> f64 {
        // The other half of the axis has the same integral, because `f(x) - f(-x) = x`.
        let squared = |x: f64| {
            let line = if x > -corner { slope * (x + corner) } else { 0.0 };
            (f(x) - line).powi(2)
        };
        (0..40_000).map(|step| squared(-1e-3 * f64::from(step))).sum()
    }

    #[test]
    fn slopes_are_the_best_ones() {
        let gelu = |x: f64| x / 2.0 * (1.0 + libm::erf(x / 2f64.sqrt()));
        let silu = |x: f64| x / (1.0 + (-x).exp());
        for (f, exact) in [(Approx::Gelu, &gelu as &dyn Fn(f64) -> f64), (Approx::Silu, &silu)] {
            let (corner, slope) = f.corner_and_slope();
            let best = difference(exact, corner, slope);
            for (by_corner, by_slope) in
                [(0.01, 0.0), (-0.01, 0.0), (0.0, 1e-4), (0.0, -1e-4), (0.05, 5e-4), (-0.05, -5e-4)]
            {
                assert!(difference(exact, corner + by_corner, slope + by_slope) > best, "{f:?}");
            }
        }
    }
}
