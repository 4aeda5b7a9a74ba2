//! What a device says about itself.
use crate::backend::Capacity;
use burn::backend::{BackendTypes, Cube};

impl Capacity for Cube {
    fn multiprocessors(device: &<Self as BackendTypes>::Device) -> Option<usize> {
        device.client().properties().hardware.num_streaming_multiprocessors.map(|count| count as usize)
    }

    fn memory(device: &<Self as BackendTypes>::Device) -> Option<u64> {
        device.client().properties().memory.max_memory()
    }
}
