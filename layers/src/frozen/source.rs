//! Which tensors were read from a frozen weight.
//!
//! A layer reads its weight into an ordinary tensor, which reaches an operation several calls further down. If the operation needs the
//! tensor in its backward pass, the engine asks here, by the tensor's autodiff node, whether it can be read again instead. Only the few
//! operations of one layer, on one thread, lie between reading and asking. So it is enough to remember the last reads of the thread. A
//! forgotten read costs memory, but changes no result.
use super::FrozenWeight;
use crate::node::node_id;
use burn::backend::{
    Backend,
    autodiff::NodeId,
    tensor::{Device as BackendDevice, FloatTensor},
};
use burn::tensor::Tensor;
use core::cell::RefCell;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// The number of reads that are remembered: more than lie between any read and its use.
const REMEMBERED: usize = 256;

thread_local! {
    static READS: RefCell<VecDeque<Remembered>> = RefCell::default();
}

/// A tensor that was read, known by its node.
struct Remembered {
    node: NodeId,
    weight: Weak<dyn FrozenWeight>,
    read: Read,
}

/// How a tensor was read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// Whether the tensor is the transposed weight.
    pub transposed: bool,
    /// Whether the weight stays on the device.
    pub stays: bool,
}

/// Remembers what a tensor was read from.
pub(super) fn remember<const D: usize>(tensor: &Tensor<D>, weight: &Arc<dyn FrozenWeight>, read: Read) {
    let Some(node) = node_id(tensor.clone()) else { return };
    READS.with_borrow_mut(|reads| {
        if reads.len() == REMEMBERED {
            reads.pop_front();
        }
        reads.push_back(Remembered { node, weight: Arc::downgrade(weight), read });
    });
}

/// What the tensor of a node can be read from again.
#[derive(Clone, Debug)]
pub(crate) struct WeightSource {
    weight: Arc<dyn FrozenWeight>,
    read: Read,
}

impl WeightSource {
    /// The source of a node, if a frozen weight was read into it.
    pub(crate) fn of(node: NodeId) -> Option<Self> {
        READS.with_borrow(|reads| {
            let Remembered { weight, read, .. } = reads.iter().rev().find(|read| read.node == node)?;
            Some(Self { weight: weight.upgrade()?, read: *read })
        })
    }

    /// Whether the tensor stays on its device, so that holding it takes no further memory.
    pub(crate) fn stays(&self) -> bool {
        self.read.stays
    }

    /// Reads the tensor.
    pub(crate) fn read<B: Backend>(&self, device: &BackendDevice<B>) -> FloatTensor<B> {
        if let Some(owned) = self.weight.on_device() {
            let weight = owned.read_on::<B>(device);
            return if self.read.transposed { B::float_swap_dims(weight, 0, 1) } else { weight };
        }
        let _ = B::flush(device); // as in `read_tensor`
        let (data, swaps) = match self.weight.read_transposed() {
            Some(transposed) => (transposed, !self.read.transposed),
            None => (self.weight.read(), self.read.transposed),
        };
        let weight = B::float_from_data(data, device);
        match swaps {
            true => B::float_swap_dims(weight, 0, 1),
            false => weight,
        }
    }
}
