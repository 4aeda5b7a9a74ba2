//! Randomized leaky ReLU.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x` if `x >= 0`, else `slope * x`; the slope is drawn per element |
//! | keeps | if `x` is tracked, the factor of every element, 1 or the slope; |
//! | | with kernels for devices, 1 bit per element and a seed of 16 bytes |
//! | backward | `dx = dy * factor` |
//!
//! If `x` is kept by another step or recomputed, the output is offered for [recomputation](crate::graph).
//!
//! Stock Burn keeps several tensors. CPU backends draw the same slopes as stock Burn. Device kernels draw a slope from the seed and the
//! position of the element, and draw it again in the backward pass.
use crate::backend::Saved;
use crate::graph::{
    BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given, tape,
};
use burn::backend::{Backend, tensor::FloatTensor};

#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;
#[cfg(any(feature = "flex", feature = "ndarray", feature = "remote"))]
mod factors;

extension! {
    /// Randomized leaky ReLU.
    pub trait RReluOps(RReluKernels) {
        /// `x`, times a slope between the bounds where it is negative; any shape.
        fn memsave_rrelu(x: FloatTensor<Self>, lower: f64, upper: f64) -> FloatTensor<Self> {
            Self::run(RRelu { bounds: [lower, upper] }, [Some(x)])
        }
    }
}

const X: usize = 0;

/// Randomized leaky ReLU.
#[derive(Clone, Copy, Debug)]
pub struct RRelu {
    /// The least slope, and the upper bound, which no slope reaches.
    bounds: [f64; 2],
}

impl RRelu {
    fn draw<B: RReluKernels>(self, x: FloatTensor<B>) -> (FloatTensor<B>, B::Slopes) {
        let (mut x, mut y) = (Some(x), None);
        let slopes = tape::draw(|| {
            let (drawn, slopes) = B::rrelu(given(x.take()), self.bounds);
            y = Some(drawn);
            slopes
        });
        (y.unwrap_or_else(|| B::rrelu_times(given(x), &slopes)), slopes)
    }
}

impl<B: RReluKernels> Operation<B, 1> for RRelu {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = B::Slopes;

    fn name(&self) -> &'static str {
        "rrelu"
    }

    fn plan(&self, inputs: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing().offer_if(inputs.available(X))
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        self.draw::<B>(given(x)).0
    }

    fn forward_saving(&self, [x]: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, B::Slopes) {
        let (y, slopes) = self.draw::<B>(given(x));
        (y, recorder.report().state("slopes", slopes, "x is tracked"))
    }

    fn recompute(self, slopes: &B::Slopes) -> impl Fn(Inputs<B, 1>) -> FloatTensor<B> + Send + 'static {
        let slopes = slopes.clone();
        move |[x]| B::rrelu_times(given(x), &slopes)
    }

    fn backward(slopes: B::Slopes, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        pass.give(X, B::rrelu_times(dy, &slopes));
    }
}

/// The kernels.
pub trait RReluKernels: Backend {
    /// The factors of all elements.
    type Slopes: Saved;

    /// Draws slopes; `x` times its factors, and these.
    fn rrelu(x: FloatTensor<Self>, bounds: [f64; 2]) -> (FloatTensor<Self>, Self::Slopes);

    /// `x` times the factors.
    fn rrelu_times(x: FloatTensor<Self>, slopes: &Self::Slopes) -> FloatTensor<Self>;
}
