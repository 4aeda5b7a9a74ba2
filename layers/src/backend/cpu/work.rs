//! The work of loops, by which they are divided among threads.
use super::{CpuElement, is_wide};

/// The work of a loop, in units of the time to read one element of a contiguous slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work(u64);

impl Work {
    /// With less work than this, a loop stays on the calling thread, because it takes longer to wake another one.
    pub(super) const WORTH_IT: u64 = 1 << 17;

    /// The product of these numbers. It may exceed `usize` on targets of 32 bits.
    pub(crate) fn of<const N: usize>(sizes: [usize; N]) -> Self {
        Self(sizes.into_iter().fold(1, |product: u64, size| product.saturating_mul(size as u64)))
    }

    /// The work of a pass that does little more than read and write its elements. Such a pass waits for memory, and sleeping threads take
    /// as long to wake as it takes for hundreds of thousands of elements. In half precision, conversions take the time instead.
    pub(crate) fn of_pass<E: CpuElement>(elements: usize) -> Self {
        Self(elements as u64 / if is_wide::<E>() { 8 } else { 1 })
    }

    pub(crate) fn is_worth_it(self) -> bool {
        self.0 >= Self::WORTH_IT
    }

    /// The same work, if parts of it are done more than once.
    pub(super) fn times(self, factor: f64) -> Self {
        Self((self.units() * factor) as u64)
    }

    /// The time in which so many elements are read.
    pub(super) fn units(self) -> f64 {
        self.0 as f64
    }
}

impl From<usize> for Work {
    fn from(elements: usize) -> Self {
        Self::of([elements])
    }
}

impl core::iter::Sum for Work {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        Self(parts.fold(0, |sum: u64, part| sum.saturating_add(part.0)))
    }
}

impl core::ops::Div<usize> for Work {
    type Output = Self;

    fn div(self, by: usize) -> Self {
        Self(self.0 / by as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_does_not_overflow() {
        assert_eq!(Work::of([u32::MAX as usize; 2]), Work(0xffff_fffe_0000_0001));
        assert_eq!(Work::of([usize::MAX; 3]) / 2, Work(u64::MAX / 2));
        assert_eq!(Work::from(7), Work::of([7, 1]));
        assert_eq!([Work(u64::MAX), Work(3)].into_iter().sum::<Work>(), Work(u64::MAX));
        assert!(!Work::of([Work::WORTH_IT as usize, 0]).is_worth_it());
    }
}
