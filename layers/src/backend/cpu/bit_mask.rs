//! One bit per element.
use super::{
    CpuBackend, CpuElement,
    elementwise::{nothing, stored},
    parallel::{self, Job, Work},
    with_element,
};
use crate::backend::{Masks, Saved};
use burn::backend::{
    Distribution, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape, bf16, f16};
use num_traits::{One, Zero};
use std::sync::Arc;

/// One bit per element, packed in 64-bit words; the last word is padded with zeros.
#[derive(Clone)]
pub struct BitMask {
    words: Arc<Vec<u64>>,
}

/// Bits per word.
pub(crate) const BITS: usize = u64::BITS as usize;
/// Words per parallel task.
pub(crate) const TASK: usize = 64;

impl BitMask {
    /// An empty mask with room for `len` bits.
    pub(crate) fn with_capacity(len: usize) -> Self {
        Self::from_words(Vec::with_capacity(len.div_ceil(BITS)))
    }

    /// Appends `value != 0` for every value. All that came before must have filled whole words.
    pub(crate) fn extend<E: CpuElement>(&mut self, values: &[E]) {
        let words = Arc::get_mut(&mut self.words).expect("nobody shares a mask that is still being filled");
        words.extend(packed(values, |value| !value.is_zero()));
    }

    /// Multiplies every value by the slope that its bit chooses, `[if clear, if set]`.
    pub(crate) fn scale<E: CpuElement>(&self, values: &mut [E], slopes: [f64; 2]) {
        let [off, on] = slopes.map(<E::Acc as CpuElement>::from_f64);
        // Common slopes get loops without a multiplication; 0 must be 0 for an infinite value, too.
        if off.is_zero() && on.is_one() {
            self.select(values, |_| E::zero(), |v| v);
        } else if off.is_zero() {
            self.select(values, |_| E::zero(), move |v| E::narrow(v.widen() * on));
        } else {
            self.select(values, move |v| E::narrow(v.widen() * off), move |v| E::narrow(v.widen() * on));
        }
    }

    /// Replaces every value by `off` or `on` of it, as its bit says.
    #[inline(always)]
    fn select<E: CpuElement>(
        &self,
        values: &mut [E],
        off: impl Fn(E) -> E + Copy + Send + Sync,
        on: impl Fn(E) -> E + Copy + Send + Sync,
    ) {
        parallel::chunks_mut(values, TASK * BITS, Work::of_pass::<E>(values.len()), |task, values| {
            parallel::vectorized(Select { words: &self.words[task * TASK..], values, off, on });
        });
    }

    /// Multiplies every value of `[batch, channels, inner]` by the slope of its channel where its bit is set; 0 where it is not.
    pub(crate) fn scale_channels<E: CpuElement>(&self, values: &mut [E], inner: usize, slopes: &[E::Acc]) {
        parallel::chunks_mut(values, TASK * BITS, values.len(), |task, values| {
            let words = &self.words[task * TASK..];
            parallel::vectorized(ScaleChannels { words, values, first: task * TASK * BITS, inner, slopes });
        });
    }

    /// The packed bits.
    pub(crate) fn words(&self) -> &[u64] {
        &self.words
    }

    pub(crate) fn from_words(words: Vec<u64>) -> Self {
        Self { words: Arc::new(words) }
    }
}

/// Replaces values by `off` or `on` of them, as their bits say.
struct Select<'a, E, F, G> {
    words: &'a [u64],
    values: &'a mut [E],
    off: F,
    on: G,
}

impl<E: CpuElement, F: Fn(E) -> E, G: Fn(E) -> E> Job for Select<'_, E, F, G> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { words, values, off, on } = self;
        let nothing = nothing();
        for (values, &word) in values.chunks_mut(BITS).zip(words) {
            select(word, values, nothing, &off, &on);
        }
    }
}

/// Replaces up to 64 values by `off` or `on` of them, as their bits say.
#[inline(always)]
fn select<E: CpuElement>(word: u64, values: &mut [E], nothing: E, off: impl Fn(E) -> E, on: impl Fn(E) -> E) {
    for (half, values) in [word as u32, (word >> HALF) as u32].into_iter().zip(values.chunks_mut(HALF)) {
        for (value, bit) in values.iter_mut().zip(&BIT) {
            let (on, off) = (on(*value), off(*value)); // both, so that no bit needs a branch
            *value = stored(if half & bit != 0 { on } else { off }, nothing);
        }
    }
}

/// Bits that are looked at together.
const HALF: usize = BITS / 2;
/// Each of them, from a table: few machines shift every element of a vector by a number of its own.
static BIT: [u32; HALF] = {
    let mut bits = [0; HALF];
    let mut at = 0;
    while at < HALF {
        bits[at] = 1 << at;
        at += 1;
    }
    bits
};

/// Scales values of `[batch, channels, inner]`, from one at the beginning of a word on.
struct ScaleChannels<'a, E: CpuElement> {
    words: &'a [u64],
    values: &'a mut [E],
    first: usize,
    inner: usize,
    slopes: &'a [E::Acc],
}

impl<E: CpuElement> Job for ScaleChannels<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { words, values, first, inner, slopes } = self;
        let scale = |value: E, slope: E::Acc| E::narrow(value.widen() * slope);
        let mut channel = first / inner % slopes.len();
        // Elements of the channel that are left.
        let mut left = inner - first % inner;
        let nothing = nothing();
        for (word, values) in words.iter().zip(values.chunks_mut(BITS)) {
            if values.len() <= left {
                select(*word, values, nothing, |_| E::zero(), |value| scale(value, slopes[channel]));
                left -= values.len();
                continue;
            }
            for (bit, value) in values.iter_mut().enumerate() {
                if left == 0 {
                    channel = (channel + 1) % slopes.len();
                    left = inner;
                }
                let on = word >> bit & 1 == 1;
                *value = if on { scale(*value, slopes[channel]) } else { E::zero() };
                left -= 1;
            }
        }
    }
}

impl Saved for BitMask {
    fn bytes(&self) -> usize {
        size_of::<u64>() * self.words.len()
    }
}

impl core::fmt::Debug for BitMask {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "BitMask({} bytes)", self.bytes())
    }
}

/// Packs `bit` of all values.
#[inline(always)]
pub(crate) fn packed<E>(values: &[E], bit: impl Fn(&E) -> bool + Copy) -> Vec<u64> {
    let mut words = vec![0; values.len().div_ceil(BITS)];
    pack_all(values, bit, &mut words);
    words
}

/// Packs `bit` of as many values as there are words for.
#[inline(always)]
pub(crate) fn pack_all<E>(values: &[E], bit: impl Fn(&E) -> bool + Copy, words: &mut [u64]) {
    for (values, words) in values.chunks(TOGETHER).zip(of_blocks(words)) {
        pack(values.iter(), bit, words);
    }
}

/// The words of as many values as are packed together.
#[inline(always)]
pub(crate) fn of_blocks(words: &mut [u64]) -> impl Iterator<Item = &mut [u64]> {
    words.chunks_mut(TOGETHER / BITS)
}

/// Values that are packed together: each becomes a byte first, and to read bytes at once that have just been written in smaller pieces
/// is to wait for them.
pub(crate) const TOGETHER: usize = 8 * BITS;

/// Packs `bit` of up to [`TOGETHER`] values.
#[inline(always)]
pub(crate) fn pack<E>(values: impl Iterator<Item = E>, mut bit: impl FnMut(E) -> bool, words: &mut [u64]) {
    debug_assert!(words.len() <= TOGETHER / BITS);
    let mut bytes = [0; TOGETHER];
    for (byte, value) in bytes.iter_mut().zip(values) {
        *byte = u8::from(bit(value)).wrapping_neg(); // all ones, as vector comparisons make them
    }
    words.iter_mut().zip(bytes.as_chunks().0).for_each(|(word, &bytes)| *word = pack_bytes(bytes));
}

/// Packs the highest bit of every byte.
#[cfg(all(target_arch = "x86_64", not(memsave_portable)))]
#[inline(always)]
fn pack_bytes(bytes: [u8; BITS]) -> u64 {
    use core::arch::x86_64::{__m128i, _mm_movemask_epi8};
    let vectors: [__m128i; 4] = bytemuck::cast(bytes);
    // SAFETY: SSE2 is part of x86-64.
    vectors.iter().rev().fold(0, |word, &vector| word << 16 | unsafe { _mm_movemask_epi8(vector) } as u64)
}

/// Packs the highest bit of every byte.
#[cfg(any(memsave_portable, not(target_arch = "x86_64")))]
#[inline(always)]
fn pack_bytes(bytes: [u8; BITS]) -> u64 {
    bytes.as_chunks::<8>().0.iter().rev().fold(0, |word, &eight| {
        // Multiplying moves bit 0 of byte i to bit 56 + i.
        let ones = u64::from_le_bytes(eight) & 0x0101_0101_0101_0101;
        word << 8 | ones.wrapping_mul(0x0102_0408_1020_4080) >> 56
    })
}

impl<B: CpuBackend> Masks for B {
    type Mask = BitMask;

    fn pack(bits: BoolTensor<B>) -> BitMask {
        let bits = B::contiguous_bools(bits);
        BitMask::from_words(packed(B::as_bytes(&bits), |&bit| bit != 0))
    }

    fn scale_by_mask(x: FloatTensor<B>, mask: &BitMask, slopes: [f64; 2]) -> FloatTensor<B> {
        let mut x = B::contiguous(x);
        with_element!(x.dtype(), "scale_by_mask", E => mask.scale(B::as_slice_mut::<E>(&mut x), slopes));
        x
    }

    fn bernoulli_mask(shape: Shape, dtype: DType, device: &B::Device, probability: f64) -> BitMask {
        /// Elements drawn at once: a multiple of 64, so that every draw fills whole words.
        const DRAW: usize = 1 << 14;
        let mut left = shape.num_elements();
        let mut mask = BitMask::with_capacity(left);
        while left > 0 {
            let draw = left.min(DRAW);
            let drawn = B::float_random(
                Shape::new([draw]),
                Distribution::Bernoulli(probability),
                device,
                dtype.into(),
            );
            with_element!(dtype, "dropout", E => mask.extend(B::as_slice::<E>(&B::contiguous(drawn))));
            left -= draw;
        }
        mask
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_packed_into_its_bit() {
        for seed in 0..100u64 {
            let bits = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(seed as u32);
            let bytes = core::array::from_fn(|at| if bits >> at & 1 == 1 { u8::MAX } else { 0 });
            assert_eq!(pack_bytes(bytes), bits);
        }
    }
}
