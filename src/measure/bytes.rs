//! Bytes of tensors, and what is measured as text.
use burn::tensor::{Tensor, kind::Basic};
use serde::{Serialize, Serializer};
use std::time::Duration;

/// Bytes in MiB (2^20) with two decimals and without the unit, for columns whose header names it.
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

/// Bytes in the unit that suits them, or "unknown".
pub(crate) fn bytes_or_unknown(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| "unknown".into(), human_bytes)
}

/// The bytes of a tensor's elements; of a view, those of the elements it shows.
pub(crate) fn tensor_bytes<const D: usize, K: Basic>(tensor: &Tensor<D, K>) -> u64 {
    (tensor.shape().num_elements() * tensor.dtype().size()) as u64
}

/// Rows of texts and numbers as CSV with a header.
pub(crate) fn csv_of<T: Serialize>(rows: &[T]) -> String {
    let mut writer = csv::Writer::from_writer(Vec::new());
    rows.iter().for_each(|row| writer.serialize(row).expect("a row of texts and numbers"));
    let text = writer.into_inner().expect("memory can be written to");
    String::from_utf8(text).expect("it is made of texts")
}

/// What consists of texts and numbers as JSON.
pub(crate) fn json_of(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).expect("texts and numbers")
}

/// A time in seconds, for `serialize_with`.
pub(crate) fn seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}
