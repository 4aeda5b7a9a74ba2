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
//! It runs to its end, unless the function says with [`Unread`] that it ends with a product whose elements it does not look at: that is
//! computed again only the first two times, to compare it. (It could stop elsewhere, where the last tensor is there that gradients are
//! computed from; but of Burn's operations nobody knows which read the outputs of those before.)
//!
//! - **Random numbers** of this library's layers (dropout, also of attention weights, and random slopes) are those of the first
//!   time, and the generator is not touched: what was drawn is kept, a bit per element (a float for random slopes), on wgpu and
//!   CUDA devices a seed of 16 bytes.
//! - **Running statistics** are updated once.
//! - **Frozen** parameters stay frozen, weights of [lazy](crate::lazy) models are read again, adapters are trained.
//! - Segments may be nested, and use parameters that others use, too.
//! - Inputs wait as the [policy](crate::saved::SavedPolicy) of the thread says, nothing within segments does.
//!
//! # What is refused
//!
//! - A tensor in the closure: it does not compile, since `forward` is [`Copy`]. What a segment computes with are its arguments.
//!
//!   ```compile_fail,E0277
//!   # use burn::tensor::{Device, Tensor};
//!   # use burn_memsave::{checkpoint::checkpoint, nn::LinearConfig};
//!   # let device = Device::flex().autodiff();
//!   # let linear = LinearConfig::new(4, 4).init(&device);
//!   let scale = Tensor::<2>::ones([1, 4], &device).require_grad();
//!   checkpoint(&linear, Tensor::ones([2, 4], &device), move |linear, x: Tensor<2>| linear.forward(x) * scale.clone());
//!   ```
//! - A tracked tensor that comes another way, in a static or in a field of the module that is no parameter: the forward pass panics,
//!   since the tensor would get no gradient, or the backward pass would wait for itself. To see it, a segment computes its output
//!   once more, without a graph, the first time that its function gives a tracked output with the parameters of a module. What is tracked only later is
//!   not seen, nor, in a module with running statistics on a device with `gradient_checkpointing`, a tensor in a plain field, which
//!   then gets no gradient.
//! - A segment that does something else the second time: the backward pass panics, and says what. Operations of this library are
//!   compared by name and shape, outputs by shape and dtype, and by some of their elements (the first times only on devices, where that
//!   takes time, and of an [`Unread`] output). So it is with Burn's own layers that draw random numbers, such as [`burn::nn::Dropout`]: they would draw
//!   others. From the first tensor on that a [policy](crate::saved::SavedPolicy) keeps rounded, elements are not compared any more.
//! - Training under Burn's `ExecutionStrategy::ddp`, which waits for all devices at the end of every backward pass, and so of those of
//!   segments, frozen ones too: the forward pass panics. [`Replicas`](crate::parallel::Replicas) train with segments.
//! - A second backward pass through a segment, from another output, as through any graph of Burn's.
//!
//! # Beside Burn's strategy
//!
//! `Device::gradient_checkpointing` computes single operations again, and gives up where a parent is frozen. Segments are any part
//! of a network, work with that strategy and without, and with frozen parameters.
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
