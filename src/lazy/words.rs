//! Memory for bytes that is aligned for every dtype.
use burn::tensor::{AllocationProperty, Bytes};

/// Memory for `len` bytes that is aligned for every dtype. (Burn copies a vector of bytes that is not.)
pub(super) fn words_for(len: usize) -> Vec<u64> {
    vec![0; len.div_ceil(size_of::<u64>())]
}

/// The first `len` bytes of words, without a copy.
pub(super) fn into_bytes(words: Vec<u64>, len: usize) -> Bytes {
    match size_of_val(&words[..]) == len {
        true => Bytes::from_elems(words),
        false => {
            Bytes::from_shared(bytes::Bytes::from_owner(Words { words, len }), AllocationProperty::Other)
        }
    }
}

/// The first `len` bytes of words.
pub(super) struct Words {
    pub words: Vec<u64>,
    pub len: usize,
}

impl AsRef<[u8]> for Words {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}
