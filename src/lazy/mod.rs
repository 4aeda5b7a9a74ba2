//! Frozen weights that stay in their file until a layer runs: inference and fine-tuning of models larger than memory.
//!
//! [`WeightFile`] opens a file without reading its tensors; [`LazyLoad::lazy_load`] makes the parameters of any module lazy. A
//! lazy weight is read when its layer runs, and dropped behind it; within a byte budget weights stay, and the next ones
//! are read ahead in the order that was learned from the pass before. What is evicted is what is used last: uses are cyclic.
//!
//! The layers of this library go further than stock ones: an embedding reads the rows that are asked for, and in training a
//! dense layer or a convolution reads its weight again in the backward pass, where a stock layer keeps it.
//!
//! - Adapters: [`Module::apply_lora`](burn::module::Module::apply_lora) *after* `lazy_load`.
//! - [`Module::materialize`](burn::module::Module::materialize) makes a lazy module an ordinary one.
//! - Records of a lazy module hold the weights, all at once, and adapters under the path they have on ordinary weights.
//!   [`prepare`] with [`PrepareSource::of_module`] writes the same file with one weight in memory at a time.
//!
//! A read that fails during a forward pass panics, with the message of the [`LazyError`].
mod cache;
mod error;
mod file;
mod format;
mod load;
mod options;
mod order;
mod prepare;
mod quantized;
mod report;
mod source;

pub use cache::{Progress, Statistics};
pub use error::LazyError;
pub use file::{ReadMode, TensorInfo, WeightFile};
pub use load::LazyLoad;
pub use options::LazyOptions;
pub use prepare::{PrepareOptions, PrepareProgress, PrepareSource, Prepared, prepare};
pub use report::{LazyReport, ReportedParameter};
