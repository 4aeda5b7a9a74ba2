//! A backend runs an operation as it is; `Autodiff` over it also records a step.
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

/// A backend that runs operations: as they are, or recording them.
pub trait Run: Backend {
    /// The backend without autodiff.
    type Plain: PackingKernels;

    /// The output of an operation.
    fn run<O: Operation<Self::Plain, N>, const N: usize>(
        operation: O,
        inputs: [Option<FloatTensor<Self>>; N],
    ) -> FloatTensor<Self>;

    /// A tensor that no gradient flows to.
    ///
    /// # Panics
    ///
    /// Panics if it is tracked: its gradient would be lost.
    fn plain(tensor: FloatTensor<Self>) -> FloatTensor<Self::Plain>;

    /// The tensor on the backend without autodiff, of an input whose gradient a step takes care of.
    fn primitive(tensor: &FloatTensor<Self>) -> FloatTensor<Self::Plain>;

    /// A tensor of the backend without autodiff, untracked.
    fn untracked(tensor: FloatTensor<Self::Plain>) -> FloatTensor<Self>;

    /// Whether the strategy of the device computes some outputs again instead of keeping them.
    fn recomputes() -> bool;

    /// Whether the strategy of the device computes this tensor again when a backward pass asks for it.
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
