//! A packed tensor: in fewer bits, on the host, or in a file.
#[cfg(feature = "system")]
use super::file::OnFile;
use super::packing::{Format, PackingKernels};
use super::{SavedPolicy, host::OnHost};
use burn::backend::tensor::FloatTensor;
#[cfg(feature = "system")]
use burn::backend::{TensorMetadata, read_sync};
use burn::tensor::DType;
use core::cell::Cell;

thread_local! {
    /// How many tensors this thread packed into fewer bits: the seed of the next.
    static ROUNDED: Cell<u32> = const { Cell::new(0) };
}

/// A tensor in the form that a policy gives it.
pub(crate) enum Stored<B: PackingKernels> {
    Packed(B::Packed),
    Host(OnHost<B>),
    #[cfg(feature = "system")]
    File(OnFile, B::Device),
}

impl SavedPolicy {
    /// Packs a tensor.
    pub(crate) fn store<B: PackingKernels>(&self, x: FloatTensor<B>) -> Stored<B> {
        let packed = |x, format| {
            let seed = ROUNDED.get();
            ROUNDED.set(seed.wrapping_add(1));
            Stored::Packed(B::pack(x, format, seed))
        };
        match self {
            Self::Half => packed(x, Format::Half),
            Self::HalfF16 => packed(x, Format::HalfF16),
            Self::Int8 => packed(x, Format::Int8),
            #[cfg(feature = "system")]
            Self::Disk(file) => {
                let device = x.device();
                let data = read_sync(B::float_into_data(x)).expect("saved tensors: reading from the device");
                Stored::File(file.put(data), device)
            }
            Self::Host | Self::Keep => Stored::Host(OnHost::new(x)),
        }
    }

    /// The bytes that a packed tensor takes in the memory of its device; `None` if the policy leaves it as it is.
    pub(crate) fn bytes<B: PackingKernels>(&self, elements: usize, dtype: DType) -> Option<usize> {
        if elements * dtype.size() < super::SMALLEST {
            return None;
        }
        match self {
            Self::Keep => None,
            Self::Half => Format::Half.bytes(elements, dtype),
            Self::HalfF16 => Format::HalfF16.bytes(elements, dtype),
            Self::Int8 => Format::Int8.bytes(elements, dtype),
            Self::Host => (!B::IS_HOST).then_some(0),
            #[cfg(feature = "system")]
            Self::Disk(_) => Some(0),
        }
    }
}

impl<B: PackingKernels> Stored<B> {
    /// Whether the tensor takes no memory in its old place any more.
    pub(crate) fn is_there(&self) -> bool {
        match self {
            Self::Host(copy) => copy.is_there(),
            Self::Packed(_) => true,
            #[cfg(feature = "system")]
            Self::File(..) => true,
        }
    }

    /// Blocks until that is so.
    pub(crate) fn arrive(&self) {
        if let Self::Host(copy) = self {
            copy.arrive();
        }
    }

    /// Restores the tensor.
    pub(crate) fn load(&self) -> FloatTensor<B> {
        match self {
            Self::Packed(packed) => B::unpack(packed),
            Self::Host(copy) => copy.load(),
            #[cfg(feature = "system")]
            Self::File(file, device) => B::float_from_data(file.load(), device),
        }
    }
}
