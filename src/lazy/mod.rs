//! Frozen weights that stay in their file until a layer runs: inference and fine-tuning of models larger than memory.
//!
//! [`WeightFile`] opens a file without reading its tensors. [`LazyLoad::lazy_load`] makes the parameters of any module lazy: a weight is
//! read when its layer runs, and stays in memory afterwards only within a byte budget. The next weights are read ahead, in the order that
//! was learned from the previous pass. Because passes repeat, the cache evicts the weight whose next use is farthest away, which is the one
//! used most recently.
//!
//! Layers of this library need less memory than Burn's: an embedding reads only the rows that its indices name, and in training a dense
//! layer or a convolution reads its weight again in the backward pass, where Burn's layer keeps it.
//!
//! # Files of other programs
//!
//! | the file has | call |
//! | --- | --- |
//! | weights of PyTorch, which are transposed | [`WeightFile::with_pytorch_adapter`] |
//! | other names | [`WeightFile::with_key_remapping`], [`with_key_remappings`](WeightFile::with_key_remappings) for a table |
//! | the prefixes of `DataParallel`, `torch.compile` or a `PeftModel` | nothing: they are ignored |
//! | the model under a key beside the state of an optimizer | [`WeightFile::with_key`] |
//! | the recurrent layers or the attention of PyTorch | [`WeightFile::with_pytorch_layers`] |
//! | weight normalization | [`WeightFile::with_weight_norm`] |
//! | one tensor for several parameters, as fused queries, keys and values | [`WeightFile::with_equal_rows`], [`with_rows`](WeightFile::with_rows) |
//! | several tensors for one parameter | [`WeightFile::with_joined_rows`] |
//! | one name of a tied weight, where the module has two | [`WeightFile::with_copies`] |
//! | queries and keys in another order, for rotary positions | [`RowOrders`] |
//!
//! Elements may be packed: 4-bit weights of bitsandbytes (`nf4`, `fp4`), float8 with its scales, and the blocks of GGUF are unpacked whenever they
//! are read, and are f32 in memory, or what [`LazyOptions::with_dtype`] says. [`TensorInfo::packing`] names the format.
//!
//! [`WeightFile::check`] shows what of a file fits a module. Tensors that Burn has no dtype for refuse only modules that use them.
//!
//! # Use
//!
//! - A mixture of experts, whose weights have no order to learn: call [`LazyCache::expect`] when the router has chosen.
//! - Adapters: call [`Module::apply_lora`](burn::module::Module::apply_lora), or attach [`Dora`](crate::lora::Dora), *after*
//!   `lazy_load`.
//! - [`Module::materialize`](burn::module::Module::materialize) makes a lazy module an ordinary one.
//! - Making a record of a lazy module reads all its weights into memory at once. Its adapters have the same paths as on ordinary weights.
//!   [`prepare`] with [`PrepareSource::of_module`] writes the same file with one weight in memory at a time.
//!
//! A read that fails during a forward or backward pass panics with the message of the [`LazyError`].
mod archive;
mod cache;
mod check;
mod error;
mod file;
mod format;
mod gguf;
mod load;
mod names;
mod open_file;
mod options;
mod packed;
mod parts;
mod prepare;
mod pytorch_layers;
mod quantized;
mod report;
mod row_order;
mod source;
mod targets;
mod tensors;
mod words;

pub use cache::{LazyCache, Progress, Statistics};
pub use check::{MatchedParameter, MissingParameter, WeightCheck};
pub use error::LazyError;
pub use file::{ReadMode, TensorInfo, WeightFile};
pub use load::LazyLoad;
pub use options::LazyOptions;
pub use prepare::{PrepareOptions, PrepareProgress, PrepareSource, Prepared, prepare};
pub use report::{LazyReport, ReportedParameter};
pub use row_order::{RowOrder, RowOrders};
