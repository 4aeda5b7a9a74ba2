//! Of Burn's operations.
use super::{Format, GROUP, noise};
use crate::backend::Saved;
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
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
    /// In a narrower type.
    Half(FloatTensor<B>),
    /// Rows of a group, the last one filled up; a scale for each.
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
                let x = B::float_mul(B::int_into_float(values, FloatDType::F32), scales);
                let elements = shape.num_elements();
                let filled = x.shape().num_elements();
                let x = B::float_reshape(x, Shape::new([filled]));
                let x = B::float_slice(x, &[(0..elements).into()]);
                B::float_cast(B::float_reshape(x, shape), dtype.into())
            }
        }
    }
}

/// In 0..1, for every element of so many groups: a multiple of the golden ratio for its place in the group, from a place on that is
/// drawn for the group.
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
    let scales = B::float_div_scalar(B::float_max_dim(B::float_abs(x.clone()), 1), 127.0.into());
    // What is not finite spoils its group.
    let scales = B::float_add(scales, B::float_sum_dim(B::float_mul_scalar(x.clone(), 0.0.into()), 1));
    let inverse = B::float_recip(B::float_clamp_min(scales.clone(), f64::from(f32::MIN_POSITIVE).into()));
    let up = up::<B>(groups, seed, &device);
    let values = B::float_floor(B::float_add(B::float_mul(x, inverse), up));
    let values = B::float_clamp(values, (-127.0).into(), 127.0.into());
    Bits::Int8 { values: B::float_into_int(values, IntDType::I8), scales }
}
