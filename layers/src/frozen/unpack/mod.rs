//! Elements of weights that files store in a few bits, in f32: [`BlockFormat`] for the blocks of GGUF, [`unpack_nibbles`] for the four bits of
//! bitsandbytes, [`unpack_float8`].
//!
//! Sums and products are those of `ggml` and bitsandbytes, in the same order, in f32, so that results are theirs to the bit, before they round them to
//! the dtype that a model computes in.
mod blocks;
mod tables;

#[cfg(any(feature = "flex", feature = "ndarray"))]
use crate::backend::cpu::parallel::{Job, each, vectorized};
#[cfg(not(any(feature = "flex", feature = "ndarray")))]
use sequential::{Job, each, vectorized};
pub use tables::{FLOAT8_E4M3, ScaledMatrix, unpack_float8, unpack_nibbles};

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
        if out.len() <= TASK {
            return vectorized(UnpackBlocks { format: self, blocks, out });
        }
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
        let Self { format, blocks: packed, out } = self;
        // Not a function that takes another one: what calls that would not have wide vectors.
        macro_rules! each_block {
            ($bytes:literal, $elements:literal, $unpack:ident) => {
                for (block, out) in
                    packed.as_chunks::<$bytes>().0.iter().zip(out.as_chunks_mut::<$elements>().0)
                {
                    blocks::$unpack(block, out);
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
