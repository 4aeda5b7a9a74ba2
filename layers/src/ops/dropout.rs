//! Dropout.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x / keep` where a bit drawn with probability `keep` is set, else 0 |
//! | keeps | 1 bit per element if `x` is tracked, else nothing; on devices with kernels of this crate, a seed of 16 bytes |
//! | backward | `dx = dy / keep` where the bit is set, else 0 |
//!
//! If `x` is kept by another step or recomputed, the output is offered for [recomputation](crate::graph).
//!
//! Stock Burn keeps a float per element. CPU backends draw the same bits as stock Burn, so the same seed drops the same elements. Device
//! kernels draw a bit from the seed and the position of the element, and draw it again in the backward pass. A dropped element is 0 even
//! if `x` is infinite or NaN, where stock multiplies by 0 and gets a NaN.
use crate::backend::Masks;
use crate::graph::{
    BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given, tape,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};

extension! {
    /// Dropout.
    pub trait DropoutOps(Masks) {
        /// Zeroes elements with probability `1 - keep` and divides the others by `keep`; any shape.
        fn memsave_dropout(x: FloatTensor<Self>, keep: f64) -> FloatTensor<Self> {
            Self::run(Dropout { keep }, [Some(x)])
        }
    }
}

const X: usize = 0;

/// Dropout; `keep` is the probability that an element stays.
#[derive(Clone, Copy, Debug)]
pub struct Dropout {
    keep: f64,
}

impl Dropout {
    fn draw<B: Masks>(self, like: &FloatTensor<B>) -> Dropped<B> {
        let mask = tape::draw(|| B::bernoulli_mask(like.shape(), like.dtype(), &like.device(), self.keep));
        Dropped { mask, scale: 1.0 / self.keep }
    }
}

impl<B: Masks> Operation<B, 1> for Dropout {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = Dropped<B>;

    fn name(&self) -> &'static str {
        "dropout"
    }

    fn plan(&self, inputs: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing().offer_if(inputs.available(X))
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        let x = given(x);
        self.draw::<B>(&x).apply(x)
    }

    fn forward_saving(&self, [x]: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Dropped<B>) {
        let x = given(x);
        let Dropped { mask, scale } = self.draw::<B>(&x);
        let dropped = Dropped { mask: recorder.report().state("mask", mask, "x is tracked"), scale };
        (dropped.apply(x), dropped)
    }

    fn recompute(self, dropped: &Dropped<B>) -> impl Fn(Inputs<B, 1>) -> FloatTensor<B> + Send + 'static {
        let dropped = dropped.clone();
        move |[x]| dropped.apply(given(x))
    }

    fn backward(dropped: Dropped<B>, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        pass.give(X, dropped.apply(dy));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct Dropped<B: Masks> {
    /// Which elements were not dropped, one bit per element.
    mask: B::Mask,
    /// The factor of these elements.
    scale: f64,
}

impl<B: Masks> Dropped<B> {
    fn apply(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        B::scale_by_mask(x, &self.mask, [0.0, self.scale])
    }
}
