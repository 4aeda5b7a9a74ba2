//! Masks of one bit per element on a CPU.
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
    /// An empty mask with capacity for `len` bits.
    pub(crate) fn with_capacity(len: usize) -> Self {
        Self::from_words(Vec::with_capacity(len.div_ceil(BITS)))
    }

    /// Appends `value != 0` for every value. The bits so far must fill whole words.
    pub(crate) fn extend<E: CpuElement>(&mut self, values: &[E]) {
        let words = Arc::get_mut(&mut self.words).expect("nobody shares a mask that is still being filled");
        words.extend(packed(values, |value| !value.is_zero()));
    }

    /// Multiplies every value by the slope that its bit selects, `[if clear, if set]`.
    pub(crate) fn scale<E: CpuElement>(&self, values: &mut [E], slopes: [f64; 2]) {
        let [off, on] = slopes.map(<E::Acc as CpuElement>::from_f64);
        // Loops without the multiplications by 0 and 1. A slope of 0 must give 0 for an infinite value, too.
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
        self.chunks(values, Work::of_pass::<E>(values.len()), |_, words, values| {
            parallel::vectorized(Select { words, values, off, on });
        });
    }

    /// Replaces every value of `[batch, channels, inner]` by `off` or `on` of it and the slope of its channel, as its bit says.
    pub(crate) fn select_by_channel<E: CpuElement>(
        &self,
        values: &mut [E],
        [channels, inner]: [usize; 2],
        slope: impl Fn(usize) -> E::Acc + Copy + Send + Sync,
        off: impl Fn(E, E::Acc) -> E + Copy + Send + Sync,
        on: impl Fn(E, E::Acc) -> E + Copy + Send + Sync,
    ) {
        self.chunks(values, values.len(), |first, words, values| {
            parallel::vectorized(SelectByChannel { words, values, first, channels, inner, slope, off, on });
        });
    }

    /// Multiplies every value of `[batch, channels, inner]` by the slope of its channel where its bit is set; 0 where it is not.
    pub(crate) fn scale_channels<E: CpuElement>(&self, values: &mut [E], inner: usize, slopes: &[E::Acc]) {
        let scaled = |value: E, slope| E::narrow(value.widen() * slope);
        let slope = |channel: usize| slopes[channel];
        self.select_by_channel(values, [slopes.len(), inner], slope, |_, _| E::zero(), scaled);
    }

    /// Calls `f(first, words, values)` for chunks of values and the words of their bits, `first` being the position of the first value.
    #[inline(always)]
    pub(crate) fn chunks<E: CpuElement>(
        &self,
        values: &mut [E],
        work: impl Into<Work>,
        f: impl Fn(usize, &[u64], &mut [E]) + Send + Sync,
    ) {
        parallel::chunks_mut(values, TASK * BITS, work, |task, values| {
            f(task * TASK * BITS, &self.words[task * TASK..], values);
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
            let (on, off) = (on(*value), off(*value)); // both, to avoid a branch per bit
            *value = stored(if half & bit != 0 { on } else { off }, nothing);
        }
    }
}

/// Bits that are read together.
const HALF: usize = BITS / 2;
/// Each of these bits, from a table: few processors can shift every element of a vector by a number of its own.
static BIT: [u32; HALF] = {
    let mut bits = [0; HALF];
    let mut at = 0;
    while at < HALF {
        bits[at] = 1 << at;
        at += 1;
    }
    bits
};

/// Replaces values of `[batch, channels, inner]` by `off` or `on` of them and the slope of their channel, as their bits say.
struct SelectByChannel<'a, E, S, F, G> {
    words: &'a [u64],
    values: &'a mut [E],
    /// The position of the first value, which is the first of a word.
    first: usize,
    channels: usize,
    inner: usize,
    slope: S,
    off: F,
    on: G,
}

impl<E, S, F, G> Job for SelectByChannel<'_, E, S, F, G>
where
    E: CpuElement,
    S: Fn(usize) -> E::Acc,
    F: Fn(E, E::Acc) -> E,
    G: Fn(E, E::Acc) -> E,
{
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { words, values, first, channels, inner, slope, off, on } = self;
        let mut channel = first / inner % channels;
        // Elements of the channel that are still to come.
        let mut left = inner - first % inner;
        let nothing = nothing();
        for (&word, mut values) in words.iter().zip(values.chunks_mut(BITS)) {
            let mut word = word;
            while !values.is_empty() {
                if left == 0 {
                    channel = if channel + 1 == channels { 0 } else { channel + 1 }; // a remainder takes longer
                    left = inner;
                }
                let (here, rest) = values.split_at_mut(left.min(values.len()));
                let slope = slope(channel);
                left -= here.len();
                let bits = word;
                word = word.unbounded_shr(here.len() as u32);
                select(bits, here, nothing, |value| off(value, slope), |value| on(value, slope));
                values = rest;
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
    for (values, words) in values.chunks(PACKED_AT_ONCE).zip(packs(words)) {
        pack(values.iter(), bit, words);
    }
}

/// Values that are packed at once. Each becomes a byte first, and a processor that reads several bytes together has to wait if they have
/// just been written one by one.
pub(crate) const PACKED_AT_ONCE: usize = 8 * BITS;

/// The words of every [`PACKED_AT_ONCE`] values.
#[inline(always)]
pub(crate) fn packs(words: &mut [u64]) -> impl Iterator<Item = &mut [u64]> {
    words.chunks_mut(PACKED_AT_ONCE / BITS)
}

/// Packs `bit` of up to [`PACKED_AT_ONCE`] values.
#[inline(always)]
pub(crate) fn pack<E>(values: impl Iterator<Item = E>, mut bit: impl FnMut(E) -> bool, words: &mut [u64]) {
    debug_assert!(words.len() <= PACKED_AT_ONCE / BITS);
    let mut bytes = [0; PACKED_AT_ONCE];
    for (byte, value) in bytes.iter_mut().zip(values) {
        *byte = u8::from(bit(value)).wrapping_neg(); // all ones, as comparisons of vectors make them
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

/// [`pack_bytes`] for other processors.
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
        /// Elements per draw: a multiple of 64, so that every draw fills whole words.
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
