//! Where, and in which form, tensors wait for the backward pass.
use burn::tensor::{Bytes, StreamId};
use core::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

#[cfg(feature = "system")]
mod file;
mod host;
#[doc(hidden)] // a trait of backends, as `ops` are
pub mod packing;
mod stored;

#[cfg(feature = "system")]
pub use file::SavedFile;
pub(crate) use stored::Stored;

/// Tensors of fewer bytes stay as they are.
const SMALLEST: usize = 16 << 10;

/// Where, and in which form, the inputs that operations keep wait for the backward pass.
///
/// | policy | bytes | comes back |
/// | --- | --- | --- |
/// | [`Keep`](Self::Keep) | all | as it was |
/// | [`Half`](Self::Half) | 0.5 of f32 and f64 | rounded to bf16, from f64 to f32, infinite beyond its range: each element is up to `2^-8` of itself off, or `2^-24` |
/// | [`HalfF16`](Self::HalfF16) | 0.5 of f32 and f64 | rounded to f16, from f64 to f32: each element is up to `2^-11` of itself off (below `2^-14`, up to `2^-25`), or `2^-24`; **above 65504 f16 is infinite**, and so is what is computed from it |
/// | [`Int8`](Self::Int8) | 0.26 of f32, 0.52 of f16 and bf16 | each element up to `1/127` of the largest of its 128 neighbours off, and right in the mean; what is infinite or not a number stays so, and the finite ones beside it are up to `1/125` off |
/// | [`Host`](Self::Host) | none on the device, but one tensor ahead in the backward pass | as it was, over the bus |
/// | [`Disk`](Self::disk) | none in memory | as it was, from a file |
///
/// **`Half`, `HalfF16` and `Int8` change gradients**, by as much as the inputs of backward passes are rounded; the results of the
/// forward pass and the loss stay as they are. What they cost is a pass over the tensor in the forward pass, and one in the
/// backward pass; `Host` and `Disk` a copy each way, for which a thread of their own waits. (A tensor that no gradient flows to comes
/// back once for every operation that keeps it.)
///
/// It holds for the inputs of operations of this library, and for the products of LoRA and DoRA: not for leaves, masks, statistics
/// and outputs that they keep (the slope of a sigmoid is read from `1 - y`, of which nothing is left where `y` is rounded to 1), for
/// parameters and frozen weights, for what is computed again, for tensors below 16 KiB, nor for operations of Burn. A tensor
/// that somebody else holds (an operation of Burn, one of which it is a kept output, a variable of yours, another part of the same
/// memory, an operation in another scope) stays as it is as long as that is so, since a second form of it would only take more memory; so does an expanded one.
/// NdArray cannot tell, and keeps everything.
///
/// In a [checkpointed](https://docs.rs/burn-memsave/latest/burn_memsave/checkpoint) segment it holds for the inputs of the
/// segment. Gradients of a tensor that several operations take are added up in another order.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_memsave_layers::{functional, saved::SavedPolicy};
///
/// let device = Device::flex().autodiff();
/// let random = || Tensor::<2>::random([256, 256], Distribution::Normal(0.0, 0.1), &device);
/// let (x, weight) = (random(), random().require_grad());
/// let run = || functional::gelu(functional::linear(x.clone(), weight.clone(), None)).sum().backward();
/// let exact = weight.grad(&run()).unwrap();
/// let close = weight.grad(&SavedPolicy::Half.scope(run)).unwrap();
/// let error = (exact - close).abs().max().into_scalar::<f32>();
/// assert!(error > 0.0 && error < 0.01);
/// ```
///
/// For a part of a model, open a scope in its forward pass; a policy can be a field:
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::Tensor;
/// use burn_memsave_layers::nn::{Linear, activation::Gelu};
/// use burn_memsave_layers::saved::SavedPolicy;
///
/// #[derive(Module, Debug)]
/// struct Block {
///     linear: Linear,
///     #[module(skip)]
///     saved: SavedPolicy,
/// }
///
/// impl Block {
///     fn forward(&self, x: Tensor<2>) -> Tensor<2> {
///         self.saved.scope(|| Gelu::new().forward(self.linear.forward(x)))
///     }
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SavedPolicy {
    /// As it is.
    #[default]
    Keep,
    /// In half as many bits: bf16, with the range of f32.
    Half,
    /// In half as many bits: f16, with eight times the precision of bf16 for what is surely within its range.
    HalfF16,
    /// In 8 bits, and a scale for every 128 elements, in memory order: `n + n / 32` bytes. Rounded up or down at random, by a
    /// generator of its own, which starts anew with every thread.
    Int8,
    /// In the memory of the host. Tensors of a CPU are there, and stay as they are.
    ///
    /// The forward pass goes on while tensors are copied, and waits where more than two are on their way. In the backward pass
    /// one tensor is fetched ahead: with the one that is asked for, the copy of the one that was kept before it begins, and
    /// waits on the device until it is asked for, or its graph is gone. Every thread of forward passes has one of its own ahead.
    /// It is the program that goes on, not the device: that does copies and operations one after the other, in the order in
    /// which a thread began them.
    ///
    /// Copies go through buffers of CubeCL, which the device shares with the host and which are used again when their copy is
    /// done. What waits for the backward pass is in ordinary memory, allocated for each tensor: Burn takes data for a device
    /// for good, and has no way to give the memory back when the copy is done.
    ///
    /// # Panics
    ///
    /// The backward pass panics if the device could not be read.
    Host,
    /// In a [file](Self::disk). It is written beside the forward pass, which waits where more than a few tensors are not written
    /// yet; in the backward pass one tensor is read ahead.
    #[cfg(feature = "system")]
    Disk(SavedFile),
}

impl SavedPolicy {
    /// [`Disk`](Self::Disk), in a file without a name in this directory, which is gone with the process.
    ///
    /// # Errors
    ///
    /// If the file cannot be made.
    ///
    /// # Panics
    ///
    /// The backward pass panics if the file could not be written, or read: the disk is full.
    ///
    /// ```
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_memsave_layers::{functional, saved::SavedPolicy};
    ///
    /// let device = Device::flex().autodiff();
    /// let random = || Tensor::<2>::random([256, 256], Distribution::Normal(0.0, 0.1), &device);
    /// let (x, weight) = (random(), random().require_grad());
    /// let run = || functional::gelu(functional::linear(x.clone(), weight.clone(), None)).sum().backward();
    /// let disk = SavedPolicy::disk(std::env::temp_dir())?;
    /// let [memory, disk] = [run(), disk.scope(run)].map(|gradients| weight.grad(&gradients).unwrap());
    /// assert_eq!(memory.into_data(), disk.into_data());
    /// # Ok::<(), std::io::Error>(())
    /// ```
    #[cfg(feature = "system")]
    pub fn disk(directory: impl AsRef<std::path::Path>) -> std::io::Result<Self> {
        SavedFile::new(directory.as_ref()).map(Self::Disk)
    }

    /// Whether tensors come back rounded.
    pub(crate) fn rounds(&self) -> bool {
        matches!(self, Self::Half | Self::HalfF16 | Self::Int8)
    }

    /// What the ledger says of a tensor.
    #[doc(hidden)] // for plans
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Keep => "as it is",
            Self::Half => "in half as many bits",
            Self::HalfF16 => "in half as many bits, as f16",
            Self::Int8 => "in 8 bits",
            Self::Host => "on the host",
            #[cfg(feature = "system")]
            Self::Disk(_) => "in a file",
        }
    }
}

/// Memory for so many bytes, aligned as elements of this width are.
fn zeros(len: usize, width: usize) -> Bytes {
    match width {
        2 => Bytes::from_elems(vec![0u16; len / 2]),
        4 => Bytes::from_elems(vec![0u32; len / 4]),
        _ => Bytes::from_elems(vec![0u64; len / 8]),
    }
}

/// Runs what looks at the bytes that a device was read into, on this stream; the message of a panic is the error.
///
/// CubeCL (0.11.3) begins the copy when the bytes are looked at (`read_lazy_async` in its `client.rs`), in order with the
/// stream of whoever looks, and panics when the device fails. Nobody writes to the tensor any more, and the bytes hold it,
/// so later is not too late. But on the stream of another thread it could be too early: a stream waits for another one up to
/// where the memory of the tensor was allocated, not to where it was last written (`update_shared_bindings` in `stream/event.rs` of
/// cubecl-server). On the stream of the thread that read the device, the copy comes after all that this thread did before.
fn on_stream<R>(stream: StreamId, look: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(|| stream.executes(look))).map_err(message)
}

/// What a panic says.
fn message(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => {
            panic.downcast::<&str>().map_or_else(|_| "a panic".into(), |message| message.to_string())
        }
    }
}
