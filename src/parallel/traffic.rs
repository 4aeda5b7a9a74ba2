//! [`Traffic`]: the bytes that devices send to each other.
use burn::tensor::{Device, Tensor};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that were sent from one device to another. The losses, one number per device and step, do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Gradients, to the devices where they are summed.
    pub gradients: u64,
    /// New values of trained parameters.
    pub values: u64,
    /// Frozen weights, from the devices that own them.
    pub frozen: u64,
}

impl Traffic {
    /// The sum of all three.
    pub fn total(&self) -> u64 {
        self.gradients + self.values + self.frozen
    }
}

/// Counts bytes. Clones count together.
#[derive(Clone, Debug, Default)]
pub(super) struct Sent(Arc<AtomicU64>);

impl Sent {
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    /// The tensor on a device, which has no autodiff, as the tensor.
    pub fn moved<const D: usize>(&self, tensor: Tensor<D>, device: &Device) -> Tensor<D> {
        if tensor.device() == *device {
            return tensor;
        }
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
        tensor.to_device(device)
    }
}
