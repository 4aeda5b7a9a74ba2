//! [`Run`]: plain backends just run an operation, and `Autodiff` also records it as a step.
use super::{
    inputs::Inputs,
    operation::Operation,
    recompute::{is_recomputed, recomputes},
    record::record,
};
use crate::saved::packing::PackingKernels;
use burn::backend::{
    Backend,
    autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy},
    tensor::FloatTensor,
};

/// A backend that runs operations, and records them if it is `Autodiff`.
pub trait Run: Backend {
    /// The backend without autodiff.
    type Plain: PackingKernels;

    /// Runs an operation, and returns its output.
    fn run<O: Operation<Self::Plain, N>, const N: usize>(
        operation: O,
        inputs: [Option<FloatTensor<Self>>; N],
    ) -> FloatTensor<Self>;

    /// The tensor without autodiff, for an input that no gradient flows to.
    ///
    /// # Panics
    ///
    /// Panics if it is tracked: its gradient would be lost.
    fn plain(tensor: FloatTensor<Self>) -> FloatTensor<Self::Plain>;

    /// The tensor without autodiff, tracked or not, for an input whose gradient a step takes care of.
    fn primitive(tensor: &FloatTensor<Self>) -> FloatTensor<Self::Plain>;

    /// Wraps a tensor without autodiff as an untracked one.
    fn untracked(tensor: FloatTensor<Self::Plain>) -> FloatTensor<Self>;

    /// Whether the strategy of the device recomputes some outputs instead of keeping them.
    fn recomputes() -> bool;

    /// Whether the strategy of the device recomputes this tensor when a backward pass asks for it.
    fn is_recomputed(tensor: &FloatTensor<Self>) -> bool;
}

crate::backend::plain_backends!(Run {
    type Plain = Self;

    fn run<O: Operation<Self, N>, const N: usize>(operation: O, inputs: Inputs<Self, N>) -> FloatTensor<Self> {
        operation.forward(inputs)
    }

    fn plain(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn primitive(tensor: &FloatTensor<Self>) -> FloatTensor<Self> {
        tensor.clone()
    }

    fn untracked(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn recomputes() -> bool {
        false
    }

    fn is_recomputed(_: &FloatTensor<Self>) -> bool {
        false
    }
});

impl<B: PackingKernels, C: CheckpointStrategy> Run for Autodiff<B, C> {
    type Plain = B;

    fn run<O: Operation<B, N>, const N: usize>(operation: O, inputs: Inputs<Self, N>) -> FloatTensor<Self> {
        record::<B, O, N>(operation, inputs, recomputes::<C>())
    }

    fn plain(tensor: FloatTensor<Self>) -> FloatTensor<B> {
        assert!(!tensor.is_tracked(), "a tensor that no gradient flows to must not be tracked");
        tensor.into_primitive()
    }

    fn primitive(tensor: &FloatTensor<Self>) -> FloatTensor<B> {
        tensor.primitive().clone()
    }

    fn untracked(tensor: FloatTensor<B>) -> FloatTensor<Self> {
        FloatTensor::<Self>::new(tensor)
    }

    fn recomputes() -> bool {
        recomputes::<C>()
    }

    fn is_recomputed(tensor: &FloatTensor<Self>) -> bool {
        recomputes::<C>() && is_recomputed::<B>(tensor)
    }
}
