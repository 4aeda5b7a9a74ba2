//! Elements whose codes are indices of a table: [`unpack_nibbles`], [`unpack_float8`].
use super::{Job, PER_ELEMENT, TASK, each, vectorized};

/// The elements of codes of four bits, two per byte, the first of which is in the higher bits: `table[code] scale`, with one scale for
/// `block` elements.
///
/// # Panics
///
/// Panics unless there is a byte for two elements, a scale for each block, and an even number of elements in a block.
pub fn unpack_nibbles(bytes: &[u8], table: &[f32; 16], scales: &[f32], block: usize, out: &mut [f32]) {
    assert!(block.is_multiple_of(2) && block > 0, "blocks of {block} codes, two of which are a byte");
    assert_eq!(bytes.len(), out.len().div_ceil(2), "a byte for two elements");
    assert_eq!(scales.len(), out.len().div_ceil(block), "a scale for every {block} elements");
    // Both elements of a byte at once.
    let pairs = std::array::from_fn(|byte| [table[byte >> 4], table[byte & 15]]);
    let (work, blocks) = (out.len().saturating_mul(PER_ELEMENT), TASK.div_ceil(block));
    let parts =
        bytes.chunks(blocks * block / 2).zip(scales.chunks(blocks)).zip(out.chunks_mut(blocks * block));
    each(parts.collect(), work, |((bytes, scales), out)| {
        vectorized(UnpackNibbles { bytes, pairs: &pairs, scales, block, out });
    });
}

struct UnpackNibbles<'a> {
    bytes: &'a [u8],
    pairs: &'a [[f32; 2]; 256],
    scales: &'a [f32],
    block: usize,
    out: &'a mut [f32],
}

impl Job for UnpackNibbles<'_> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { bytes, pairs, scales, block, out } = self;
        for ((bytes, scale), out) in bytes.chunks(block / 2).zip(scales).zip(out.chunks_mut(block)) {
            let (whole, last) = out.as_chunks_mut::<2>();
            for (out, byte) in whole.iter_mut().zip(bytes) {
                *out = pairs[usize::from(*byte)];
            }
            if let ([last], Some(byte)) = (last, bytes.last()) {
                *last = pairs[usize::from(*byte)][0];
            }
            for out in out {
                *out *= scale;
            }
        }
    }
}

/// The numbers of eight bits that PyTorch calls `float8_e4m3fn`: a sign, four bits of exponent, three of mantissa, no infinity.
pub static FLOAT8_E4M3: [f32; 256] = {
    let (mut table, mut code) = ([0.0; 256], 0);
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, (code & 7) as f32);
        let magnitude = match (exponent, code & 7) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa / 512.0,
            _ => (8.0 + mantissa) * (1u32 << exponent) as f32 / 1024.0,
        };
        table[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    table
};

/// Where in a matrix are the elements that [`unpack_float8`] unpacks.
#[derive(Clone, Copy, Debug)]
pub struct ScaledMatrix<'a> {
    /// The columns of the matrix.
    pub columns: usize,
    /// The rows and columns that have one scale.
    pub block: [usize; 2],
    /// The scales of blocks, in row-major order, beginning with a row of blocks.
    pub scales: &'a [f32],
    /// The first element, counted from the first row of the first block.
    pub first: usize,
}

/// The elements of numbers of eight bits, consecutive ones of a matrix in row-major order: `table[code] scale`.
///
/// # Panics
///
/// Panics unless there is a code for every element and a scale for every block, and neither rows nor blocks are empty.
pub fn unpack_float8(codes: &[u8], table: &[f32; 256], matrix: ScaledMatrix<'_>, out: &mut [f32]) {
    assert_eq!(codes.len(), out.len(), "a code for every element");
    let ScaledMatrix { columns, block: [rows_of_block, columns_of_block], scales, first } = matrix;
    let (work, across) = (out.len().saturating_mul(PER_ELEMENT), columns.div_ceil(columns_of_block));
    let parts = codes.chunks(TASK).zip(out.chunks_mut(TASK)).zip((first..).step_by(TASK));
    each(parts.collect(), work, |((mut codes, mut out), mut at)| {
        while !codes.is_empty() {
            let (row, column) = (at / columns, at % columns);
            let scale = scales[row / rows_of_block * across + column / columns_of_block];
            // To the end of the block or of the row.
            let end = (column / columns_of_block + 1) * columns_of_block;
            let count = (end.min(columns) - column).min(codes.len());
            let (these, targets);
            (these, codes) = codes.split_at(count);
            (targets, out) = out.split_at_mut(count);
            for (out, code) in targets.iter_mut().zip(these) {
                *out = table[usize::from(*code)] * scale;
            }
            at += count;
        }
    });
}
