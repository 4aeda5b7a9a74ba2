//! One bit per element.
use super::{CpuElement, parallel};
use crate::backend::{PiecewiseLinear, Saved, piecewise_linear::Visitor};
use num_traits::{One, Zero};
use std::sync::Arc;

/// One bit per element, packed in 64-bit words; the last word is padded with zeros.
#[derive(Clone)]
pub struct BitMask {
    words: Arc<Vec<u64>>,
}

const BITS: usize = u64::BITS as usize;
/// Words per parallel task.
const TASK: usize = 64;

impl BitMask {
    /// The bits of `f` at every value.
    pub(super) fn of<E: CpuElement>(values: &[E], f: PiecewiseLinear) -> Self {
        Self::from_words(f.with(Bits(values)))
    }

    /// `f` of every value, and its bits.
    pub(super) fn apply<E: CpuElement>(values: &[E], f: PiecewiseLinear) -> (Vec<E>, Self) {
        let (out, words) = f.with(Apply(values));
        (out, Self::from_words(words))
    }

    /// Replaces every value by `f` of it; the bits.
    pub(super) fn apply_in_place<E: CpuElement>(values: &mut [E], f: PiecewiseLinear) -> Self {
        Self::from_words(f.with(ApplyInPlace(values)))
    }

    /// An empty mask with room for `len` bits.
    pub(super) fn with_capacity(len: usize) -> Self {
        Self::from_words(Vec::with_capacity(len.div_ceil(BITS)))
    }

    /// Appends `value != 0` for every value. All that came before must have filled whole words.
    pub(super) fn extend<E: CpuElement>(&mut self, values: &[E]) {
        let words = Arc::get_mut(&mut self.words).expect("nobody shares a mask that is still being filled");
        words.extend(values.chunks(BITS).map(|chunk| pack(chunk.iter(), |v| !v.is_zero())));
    }

    /// Multiplies every value by the slope that its bit chooses, `[if clear, if set]`.
    pub(super) fn scale<E: CpuElement>(&self, values: &mut [E], slopes: [f64; 2]) {
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
        let select = |word: u64, values: &mut [E]| {
            for (byte, values) in values.chunks_mut(8).enumerate() {
                let byte = (word >> (8 * byte)) as u32 & 0xff;
                for (bit, value) in values.iter_mut().enumerate() {
                    let (on, off) = (on(*value), off(*value)); // both, so that no bit needs a branch
                    *value = if byte & (1 << bit) != 0 { on } else { off };
                }
            }
        };
        parallel::chunks_mut(values, TASK * BITS, values.len(), |task, values| {
            let words = &self.words[task * TASK..];
            let (full, rest) = values.as_chunks_mut::<BITS>();
            let rest_word = words.get(full.len());
            full.iter_mut().zip(words).for_each(|(values, &word)| select(word, values));
            if let Some(&word) = rest_word {
                select(word, rest);
            }
        });
    }

    /// The packed bits.
    pub(super) fn words(&self) -> &[u64] {
        &self.words
    }

    fn from_words(words: Vec<u64>) -> Self {
        Self { words: Arc::new(words) }
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

/// Calls `f(values, word)` for every 64 values and the word of their bits; the number of values is known where `f` is
/// inlined, but for the rest at the end.
#[inline(always)]
fn for_words<E>(values: &mut [E], words: &mut [u64], f: impl Fn(&mut [E]) -> u64) {
    let (full, rest) = values.as_chunks_mut::<BITS>();
    if let Some(word) = words.get_mut(full.len()) {
        *word = f(rest);
    }
    full.iter_mut().zip(words).for_each(|(values, word)| *word = f(values));
}

/// Packs `bit` of up to 64 values.
#[inline(always)]
fn pack<E>(values: impl Iterator<Item = E>, mut bit: impl FnMut(E) -> bool) -> u64 {
    let mut bytes = [0; BITS];
    for (byte, value) in bytes.iter_mut().zip(values) {
        *byte = u8::from(bit(value)).wrapping_neg(); // all ones, as vector comparisons make them
    }
    pack_bytes(bytes)
}

/// Packs the highest bit of every byte.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn pack_bytes(bytes: [u8; BITS]) -> u64 {
    use core::arch::x86_64::{__m128i, _mm_movemask_epi8};
    let vectors: [__m128i; 4] = bytemuck::cast(bytes);
    // SAFETY: SSE2 is part of x86-64.
    vectors.iter().rev().fold(0, |word, &vector| word << 16 | unsafe { _mm_movemask_epi8(vector) } as u64)
}

/// Packs the highest bit of every byte.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn pack_bytes(bytes: [u8; BITS]) -> u64 {
    bytes.as_chunks::<8>().0.iter().rev().fold(0, |word, &eight| {
        // Multiplying moves bit 0 of byte i to bit 56 + i.
        let ones = u64::from_le_bytes(eight) & 0x0101_0101_0101_0101;
        word << 8 | ones.wrapping_mul(0x0102_0408_1020_4080) >> 56
    })
}

struct Bits<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E, Vec<u64>> for Bits<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> Vec<u64> {
        let mut words = vec![0; self.0.len().div_ceil(BITS)];
        parallel::chunks_mut(&mut words, TASK, self.0.len(), |task, words| {
            let (full, rest) = self.0[task * TASK * BITS..].as_chunks::<BITS>();
            if let Some(word) = words.get_mut(full.len()) {
                *word = pack(rest.iter(), |&v| f(v).1);
            }
            full.iter().zip(words).for_each(|(values, word)| *word = pack(values.iter(), |&v| f(v).1));
        });
        words
    }
}

struct Apply<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E, (Vec<E>, Vec<u64>)> for Apply<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> (Vec<E>, Vec<u64>) {
        let mut words = vec![0; self.0.len().div_ceil(BITS)];
        let out = parallel::zip_copied(self.0, &mut words, [TASK * BITS, TASK], |_, out, words| {
            for_words(out, words, |values| replace(values, f));
        });
        (out, words)
    }
}

struct ApplyInPlace<'a, E>(&'a mut [E]);

impl<E: CpuElement> Visitor<E, Vec<u64>> for ApplyInPlace<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> Vec<u64> {
        let work = self.0.len();
        let mut words = vec![0; work.div_ceil(BITS)];
        parallel::zip_chunks_mut(self.0, &mut words, [TASK * BITS, TASK], work, |_, values, words| {
            for_words(values, words, |values| replace(values, f));
        });
        words
    }
}

/// Replaces up to 64 values by `f` of them; their bits.
#[inline(always)]
fn replace<E: Copy>(values: &mut [E], f: impl Fn(E) -> (E, bool)) -> u64 {
    pack(values.iter_mut(), |value| {
        let (y, bit) = f(*value);
        *value = y;
        bit
    })
}
