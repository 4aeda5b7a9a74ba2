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
//! The forward pass of a segment runs as it would without a checkpoint, and what it kept is dropped at its end. The backward pass
//! recomputes the segment from the same inputs and parameters, and gives the same gradients, to the last bit on CPU backends.
//!
//! The whole segment is recomputed, unless the function returns an [`Unread`], which says that the segment ends with a product whose
//! elements it does not read. That product is recomputed only the first two times, to compare it. (A segment could stop at the last tensor
//! that gradients are computed from, but it is unknown which of Burn's operations read the outputs of others.)
//!
//! - **Random numbers** of this library's layers (dropout, also of attention weights, and random slopes) are those of the first time, and
//!   the generator is not touched. What was drawn is kept: a bit per element (a float for random slopes), or a seed of 16 bytes on wgpu and
//!   CUDA devices.
//! - **Running statistics** are updated once.
//! - **Frozen** parameters stay frozen, weights of [lazy](crate::lazy) models are read again, and adapters are trained.
//! - Segments may be nested, and may share parameters with others.
//! - The [policy](crate::saved::SavedPolicy) of the thread applies to the inputs of segments, and to nothing inside them.
//!
//! # What is refused
//!
//! - A tensor captured by the closure. Pass it as an argument instead; this does not compile, since `forward` is [`Copy`]:
//!
//!   ```compile_fail,E0277
//!   # use burn::tensor::{Device, Tensor};
//!   # use burn_memsave::{checkpoint::checkpoint, nn::LinearConfig};
//!   # let device = Device::flex().autodiff();
//!   # let linear = LinearConfig::new(4, 4).init(&device);
//!   let scale = Tensor::<2>::ones([1, 4], &device).require_grad();
//!   checkpoint(&linear, Tensor::ones([2, 4], &device), move |linear, x: Tensor<2>| linear.forward(x) * scale.clone());
//!   ```
//! - A tracked tensor that comes another way, from a static or from a field of the module that is not a parameter: the forward pass panics,
//!   since the tensor would get no gradient, or the backward pass would wait for itself. To find such tensors, a segment computes its
//!   output once more, without a graph, the first time that its function returns a tracked output with the parameters of a module. A tensor
//!   that is tracked only later is not found. Nor is one in a plain field of a module with running statistics, on a device with
//!   `gradient_checkpointing`; it gets no gradient.
//! - A segment that does something else the second time: the backward pass panics, and says what. It compares operations of this library by
//!   name and shape, and outputs by shape, dtype and some of their elements. On devices, where comparing elements takes time, and for an
//!   [`Unread`] output, they are compared only the first times. Once a [policy](crate::saved::SavedPolicy) has kept a tensor rounded, they
//!   are no longer compared. Burn's own layers that draw random numbers, such as [`burn::nn::Dropout`], are refused in this way, since they
//!   would draw others.
//! - Training under Burn's `ExecutionStrategy::ddp`: the forward pass panics, also with frozen parameters, since Burn waits for all devices
//!   at the end of every backward pass, those of segments included. Use [`Replicas`](crate::parallel::Replicas), which train with segments.
//! - A second backward pass through a segment, from another output, as with any graph of Burn's.
//!
//! # Beside Burn's strategy
//!
//! `Device::gradient_checkpointing` recomputes single operations, and gives up where a parent is frozen. Segments are any part of a
//! network, and work with or without that strategy, and with frozen parameters.
mod compared;
mod modules;
pub(crate) mod parents;
mod remembered;
pub(crate) mod segment;
mod tensors;
mod tiled;

pub use modules::{Checkpointed, checkpoint_sequential};
pub use segment::checkpoint;
pub use tensors::{TensorMapper, Tensors, Unread};
pub use tiled::{Tile, tiled};
