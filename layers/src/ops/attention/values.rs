//! Attention as a step that keeps its weights: only the values are tracked, and the weights take no more memory than what they are
//! computed from.
use super::chunks::with_heads;
use super::{AttentionKernels, split_heads};
use crate::graph::{BackwardPass, Inputs, KeepPlan, KeptTensor, Operation, Recorder, Tracking, given};
use crate::saved::packing::PackingKernels;
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};

const VALUE: usize = 0;

/// The output of an attention whose values may be tracked.
#[derive(Clone)]
pub(super) struct WeightsKept<B: Backend> {
    pub(super) output: FloatTensor<B>,
    /// `[batch, heads, queries, keys]`
    pub(super) weights: FloatTensor<B>,
    /// Whether the heads of the output are merged.
    pub(super) merged: bool,
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub(super) struct SavedWeights<B: PackingKernels> {
    weights: KeptTensor<FloatTensor<B>>,
    groups: usize,
    merged: bool,
}

impl<B: AttentionKernels + PackingKernels> Operation<B, 1> for WeightsKept<B> {
    const INPUTS: [&'static str; 1] = ["value"];
    type Saved = SavedWeights<B>;

    fn name(&self) -> &'static str {
        "attention"
    }

    fn plan(&self, _: &Tracking<B, 1>) -> KeepPlan<1> {
        KeepPlan::nothing()
    }

    fn forward(&self, _: Inputs<B, 1>) -> FloatTensor<B> {
        self.output.clone()
    }

    fn forward_saving(
        &self,
        [value]: Inputs<B, 1>,
        recorder: &Recorder<1>,
    ) -> (FloatTensor<B>, SavedWeights<B>) {
        let weights = recorder.report().made::<B>("weights", self.weights.clone(), "value is tracked");
        let groups = given(value).shape()[1];
        (self.output.clone(), SavedWeights { weights, groups, merged: self.merged })
    }

    fn backward(saved: SavedWeights<B>, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let SavedWeights { weights, groups, merged } = saved;
        let weights = weights.get();
        let dy = if merged { split_heads::<B>(dy, weights.shape()[1]) } else { dy };
        let [weights, dy] = [weights, dy].map(|x| with_heads::<B>(x, groups));
        pass.give(VALUE, B::product(B::float_transpose(weights), dy));
    }
}
