//! The autodiff node of a tensor, by which the [ledger](crate::ledger) finds the module of a parameter.
use crate::backend::plain_backends;
use crate::burn_next::routed;
use burn::backend::{
    Backend, Dispatch,
    autodiff::{Autodiff, NodeId, checkpoint::strategy::CheckpointStrategy},
    tensor::FloatTensor,
};
use burn::tensor::{DType, Tensor};

routed! {
    [Autodiff]
    /// Asks for the node of a tensor.
    pub trait NodeOps: Backend {
        /// The autodiff node of `x`; `None` without autodiff.
        fn memsave_node_id(_x: FloatTensor<Self>) -> Option<NodeId> {
            None
        }
    }
}
plain_backends!(NodeOps);

impl<B: NodeOps, C: CheckpointStrategy> NodeOps for Autodiff<B, C> {
    fn memsave_node_id(x: FloatTensor<Self>) -> Option<NodeId> {
        Some(x.id())
    }
}

/// The autodiff node of `x`; `None` without autodiff, and for a quantized tensor.
pub fn node_id<const D: usize>(x: Tensor<D>) -> Option<NodeId> {
    if matches!(x.dtype(), DType::QFloat(_)) {
        return None;
    }
    Dispatch::memsave_node_id(x.into_dispatch())
}
