//! Masks made by Burn's operations. The bits are packed in 32-bit words of an integer tensor, so they stay on the device.
use super::{Masks, Saved};
use burn::backend::{
    Backend, Distribution, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, IntDType, Shape, Slice, TensorData};

composing_backends!(Masks {
    type Mask = DeviceMask<Self>;

    fn pack(bits: BoolTensor<Self>) -> DeviceMask<Self> {
        pack(bits)
    }

    fn scale_by_mask(x: FloatTensor<Self>, mask: &DeviceMask<Self>, slopes: [f64; 2]) -> FloatTensor<Self> {
        scale_by_mask(x, mask, slopes)
    }

    fn bernoulli_mask(shape: Shape, dtype: DType, device: &Self::Device, probability: f64) -> DeviceMask<Self> {
        bernoulli_mask(shape, dtype, device, probability)
    }
});

/// One bit per element, in words on the device.
#[derive(Clone, Debug)]
pub struct DeviceMask<B: Backend> {
    words: IntTensor<B>,
    shape: Shape,
}

impl<B: Backend> Saved for DeviceMask<B> {
    fn bytes(&self) -> usize {
        size_of::<i32>() * self.words.shape().num_elements()
    }
}

const BITS: usize = i32::BITS as usize;

/// Bit `i` of a word, for every `i`.
fn powers<B: Backend>(device: &B::Device) -> IntTensor<B> {
    let powers: Vec<i32> = (0..BITS).map(|bit| 1i32.wrapping_shl(bit as u32)).collect();
    B::int_from_data(TensorData::new(powers, [1, BITS]), device)
}

/// Packs a tensor of booleans, by sums of distinct powers of two. Neither these sums nor parts of them overflow.
fn pack<B: Backend>(bits: BoolTensor<B>) -> DeviceMask<B> {
    let (shape, device) = (bits.shape(), bits.device());
    let len = shape.num_elements();
    let words = len.div_ceil(BITS);
    let bits = B::bool_into_int(B::bool_reshape(bits, Shape::new([len])), IntDType::I32);
    let padding = words * BITS - len;
    let bits = match padding {
        0 => bits,
        _ => B::int_cat(vec![bits, B::int_zeros(Shape::new([padding]), &device, IntDType::I32)], 0),
    };
    let bits = B::int_reshape(bits, Shape::new([words, BITS]));
    let powers = B::int_expand(powers::<B>(&device), Shape::new([words, BITS]));
    DeviceMask { words: B::int_sum_dim(B::int_mul(bits, powers), 1), shape }
}

impl<B: Backend> DeviceMask<B> {
    /// The packed booleans.
    pub(crate) fn unpack(&self) -> BoolTensor<B> {
        let device = self.words.device();
        let spread = Shape::new([self.words.shape()[0], BITS]);
        let words = B::int_expand(self.words.clone(), spread.clone());
        let bits = B::bitwise_and(words, B::int_expand(powers::<B>(&device), spread.clone()));
        let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
        let clear = B::int_equal_elem(bits, 0.into(), bools);
        let clear = B::bool_reshape(clear, Shape::new([spread.num_elements()]));
        let clear = B::bool_slice(clear, &[Slice::from(0..self.shape.num_elements())]);
        B::bool_reshape(B::bool_not(clear), self.shape.clone())
    }
}

/// See [`Masks::scale_by_mask`].
fn scale_by_mask<B: Backend>(x: FloatTensor<B>, mask: &DeviceMask<B>, slopes: [f64; 2]) -> FloatTensor<B> {
    let scaled = |x: FloatTensor<B>, slope: f64| match slope {
        1.0 => x,
        _ => B::float_mul_scalar(x, slope.into()),
    };
    let set = mask.unpack();
    match slopes {
        [0.0, on] => B::float_mask_fill(scaled(x, on), B::bool_not(set), 0.into()),
        [off, on] => B::float_mask_where(scaled(x.clone(), off), set, scaled(x, on)),
    }
}

/// See [`Masks::bernoulli_mask`].
fn bernoulli_mask<B: Backend>(
    shape: Shape,
    dtype: DType,
    device: &B::Device,
    probability: f64,
) -> DeviceMask<B> {
    let bools = get_or_init_device_settings::<B>(device).bool_dtype;
    let drawn = B::float_random(shape, Distribution::Bernoulli(probability), device, dtype.into());
    pack::<B>(B::float_not_equal_elem(drawn, 0.into(), bools))
}
