//! What the CPU kernels share: element types, slices of tensors, threads, and loops over elements, channels and masks.
//!
//! The CPU backends are those whose tensors are slices in memory, [`CpuBackend`]. Sums and products are made in [`CpuElement::Acc`], f32
//! for half precision, and rounded once.
use super::Placeholders;
use burn::backend::{
    TensorMetadata,
    tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor},
};
use burn::tensor::{DType, Element, Shape, bf16, f16};
use core::mem::MaybeUninit;
use elementwise::{Update, UpdateWith};
use half::slice::HalfFloatSliceExt;
use num_traits::Float;
use parallel::vectorized;

pub(crate) mod affine;
pub(crate) mod axis_map;
pub(crate) mod bit_mask;
pub(crate) mod channels;
pub(crate) mod elementwise;
pub(crate) mod exp;
mod few_rows;
pub(crate) mod gemm;
pub(crate) mod half_precision;
pub(crate) mod in_place;
pub(crate) mod long_rows;
mod matrix;
pub(crate) mod parallel;
pub(crate) mod pieces;
pub(crate) mod plan;
pub(crate) mod product;
mod quantized;
pub(crate) mod strips;
pub(crate) mod sums;
pub(crate) mod transpose;
pub(crate) mod unpacked_rows;
mod work;

pub use bit_mask::BitMask;
pub use gemm::make_buffers;
pub use matrix::Matrix;
pub use quantized::QuantizedMatrix;

/// An element type of tensors. Kernels compute in its `Acc`, which is f32 for half precision, else the type itself.
pub trait CpuElement: Element + bytemuck::Pod + Float + Send + Sync {
    /// The type that sums and products are made in.
    type Acc: CpuElement<Acc = Self::Acc> + product::Lanes;
    /// To `Acc`.
    fn widen(self) -> Self::Acc;
    /// Writes all values as `Acc`. Both slices have the same length.
    fn widen_all(values: &[Self], wide: &mut [MaybeUninit<Self::Acc>]);
    /// From `Acc`, rounded.
    fn narrow(value: Self::Acc) -> Self;
    /// From an f64, rounded.
    fn from_f64(value: f64) -> Self;
    /// To an f64.
    fn into_f64(self) -> f64;
    /// `e^self`; in f32, by a function that is vectorized in loops.
    fn fast_exp(self) -> Self;
    /// The natural logarithm; in f32 likewise.
    fn fast_ln(self) -> Self;
    /// The error function; in f32 likewise.
    fn fast_erf(self) -> Self;
    /// The hyperbolic tangent; in f32 likewise.
    fn fast_tanh(self) -> Self;
}

macro_rules! cpu_element {
    ($element:ty, $acc:ty, $widen:expr, $widen_all:expr, $narrow:expr, $from_f64:expr, $to_f64:expr, $exp:expr, $ln:expr, $erf:expr, $tanh:expr) => {
        impl CpuElement for $element {
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                $widen(self)
            }
            #[inline(always)]
            fn widen_all(values: &[Self], wide: &mut [MaybeUninit<$acc>]) {
                $widen_all(values, wide)
            }
            #[inline(always)]
            fn narrow(value: $acc) -> Self {
                $narrow(value)
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                $from_f64(value)
            }
            #[inline(always)]
            fn into_f64(self) -> f64 {
                $to_f64(self)
            }
            #[inline(always)]
            fn fast_exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn fast_ln(self) -> Self {
                $ln(self)
            }
            #[inline(always)]
            fn fast_erf(self) -> Self {
                $erf(self)
            }
            #[inline(always)]
            fn fast_tanh(self) -> Self {
                $tanh(self)
            }
        }
    };
}
cpu_element!(
    f32,
    f32,
    |v| v,
    copy_all,
    |v| v,
    |v| v as f32,
    f64::from,
    exp::exp,
    exp::ln,
    exp::erf,
    exp::tanh
);
cpu_element!(f64, f64, |v| v, copy_all, |v| v, |v| v, |v| v, f64::exp, f64::ln, libm::erf, f64::tanh);
macro_rules! half_element {
    ($half:ident, $widen_all:expr) => {
        cpu_element!(
            $half,
            f32,
            $half::to_f32,
            $widen_all,
            $half::from_f32,
            |v| $half::from_f32(to_odd(v)),
            $half::to_f64,
            |v| $half::from_f32(exp::exp($half::to_f32(v))),
            |v| $half::from_f32(exp::ln($half::to_f32(v))),
            |v| $half::from_f32(exp::erf($half::to_f32(v))),
            |v| $half::from_f32(exp::tanh($half::to_f32(v)))
        );
    };
}
half_element!(f16, widen_f16);
half_element!(bf16, widen_bf16);

/// By an instruction of the machine, which `half` looks for once per call.
#[inline(always)]
fn widen_f16(values: &[f16], wide: &mut [MaybeUninit<f32>]) {
    wide.fill(MaybeUninit::new(0.0));
    // SAFETY: all of them have just been written.
    values.convert_to_f32_slice(unsafe { wide.assume_init_mut() });
}

/// The upper half of the bits. (`to_f32` also looks for signaling NaNs, to make them quiet.)
#[inline(always)]
fn widen_bf16(values: &[bf16], wide: &mut [MaybeUninit<f32>]) {
    for (wide, value) in wide.iter_mut().zip(values) {
        wide.write(f32::from_bits(u32::from(value.to_bits()) << 16));
    }
}

#[inline(always)]
fn copy_all<E: Copy>(values: &[E], copies: &mut [MaybeUninit<E>]) {
    copies.write_copy_of_slice(values);
}

/// Writes all values as `Acc`, and returns them. Both slices have the same length.
#[inline(always)]
pub(crate) fn widen_into<'a, E: CpuElement>(
    values: &[E],
    wide: &'a mut [MaybeUninit<E::Acc>],
) -> &'a [E::Acc] {
    assert_eq!(values.len(), wide.len(), "a place for each");
    E::widen_all(values, wide);
    // SAFETY: all of them have just been written.
    unsafe { wide.assume_init_ref() }
}

/// The number itself if it is an f32, else the one of its two neighbors whose last bit is odd (round to odd). Rounded on to half precision,
/// the result is the same as if the f64 had been rounded once. (`half` 2 drops the lower half of an f64 before it looks for ties.)
#[inline(always)]
fn to_odd(value: f64) -> f32 {
    let nearest = value as f32;
    let is_beyond = f64::from(nearest).abs() > value.abs();
    let odd = f32::from_bits((nearest.to_bits() - u32::from(is_beyond)) | 1);
    if f64::from(nearest) == value || value.is_nan() { nearest } else { odd }
}

/// A backend whose tensors are slices in memory.
pub trait CpuBackend: Placeholders {
    /// Whether a NaN is the maximum of its window in this backend's max pool.
    const NAN_WINS_MAX_POOL: bool;

    /// The tensor with its elements in row-major order and nothing else in its buffer, copied only if they are not.
    fn contiguous(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// Whether [`contiguous`](Self::contiguous) copies nothing.
    fn is_contiguous(x: &FloatTensor<Self>) -> bool;

    /// The bytes of the buffer that holds a tensor, if known.
    fn buffer_bytes(_: &FloatTensor<Self>) -> Option<usize> {
        None
    }

    /// The elements of a [contiguous](Self::contiguous) tensor of dtype `E`.
    fn as_slice<E: CpuElement>(x: &FloatTensor<Self>) -> &[E];

    /// A tensor of dtype `E` as a matrix of all its rows, without a copy. `None` if there is no such view, or if this backend multiplies
    /// matrices itself.
    fn matrix<E: CpuElement>(_: &FloatTensor<Self>) -> Option<Matrix<'_, E>> {
        None
    }

    /// The elements of a [contiguous](Self::contiguous) tensor of dtype `E`; copied first if the tensor is shared.
    fn as_slice_mut<E: CpuElement>(x: &mut FloatTensor<Self>) -> &mut [E];

    /// A tensor of dtype `E` that owns `values`.
    fn from_vec<E: CpuElement>(values: Vec<E>, shape: Shape) -> FloatTensor<Self>;

    /// The bytes of booleans in row-major order, with nothing else in the buffer: zero where false.
    fn contiguous_bools(x: BoolTensor<Self>) -> BoolTensor<Self>;

    /// The bytes of [contiguous](Self::contiguous_bools) booleans.
    fn as_bytes(x: &BoolTensor<Self>) -> &[u8];

    /// Integers as i64, in row-major order, with nothing else in the buffer; copied only if they are not.
    fn contiguous_ints(x: IntTensor<Self>) -> IntTensor<Self>;

    /// The elements of [contiguous](Self::contiguous_ints) integers.
    fn as_ints(x: &IntTensor<Self>) -> &[i64];

    /// The bytes of a tensor of u8 that fills its buffer; copied first if the tensor is shared.
    fn codes_mut(x: &mut IntTensor<Self>) -> &mut [u8];

    /// The elements of a quantized matrix, if they are in row-major order and its scales can be read.
    fn quantized_matrix(weight: &QuantizedTensor<Self>) -> Option<QuantizedMatrix<'_>>;
}

/// Runs the expression with `$E` bound to the element type of a dtype.
macro_rules! with_element {
    ($dtype:expr, $op:literal, $E:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $E = f32;
                $body
            }
            DType::F64 => {
                type $E = f64;
                $body
            }
            DType::F16 => {
                type $E = f16;
                $body
            }
            DType::BF16 => {
                type $E = bf16;
                $body
            }
            dtype => panic!("{}: the dtype {dtype:?} is not a floating-point type of this backend", $op),
        }
    };
}

pub(crate) use with_element;

impl<B: CpuBackend> super::ChannelSums for B {
    fn sum_to_channels(x: FloatTensor<B>) -> FloatTensor<B> {
        let x = B::contiguous(x);
        with_element!(x.dtype(), "sum", E => {
            let sums = channels::Channels::of(B::as_slice::<E>(&x), &x.shape()).sums();
            let shape = Shape::new([sums.len()]);
            B::from_vec(sums.into_iter().map(E::from_f64).collect(), shape)
        })
    }
}

impl<B: CpuBackend> super::Capacity for B {}

impl<B: CpuBackend> super::Scaling for B {
    fn scale(x: FloatTensor<B>, factor: FloatTensor<B>, by: f64) -> FloatTensor<B> {
        let mut x = B::contiguous(x);
        with_element!(x.dtype(), "scale", E => {
            let factor = scalar::<B, E>(factor) * <E as CpuElement>::Acc::from_f64(by);
            let work = x.shape().num_elements();
            parallel::chunks_mut(B::as_slice_mut::<E>(&mut x), 1 << 14, work, |_, x| {
                vectorized(Update { x, f: |x| x * factor });
            });
        });
        x
    }
}

/// Replaces every `x` by `f(x, y)`, rounded once, in tasks of `task` elements.
pub(crate) fn zip_in_place<E: CpuElement>(
    x: &mut [E],
    y: &[E],
    task: usize,
    work: usize,
    f: impl Fn(E::Acc, E::Acc) -> E::Acc + Send + Sync,
) {
    parallel::chunks_mut(x, task, work, |index, x| {
        vectorized(UpdateWith { x, a: &y[index * task..], f: &f });
    });
}

/// The one element of a tensor of any dtype.
pub(crate) fn scalar<B: CpuBackend, E: CpuElement>(x: FloatTensor<B>) -> E::Acc {
    B::as_slice::<E::Acc>(&B::contiguous(B::float_cast(x, E::Acc::dtype().into())))[0]
}

/// The values themselves if their type is its own `Acc`.
pub(crate) fn accumulators<E: CpuElement>(values: &mut [E]) -> Option<&mut [E::Acc]> {
    is_wide::<E>().then(|| bytemuck::cast_slice_mut(values))
}

/// [`accumulators`], read only.
pub(crate) fn accumulators_of<E: CpuElement>(values: &[E]) -> Option<&[E::Acc]> {
    is_wide::<E>().then(|| bytemuck::cast_slice(values))
}

/// Copies of the values in `Acc`.
pub(crate) fn widened<E: CpuElement>(values: &[E]) -> Vec<E::Acc> {
    values.iter().map(|value| value.widen()).collect()
}

/// Whether the type is its own `Acc`.
pub(crate) fn is_wide<E: CpuElement>() -> bool {
    E::dtype() == <E::Acc as Element>::dtype()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_of_an_f64_are_rounded_once() {
        let tie = f64::from(bf16::ONE) + 2f64.powi(-8);
        let above = tie + 2f64.powi(-40);
        assert_eq!(<bf16 as CpuElement>::from_f64(tie).to_f64(), 1.0);
        assert_eq!(<bf16 as CpuElement>::from_f64(above).to_f64(), 1.0 + 2f64.powi(-7));
        assert_eq!(<bf16 as CpuElement>::from_f64(-above).to_f64(), -1.0 - 2f64.powi(-7));
        let tie = 1.0 + 2f64.powi(-11);
        assert_eq!(<f16 as CpuElement>::from_f64(tie).to_f64(), 1.0);
        assert_eq!(<f16 as CpuElement>::from_f64(tie + 2f64.powi(-50)).to_f64(), 1.0 + 2f64.powi(-10));
        for value in [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, 1.5] {
            assert_eq!(<bf16 as CpuElement>::from_f64(value).to_f64().to_bits(), value.to_bits());
        }
        assert_eq!(<bf16 as CpuElement>::from_f64(1e300).to_f64(), f64::INFINITY);
        assert_eq!(<bf16 as CpuElement>::from_f64(1e-300).to_f64(), 0.0);
        assert!(<f16 as CpuElement>::from_f64(f64::NAN).is_nan());
    }
}
