//! The placeholder: what a lazy parameter holds instead of its weight. It is a tensor of the right shape, dtype and device that takes no
//! memory (as on PyTorch's *meta* device). It is recognized by its first element, a NaN with which no weight begins.
use crate::backend::remote::data;
#[cfg(feature = "ndarray")]
use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device, Shape, Tensor, TensorData};

/// Every byte of the first element of a placeholder. It is a NaN in every dtype, also after a cast, but not the NaN that the arithmetic
/// of a CPU produces.
const NAN_BYTE: u8 = 0xff;

/// A tensor of this shape that takes no memory.
pub(super) fn placeholder<const D: usize>(shape: Shape, dtype: DType, device: &Device) -> Tensor<D> {
    #[cfg(feature = "ndarray")]
    if let DispatchDevice::NdArray(_) = device.clone().inner().as_dispatch() {
        let bytes = untouched::bytes(shape.num_elements() * dtype.size());
        return Tensor::from_data(TensorData::from_bytes(bytes, shape, dtype), (device, dtype));
    }
    let nan = TensorData::from_bytes_vec(vec![NAN_BYTE; dtype.size()], [1; D], dtype);
    Tensor::<D>::from_data(nan, (device, dtype)).expand(shape)
}

/// For NdArray, whose tensors cannot have strides of zero: address space of which only the first page is ever touched.
#[cfg(feature = "ndarray")]
mod untouched {
    use burn::tensor::{AllocationProperty, Bytes};
    use std::sync::{Mutex, PoisonError};

    /// The largest mapping so far, which all placeholders share.
    static MAPPED: Mutex<bytes::Bytes> = Mutex::new(bytes::Bytes::new());

    /// `len` bytes that begin with the NaN. Only their first page is in memory.
    pub(super) fn bytes(len: usize) -> Bytes {
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner); // replaced as a whole
        if mapped.len() < len {
            *mapped = map(len);
        }
        Bytes::from_shared(mapped.slice(..len), AllocationProperty::Other)
    }

    fn map(len: usize) -> bytes::Bytes {
        const NAN: [u8; 8] = [super::NAN_BYTE; 8];
        let Ok(mut map) = memmap2::MmapMut::map_anon(len.max(NAN.len())) else {
            return bytes::Bytes::from([&NAN[..], &vec![0; len.saturating_sub(NAN.len())]].concat());
        };
        map[..NAN.len()].copy_from_slice(&NAN);
        bytes::Bytes::from_owner(map)
    }
}

/// Whether a tensor is a placeholder, or was one before it was cast. A cast keeps the highest bits of the NaN (from bf16, seven bits of the
/// fraction).
pub(super) fn is_placeholder<const D: usize>(tensor: &Tensor<D>) -> bool {
    let least = if tensor.dtype() == DType::F16 { 0xf8 } else { NAN_BYTE };
    tensor.dtype().is_float()
        && matches!(first_element(tensor).as_bytes(), [.., low, high] if *high == NAN_BYTE && *low >= least)
}

fn first_element<const D: usize>(tensor: &Tensor<D>) -> TensorData {
    let first = tensor.clone().slice(core::array::from_fn::<_, D, _>(|_| 0..1));
    data(&tensor.device(), move || first.try_into_data())
}
