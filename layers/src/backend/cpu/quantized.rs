//! Quantized matrices in memory.
use super::{CpuElement, parallel};
use burn::tensor::quantization::BlockLayout;
use core::ops::Range;

/// A quantized matrix in memory: an element is `scale * value`.
pub struct QuantizedMatrix<'a> {
    /// In row-major order.
    pub values: &'a [i8],
    /// One scale for all values, or one per block.
    pub scales: &'a [f32],
    /// A factor of the scales of all blocks.
    pub global: Option<f32>,
    /// How the blocks lie.
    pub blocks: Option<BlockLayout>,
}

impl QuantizedMatrix<'_> {
    /// The elements of some rows and columns of a matrix that has `width` columns.
    pub(crate) fn dequantize<E: CpuElement>(
        &self,
        width: usize,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Vec<E> {
        let to_float = |scale: f32, value: i8| E::from_f64(f64::from(scale * f32::from(value)));
        let row_of_blocks = |blocks: &BlockLayout, start: usize, target: &mut [E]| {
            let global = self.global.unwrap_or(1.0);
            for (at, target) in target.iter_mut().enumerate() {
                let scale = global * self.scales[blocks.block_of(start + at)];
                *target = to_float(scale, self.values[start + at]);
            }
        };
        let (len, task) = (rows.len() * columns.len(), parallel::items_per_task(rows.len(), columns.len()));
        parallel::filled(len, E::zero(), task * columns.len(), len, |index, targets| {
            for (row, target) in targets.chunks_mut(columns.len()).enumerate() {
                let start = (rows.start + index * task + row) * width + columns.start;
                match &self.blocks {
                    Some(blocks) => row_of_blocks(blocks, start, target),
                    None => {
                        let values = &self.values[start..start + columns.len()];
                        let targets = target.iter_mut().zip(values);
                        targets.for_each(|(target, &value)| *target = to_float(self.scales[0], value));
                    }
                }
            }
        })
    }
}
