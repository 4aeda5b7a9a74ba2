//! Training steps that fit into memory, by one of two means.
//!
//! - A batch is split into parts: [`micro_batched`], or [`micro_batched_within`], which also finds the size of the parts. [`largest_batch`]
//!   finds how many items fit at once.
//! - Blocks of the model are recomputed in the backward pass. [`auto_checkpoint`] measures the blocks, and returns a [`Plan`] of which of
//!   them to recompute. [`profile`](profile()) only measures, for plans with several budgets.
//!
//! The model decides what its blocks are: its forward pass runs each one through [`block`]. They cannot be found in the module tree, since
//! the forward pass of a Burn module is a method with any name and signature, and Burn has no hooks around it. Only the paths of blocks
//! come from the tree.
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
mod budget;
mod choose;
mod dry_run;
mod estimate;
mod parts;
mod planned;
mod profile;
mod retry;
mod trace;

pub use batches::{largest_batch, micro_batched, micro_batched_within};
pub(crate) use block::set_aside;
pub use block::{Treatment, block};
pub use budget::auto_checkpoint;
pub use dry_run::dry_run;
pub(crate) use estimate::float_bytes;
pub use estimate::{Estimate, OptimizerState, StepEstimate, estimate, estimate_step};
pub use parts::{ItemWeights, PartWeight, PartsError};
pub(crate) use parts::{all_tied, checked_weight, may_be_taken_in_parts};
pub use planned::Plan;
pub use profile::{BlockCost, BlockProfile, Profile, ProfileOptions, profile};
pub use retry::retry_with_smaller_batch;

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
    /// Only the kernels of wgpu and CUDA can be left out.
    #[error(
        "this device has no dry runs, which leave out the launches of kernels: that is for devices of wgpu and CUDA, with their features \
         turned on. Elsewhere measure a step of a small batch, with `measure::measure_step`"
    )]
    NoDryRun,
    /// No [`block`] ran in the forward pass. Only what the forward pass runs through it is a block: Burn has no hooks around the forward
    /// pass of a module by which blocks could be found in the module tree.
    #[error(
        "the forward pass runs no `plan::block`, so there is nothing to plan: call the layers that may be treated through it, as Burn \
         has no hooks around the forward pass of a module"
    )]
    NoBlocks,
    /// Two forward passes ran different blocks.
    #[error("the forward pass runs other blocks the second time")]
    Blocks,
    /// There is no backward pass.
    #[error("the loss requires no gradient")]
    NoGradient,
}
