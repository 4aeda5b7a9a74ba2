//! Kernels for devices. Both formats use words of 32 bits, so that no device needs numbers of 8 or 16 bits.
use super::{Format, GROUP, PackingKernels, STEPS, STEPS_BESIDE};
use crate::backend::Saved;
use crate::backend::cube::{Grid, constant, empty, launch, max_over_units, random, vector_size};
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension,
    ops::FloatTensorOps,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, Shape};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// Elements of 16 bits that a unit takes, two words.
const HALVES: usize = 4;
/// Elements of 8 bits in a word.
const BYTES: usize = 4;
/// Units of a cube, which takes a group. A unit takes a word.
const UNITS: usize = GROUP / BYTES;

/// A tensor in fewer bits.
#[derive(Clone, Debug)]
pub struct Packed {
    bits: PackedBits,
    shape: Shape,
    dtype: DType,
}

#[derive(Clone, Debug)]
enum PackedBits {
    /// bf16 or f16, from f32.
    Halves {
        words: IntTensor<Cube>,
        is_f16: bool,
    },
    /// f32, from f64.
    Single(FloatTensor<Cube>),
    Int8(Box<Int8>),
}

#[derive(Clone, Debug)]
struct Int8 {
    words: IntTensor<Cube>,
    scales: FloatTensor<Cube>,
}

impl Saved for Packed {
    fn bytes(&self) -> usize {
        let of = |elements: Shape| size_of::<u32>() * elements.num_elements();
        match &self.bits {
            PackedBits::Halves { words, .. } => of(words.shape()),
            PackedBits::Single(values) => of(values.shape()),
            PackedBits::Int8(packed) => of(packed.words.shape()) + of(packed.scales.shape()),
        }
    }
}

impl PackingKernels for Cube {
    const IS_HOST: bool = false;
    type Packed = Packed;

    #[cfg(not(feature = "fusion"))]
    fn is_expanded(x: &FloatTensor<Self>) -> bool {
        x.meta.shape().iter().zip(x.meta.strides().iter()).any(|(&len, &stride)| len > 1 && stride == 0)
    }

    fn pack(x: FloatTensor<Self>, format: Format, seed: u32) -> Packed {
        let (shape, dtype) = (x.shape(), x.dtype());
        let bits = match (format, dtype) {
            (Format::Half | Format::HalfF16, DType::F64) => {
                PackedBits::Single(Self::float_cast(x, FloatDType::F32))
            }
            (Format::Half | Format::HalfF16, _) => {
                let is_f16 = format == Format::HalfF16;
                PackedBits::Halves { words: Self::cube_to_halves(x, is_f16), is_f16 }
            }
            (Format::Int8, _) => {
                let (words, scales) = Self::cube_to_bytes(x, seed);
                PackedBits::Int8(Box::new(Int8 { words, scales }))
            }
        };
        Packed { bits, shape, dtype }
    }

    fn unpack(packed: &Packed) -> FloatTensor<Self> {
        let Packed { bits, shape, dtype } = packed.clone();
        match bits {
            PackedBits::Halves { words, is_f16 } => Self::cube_from_halves(words, shape, is_f16),
            PackedBits::Single(values) => Self::float_cast(values, dtype.into()),
            PackedBits::Int8(packed) => {
                let Int8 { words, scales } = *packed;
                Self::cube_from_bytes(words, scales, shape, dtype)
            }
        }
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait PackingCube: Backend {
    /// An f32 tensor in bf16 or f16, two in a word.
    #[fusion(dtype = DType::I32, shape = Shape::new([x.num_elements().div_ceil(2)]))]
    fn cube_to_halves(x: FloatTensor<Self>, is_f16: bool) -> IntTensor<Self>;

    /// An f32 tensor of words.
    #[fusion(dtype = DType::F32, shape = shape.clone())]
    fn cube_from_halves(words: IntTensor<Self>, shape: Shape, is_f16: bool) -> FloatTensor<Self>;

    /// A tensor in bytes, four in a word, and the scales of the groups.
    #[fusion(meta = |x, _seed| {
        let described = |unit, dtype| burn::backend::fusion::custom::TensorSpec {
            shape: Shape::new([x.shape.num_elements().div_ceil(unit)]),
            dtype,
        };
        (described(BYTES, DType::I32), described(GROUP, DType::F32))
    })]
    fn cube_to_bytes(x: FloatTensor<Self>, seed: u32) -> (IntTensor<Self>, FloatTensor<Self>);

    /// A tensor of words and scales.
    #[fusion(dtype = *dtype, shape = shape.clone())]
    fn cube_from_bytes(
        words: IntTensor<Self>,
        scales: FloatTensor<Self>,
        shape: Shape,
        dtype: DType,
    ) -> FloatTensor<Self>;
}

impl PackingCube for CubeBackend {
    fn cube_to_halves(x: FloatTensor<Self>, is_f16: bool) -> IntTensor<Self> {
        let elements = x.shape().num_elements();
        let words = empty(&x, Shape::new([elements.div_ceil(2)]), DType::I32);
        let size = vector_size(&[&x], HALVES);
        if let Some(grid) = Grid::of_units(elements.div_ceil(HALVES), &[&x]) {
            let packed = words.clone().into_linear_view();
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(to_halves, grid, size, x.into_linear_view(), packed, is_f16) };
        }
        words
    }

    fn cube_from_halves(words: IntTensor<Self>, shape: Shape, is_f16: bool) -> FloatTensor<Self> {
        let elements = shape.num_elements();
        let x = empty(&words, shape, DType::F32);
        let size = vector_size(&[&x], HALVES);
        if let Some(grid) = Grid::of_units(elements.div_ceil(HALVES), &[&x]) {
            let view = x.clone().into_linear_view();
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(from_halves, grid, size, words.into_linear_view(), view, is_f16) };
        }
        x
    }

    fn cube_to_bytes(x: FloatTensor<Self>, seed: u32) -> (IntTensor<Self>, FloatTensor<Self>) {
        let elements = x.shape().num_elements();
        let groups = elements.div_ceil(GROUP);
        let words = empty(&x, Shape::new([elements.div_ceil(BYTES)]), DType::I32);
        let scales = empty(&x, Shape::new([groups]), DType::F32);
        let size = vector_size(&[&x], BYTES);
        let grid = Grid::of_cubes(groups, UNITS, &[&x]);
        let views = [&words, &scales].map(|tensor: &CubeTensor| tensor.clone().into_linear_view());
        let ([packed, of_groups], x) = (views, x.into_linear_view());
        // SAFETY: the kernel compares every position with the shapes.
        unsafe { launch!(to_bytes, grid, size, x, packed, of_groups, seed, grid.dtypes[0]) };
        (words, scales)
    }

    fn cube_from_bytes(
        words: IntTensor<Self>,
        scales: FloatTensor<Self>,
        shape: Shape,
        dtype: DType,
    ) -> FloatTensor<Self> {
        let elements = shape.num_elements();
        let x = empty(&words, shape, dtype);
        let size = vector_size(&[&x], BYTES);
        if let Some(grid) = Grid::of_units(elements.div_ceil(BYTES), &[&x]) {
            let [words, scales] = [words, scales].map(CubeTensor::into_linear_view);
            let view = x.clone().into_linear_view();
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(from_bytes, grid, size, words, scales, view, grid.dtypes[0]) };
        }
        x
    }
}

/// The upper half of the bits of an f32, rounded to nearest, ties to even.
#[cube]
fn to_half(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let rounded = (bits + 0x7FFFu32 + ((bits >> 16u32) & 1u32)) >> 16u32;
    // Rounded up, a NaN could become infinite.
    let no_number = (bits & 0x7FFF_FFFFu32) > 0x7F80_0000u32;
    select(no_number, (bits >> 16u32) | 0x40u32, rounded)
}

/// The bits of the nearest f16, ties to even.
///
/// A sum with 0.5, whose last bit is worth `2^-24`, rounds those that are subnormal.
#[cube]
fn to_f16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = (bits >> 16u32) & 0x8000u32;
    let size = bits & 0x7FFF_FFFFu32;
    let normal = (size + 0xFFFu32 + ((size >> 13u32) & 1u32) - 0x3800_0000u32) >> 13u32;
    let subnormal = u32::reinterpret(f32::reinterpret(size) + 0.5) - 0x3F00_0000u32;
    let finite = select(size < 0x3880_0000u32, subnormal, normal);
    let beyond = select(size > 0x7F80_0000u32, 0x7E00u32, 0x7C00u32); // not a number, or infinite
    select(size >= 0x4780_0000u32, beyond, finite) | sign
}

/// The number whose bits as an f16 are the lower 16.
#[cube]
fn from_f16(half: u32) -> f32 {
    let sign = (half & 0x8000u32) << 16u32;
    let size = (half & 0x7FFFu32) << 13u32;
    let exponent = size & 0x0F80_0000u32;
    // A subnormal number is what its bits add to 2^-14.
    let subnormal =
        u32::reinterpret(f32::reinterpret(size + 0x3880_0000u32) - f32::reinterpret(0x3880_0000u32));
    let beyond = size + 0x7000_0000u32;
    let finite = select(exponent == 0u32, subnormal, size + 0x3800_0000u32);
    f32::reinterpret(select(exponent == 0x0F80_0000u32, beyond, finite) | sign)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn to_halves<N: Size>(
    x: LinearView<'_, Vector<f32, N>>,
    mut words: LinearViewMut<'_, u32>,
    #[comptime] is_f16: bool,
) {
    let size = N::value().comptime();
    let vectors = comptime!(HALVES / size);
    let mut first = 0u32;
    let mut second = 0u32;
    #[unroll]
    for part in 0..vectors {
        let at = ABSOLUTE_POS * vectors + part;
        if x.is_in_bounds(at) {
            let values = x.read(at);
            #[unroll]
            for lane in 0..size {
                let element = comptime!(part * size + lane);
                let value = values.extract(lane);
                let half = if comptime!(is_f16) { to_f16(value) } else { to_half(value) };
                let half = half << comptime!(16 * (element % 2) as u32);
                if comptime!(element < 2) {
                    first |= half;
                } else {
                    second |= half;
                }
            }
        }
    }
    let at = ABSOLUTE_POS * 2;
    if words.is_in_bounds(at) {
        words.write(at, first);
    }
    if words.is_in_bounds(at + 1) {
        words.write(at + 1, second);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn from_halves<N: Size>(
    words: LinearView<'_, u32>,
    mut x: LinearViewMut<'_, Vector<f32, N>>,
    #[comptime] is_f16: bool,
) {
    let size = N::value().comptime();
    let vectors = comptime!(HALVES / size);
    let first = words.read_checked(ABSOLUTE_POS * 2);
    let second = words.read_checked(ABSOLUTE_POS * 2 + 1);
    #[unroll]
    for part in 0..vectors {
        let at = ABSOLUTE_POS * vectors + part;
        if x.is_in_bounds(at) {
            let mut values = Vector::<f32, N>::new(0.0);
            #[unroll]
            for lane in 0..size {
                let element = comptime!(part * size + lane);
                let word = if comptime!(element < 2) { first } else { second };
                let half = word >> comptime!(16 * (element % 2) as u32);
                let value = if comptime!(is_f16) { from_f16(half) } else { f32::reinterpret(half << 16u32) };
                values.insert(lane, value);
            }
            x.write(at, values);
        }
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn to_bytes<T: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut words: LinearViewMut<'_, u32>,
    mut scales: LinearViewMut<'_, f32>,
    seed: u32,
    #[define(T)] _dtype: ElemType,
) {
    let group = CUBE_POS;
    if !scales.is_in_bounds(group) {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = comptime!(BYTES / size);
    let word = group * UNITS + UNIT_POS as usize;
    // Compared as integers: the largest finite element, and whether there are others.
    let mut largest = 0u32;
    let mut beside = 0u32;
    #[unroll]
    for part in 0..vectors {
        let at = word * vectors + part;
        if x.is_in_bounds(at) {
            let values = Vector::<f32, N>::cast_from(x.read(at));
            #[unroll]
            for lane in 0..size {
                let bits = u32::reinterpret(values.extract(lane)) & 0x7FFF_FFFFu32;
                let is_finite = bits < 0x7F80_0000u32;
                largest = max(largest, select(is_finite, bits, 0u32));
                beside = select(is_finite, beside, 1u32);
            }
        }
    }
    let largest = max_over_units::<u32>(largest, UNITS);
    let is_finite = max_over_units::<u32>(beside, UNITS) == 0u32;
    let steps =
        select(is_finite, constant::<f32>(comptime!(STEPS)), constant::<f32>(comptime!(STEPS_BESIDE)));
    let scale = f32::reinterpret(largest) / steps;
    // Below, its inverse would be infinite.
    let is_zero = scale < constant::<f32>(comptime!(f32::MIN_POSITIVE));
    let scale = select(is_zero, 0.0, scale);
    let inverse = select(is_zero, 0.0, 1.0 / scale);
    if UNIT_POS == 0 {
        // Negative if not all elements are finite.
        let beside = -max(scale, constant::<f32>(comptime!(f32::MIN_POSITIVE)));
        scales.write(group, select(is_finite, scale, beside));
    }
    let mut bytes = 0u32;
    #[unroll]
    for part in 0..vectors {
        let at = word * vectors + part;
        if x.is_in_bounds(at) {
            let values = Vector::<f32, N>::cast_from(x.read(at));
            #[unroll]
            for lane in 0..size {
                let element = comptime!(part * size + lane);
                let position = u32::cast_from(word * BYTES + element);
                let up = random::unit::<f32>(random::noise(position, seed));
                let bits = u32::reinterpret(values.extract(lane));
                let size = bits & 0x7FFF_FFFFu32;
                let finite = f32::reinterpret(select(size < 0x7F80_0000u32, bits, 0u32));
                let rounded = (finite * inverse + up).floor();
                // In 1..=255: 128 is subtracted later. In a group that is not all finite, 255 and 1 are infinite, and 0 is NaN.
                let byte = u32::cast_from(clamp(rounded, -steps, steps) + 128.0) & 0xFFu32;
                let infinite = select(bits == size, 255u32, 1u32);
                let byte = select(size >= 0x7F80_0000u32, infinite, byte);
                let byte = select(size > 0x7F80_0000u32, 0u32, byte);
                bytes |= byte << comptime!(8 * element as u32);
            }
        }
    }
    if words.is_in_bounds(word) {
        words.write(word, bytes);
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn from_bytes<T: Float, N: Size>(
    words: LinearView<'_, u32>,
    scales: LinearView<'_, f32>,
    mut x: LinearViewMut<'_, Vector<T, N>>,
    #[define(T)] _dtype: ElemType,
) {
    let size = N::value().comptime();
    let vectors = comptime!(BYTES / size);
    let bytes = words.read_checked(ABSOLUTE_POS);
    let scale = scales.read_checked(ABSOLUTE_POS / UNITS);
    #[unroll]
    for part in 0..vectors {
        let at = ABSOLUTE_POS * vectors + part;
        if x.is_in_bounds(at) {
            let mut values = Vector::<f32, N>::new(0.0);
            #[unroll]
            for lane in 0..size {
                let byte = (bytes >> comptime!(8 * (part * size + lane) as u32)) & 0xFFu32;
                let value = (f32::cast_from(byte) - 128.0) * scale.abs();
                let infinite = select(byte == 1u32, 0xFF80_0000u32, 0x7F80_0000u32);
                let beside = select(byte == 0u32, 0x7FC0_0000u32, infinite);
                let is_code = byte <= 1u32 || byte == 255u32;
                values.insert(lane, select(scale < 0.0 && is_code, f32::reinterpret(beside), value));
            }
            x.write(at, Vector::cast_from(values));
        }
    }
}
