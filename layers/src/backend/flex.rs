//! Slices of Flex tensors.
use super::cpu::{CpuBackend, CpuElement};
use burn::backend::{
    Flex,
    flex::FlexDevice,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{Bytes, DType, Shape, bf16, f16};
use burn_flex::{FlexTensor, Layout};

impl CpuBackend for Flex {
    const NAN_WINS_MAX_POOL: bool = true;

    fn contiguous(x: FloatTensor<Self>) -> FloatTensor<Self> {
        // The public form borrows and returns a second handle, which must not count as sharing: the first one ends here.
        x.to_contiguous()
    }

    fn as_slice<E: CpuElement>(x: &FloatTensor<Self>) -> &[E] {
        x.storage::<E>()
    }

    fn as_slice_mut<E: CpuElement>(x: &mut FloatTensor<Self>) -> &mut [E] {
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
}
