//! Frozen weights that stay in their file until a layer runs: inference and fine-tuning of models larger than memory.
//!
//! [`WeightFile`] opens a file without reading its tensors; [`LazyLoad::lazy_load`] makes the parameters of any module
//! lazy. A lazy weight is read when its layer runs, and dropped afterwards. Within a byte budget weights stay in memory,
//! and the next ones are read ahead, in the order that was learned from the pass before. Passes repeat, so the weight that
//! is evicted is the one whose next use is farthest away: the one used last.
//!
//! Layers of this library need less than stock ones: an embedding reads only the rows that its indices name, and in training a
//! dense layer or a convolution reads its weight again in the backward pass, where a stock layer keeps it.
//!
//! - Adapters: call [`Module::apply_lora`](burn::module::Module::apply_lora), or attach [`Dora`](crate::lora::Dora), *after*
//!   `lazy_load`.
//! - [`Module::materialize`](burn::module::Module::materialize) makes a lazy module an ordinary one.
//! - Records of a lazy module hold the weights, all at once, and adapters under the paths that they have on ordinary weights.
//!   [`prepare`] with [`PrepareSource::of_module`] writes the same file with one weight in memory at a time.
//!
//! A read that fails during a forward or backward pass panics with the message of the [`LazyError`].
mod cache;
mod error;
mod file;
mod format;
mod load;
mod options;
mod prepare;
mod quantized;
mod report;
mod source;
mod targets;

pub use cache::{LazyCache, Progress, Statistics};
pub use error::LazyError;
pub use file::{ReadMode, TensorInfo, WeightFile};
pub use load::LazyLoad;
pub use options::LazyOptions;
pub use prepare::{PrepareOptions, PrepareProgress, PrepareSource, Prepared, prepare};
pub use report::{LazyReport, ReportedParameter};
