//! Quantization to eight bits per weight: `x = scale q`, with one scale for [`BLOCK`] weights along the last axis.
//!
//! The layout is that of Burn's scheme, so that Burn reads such files, too: all `q`, then all scales.
use burn::tensor::Shape;
use burn::tensor::quantization::{QuantScheme, QuantStore, QuantValue, ScaleDtype};

/// The number of weights with one scale.
pub(super) const BLOCK: usize = 32;

pub(super) fn scheme() -> QuantScheme {
    QuantScheme::default()
        .with_value(QuantValue::Q8S)
        .with_store(QuantStore::Native)
        .per_block([BLOCK as u8], ScaleDtype::F32)
}

/// Whether a tensor has whole blocks.
pub(super) fn fits(shape: &Shape) -> bool {
    shape.num_dims() > 1 && shape[shape.num_dims() - 1].is_multiple_of(BLOCK) && shape.num_elements() > 0
}

/// Quantizes whole blocks: the largest magnitude of a block becomes 127, and every quotient is rounded to the nearest integer. If an
/// element is not finite, which would spoil its block, returns its index and value, and quantizes nothing.
pub(super) fn quantize(x: &[f32], values: &mut [i8], scales: &mut [f32]) -> Result<(), (usize, f32)> {
    if let Some((index, &value)) = x.iter().enumerate().find(|(_, x)| !x.is_finite()) {
        return Err((index, value));
    }
    for ((x, values), scale) in x.chunks_exact(BLOCK).zip(values.chunks_exact_mut(BLOCK)).zip(scales) {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        *scale = if largest > 0.0 { largest / 127.0 } else { 1.0 };
        for (x, value) in x.iter().zip(values) {
            *value = (x / *scale).round() as i8;
        }
    }
    Ok(())
}

/// `scale q` of the elements from `first` on, given the scales of their blocks.
pub(super) fn dequantize(values: &[i8], scales: &[f32], first: usize, out: &mut [f32]) {
    for (index, (value, out)) in values.iter().zip(out).enumerate() {
        *out = f32::from(*value) * scales[(first % BLOCK + index) / BLOCK];
    }
}
