//! What a device says about itself.
use crate::backend::Multiprocessors;
use burn::backend::{BackendTypes, Cube};

impl Multiprocessors for Cube {
    fn multiprocessors(device: &<Self as BackendTypes>::Device) -> Option<usize> {
        device.client().properties().hardware.num_streaming_multiprocessors.map(|count| count as usize)
    }
}
