//! What a device says about itself.
use crate::backend::Capacity;
use burn::backend::{BackendTypes, Cube};
use burn_cubecl::cubecl::features::Plane;

impl Capacity for Cube {
    /// wgpu and Metal do not say it. Planes tell a GPU from a device in software; it is taken for one of 64, as by CubeCL.
    fn multiprocessors(device: &<Self as BackendTypes>::Device) -> Option<usize> {
        let client = device.client();
        let properties = client.properties();
        let said = properties.hardware.num_streaming_multiprocessors.map(|count| count as usize);
        said.or_else(|| properties.features.plane.contains(Plane::Ops).then_some(64))
    }

    /// Where a runtime does not say it, of eight buffers as large as can be.
    fn memory(device: &<Self as BackendTypes>::Device) -> Option<u64> {
        let client = device.client();
        let memory = &client.properties().memory;
        Some(memory.max_memory().unwrap_or(memory.max_page_size.saturating_mul(8)))
    }

    fn largest(device: &<Self as BackendTypes>::Device) -> usize {
        usize::try_from(device.client().properties().memory.max_page_size).unwrap_or(usize::MAX)
    }
}
