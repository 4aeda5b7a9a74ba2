//! How the tensors that operations keep are stored until the backward pass: in which form, and where. [`SavedPolicy`] chooses; the
//! submodules store the tensors and bring them back.
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

/// How operations store the inputs that they keep for the backward pass: in which form, and where.
///
/// | policy | bytes | comes back |
/// | --- | --- | --- |
/// | [`Keep`](Self::Keep) | all | as it was |
/// | [`Half`](Self::Half) | 0.5 of f32 and f64 | rounded, f32 to bf16 and f64 to f32: each element is off by up to `2^-8`, or `2^-24`, of itself; infinite beyond the range of that type |
/// | [`HalfF16`](Self::HalfF16) | 0.5 of f32 and f64 | rounded, f32 to f16 and f64 to f32: each element is off by up to `2^-11` (below `2^-14`, by up to `2^-25` in absolute terms), or `2^-24`, of itself; **from 65520 on f16 is infinite**, and so is what is computed from it |
/// | [`Int8`](Self::Int8) | 0.26 of f32, 0.52 of f16 and bf16 | rounded up or down at random: each element is off by up to `1/127` of the largest in its group of 128, and right in the mean; infinity and NaN stay so, and finite elements in their group are off by up to `1/125` |
/// | [`Host`](Self::Host) | none on the device, except one tensor that is fetched ahead in the backward pass | as it was, over the bus |
/// | [`Disk`](Self::disk) | none in memory | as it was, from a file |
///
/// **`Half`, `HalfF16` and `Int8` change gradients**, because the backward pass reads rounded inputs. The results of the forward pass
/// and the loss do not change. These policies cost one pass over the tensor in the forward pass, and one in the backward pass. `Host`
/// and `Disk` cost a copy each way, and a separate thread blocks on it. (An untracked tensor is restored once for every operation that
/// keeps it.)
///
/// # What a policy applies to
///
/// A policy applies to the inputs of this library's operations, and to the products of LoRA and DoRA. It does not apply to:
///
/// - leaves, parameters and frozen weights;
/// - masks, statistics and outputs that operations keep (the slope of a sigmoid is read from `1 - y`, of which nothing is left where `y`
///   is rounded to 1);
/// - recomputed tensors, tensors below 16 KiB, and expanded tensors;
/// - Burn's operations.
///
/// A tensor stays as it is while something else has a handle of it, since a second form would only take more memory. That may be an
/// operation of Burn, the operation that keeps it as its output, one of your variables, another part of the same memory, or an
/// operation in another scope. NdArray cannot tell whether a tensor is shared, so it stores everything as it is.
///
/// In a [checkpointed](https://docs.rs/burn-memsave/latest/burn_memsave/checkpoint) segment, a policy applies only to the inputs of the
/// segment. Under a policy, the gradients of a tensor that several operations read are summed in another order.
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
/// To apply a policy to a part of a model, open a scope in its forward pass. The policy can be a field:
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
    /// In half as many bits: f16, with eight times the precision of bf16. For tensors that are surely within its range.
    HalfF16,
    /// In 8 bits, with a scale for every 128 elements in memory order: `n + n / 32` bytes. Stochastic rounding uses a generator of
    /// its own, which starts anew in every thread.
    Int8,
    /// In the memory of the host. Tensors of a CPU backend are there already, and stay as they are.
    ///
    /// The forward pass continues while tensors are copied, and blocks if more than two copies are unfinished. The backward pass
    /// fetches one tensor ahead: when it asks for a tensor, the copy of the one that was stored before it begins, too. That copy stays
    /// on the device until it is asked for or its graph is freed. Each thread that runs forward passes has its own tensor ahead. Only
    /// the program continues during a copy: the device runs copies and operations one after the other, in the order in which a thread
    /// began them.
    ///
    /// Copies go through buffers of CubeCL that the device and the host share, and that are reused when their copy is done. The stored
    /// elements are in ordinary memory, allocated for each tensor, because Burn never gives back memory that was handed to a device.
    ///
    /// # Panics
    ///
    /// The backward pass panics if the device could not be read.
    Host,
    /// In a [file](Self::disk). A separate thread writes it during the forward pass, which blocks if more than a few tensors are not
    /// written yet. The backward pass reads one tensor ahead.
    #[cfg(feature = "system")]
    Disk(SavedFile),
}

impl SavedPolicy {
    /// [`Disk`](Self::Disk), in an unnamed file in this directory. The file disappears at the latest when the process ends.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be created.
    ///
    /// # Panics
    ///
    /// The backward pass panics if the file could not be written or read, for example because the disk is full.
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

    /// The reason that the ledger gives for a tensor.
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

/// `len` bytes of zeros, aligned for elements of `width` bytes.
fn zeros(len: usize, width: usize) -> Bytes {
    match width {
        2 => Bytes::from_elems(vec![0u16; len / 2]),
        4 => Bytes::from_elems(vec![0u32; len / 4]),
        _ => Bytes::from_elems(vec![0u64; len / 8]),
    }
}

/// Runs `look`, which reads bytes that come from a device, on `stream`. Turns a panic into an error with its message.
///
/// CubeCL (0.11.3) begins the copy only when somebody looks at the bytes (`read_lazy_async` in its `client.rs`), in order with the stream
/// of the thread that looks, and panics if the device fails. A late copy is right, since nothing writes to the tensor any more, and
/// the bytes have a handle of it. But on the stream of another thread the copy could be too early: a stream waits for another one only
/// up to where the memory of the tensor was allocated, not to where it was last written (`update_shared_bindings` in `stream/event.rs`
/// of cubecl-server). On the stream of the thread that stored the tensor, the copy comes after everything this thread did before.
fn on_stream<R>(stream: StreamId, look: impl FnOnce() -> R) -> Result<R, String> {
    catch_unwind(AssertUnwindSafe(|| stream.executes(look))).map_err(message)
}

/// The message of a panic.
fn message(panic: Box<dyn Any + Send>) -> String {
    match panic.downcast::<String>() {
        Ok(message) => *message,
        Err(panic) => {
            panic.downcast::<&str>().map_or_else(|_| "a panic".into(), |message| message.to_string())
        }
    }
}
