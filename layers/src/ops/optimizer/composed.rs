//! Steps of optimizers, composed of Burn's operations. A word holds four codes, and a row of a matrix is a block.
use super::codes::{CODES, Codes, SIGNED_ZERO};
use super::{AdamWStep, BLOCK, CODES_OF_WORD, LARGEST_GRADIENT, is_rounded};
use crate::backend::{wide, widen};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, IntDType, Shape, TensorData};

/// Panics if a weight would have to be rounded stochastically, which cannot be composed of Burn's operations.
pub(super) fn refuse_random(dtype: DType, seed: Option<u32>) {
    assert!(
        seed.is_none() || !is_rounded(dtype),
        "stochastic rounding: remote devices do not round weights in half precision at random; turn it off for {dtype:?}"
    );
}

/// The moments after a step.
pub(super) fn moments<B: Backend>(
    gradient: FloatTensor<B>,
    first: FloatTensor<B>,
    second: FloatTensor<B>,
    step: &AdamWStep,
) -> [FloatTensor<B>; 2] {
    let mean = |moment, beta: f32, of| {
        let [moment, of] =
            [(moment, beta), (of, 1.0 - beta)].map(|(x, by)| B::float_mul_scalar(x, by.into()));
        B::float_add(moment, of)
    };
    let square = B::float_mul(gradient.clone(), gradient.clone());
    [mean(first, step.beta_1, gradient), mean(second, step.beta_2, square)]
}

/// The gradient, clamped to [`LARGEST_GRADIENT`]. Elements that are not finite stay as they are.
pub(super) fn at_most_largest<B: Backend>(gradient: FloatTensor<B>) -> FloatTensor<B> {
    let bools = get_or_init_device_settings::<B>(&gradient.device()).bool_dtype;
    [LARGEST_GRADIENT, -LARGEST_GRADIENT].into_iter().fold(gradient, |gradient, limit| {
        // The numbers between the limit and infinity.
        let beyond = |limit: f32, x: FloatTensor<B>| match limit > 0.0 {
            true => B::float_greater_elem(x, limit.into(), bools),
            false => B::float_lower_elem(x, limit.into(), bools),
        };
        let most = f32::MAX.copysign(limit);
        let is_finite = B::bool_not(beyond(most, gradient.clone()));
        let is_beyond = B::bool_and(beyond(limit, gradient.clone()), is_finite);
        B::float_mask_fill(gradient, is_beyond, limit.into())
    })
}

/// The weight after a step.
pub(super) fn adamw<B: Backend>(
    weight: FloatTensor<B>,
    first: FloatTensor<B>,
    second: FloatTensor<B>,
    step: &AdamWStep,
) -> FloatTensor<B> {
    let dtype = weight.dtype();
    refuse_random(dtype, step.seed);
    let factors = step.factors();
    let root = B::float_mul_scalar(B::float_sqrt(second), factors.root.into());
    let divisor = B::float_add_scalar(root, step.epsilon.into());
    let change = B::float_div(B::float_mul_scalar(first.clone(), factors.rate.into()), divisor);
    let weight = widen::<B>(weight);
    let weight = match step.cautious {
        false => B::float_mul_scalar(weight, factors.keep.into()),
        true => {
            let bools = get_or_init_device_settings::<B>(&weight.device()).bool_dtype;
            let [a, b] = [weight.clone(), first].map(|x| B::float_greater_equal_elem(x, 0f32.into(), bools));
            let decay = B::float_mul_scalar(weight.clone(), (1.0 - factors.keep).into());
            B::float_sub(weight, B::float_mask_fill(decay, B::bool_not_equal(a, b), 0f32.into()))
        }
    };
    let weight = B::float_sub(weight, B::float_cast(change, wide(dtype).into()));
    B::float_cast(weight, dtype.into())
}

/// A matrix with a row per block; the last row is filled up with zeros.
pub(super) fn blocks<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let elements = x.shape().num_elements();
    let blocks = elements.div_ceil(BLOCK);
    let device = x.device();
    let x = B::float_reshape(x, Shape::new([elements]));
    let missing = blocks * BLOCK - elements;
    let x = match missing {
        0 => x,
        _ => B::float_cat(vec![x, B::float_from_data(TensorData::zeros::<f32, _>([missing]), &device)], 0),
    };
    B::float_reshape(x, Shape::new([blocks, BLOCK]))
}

/// The codes in words, as integers of the backend's dtype.
fn unpacked<B: Backend>(words: IntTensor<B>) -> IntTensor<B> {
    let count = words.shape().num_elements();
    let words = B::int_reshape(words, Shape::new([count, 1]));
    let byte = |at: usize| {
        let shifted = B::bitwise_right_shift_scalar(words.clone(), ((8 * at) as i32).into());
        B::bitwise_and_scalar(shifted, 255i32.into())
    };
    let bytes = B::int_cat((0..CODES_OF_WORD).map(byte).collect(), 1);
    B::int_reshape(bytes, Shape::new([count * CODES_OF_WORD]))
}

/// The words of codes.
fn packed<B: Backend>(codes: IntTensor<B>) -> IntTensor<B> {
    let count = codes.shape().num_elements() / CODES_OF_WORD;
    let codes = B::int_reshape(codes, Shape::new([count, CODES_OF_WORD]));
    let byte = |at: usize| {
        let byte = B::int_slice(codes.clone(), &[(0..count).into(), (at..at + 1).into()]);
        B::bitwise_left_shift_scalar(byte, ((8 * at) as i32).into())
    };
    let words = (1..CODES_OF_WORD).fold(byte(0), |words, at| B::bitwise_or(words, byte(at)));
    B::int_reshape(words, Shape::new([count]))
}

/// Numbers in a row per block, times the scales of their blocks.
fn scaled<B: Backend>(numbers: FloatTensor<B>, scales: FloatTensor<B>) -> FloatTensor<B> {
    let blocks = scales.shape().num_elements();
    let numbers = B::float_reshape(numbers, Shape::new([blocks, BLOCK]));
    B::float_mul(numbers, B::float_reshape(scales, Shape::new([blocks, 1])))
}

/// The numbers of dynamic codes.
pub(super) fn decoded<B: Backend>(
    words: IntTensor<B>,
    scales: FloatTensor<B>,
    codes: &Codes,
) -> FloatTensor<B> {
    let numbers = TensorData::new(codes.numbers.to_vec(), [CODES]);
    let numbers = B::float_from_data(numbers, &scales.device());
    scaled::<B>(B::float_select(numbers, 0, unpacked::<B>(words)), scales)
}

/// The numbers of linear codes.
pub(super) fn decoded_linear<B: Backend>(words: IntTensor<B>, scales: FloatTensor<B>) -> FloatTensor<B> {
    let codes = B::int_into_float(unpacked::<B>(words), FloatDType::F32);
    let numbers = B::float_sub_scalar(codes, f32::from(SIGNED_ZERO).into());
    scaled::<B>(B::float_div_scalar(numbers, 127f32.into()), scales)
}

/// The scales of rows, and the rows divided by them.
fn unscaled<B: Backend>(rows: FloatTensor<B>) -> (FloatTensor<B>, FloatTensor<B>) {
    let scales = B::float_max_dim(B::float_abs(rows.clone()), 1);
    // An element that is not finite makes the scale NaN.
    let scales = B::float_add(scales, B::float_sum_dim(B::float_mul_scalar(rows.clone(), 0f32.into()), 1));
    let inverse = B::float_recip(B::float_clamp_min(scales.clone(), f32::MIN_POSITIVE.into()));
    let blocks = scales.shape().num_elements();
    (B::float_reshape(scales, Shape::new([blocks])), B::float_mul(rows, inverse))
}

/// The dynamic codes of blocks in a row each, and their scales.
pub(super) fn encoded<B: Backend>(rows: FloatTensor<B>, codes: &Codes) -> (IntTensor<B>, FloatTensor<B>) {
    let device = rows.device();
    let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
    let (scales, x) = unscaled::<B>(rows);
    let elements = x.shape().num_elements();
    let x = B::float_reshape(x, Shape::new([elements]));
    // The first code has no threshold below it.
    let thresholds = [vec![f32::NEG_INFINITY], codes.thresholds()].concat();
    let thresholds = B::float_from_data(TensorData::new(thresholds, [CODES]), &device);
    let mut found = B::int_zeros(Shape::new([elements]), &device, IntDType::I32);
    for bit in (0..8).rev() {
        let next = B::int_add_scalar(found.clone(), (1i32 << bit).into());
        let threshold = B::float_select(thresholds.clone(), 0, next.clone());
        found = B::int_mask_where(found, B::float_greater(x.clone(), threshold, bools), next);
    }
    (packed::<B>(found), scales)
}

/// The linear codes of blocks in a row each, and their scales.
pub(super) fn encoded_linear<B: Backend>(rows: FloatTensor<B>) -> (IntTensor<B>, FloatTensor<B>) {
    let (scales, x) = unscaled::<B>(rows);
    let elements = x.shape().num_elements();
    let x = B::float_reshape(x, Shape::new([elements]));
    let shifted =
        B::float_add_scalar(B::float_mul_scalar(x, 127f32.into()), (f32::from(SIGNED_ZERO) + 0.5).into());
    let codes =
        B::float_into_int(B::float_clamp(B::float_floor(shifted), 0f32.into(), 254f32.into()), IntDType::I32);
    (packed::<B>(codes), scales)
}
