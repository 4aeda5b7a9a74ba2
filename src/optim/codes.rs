//! [`Coded`]: a moment as 8-bit codes, in memory and in records.
use crate::measure::is_host;
use crate::ops::{AdamW8bitTensors, AdamWStep, BLOCK, CODES_OF_WORD, MomentumStep, OptimizerOps};
use burn::backend::{Dispatch, DispatchTensor};
use burn::optim::{StateSink, StateSource};
use burn::tensor::{Bytes, DType, Device, Int, Tensor, TensorData};

/// A moment as codes, and the scales of its blocks. In records, codes are the bytes of whole blocks on every device.
#[derive(Clone, Debug)]
pub(super) struct Coded {
    pub(super) codes: Tensor<1, Int>,
    pub(super) scales: Tensor<1>,
    /// The number of elements. The codes beyond it stand for zeros.
    pub(super) elements: usize,
}

impl Coded {
    /// Zeros.
    pub(super) fn zeros(elements: usize, device: &Device) -> Self {
        let blocks = elements.div_ceil(BLOCK);
        let (len, dtype) = layout(blocks, device);
        Self {
            codes: Tensor::zeros([len], (device, dtype)),
            scales: Tensor::zeros([blocks], (device, DType::F32)),
            elements,
        }
    }

    /// Whether it is a moment of a tensor with this many elements.
    pub(super) fn is_of(&self, elements: usize) -> bool {
        self.elements == elements
    }

    /// Moves it to another device, where codes may be stored in another way.
    pub(super) fn moved(self, device: &Device) -> Self {
        let Self { codes, scales, elements } = self;
        let codes = match is_host(&codes.device()) == is_host(device) {
            true => codes.to_device(device),
            false => to_codes(to_bytes(codes), device),
        };
        Self { codes, scales: scales.to_device(device), elements }
    }

    /// A step of AdamW. Returns the weight, and its moments as codes.
    pub(super) fn adamw(
        gradient: DispatchTensor,
        weight: DispatchTensor,
        [first, second]: [Self; 2],
        step: AdamWStep,
    ) -> (DispatchTensor, [Self; 2]) {
        let elements = first.elements;
        let tensors = AdamW8bitTensors {
            weight,
            first: first.codes.into_dispatch(),
            first_scales: first.scales.into_dispatch(),
            second: second.codes.into_dispatch(),
            second_scales: second.scales.into_dispatch(),
        };
        let after = Dispatch::memsave_adamw_8bit(gradient, tensors, step);
        let moments = [(after.first, after.first_scales), (after.second, after.second_scales)];
        (after.weight, moments.map(|(codes, scales)| Self::of(codes, scales, elements)))
    }

    /// A step of momentum. Returns the direction in f32, and the momentum as codes.
    pub(super) fn momentum(self, gradient: DispatchTensor, step: MomentumStep) -> (DispatchTensor, Self) {
        let Self { codes, scales, elements } = self;
        let (codes, scales) = (codes.into_dispatch(), scales.into_dispatch());
        let after = Dispatch::memsave_momentum_8bit(gradient, codes, scales, step);
        (after.direction, Self::of(after.codes, after.scales, elements))
    }

    fn of(codes: DispatchTensor, scales: DispatchTensor, elements: usize) -> Self {
        Self { codes: Tensor::from_dispatch(codes), scales: Tensor::from_dispatch(scales), elements }
    }

    /// Records it under a name.
    pub(super) fn flatten(&self, prefix: &str, name: &str, out: &mut StateSink) {
        out.push_tensor(prefix, &format!("{name}_codes"), to_bytes(self.codes.clone()));
        out.push_tensor(prefix, &format!("{name}_scales"), self.scales.to_data());
        out.push_scalar(prefix, &format!("{name}_elements"), (self.elements as u64).into());
    }

    /// Reads what [`flatten`](Self::flatten) recorded; `None` if there is nothing, or if it is damaged.
    pub(super) fn unflatten(
        prefix: &str,
        name: &str,
        source: &mut StateSource,
        device: &Device,
    ) -> Option<Self> {
        let codes = source.take_tensor(prefix, &format!("{name}_codes"))?;
        let scales = source.take_tensor(prefix, &format!("{name}_scales"))?;
        let elements = u64::try_from(source.take_scalar(prefix, &format!("{name}_elements"))?).ok()?;
        let elements = usize::try_from(elements).ok()?;
        let fits = codes.dtype() == DType::U8
            && scales.dtype() == DType::F32
            && scales.shape().num_dims() == 1
            && scales.shape()[0] == elements.div_ceil(BLOCK)
            && codes.shape().as_slice() == [scales.shape()[0] * BLOCK];
        fits.then(|| Self {
            codes: to_codes(codes, device),
            scales: Tensor::from_data(scales, (device, DType::F32)),
            elements,
        })
    }
}

/// A recorded tensor of floats, in f32; `None` if there is none of the name and rank.
pub(super) fn recorded<const D: usize>(
    prefix: &str,
    name: &str,
    source: &mut StateSource,
    device: &Device,
) -> Option<Tensor<D>> {
    let data = source.take_tensor(prefix, name)?;
    let fits = data.dtype().is_float() && data.shape().num_dims() == D;
    fits.then(|| Tensor::from_data(data.convert_dtype(DType::F32), (device, DType::F32)))
}

/// The length and dtype of the tensor that holds the codes of this many blocks on a device.
fn layout(blocks: usize, device: &Device) -> (usize, DType) {
    match is_host(device) {
        true => (blocks * BLOCK, DType::U8),
        false => (blocks * BLOCK / CODES_OF_WORD, DType::I32),
    }
}

/// One byte per code.
fn to_bytes(codes: Tensor<1, Int>) -> TensorData {
    let (bytes, ..) = codes.into_data().into_parts();
    let len = bytes.len();
    TensorData::from_bytes(bytes, [len], DType::U8)
}

fn to_codes(bytes: TensorData, device: &Device) -> Tensor<1, Int> {
    let (len, dtype) = layout(bytes.shape()[0] / BLOCK, device);
    // Words must be aligned, and the bytes may not be.
    let data = match dtype {
        DType::I32 => Bytes::from_elems(bytemuck::pod_collect_to_vec::<u8, i32>(bytes.as_bytes())),
        _ => bytes.into_parts().0,
    };
    Tensor::from_data(TensorData::from_bytes(data, [len], dtype), (device, dtype))
}
