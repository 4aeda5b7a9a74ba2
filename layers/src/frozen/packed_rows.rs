//! Rows of a matrix that are packed, for products that unpack a part of them at a time.
use core::fmt::Debug;

/// Rows that are unpacked whenever they are used.
pub trait PackedRows: Debug + Send + Sync {
    /// Unpacks elements of consecutive rows, beginning with the first element of this row, until `out` is full.
    ///
    /// # Panics
    ///
    /// Panics if the rows can no longer be read, as [`FrozenWeight::read`](super::FrozenWeight::read).
    fn unpack(&self, row: usize, out: &mut [f32]);

    /// Called after a product with all rows. By default, does nothing.
    ///
    /// # Panics
    ///
    /// Panics if what was unpacked may not be what it was before.
    fn were_used(&self) {}
}
