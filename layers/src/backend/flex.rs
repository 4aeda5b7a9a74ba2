//! Slices of Flex tensors.
use super::{
    Placeholders,
    cpu::{CpuBackend, CpuElement, Matrix, QuantizedMatrix, parallel},
};
use burn::backend::{
    Flex, TensorMetadata,
    flex::FlexDevice,
    ops::IntTensorOps,
    tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor},
};
use burn::tensor::{
    Bytes, DType, IntDType, Shape, bf16, f16,
    quantization::{BlockLayout, QuantValue, global_scale_dtype},
};
use burn_flex::{FlexTensor, Layout};

/// Elements of a shared tensor that are copied at once.
const COPIED: usize = 1 << 14;

impl CpuBackend for Flex {
    const NAN_WINS_MAX_POOL: bool = true;

    fn contiguous(x: FloatTensor<Self>) -> FloatTensor<Self> {
        // `to_contiguous` borrows `x` and may return a second handle of it. The first one ends here, so that the tensor is not shared.
        x.to_contiguous()
    }

    fn is_contiguous(x: &FloatTensor<Self>) -> bool {
        let whole = x.bytes().len() == x.layout().num_elements() * x.dtype().size();
        x.is_contiguous() && x.layout().start_offset() == 0 && whole
    }

    fn buffer_bytes(x: &FloatTensor<Self>) -> Option<usize> {
        Some(x.bytes().len())
    }

    fn as_slice<E: CpuElement>(x: &FloatTensor<Self>) -> &[E] {
        x.storage::<E>()
    }

    fn matrix<E: CpuElement>(x: &FloatTensor<Self>) -> Option<Matrix<'_, E>> {
        let strides = x.layout().strides().iter().map(|&stride| stride.try_into().ok());
        let values = x.storage::<E>().get(x.layout().start_offset()..)?;
        Matrix::of_rows(values, &x.shape(), &strides.collect::<Option<Vec<usize>>>()?)
    }

    fn as_slice_mut<E: CpuElement>(x: &mut FloatTensor<Self>) -> &mut [E] {
        if !x.can_mut() {
            // Flex would copy on this thread only.
            let values = Self::as_slice::<E>(x);
            *x = Self::from_vec(parallel::copied(values, COPIED, values.len(), |_, _| ()), x.shape());
        }
        x.storage_mut::<E>()
    }

    fn from_vec<E: CpuElement>(values: Vec<E>, shape: Shape) -> FloatTensor<Self> {
        FlexTensor::new(Bytes::from_elems(values), Layout::contiguous(shape), E::dtype())
    }

    fn contiguous_bools(x: BoolTensor<Self>) -> BoolTensor<Self> {
        x.to_contiguous()
    }

    fn as_bytes(x: &BoolTensor<Self>) -> &[u8] {
        x.bytes()
    }

    fn contiguous_ints(x: IntTensor<Self>) -> IntTensor<Self> {
        Self::int_cast(x, IntDType::I64).to_contiguous()
    }

    fn as_ints(x: &IntTensor<Self>) -> &[i64] {
        x.storage::<i64>()
    }

    fn codes_mut(x: &mut IntTensor<Self>) -> &mut [u8] {
        assert!(Self::is_contiguous(x), "codes are not a part of another tensor");
        x.storage_mut::<u8>()
    }

    fn quantized_matrix(weight: &QuantizedTensor<Self>) -> Option<QuantizedMatrix<'_>> {
        let DType::QFloat(scheme) = weight.dtype() else { return None };
        // The global scale of a two-level scheme is private in 0.22.1. In the next Burn, codes of floats are not multiples of a scale.
        let one_level = global_scale_dtype(&scheme).is_none();
        let is_integer = !matches!(scheme.value, QuantValue::E5M2 | QuantValue::E4M3 | QuantValue::E2M1);
        let values = weight.tensor().as_slice::<i8>().filter(|_| one_level && is_integer)?;
        let blocks = scheme.block_size().map(|block| BlockLayout::new(&weight.shape(), &block));
        Some(QuantizedMatrix { values, scales: weight.scales(), global: None, blocks })
    }
}

impl Placeholders for Flex {
    fn shape_only(shape: Shape, dtype: DType, _: &FlexDevice) -> FloatTensor<Self> {
        let one = Shape::from(vec![1; shape.num_dims()]);
        let one = match dtype {
            DType::F64 => FlexTensor::filled_typed(one, dtype, 0f64),
            DType::F16 => FlexTensor::filled_typed(one, dtype, f16::ZERO),
            DType::BF16 => FlexTensor::filled_typed(one, dtype, bf16::ZERO),
            _ => FlexTensor::filled_typed(one, dtype, 0f32),
        };
        <Self as burn::backend::ops::FloatTensorOps<Self>>::float_expand(one, shape) // a view of stride zero
    }

    /// Zeros, because 0.22.1 copies the result of `float_empty` when it is first written.
    fn unwritten(shape: Shape, dtype: DType, device: &FlexDevice) -> FloatTensor<Self> {
        <Self as burn::backend::ops::FloatTensorOps<Self>>::float_full(
            shape,
            0.0.into(),
            device,
            dtype.into(),
        )
    }
}
