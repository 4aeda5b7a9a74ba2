//! The sizes of text models: published ones, and small ones for tests.
mod decoder;
mod encoder;
mod gpt;
mod t5;

use crate::cache::PAGE;
use burn::tensor::DType;
pub use decoder::{Biases, DecoderSize, Experts, Gemma, Window};
pub use encoder::EncoderSize;
pub use gpt::{Gpt2Size, GptJSize};
pub use t5::T5Size;

/// The most bytes of so many keys of a head, and as many values, for each token of up to this length.
fn cache_bytes(heads: [usize; 3], head: usize, length: usize, [stored, computed]: [DType; 2]) -> u64 {
    // Integers have a scale for each token and head.
    let of_scale = if stored == DType::I8 { DType::F32.size() } else { 0 };
    let token = |dtype: DType| (head as u64).saturating_mul(dtype.size() as u64);
    let bytes = |length: usize| {
        let (pages, tail) = ((length / PAGE * PAGE) as u64, (length % PAGE) as u64);
        let stored = pages.saturating_mul(token(stored).saturating_add(of_scale as u64));
        stored.saturating_add(tail.saturating_mul(token(computed)))
    };
    // Those of a page that is not complete may be more than those of one that is.
    let most = bytes(length).max(bytes((length / PAGE * PAGE).saturating_sub(1)));
    heads.iter().fold(most.saturating_mul(2), |bytes, &count| bytes.saturating_mul(count as u64))
}
