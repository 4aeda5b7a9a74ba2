//! How much memory a training step takes, and which operation keeps what.
//!
//! - [`TrackingAllocator`]: a global allocator that counts; [`Scope`]: live and peak bytes since a point in the program.
//! - [`bytes_in_use`], [`peak_bytes`]: the same for any device, CPU or not.
//! - [`ResidentMemory`]: the memory of the process, as the system reports it.
//! - [`measure_step`]: memory, gradients and time of one training step of a model.
//! - [`measure_layer`]: exact bytes of one layer, for tests and benchmarks.
//! - [`ledger`]: what each operation of a forward pass keeps, and why.
//! - [`explain`]: the same, with what would remove it.
//! - [`timeline`]: the memory over a step by categories, as a plot or a trace; [`RunMemory`]: over a whole training run.
//! - [`watch_graphs`]: graphs that stay alive, named by the modules in them.
//! - [`Gate`]: a test that fails when a step needs more than a file records, and names the layers that grew.
//! - `criterion`, with the feature of this name: bytes of a step instead of its time, for `cargo bench`.
//!
//! All numbers are in bytes. What is unknown is `None`, never 0. On CPU devices, bytes are counted only if the allocator is installed.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::measure::{TrackingAllocator, measure_step};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(64, 32).init(&device);
//! let x = Tensor::<2>::ones([16, 64], &device);
//! let step = measure_step(&model, x, |model, x| model.forward(x).powf_scalar(2.0).mean());
//! println!("{step}");
//! assert!(step.kept >= Some(16 * 64 * 4)); // the input, for the gradient of the weight
//! assert_eq!(step.gradients, 4 * (64 * 32 + 32));
//! ```
mod allocator;
mod bytes;
#[cfg(feature = "criterion")]
pub mod criterion;
mod device;
#[cfg(feature = "system")]
mod gate;
mod graphs;
#[cfg_attr(not(any(feature = "wgpu", feature = "cuda")), path = "no_launches.rs")]
mod launches;
mod ledger;
mod run;
mod step;
mod svg;
mod table;
mod timeline;

pub use crate::explain::{ExplainedRow, Explanation, FoundPattern, Pattern, Remedy, Suggestion, explain};
pub use crate::platform::ResidentMemory;
pub use allocator::{Scope, TrackingAllocator};
pub(crate) use bytes::{bytes_or_unknown, csv_of, json_of, seconds, tensor_bytes};
pub use bytes::{human_bytes, mib};
pub(crate) use device::{Lap, Laps, is_host, warm_up};
pub use device::{bytes_in_use, peak_bytes};
#[cfg(feature = "system")]
pub use gate::{Gate, GateBytes, GateError, GateFault, GateLayer};
pub use graphs::{GraphWatch, LiveGraphRow, LiveGraphs, watch_graphs};
pub(crate) use launches::{NoLaunches, is_dry};
pub use ledger::{Ledger, LedgerRow, ledger};
pub(crate) use ledger::{Path, bytes_once, modules_of, note, shown};
pub use run::{RunMemory, RunStep};
pub use step::{LayerMeasurement, Measurement, StepInput, measure_layer, measure_step};
pub(crate) use table::{number, table};
pub use timeline::{Moment, Timeline, timeline};
