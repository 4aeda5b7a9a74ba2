//! A tensor while it waits.
use super::{SavedPolicy, file::OnFile, zeros};
use crate::ops::packing::{Format, PackingKernels};
use burn::backend::{TensorMetadata, read_sync, tensor::FloatTensor};
use burn::tensor::{DType, TensorData};
use core::cell::Cell;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};

thread_local! {
    /// How many tensors were rounded at random.
    static ROUNDED: Cell<u32> = const { Cell::new(0) };
}

/// A tensor in the form that a policy has it wait in.
pub(crate) enum Stored<B: PackingKernels> {
    Packed(B::Packed),
    Host(OnHost, B::Device),
    File(OnFile, B::Device),
}

impl SavedPolicy {
    /// A tensor as it waits.
    pub(crate) fn store<B: PackingKernels>(&self, x: FloatTensor<B>) -> Stored<B> {
        let device = x.device();
        let packed = |x, format| {
            let seed = ROUNDED.get();
            ROUNDED.set(seed.wrapping_add(1));
            Stored::Packed(B::pack(x, format, seed))
        };
        match self {
            Self::Half => packed(x, Format::Half),
            Self::Int8 => packed(x, Format::Int8),
            Self::Disk(file) => Stored::File(file.put(read_sync(host::<B>(x))), device),
            Self::Host | Self::Keep => Stored::Host(OnHost::of::<B>(x), device),
        }
    }

    /// The bytes that a tensor takes in the memory of its device; `None` if it stays as it is.
    pub(crate) fn bytes<B: PackingKernels>(&self, elements: usize, dtype: DType) -> Option<usize> {
        if elements * dtype.size() < super::SMALLEST {
            return None;
        }
        match self {
            Self::Keep => None,
            Self::Half => Format::Half.bytes(elements, dtype),
            Self::Int8 => Format::Int8.bytes(elements, dtype),
            Self::Host => (!B::IS_HOST).then_some(0),
            Self::Disk(_) => Some(0),
        }
    }
}

impl<B: PackingKernels> Stored<B> {
    /// Whether nothing of it is in its old place any more.
    pub(crate) fn is_there(&mut self) -> bool {
        match self {
            Self::Host(copy, _) => copy.is_there(),
            Self::Packed(_) | Self::File(..) => true,
        }
    }

    /// Waits until that is so.
    pub(crate) fn arrive(&mut self) {
        if let Self::Host(copy, _) = self {
            copy.get();
        }
    }

    /// The tensor again.
    pub(crate) fn load(&mut self) -> FloatTensor<B> {
        match self {
            Self::Packed(packed) => B::unpack(packed),
            Self::Host(copy, device) => B::float_from_data(copy.get().clone(), device),
            Self::File(file, device) => B::float_from_data(file.load(), device),
        }
    }

    /// The tensor, for the last time.
    pub(crate) fn into_tensor(mut self) -> FloatTensor<B> {
        match self {
            Self::Host(mut copy, device) => {
                copy.get();
                let OnHost::Copied(data) = copy else { unreachable!("it is there") };
                B::float_from_data(data, &device)
            }
            Self::Packed(_) | Self::File(..) => self.load(),
        }
    }
}

async fn host<B: PackingKernels>(x: FloatTensor<B>) -> TensorData {
    B::float_into_data(x).await.expect("saved tensors: reading from the device")
}

/// In memory of its own: devices read into buffers that they share with the host, of which there are few.
fn owned(data: TensorData) -> TensorData {
    let (bytes, shape, dtype) = data.into_parts();
    let mut own = zeros(bytes.len(), dtype.size());
    own.copy_from_slice(&bytes);
    TensorData::from_bytes(own, shape, dtype)
}

type Copying = Pin<Box<dyn Future<Output = TensorData> + Send>>;

/// A tensor of a device in the memory of the host.
pub(crate) enum OnHost {
    /// On its way; until it is there, the tensor on the device lives.
    Copying(Copying),
    Copied(TensorData),
}

impl OnHost {
    fn of<B: PackingKernels>(x: FloatTensor<B>) -> Self {
        let mut copy = Self::Copying(Box::pin(async { owned(host::<B>(x).await) }));
        copy.is_there(); // begins
        copy
    }

    fn is_there(&mut self) -> bool {
        if let Self::Copying(copying) = self
            && let Poll::Ready(data) = copying.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            *self = Self::Copied(data);
        }
        matches!(self, Self::Copied(_))
    }

    fn get(&mut self) -> &TensorData {
        if let Self::Copying(copying) = self {
            *self = Self::Copied(read_sync(copying.as_mut()));
        }
        let Self::Copied(data) = self else { unreachable!("it is there") };
        data
    }
}
