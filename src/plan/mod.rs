//! Training steps that fit into memory.
//!
//! A batch is cut into parts ([`micro_batched`], [`micro_batched_within`]), or blocks of the model are computed again ([`profile`],
//! [`auto_checkpoint`]). What a block is the model says: its forward pass runs it through [`block`]. Blocks cannot be found from the
//! module tree, because Burn has no hooks around the forward pass of a module, which is a method of any name and signature; of the tree are
//! only their paths.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::nn::LinearConfig;
//! use burn_memsave::plan::micro_batched;
//!
//! let device = Device::flex().autodiff();
//! let model = LinearConfig::new(8, 4).init(&device);
//! let batch = Tensor::<2>::ones([10, 8], &device);
//! let parts = batch.split(4, 0).into_iter().map(|part| (part.clone(), part.dims()[0])); // 4, 4 and 2 items
//! let (loss, gradients) = micro_batched(&model, parts, |model, x| model.forward(x).powf_scalar(2.0).mean())?;
//! assert_eq!((loss.dims(), gradients.len()), ([1], 2));
//! # Ok::<(), burn_memsave::plan::PlanError>(())
//! ```
use crate::measure::human_bytes;

mod batches;
mod block;
mod choose;
mod dry_run;
mod estimate;
mod parts;
mod profile;
mod retry;
mod table;
mod trace;

pub use batches::{largest_batch, micro_batched, micro_batched_within};
pub(crate) use block::set_aside;
pub use block::{Treatment, block};
pub use dry_run::dry_run;
pub use estimate::{Estimate, OptimizerState, StepEstimate, estimate, estimate_step};
pub use parts::{ItemWeights, PartWeight, PartsError};
pub(crate) use parts::{checked_weight, may_be_taken_in_parts};
pub use profile::{BlockCost, BlockProfile, Profile, ProfileOptions, profile};
pub use retry::retry_halved;
pub use table::{Plan, auto_checkpoint};

/// Why a step cannot be planned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The batch cannot be taken in parts.
    #[error(transparent)]
    Parts(#[from] PartsError),
    /// The budget is too small.
    #[error("a budget of {} is too small: the least that a step was found to need is {}", human_bytes(*budget), human_bytes(*least))]
    Budget {
        /// Bytes.
        budget: u64,
        /// Bytes.
        least: u64,
    },
    /// Bytes are not counted on this device.
    #[error(
        "bytes are not counted on this device: on a CPU device, make `measure::TrackingAllocator` the global allocator; \
         servers do not say what they have"
    )]
    NotCounted,
    /// There is no memory for one item.
    #[error("the device has no memory for a batch of one item")]
    OutOfMemory,
    /// The device failed.
    #[error("the device failed: {0}")]
    Device(String),
    /// Kernels that could be left out are those of wgpu and CUDA.
    #[error(
        "this device has no dry runs, which leave out the launches of kernels: that is for devices of wgpu and CUDA, with their features \
         turned on. Elsewhere measure a step of a small batch, with `measure::measure_step`"
    )]
    NoDryRun,
    /// No [`block`] ran in the forward pass. Blocks are what the forward pass runs through it, and are not found in the module tree:
    /// Burn has no hooks around the forward pass of a module.
    #[error(
        "the forward pass runs no `plan::block`, so there is nothing to plan: call the layers that may be treated through it, as Burn \
         has no hooks around the forward pass of a module"
    )]
    NoBlocks,
    /// The blocks of two forward passes are not the same.
    #[error("the forward pass runs other blocks the second time")]
    Blocks,
    /// There is no backward pass.
    #[error("the loss requires no gradient")]
    NoGradient,
}
