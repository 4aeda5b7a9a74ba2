//! Elements of weights that files store in a few bits, in f32: [`BlockFormat`] for the blocks of GGUF, [`unpack_nibbles`] for the four bits of
//! bitsandbytes, [`unpack_float8`].
//!
//! Sums and products are those of `ggml` and bitsandbytes, in the same order, in f32, so that results are theirs to the bit, before they round them to
//! the dtype that a model computes in.
#[cfg(any(feature = "flex", feature = "ndarray"))]
use crate::backend::cpu::parallel::{Job, each, vectorized};
use half::f16;
#[cfg(not(any(feature = "flex", feature = "ndarray")))]
use sequential::{Job, each, vectorized};

/// Without a backend on CPUs.
#[cfg(not(any(feature = "flex", feature = "ndarray")))]
mod sequential {
    pub trait Job {
        type Result;
        fn run(self) -> Self::Result;
    }

    pub fn vectorized<J: Job>(job: J) -> J::Result {
        job.run()
    }

    pub fn each<J>(jobs: Vec<J>, _work: usize, f: impl Fn(J)) {
        jobs.into_iter().for_each(f);
    }
}

/// The elements that a thread unpacks at a time, about: a multiple of every block.
const TASK: usize = 1 << 14;

/// The time to unpack an element, in the time to read one.
const PER_ELEMENT: usize = 4;

/// A format of blocks of elements in `ggml`, by its name there. A block has its scales within it.
///
/// An element of `Q4_0`, `Q5_0`, `Q8_0` (32 per block), `Q3_K` or `Q6_K` (256) is `scale q`, with a signed `q`. One of `Q4_1`, `Q5_1` (32),
/// `Q2_K`, `Q4_K` or `Q5_K` (256) is `scale q - minimum`, with an unsigned `q` (in `Q4_1` and `Q5_1` the minimum is added). In `IQ4_NL` (32)
/// and `IQ4_XS` (256), `q` comes from a table of 16 integers. In blocks of 256,
/// scales and minima of 16 or 32 elements are themselves integers of a few bits, times one scale of the block.
///
/// ```
/// use burn_memsave_layers::frozen::BlockFormat;
///
/// // A scale of 1 in half precision, and 32 integers.
/// let block: Vec<u8> = [0x00, 0x3c].into_iter().chain(0..32).collect();
/// let mut elements = [0.0; 32];
/// BlockFormat::Q8_0.unpack(&block, &mut elements);
/// assert_eq!(elements[31], 31.0);
/// ```
#[allow(missing_docs)] // all of them above
#[allow(non_camel_case_types)] // the names that everybody knows
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BlockFormat {
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
}

impl BlockFormat {
    /// The elements of a block.
    pub const fn elements(self) -> usize {
        match self {
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 | Self::IQ4_NL => 32,
            Self::Q2_K | Self::Q3_K | Self::Q4_K | Self::Q5_K | Self::Q6_K | Self::IQ4_XS => 256,
        }
    }

    /// The bytes of a block.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Q4_0 | Self::IQ4_NL => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::IQ4_XS => 136,
            Self::Q2_K => 84,
            Self::Q3_K => 110,
            Self::Q4_K => 144,
            Self::Q5_K => 176,
            Self::Q6_K => 210,
        }
    }

    /// The elements of whole blocks.
    ///
    /// # Panics
    ///
    /// Panics unless `out` has the [elements](Self::elements) of as many whole blocks as `blocks` has.
    pub fn unpack(self, blocks: &[u8], out: &mut [f32]) {
        let (elements, bytes) = (self.elements(), self.bytes());
        assert!(
            blocks.len().is_multiple_of(bytes) && blocks.len() / bytes * elements == out.len(),
            "{} bytes are no {self:?} blocks of {} elements",
            blocks.len(),
            out.len()
        );
        let work = out.len().saturating_mul(PER_ELEMENT);
        let parts = blocks.chunks(TASK / elements * bytes).zip(out.chunks_mut(TASK));
        each(parts.collect(), work, |(blocks, out)| {
            vectorized(UnpackBlocks { format: self, blocks, out });
        });
    }
}

struct UnpackBlocks<'a> {
    format: BlockFormat,
    blocks: &'a [u8],
    out: &'a mut [f32],
}

impl Job for UnpackBlocks<'_> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { format, blocks, out } = self;
        // Not a function that takes another one: what calls that would not have wide vectors.
        macro_rules! each_block {
            ($bytes:literal, $elements:literal, $unpack:ident) => {
                for (block, out) in
                    blocks.as_chunks::<$bytes>().0.iter().zip(out.as_chunks_mut::<$elements>().0)
                {
                    $unpack(block, out);
                }
            };
        }
        match format {
            BlockFormat::Q4_0 => each_block!(18, 32, q4_0),
            BlockFormat::Q4_1 => each_block!(20, 32, q4_1),
            BlockFormat::Q5_0 => each_block!(22, 32, q5_0),
            BlockFormat::Q5_1 => each_block!(24, 32, q5_1),
            BlockFormat::Q8_0 => each_block!(34, 32, q8_0),
            BlockFormat::Q2_K => each_block!(84, 256, q2_k),
            BlockFormat::Q3_K => each_block!(110, 256, q3_k),
            BlockFormat::Q4_K => each_block!(144, 256, q4_k),
            BlockFormat::Q5_K => each_block!(176, 256, q5_k),
            BlockFormat::Q6_K => each_block!(210, 256, q6_k),
            BlockFormat::IQ4_NL => each_block!(18, 32, iq4_nl),
            BlockFormat::IQ4_XS => each_block!(136, 256, iq4_xs),
        }
    }
}

/// The number in half precision at this byte.
#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The bits of a byte from `shift` on, as many as `mask` has.
#[inline(always)]
fn bits(byte: u8, shift: usize, mask: u8) -> i32 {
    (i32::from(byte) >> shift) & i32::from(mask)
}

#[inline(always)]
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for at in 0..16 {
        let byte = block[2 + at];
        out[at] = (bits(byte, 0, 15) - 8) as f32 * scale;
        out[16 + at] = (bits(byte, 4, 15) - 8) as f32 * scale;
    }
}

#[inline(always)]
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for at in 0..16 {
        let byte = block[4 + at];
        out[at] = bits(byte, 0, 15) as f32 * scale + minimum;
        out[16 + at] = bits(byte, 4, 15) as f32 * scale + minimum;
    }
}

/// The fifth bits of elements `at` and `16 + at`, of the four bytes that have one for each.
#[inline(always)]
fn fifth_bits(high: u32, at: usize) -> [i32; 2] {
    [((high >> at) & 1) as i32 * 16, ((high >> (16 + at)) & 1) as i32 * 16]
}

#[inline(always)]
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    for at in 0..16 {
        let (byte, [first, second]) = (block[6 + at], fifth_bits(high, at));
        out[at] = (bits(byte, 0, 15) + first - 16) as f32 * scale;
        out[16 + at] = (bits(byte, 4, 15) + second - 16) as f32 * scale;
    }
}

#[inline(always)]
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    for at in 0..16 {
        let (byte, [first, second]) = (block[8 + at], fifth_bits(high, at));
        out[at] = (bits(byte, 0, 15) + first) as f32 * scale + minimum;
        out[16 + at] = (bits(byte, 4, 15) + second) as f32 * scale + minimum;
    }
}

#[inline(always)]
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for at in 0..32 {
        out[at] = f32::from(block[2 + at].cast_signed()) * scale;
    }
}

/// Two bits per element: 16 scales and minima of four bits each, the bits, and the scales of both.
#[inline(always)]
fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scale, minimum) = (half_at(block, 80), half_at(block, 82));
    // 128 elements have 32 bytes; 32 of them the same two bits of each.
    for part in 0..8 {
        let bytes = block[16 + part / 4 * 32..][..32].iter();
        for (out, byte) in out[part * 32..][..32].iter_mut().zip(bytes) {
            *out = bits(*byte, part % 4 * 2, 3) as f32;
        }
    }
    for (out, byte) in out.as_chunks_mut::<16>().0.iter_mut().zip(&block[..16]) {
        let (scale, minimum) = (scale * bits(*byte, 0, 15) as f32, minimum * bits(*byte, 4, 15) as f32);
        for out in out {
            *out = scale * *out - minimum;
        }
    }
}

/// Three bits per element: the third bits, then the others, 16 signed scales of six bits each, and their scale.
#[inline(always)]
fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let scale = half_at(block, 108);
    for part in 0..8 {
        let bytes = block[32 + part / 4 * 32..][..32].iter().zip(&block[..32]);
        for (out, (low, high)) in out[part * 32..][..32].iter_mut().zip(bytes) {
            *out = (bits(*low, part % 4 * 2, 3) + 4 * bits(*high, part, 1) - 4) as f32;
        }
    }
    for (part, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let low = bits(block[96 + part % 8], part / 8 * 4, 15);
        let high = bits(block[104 + part % 4], part / 4 * 2, 3);
        let scale = scale * (low + 16 * high - 32) as f32;
        for out in out {
            *out *= scale;
        }
    }
}

/// The scale and the minimum of 32 elements, six bits each, as `Q4_K` and `Q5_K` have eight of both in twelve bytes.
#[inline(always)]
fn scale_and_minimum(bytes: &[u8], part: usize) -> [f32; 2] {
    let [scale, minimum] = match part {
        0..4 => [bits(bytes[part], 0, 63), bits(bytes[part + 4], 0, 63)],
        _ => {
            let high = |byte: u8| 16 * bits(byte, 6, 3);
            let low = bytes[part + 4];
            [bits(low, 0, 15) + high(bytes[part - 4]), bits(low, 4, 15) + high(bytes[part])]
        }
    };
    [scale as f32, minimum as f32]
}

/// Four bits per element: the scales of scales and minima, both, and the bits.
#[inline(always)]
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for part in 0..8 {
        let [of_scale, of_minimum] = scale_and_minimum(&block[4..16], part);
        let (scale, minimum) = (scale * of_scale, minimum * of_minimum);
        let (first, shift) = (16 + part / 2 * 32, part % 2 * 4);
        for at in 0..32 {
            out[part * 32 + at] = scale * bits(block[first + at], shift, 15) as f32 - minimum;
        }
    }
}

/// Five bits per element: as [`q4_k`], with the fifth bits before the others.
#[inline(always)]
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (scale, minimum) = (half_at(block, 0), half_at(block, 2));
    for part in 0..8 {
        let [of_scale, of_minimum] = scale_and_minimum(&block[4..16], part);
        let (scale, minimum) = (scale * of_scale, minimum * of_minimum);
        let (first, shift) = (48 + part / 2 * 32, part % 2 * 4);
        for at in 0..32 {
            let q = bits(block[first + at], shift, 15) + 16 * bits(block[16 + at], part, 1);
            out[part * 32 + at] = scale * q as f32 - minimum;
        }
    }
}

/// Six bits per element: the lower four, the upper two, 16 signed scales, and their scale.
#[inline(always)]
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    for part in 0..8 {
        // Of 128 elements, 64 have the lower halves of 64 bytes, and 32 the same two bits of 32 bytes.
        let (of_half, half) = (part % 4, part / 4);
        let low = block[half * 64 + of_half % 2 * 32..][..32].iter();
        let high = block[128 + half * 32..][..32].iter();
        for (out, (low, high)) in out[part * 32..][..32].iter_mut().zip(low.zip(high)) {
            *out = (bits(*low, of_half / 2 * 4, 15) + 16 * bits(*high, of_half * 2, 3) - 32) as f32;
        }
    }
    for (out, of_part) in out.as_chunks_mut::<16>().0.iter_mut().zip(&block[192..208]) {
        let scale = scale * f32::from(of_part.cast_signed());
        for out in out {
            *out *= scale;
        }
    }
}

/// The integers of `IQ4_NL` and `IQ4_XS`, denser around zero.
const NON_LINEAR: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// The integers of 16 bytes: those of the lower halves, then those of the upper ones.
#[inline(always)]
fn non_linear(bytes: &[u8], out: &mut [f32; 32]) {
    for (at, byte) in bytes[..16].iter().enumerate() {
        out[at] = NON_LINEAR[usize::from(byte & 15)];
        out[16 + at] = NON_LINEAR[usize::from(byte >> 4)];
    }
}

#[inline(always)]
fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    non_linear(&block[2..], out);
    for out in out {
        *out *= scale;
    }
}

/// As [`iq4_nl`], with eight signed scales of six bits: their scale, the upper two bits, the lower four, and the indices.
#[inline(always)]
fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let scale = half_at(block, 0);
    for (part, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let low = bits(block[4 + part / 2], part % 2 * 4, 15);
        let high = bits(block[2 + part / 4], part % 4 * 2, 3);
        let scale = scale * (low + 16 * high - 32) as f32;
        non_linear(&block[8 + part * 16..], out);
        for out in out {
            *out *= scale;
        }
    }
}

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
