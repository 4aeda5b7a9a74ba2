//! Bytes of tensors, and bytes as text.
use burn::tensor::{Tensor, kind::Basic};
use serde::Serialize;
use std::io;

/// Bytes in MiB (2^20) with two decimals and no unit, for columns whose head names it.
///
/// ```
/// assert_eq!(burn_memsave::measure::mib(16 * 64 * 56 * 56 * 4), "12.25");
/// ```
pub fn mib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 20))
}

/// Bytes in the unit that suits them: B, KiB, MiB or GiB.
///
/// ```
/// use burn_memsave::measure::human_bytes;
///
/// assert_eq!(human_bytes(80), "80 B");
/// assert_eq!(human_bytes(1536), "1.50 KiB");
/// assert_eq!(human_bytes(12_845_056), "12.25 MiB");
/// ```
pub fn human_bytes(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(power, _)| bytes >> power > 0) {
        Some((power, unit)) => format!("{:.2} {unit}", bytes as f64 / (1u64 << power) as f64),
        None => format!("{bytes} B"),
    }
}

/// The bytes of a tensor's elements; of a view, those of the elements it shows.
pub(super) fn tensor_bytes<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> u64 {
    (tensor.shape().num_elements() * tensor.dtype().size()) as u64
}

/// Rows as CSV with a header.
pub(super) fn csv_of<T: Serialize>(rows: &[T]) -> io::Result<String> {
    let mut writer = csv::Writer::from_writer(Vec::new());
    for row in rows {
        writer.serialize(row)?;
    }
    let text = writer.into_inner().map_err(|error| error.into_error())?;
    String::from_utf8(text).map_err(io::Error::other)
}
