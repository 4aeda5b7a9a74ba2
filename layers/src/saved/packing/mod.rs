//! Packing: tensors in fewer bits between the forward and the backward pass.
//!
//! | format | bytes of n elements | `x` comes back as |
//! | --- | --- | --- |
//! | [`Format::Half`] | `2 n` of f32, `4 n` of f64 | bf16 of f32, f32 of f64: rounded to nearest, `abs(error) <= abs(x) / 2^8`, or `/ 2^24` |
//! | [`Format::HalfF16`] | the same | f16 of f32, f32 of f64: `abs(error) <= max(abs(x) / 2^11, 2^-25)`; **infinite** from 65520 on, or `/ 2^24` |
//! | [`Format::Int8`] | `n + 4 ceil(n / 128)` | a multiple of `s`, the largest `abs(x)` of its group of 128 elements over 127: rounded up or down at random, `abs(error) < s`, `x` in the mean |
//!
//! Infinities and NaN come back as they are. An f64 that is infinite in f32 comes back as infinity. The finite elements of a group with
//! such an element are multiples of the largest finite one over 125. Beyond the largest bf16, 3.39e38, `Half` gives infinity. For subnormal
//! numbers the bounds are absolute.
#[cfg(any(feature = "remote", all(test, feature = "flex")))]
use crate::backend::composing_backends;
use crate::backend::{Placeholders, Saved};
use burn::backend::tensor::FloatTensor;
use burn::tensor::DType;

#[cfg(any(feature = "remote", all(test, feature = "flex")))]
mod composed;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

/// Consecutive elements in row-major order that share a scale.
const GROUP: usize = 128;

/// The largest element of a group, in multiples of its scale.
#[cfg(any(feature = "flex", feature = "ndarray", feature = "remote", feature = "wgpu", feature = "cuda"))]
const STEPS: f32 = 127.0;

/// The largest finite element of a group with others that are not, in multiples of its scale. The scale of such a group is negative, and
/// three codes have other meanings: `INFINITE`, `-INFINITE` and `NO_NUMBER`.
#[cfg(any(feature = "flex", feature = "ndarray", feature = "remote", feature = "wgpu", feature = "cuda"))]
const STEPS_BESIDE: f32 = 125.0;

/// The code of infinity.
#[cfg(any(feature = "flex", feature = "ndarray", feature = "remote"))]
const INFINITE: i8 = 127;

/// The code of NaN.
#[cfg(any(feature = "flex", feature = "ndarray", feature = "remote"))]
const NO_NUMBER: i8 = -128;

/// A form that takes less memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Half as many bits.
    Half,
    /// Half as many bits, f16 where [`Half`](Self::Half) has bf16.
    HalfF16,
    /// Eight bits, and a scale for every 128 elements.
    Int8,
}

impl Format {
    /// The packed bytes of so many elements of a dtype; `None` if packing would not save any, or if the dtype has no such form.
    pub(crate) fn bytes(self, elements: usize, dtype: DType) -> Option<usize> {
        match (self, dtype) {
            (Self::Half | Self::HalfF16, DType::F32 | DType::F64) => Some(elements * dtype.size() / 2),
            (Self::Int8, DType::F64 | DType::F32 | DType::F16 | DType::BF16) => {
                Some(elements + size_of::<f32>() * elements.div_ceil(GROUP))
            }
            _ => None,
        }
    }
}

/// The kernels.
pub trait PackingKernels: Placeholders {
    /// Whether tensors are in the memory of the host.
    const IS_HOST: bool;

    /// A tensor in fewer bits, with its shape and dtype.
    type Packed: Saved;

    /// Whether several elements share memory, as far as is known.
    fn is_expanded(_: &FloatTensor<Self>) -> bool {
        false
    }

    /// Packs a tensor, which is not empty, of a dtype that the format takes. Stochastic rounding uses `seed`.
    fn pack(x: FloatTensor<Self>, format: Format, seed: u32) -> Self::Packed;

    /// The tensor in its original dtype, in row-major order.
    fn unpack(packed: &Self::Packed) -> FloatTensor<Self>;
}

#[cfg(any(feature = "remote", all(test, feature = "flex")))]
composing_backends!(PackingKernels {
    const IS_HOST: bool = false;
    type Packed = composed::Packed<Self>;

    fn pack(x: FloatTensor<Self>, format: Format, seed: u32) -> Self::Packed {
        composed::Packed::of(x, format, seed)
    }

    fn unpack(packed: &Self::Packed) -> FloatTensor<Self> {
        packed.unpack()
    }
});

/// A pseudorandom number for every position and seed.
///
/// The finalizer of C. Wellons, "Prospecting for Hash Functions" (2018), `lowbias32`.
#[cfg(any(feature = "flex", feature = "ndarray", feature = "remote"))]
#[inline(always)]
pub(crate) fn noise(position: u32, seed: u32) -> u32 {
    let mut x = position ^ seed.wrapping_mul(0x9E37_79B9);
    x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
    x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use crate::backend::testing::{Composed, composed, random};
    use crate::saved::packing::*;
    use burn::backend::{Flex, TensorMetadata, ops::FloatTensorOps, read_sync};

    fn values(x: FloatTensor<Flex>) -> Vec<f64> {
        read_sync(Flex::float_into_data(x)).expect("a CPU tensor").iter::<f64>().collect()
    }

    const DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

    /// Errors are within the bounds of the table for every dtype, also with incomplete groups and gaps in memory.
    #[test]
    fn errors_are_bounded() {
        for shape in [&[1][..], &[127], &[3, 128], &[5, 77], &[2, 3, 50]] {
            for dtype in DTYPES {
                let x = Flex::float_cast(random(shape), dtype.into());
                let x = if shape.len() > 1 { Flex::float_swap_dims(x, 0, 1) } else { x };
                let wide = values(x.clone());
                for format in [Format::Half, Format::HalfF16, Format::Int8] {
                    let Some(bytes) = format.bytes(wide.len(), dtype) else { continue };
                    let packed = Flex::pack(x.clone(), format, 3);
                    assert_eq!(packed.bytes(), bytes);
                    let y = Flex::unpack(&packed);
                    assert_eq!((y.shape(), y.dtype()), (x.shape(), dtype));
                    let y = values(y);
                    for (x, y) in wide.chunks(GROUP).zip(y.chunks(GROUP)) {
                        let scale = x.iter().fold(0.0, |scale: f64, x| scale.max(x.abs())) / 127.0;
                        for (x, y) in x.iter().zip(y) {
                            let narrowed = x.abs() * if dtype.size() == 2 { 2f64.powi(-8) } else { 1e-6 };
                            let error = match (format, dtype) {
                                (Format::Int8, _) => scale * 1.0001 + narrowed,
                                (_, DType::F64) => x.abs() / 2f64.powi(24),
                                (Format::HalfF16, _) => (x.abs() / 2f64.powi(11)).max(2f64.powi(-25)),
                                (Format::Half, _) => x.abs() / 2f64.powi(8),
                            };
                            assert!((x - y).abs() <= error, "{x}, {y}, {format:?} of {dtype:?}");
                        }
                    }
                }
            }
        }
    }

    /// The mean over many seeds is the tensor itself.
    #[test]
    fn rounding_has_no_bias() {
        const SEEDS: u32 = 4000;
        let x = random(&[200]);
        let mut means = vec![0.0; 200];
        for seed in 0..SEEDS {
            let y = values(Flex::unpack(&Flex::pack(x.clone(), Format::Int8, seed)));
            means.iter_mut().zip(y).for_each(|(mean, y)| *mean += y / f64::from(SEEDS));
        }
        for (x, mean) in values(x).into_iter().zip(means) {
            // Steps are less than 4/127; the mean of as many has a deviation of at most step / 2 / sqrt(4000).
            assert!((x - mean).abs() < 6.0 * 0.5 * (4.0 / 127.0) / f64::from(SEEDS).sqrt(), "{x}, {mean}");
        }
    }

    #[test]
    fn zeros_and_what_is_not_finite() {
        let x = |value: f32| {
            let mut values = vec![1.0f32; 200];
            values[3] = value;
            <Flex as crate::backend::cpu::CpuBackend>::from_vec(values, [200].into())
        };
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let cpu = Flex::unpack(&Flex::pack(x(value), Format::Int8, 0));
            let body =
                Composed::unpack(&Composed::pack(composed(&x(value)), Format::Int8, 0)).into_primitive();
            for y in [cpu, body].map(values) {
                assert!(y[3] as f32 == value || y[3].is_nan() && value.is_nan(), "{value}: {}", y[3]);
                let mut beside = y[..GROUP].iter().enumerate().filter(|&(at, _)| at != 3);
                let step = f64::from(1.0 / STEPS_BESIDE) * 1.0001;
                assert!(beside.all(|(_, &y)| (y - 1.0).abs() < step), "{value}: {y:?}");
                assert!(y[GROUP..].iter().all(|&y| (y - 1.0).abs() < 1e-6), "{value}");
            }
            for format in [Format::Half, Format::HalfF16] {
                let y = values(Flex::unpack(&Flex::pack(x(value), format, 0)));
                assert!(y[3] as f32 == value || y[3].is_nan() && value.is_nan(), "{value}");
            }
        }
        // The range of f16 ends at 65504, where that of bf16 does not.
        for (value, half) in
            [(65504.0, 65504.0), (65519.0, 65504.0), (65520.0, f32::INFINITY), (6e-8, 2f32.powi(-24))]
        {
            for value in [value, -value] {
                let y = values(Flex::unpack(&Flex::pack(x(value), Format::HalfF16, 0)));
                assert_eq!(y[3] as f32, half.copysign(value));
                assert!(values(Flex::unpack(&Flex::pack(x(value), Format::Half, 0)))[3].is_finite());
            }
        }
        for tiny in [0.0f32, 1e-44, 1e-38] {
            let x = <Flex as crate::backend::cpu::CpuBackend>::from_vec(vec![tiny; 130], [130].into());
            for y in values(Flex::unpack(&Flex::pack(x, Format::Int8, 0))) {
                assert!((y - f64::from(tiny)).abs() <= 1.2e-38, "{y}, {tiny}");
            }
        }
    }

    #[test]
    fn compositions_do_the_same() {
        for shape in [&[1][..], &[128], &[5, 77]] {
            let x = random(shape);
            for format in [Format::Half, Format::HalfF16, Format::Int8] {
                let packed = Composed::pack(composed(&x), format, 0);
                let y = Composed::unpack(&packed).into_primitive();
                assert_eq!((y.shape(), y.dtype()), (x.shape(), DType::F32));
                for (x, y) in values(x.clone()).into_iter().zip(values(y)) {
                    let error = match format {
                        Format::Half => x.abs() / 256.0,
                        Format::HalfF16 => (x.abs() / 2048.0).max(2f64.powi(-25)),
                        Format::Int8 => 5.0 / 127.0,
                    };
                    assert!((x - y).abs() <= error, "{x}, {y}, {format:?}");
                }
            }
        }
    }
}
