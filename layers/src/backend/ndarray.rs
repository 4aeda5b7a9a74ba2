//! Slices of NdArray tensors.
use super::{
    Placeholders,
    cpu::{CpuBackend, CpuElement, QuantizedMatrix},
};
use burn::backend::{
    NdArray, TensorMetadata,
    ndarray::{NdArrayTensor, SharedArray},
    ops::IntTensorOps,
    tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor},
};
use burn::tensor::{DType, IntDType, Shape, quantization::BlockLayout};

/// The array in row-major order, copied only if it is not.
macro_rules! contiguous {
    ($storage:expr) => {{
        if $storage.view().is_standard_layout() {
            $storage.into()
        } else {
            $storage.view().as_standard_layout().into_owned().into_shared().into()
        }
    }};
}

impl CpuBackend for NdArray {
    const NAN_WINS_MAX_POOL: bool = false;

    fn contiguous(x: FloatTensor<Self>) -> FloatTensor<Self> {
        match x {
            NdArrayTensor::F32(storage) => contiguous!(storage),
            NdArrayTensor::F64(storage) => contiguous!(storage),
            other => other,
        }
    }

    fn is_contiguous(x: &FloatTensor<Self>) -> bool {
        match x {
            NdArrayTensor::F32(storage) => storage.view().is_standard_layout(),
            NdArrayTensor::F64(storage) => storage.view().is_standard_layout(),
            _ => true,
        }
    }

    fn as_slice<E: CpuElement>(x: &FloatTensor<Self>) -> &[E] {
        assert_eq!(x.dtype(), E::dtype(), "NdArray: operands of one operation have one dtype");
        match x {
            NdArrayTensor::F32(x) => bytemuck::cast_slice(x.view().to_slice().expect("contiguous")),
            NdArrayTensor::F64(x) => bytemuck::cast_slice(x.view().to_slice().expect("contiguous")),
            _ => unreachable!("a float tensor of NdArray is F32 or F64"),
        }
    }

    fn as_slice_mut<E: CpuElement>(x: &mut FloatTensor<Self>) -> &mut [E] {
        assert_eq!(x.dtype(), E::dtype(), "NdArray: operands of one operation have one dtype");
        match x {
            NdArrayTensor::F32(x) => {
                bytemuck::cast_slice_mut(x.ensure_owned().as_slice_mut().expect("contiguous"))
            }
            NdArrayTensor::F64(x) => {
                bytemuck::cast_slice_mut(x.ensure_owned().as_slice_mut().expect("contiguous"))
            }
            _ => unreachable!("a float tensor of NdArray is F32 or F64"),
        }
    }

    fn from_vec<E: CpuElement>(values: Vec<E>, shape: Shape) -> FloatTensor<Self> {
        fn array<T: Clone>(values: Vec<T>, shape: &Shape) -> SharedArray<T> {
            SharedArray::from_shape_vec(shape.as_slice(), values).expect("as many values as the shape says")
        }
        // `cast_vec` keeps the buffer: the types are the same, which only the dtype knows.
        match E::dtype() {
            DType::F32 => array::<f32>(bytemuck::cast_vec(values), &shape).into(),
            DType::F64 => array::<f64>(bytemuck::cast_vec(values), &shape).into(),
            dtype => panic!("NdArray has no {dtype:?}"),
        }
    }

    fn contiguous_bools(x: BoolTensor<Self>) -> BoolTensor<Self> {
        match x {
            NdArrayTensor::Bool(storage) => {
                storage.view().as_standard_layout().into_owned().into_shared().into()
            }
            other => other,
        }
    }

    fn as_bytes(x: &BoolTensor<Self>) -> &[u8] {
        match x {
            NdArrayTensor::Bool(x) => bytemuck::cast_slice(x.view().to_slice().expect("contiguous")),
            _ => unreachable!("a boolean tensor of NdArray is Bool"),
        }
    }

    fn contiguous_ints(x: IntTensor<Self>) -> IntTensor<Self> {
        match Self::int_cast(x, IntDType::I64) {
            NdArrayTensor::I64(storage) => contiguous!(storage),
            _ => unreachable!("integers that were cast to i64"),
        }
    }

    fn as_ints(x: &IntTensor<Self>) -> &[i64] {
        match x {
            NdArrayTensor::I64(x) => x.view().to_slice().expect("contiguous"),
            _ => unreachable!("contiguous integers are of i64"),
        }
    }

    fn codes_mut(x: &mut IntTensor<Self>) -> &mut [u8] {
        match x {
            NdArrayTensor::U8(x) => x.ensure_owned().as_slice_mut().expect("contiguous"),
            _ => panic!("NdArray: codes are of 8 bits"),
        }
    }

    fn quantized_matrix(weight: &QuantizedTensor<Self>) -> Option<QuantizedMatrix<'_>> {
        let NdArrayTensor::I8(storage) = &weight.qtensor else { return None };
        let values = storage.view().to_slice()?;
        let blocks = weight.scheme.block_size().map(|block| BlockLayout::new(&weight.shape(), &block));
        Some(QuantizedMatrix { values, scales: &weight.qparams, global: weight.global, blocks })
    }
}

/// The default bodies allocate whole tensors, for as long as one backward step takes: NdArray has no views of stride zero.
impl Placeholders for NdArray {}
