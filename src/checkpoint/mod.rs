//! Checkpointed segments: parts of a network that keep only their inputs, and are recomputed in the backward pass.
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
//! let gradients = y.sum().backward(); // recomputes the block
//! assert!(block.linear_inner.weight.grad(&gradients).is_some());
//! ```
//!
//! # What is recomputed
//!
//! The forward pass of a segment runs as it would without a checkpoint. Everything that it kept is dropped when the segment ends. The
//! backward pass recomputes the segment from the same inputs and parameters, and computes the same gradients, to the last bit on CPU
//! backends.
//!
//! The whole segment is recomputed, unless its function returns an [`EarlyStop`]. That promises that the segment ends with a product whose
//! elements it does not read. The product is recomputed only the first two times, to compare it. (In principle, a segment could always stop
//! at the last tensor that a gradient is computed from. But it is unknown which of Burn's operations read the outputs of others.)
//!
//! - **Random numbers** of this library's layers (dropout, also of attention weights, and random slopes) are the same both times. They are
//!   not drawn again but kept: a bit per element (a float for random slopes), or a seed of 16 bytes on wgpu and CUDA devices.
//! - **Running statistics** of norms are updated only by the first run.
//! - **Frozen** parameters stay frozen, weights of [lazy](crate::lazy) models are read again, and adapters are trained as usual.
//! - Segments may be nested, and may share parameters with others.
//! - The [policy](crate::saved::SavedPolicy) of the thread applies to the inputs of segments, and to nothing inside them.
//!
//! # What is refused
//!
//! - A tensor that the closure captures. Pass it as an argument instead. This does not compile, because `forward` must be [`Copy`]:
//!
//!   ```compile_fail,E0277
//!   # use burn::tensor::{Device, Tensor};
//!   # use burn_memsave::{checkpoint::checkpoint, nn::LinearConfig};
//!   # let device = Device::flex().autodiff();
//!   # let linear = LinearConfig::new(4, 4).init(&device);
//!   let scale = Tensor::<2>::ones([1, 4], &device).require_grad();
//!   checkpoint(&linear, Tensor::ones([2, 4], &device), move |linear, x: Tensor<2>| linear.forward(x) * scale.clone());
//!   ```
//! - A tracked tensor that the segment gets in another way: from a static, or from a field of the module that is not a parameter. The
//!   forward pass panics, because the tensor would get no gradient, or the backward pass would wait for itself. To find such tensors, a
//!   segment computes its output once more, without a graph, the first time that its function returns a tracked output with the parameters
//!   of a module. This does not find a tensor that becomes tracked only later, nor, on a device with `gradient_checkpointing`, one in a
//!   plain field of a module with running statistics; the latter gets no gradient.
//! - A segment that does something else the second time. The backward pass panics, and says what differs. It compares operations of this
//!   library by name and shape, and outputs by shape, dtype and some of their elements. Elements are compared only the first few times on
//!   devices, where comparing takes time, and for an [`EarlyStop`] output. They are no longer compared once a
//!   [policy](crate::saved::SavedPolicy) has kept a tensor rounded. Burn's own layers that draw random numbers, such as
//!   [`burn::nn::Dropout`], are found and refused in this way, because they would draw others the second time.
//! - Training under Burn's `ExecutionStrategy::ddp`. The forward pass panics, even with frozen parameters, because Burn waits for all
//!   devices at the end of every backward pass, also of those within segments. Use [`Replicas`](crate::parallel::Replicas) instead, which
//!   train models with segments.
//! - A second backward pass through a segment, from another output, as with every graph of Burn.
//!
//! # Segments and Burn's own strategy
//!
//! `Device::gradient_checkpointing` recomputes single operations, but none with a frozen input. A segment can be any part of a network,
//! and works with or without that strategy, and with frozen parameters.
mod compared;
mod mappers;
mod modules;
mod parents;
mod remembered;
pub(crate) mod segment;
mod tensors;
mod tiled;

pub use modules::{Checkpointed, checkpoint_sequential};
pub use segment::checkpoint;
pub use tensors::{EarlyStop, TensorMapper, Tensors};
pub use tiled::{Tile, checkpoint_tiled};
