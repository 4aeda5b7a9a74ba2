//! Packing, composed of Burn's operations.
use super::{Format, GROUP, INFINITE, NO_NUMBER, STEPS, STEPS_BESIDE, noise};
use crate::backend::Saved;
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, IntDType, Shape, TensorData};

/// A tensor in fewer bits.
#[derive(Clone, Debug)]
pub struct Packed<B: Backend> {
    bits: Bits<B>,
    shape: Shape,
    dtype: DType,
}

#[derive(Clone, Debug)]
enum Bits<B: Backend> {
    /// The elements in a narrower dtype.
    Half(FloatTensor<B>),
    /// A row per group, the last one filled up, and a scale per row.
    Int8 { values: IntTensor<B>, scales: FloatTensor<B> },
}

impl<B: Backend> Saved for Packed<B> {
    fn bytes(&self) -> usize {
        match &self.bits {
            Bits::Half(values) => values.shape().num_elements() * values.dtype().size(),
            Bits::Int8 { values, scales } => {
                values.shape().num_elements() + size_of::<f32>() * scales.shape().num_elements()
            }
        }
    }
}

impl<B: Backend> Packed<B> {
    pub(super) fn of(x: FloatTensor<B>, format: Format, seed: u32) -> Self {
        let (shape, dtype) = (x.shape(), x.dtype());
        let bits = match (format, dtype) {
            (Format::Half | Format::HalfF16, DType::F64) => Bits::Half(B::float_cast(x, FloatDType::F32)),
            (Format::Half, _) => Bits::Half(B::float_cast(x, FloatDType::BF16)),
            (Format::HalfF16, _) => Bits::Half(B::float_cast(x, FloatDType::F16)),
            (Format::Int8, _) => int8(x, seed),
        };
        Self { bits, shape, dtype }
    }

    pub(super) fn unpack(&self) -> FloatTensor<B> {
        let Self { bits, shape, dtype } = self.clone();
        match bits {
            Bits::Half(values) => B::float_cast(values, dtype.into()),
            Bits::Int8 { values, scales } => {
                let x = from_int8::<B>(values, scales);
                let elements = shape.num_elements();
                let filled = x.shape().num_elements();
                let x = B::float_reshape(x, Shape::new([filled]));
                let x = B::float_slice(x, &[(0..elements).into()]);
                B::float_cast(B::float_reshape(x, shape), dtype.into())
            }
        }
    }
}

/// A number in 0..1 for every element of `groups` groups, which is added before the fraction is dropped: the fraction of a multiple of the
/// golden ratio, by the place in the group, plus a start that is drawn for the group.
fn up<B: Backend>(groups: usize, seed: u32, device: &B::Device) -> FloatTensor<B> {
    const GOLDEN: f64 = 0.618_033_988_749_894_9;
    let unit = |of: f64| of as f32;
    let starts = (0..groups).map(|group| unit(f64::from(noise(group as u32, seed)) / 2f64.powi(32)));
    let places = (0..GROUP).map(|place| unit((place as f64 * GOLDEN).fract()));
    let starts = TensorData::new(starts.collect::<Vec<_>>(), [groups, 1]);
    let places = TensorData::new(places.collect::<Vec<_>>(), [1, GROUP]);
    let [starts, places] = [starts, places].map(|data| B::float_from_data(data, device));
    let sum = B::float_add(starts, places);
    B::float_sub(sum.clone(), B::float_floor(sum))
}

fn int8<B: Backend>(x: FloatTensor<B>, seed: u32) -> Bits<B> {
    let elements = x.shape().num_elements();
    let device = x.device();
    let groups = elements.div_ceil(GROUP);
    let x = B::float_reshape(B::float_cast(x, FloatDType::F32), Shape::new([elements]));
    let missing = groups * GROUP - elements;
    let x = match missing {
        0 => x,
        _ => B::float_cat(vec![x, B::float_from_data(TensorData::zeros::<f32, _>([missing]), &device)], 0),
    };
    let x = B::float_reshape(x, Shape::new([groups, GROUP]));
    let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
    let (infinite, no_number) = (B::float_is_inf(x.clone(), bools), B::float_is_nan(x.clone(), bools));
    let signs = B::float_sign(x.clone());
    let beside = B::bool_or(infinite.clone(), no_number.clone());
    let x = B::float_mask_fill(x, beside.clone(), 0.into());
    // The groups with elements that are not finite, `[groups, 1]`.
    let beside = B::float_max_dim(B::bool_into_float(beside, FloatDType::F32), 1);
    let beside = B::float_greater_elem(beside, 0.into(), bools);
    let largest = B::float_max_dim(B::float_abs(x.clone()), 1);
    let of = |steps: f32| B::float_div_scalar(largest.clone(), steps.into());
    let scales = B::float_mask_where(of(STEPS), beside.clone(), of(STEPS_BESIDE));
    let positive = B::float_clamp_min(scales.clone(), f32::MIN_POSITIVE.into());
    let scales = B::float_mask_where(scales, beside.clone(), B::float_neg(positive.clone()));
    let up = up::<B>(groups, seed, &device);
    let values = B::float_floor(B::float_add(B::float_mul(x, B::float_recip(positive)), up));
    let within = |steps: f32| B::float_clamp(values.clone(), (-steps).into(), steps.into());
    let beside = B::bool_expand(beside, values.shape());
    let values = B::float_mask_where(within(STEPS), beside, within(STEPS_BESIDE));
    let signs = B::float_mul_scalar(signs, INFINITE.into());
    let values =
        B::float_mask_fill(B::float_mask_where(values, infinite, signs), no_number, NO_NUMBER.into());
    Bits::Int8 { values: B::float_into_int(values, IntDType::I8), scales }
}

/// The elements, in a row per group.
fn from_int8<B: Backend>(values: IntTensor<B>, scales: FloatTensor<B>) -> FloatTensor<B> {
    let bools = get_or_init_device_settings::<B>(&scales.device()).bool_dtype;
    let values = B::int_into_float(values, FloatDType::F32);
    let x = B::float_mul(values.clone(), B::float_abs(scales.clone()));
    let beside = B::bool_expand(B::float_lower_elem(scales, 0.into(), bools), x.shape());
    let with = |x, code: i8, value: f32| {
        let is_code: BoolTensor<B> = B::float_equal_elem(values.clone(), code.into(), bools);
        B::float_mask_fill(x, B::bool_and(is_code, beside.clone()), value.into())
    };
    let x = with(x, INFINITE, f32::INFINITY);
    let x = with(x, -INFINITE, f32::NEG_INFINITY);
    with(x, NO_NUMBER, f32::NAN)
}
