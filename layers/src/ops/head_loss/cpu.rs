//! The kernel of losses of heads on a CPU: the largest magnitude of a matrix, in one pass on all threads.
use super::{HeadLossKernels, composed_largest_magnitude};
use crate::backend::cpu::{CpuBackend, parallel};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, f16};

impl<B: CpuBackend> HeadLossKernels for B {
    /// So that a block stays in the cache.
    const BLOCK_BYTES: usize = 1 << 20;

    fn largest_magnitude(x: FloatTensor<B>) -> FloatTensor<B> {
        // The weight may be transposed, as one that is shared with an embedding is.
        let handles = [x.clone(), B::float_transpose(x.clone())];
        match handles.into_iter().find(|x| x.dtype() == DType::F16 && B::is_contiguous(x)) {
            Some(x) => B::from_vec(vec![largest_magnitude(B::as_slice(&x))], Shape::new([1])),
            None => composed_largest_magnitude::<B>(x),
        }
    }
}

/// The largest absolute value; NaN if any value is.
fn largest_magnitude(values: &[f16]) -> f16 {
    const MAGNITUDE: u16 = 0x7fff; // all bits but the sign are ordered as the numbers are
    let largest = |values: &[f16]| values.iter().fold(0, |largest, x| (x.to_bits() & MAGNITUDE).max(largest));
    let job = parallel::items_per_job(values.len(), values.len());
    let parts = parallel::map_ranges(values.len(), job, |range| largest(&values[range]));
    f16::from_bits(parts.into_iter().max().unwrap_or(0))
}
