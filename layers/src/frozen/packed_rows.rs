//! Rows of a matrix that are packed, for products that unpack a part of them at a time.
use core::{fmt::Debug, ops::Range};

/// A matrix whose rows are read and unpacked whenever they are used.
pub trait PackedRows: Debug + Send + Sync {
    /// Reads rows.
    ///
    /// # Panics
    ///
    /// Panics if the rows can no longer be read, as [`FrozenWeight::read`](super::FrozenWeight::read).
    fn read_packed(&self, rows: Range<usize>) -> Box<dyn PackedElements + '_>;

    /// Called after a product with all rows. By default, does nothing.
    ///
    /// # Panics
    ///
    /// Panics if what was unpacked may not be what it was before.
    fn were_used(&self) {}
}

/// Elements that have been read, and are still packed.
pub trait PackedElements {
    /// Unpacks elements, beginning with `first` of those that were read, until `out` is full.
    fn unpack(&self, first: usize, out: &mut [f32]);
}
