//! Parts of a network that keep nothing but their inputs, and are computed again in the backward pass.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::checkpoint::checkpoint;
//! use burn_memsave::nn::transformer::PositionWiseFeedForwardConfig;
//!
//! let device = Device::flex().autodiff();
//! let block = PositionWiseFeedForwardConfig::new(8, 32).init(&device);
//! let x = Tensor::<3>::ones([2, 5, 8], &device);
//! let y = checkpoint(&block, x, |block, x| block.forward(x));
//! let gradients = y.sum().backward(); // computes the block again
//! assert!(block.linear_inner.weight.grad(&gradients).is_some());
//! ```
//!
//! # What is computed again
//!
//! The forward pass of the segment runs as it would without a checkpoint, and what it kept is dropped at its end. The backward
//! pass runs it again, from the same inputs and parameters, and gives the same gradients, to the last bit on CPU backends.
//!
//! - **Random numbers** of this library's layers (dropout, also of attention weights, and random slopes) are those of the first
//!   time: what was drawn is kept, a bit per element, or a seed on wgpu and CUDA devices. The generator is not touched. Burn's own
//!   layers that draw, such as [`burn::nn::Dropout`], would draw anew: this is noticed, and an error.
//! - **Running statistics** are updated once.
//! - **Frozen** parameters stay frozen, weights of [lazy](crate::lazy) models are read again, adapters are trained.
//! - Segments may be nested, and use parameters that others use, too.
//!
//! # What is refused
//!
//! `forward` is [`Copy`], so that it cannot hold a tensor: what it computes with is an argument, of which the segment knows.
//! A segment that does something else the second time (other operations, other shapes, other results) panics in the
//! backward pass, and says what; so does Burn on a second backward pass through the same graph.
//!
//! # Beside Burn's strategy
//!
//! `Device::gradient_checkpointing` computes single operations again, and gives up where a parent is frozen. Segments are any part
//! of a network, work with that strategy and without, and with frozen parameters.
mod modules;
mod segment;
mod tensors;
mod tiled;

pub use modules::{Checkpointed, checkpoint_sequential};
pub use segment::checkpoint;
pub use tensors::{TensorMapper, Tensors};
pub use tiled::tiled;
