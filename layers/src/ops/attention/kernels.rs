//! The kernels of attention: they turn products of queries and keys into weights, and gradients of weights into gradients of products.
use super::parts::Put;
use crate::backend::{Capacity, Masks, Placeholders, composing_backends, widen};
use burn::backend::{
    Backend, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, Shape};
use core::ops::Range;

/// How the products of queries and keys become scores, and scores become weights.
///
/// `score = softcap * tanh(scale * product / softcap)`, or `scale * product` without a cap; then masked scores are replaced by
/// `masked`, and the bias is added. A row of weights is the softmax of a row of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// What the products are multiplied by.
    pub scale: f64,
    /// The limit of the absolute values of the scores.
    pub softcap: Option<f64>,
    /// Whether a query sees only the keys that are not after it; the last query is aligned with the last key.
    pub causal: bool,
    /// The score where a mask hides a key: minus infinity, or finite.
    pub masked: f64,
    /// Whether `exp(0)` is added to the sum of a row, so that weights may sum to less than 1
    /// (<https://www.evanmiller.org/attention-is-off-by-one.html>).
    pub quiet: bool,
}

impl Scores {
    /// The number of keys that row number `row` of `rows` sees.
    pub(super) fn visible(&self, row: usize, rows: usize, keys: usize) -> usize {
        match self.causal {
            true => (keys + row + 1).saturating_sub(rows).min(keys),
            false => keys,
        }
    }
}

/// Some rows of the scores of an attention.
#[derive(Clone, Debug)]
pub struct ScoreRows<B: Backend> {
    /// How scores are made.
    pub scores: Scores,
    /// What is hidden: `[batch, heads, rows, keys]` of these rows, or 1 in place of any of them.
    pub mask: Option<BoolTensor<B>>,
    /// What is added to the scores; as the mask.
    pub bias: Option<FloatTensor<B>>,
    /// Which queries these are.
    pub queries: Range<usize>,
    /// How many queries there are.
    pub all_queries: usize,
    /// How many keys there are; the rows may hold fewer, the first ones.
    pub all_keys: usize,
}

/// Gradients of some rows of scores.
pub struct ScoreGrads<B: Backend> {
    /// The weights.
    pub weights: FloatTensor<B>,
    /// Gradient of the products of queries and keys.
    pub products: FloatTensor<B>,
    /// Gradient of the scores that the bias was added to, in f32 at least, if wanted.
    pub bias: Option<FloatTensor<B>>,
}

/// The rows of weights per multiprocessor in a chunk. On an H200, a step with 8 heads of 64 and 16,384 tokens takes 2.4x Burn's time with
/// 8 rows, 0.9x with 32, 0.7x with 64 and 0.6x with 128; it takes 0.01x, 0.02x, 0.04x and 0.07x its memory.
const ROWS: usize = 64;

/// The kernels; the default bodies compose Burn's operations.
pub trait AttentionKernels: Capacity + Masks + Placeholders {
    /// Whether matrix products that are summed over chunks are made in f32, too: where they cancel out, their rounding errors would
    /// remain. Devices have units for products of half precision, and fewer chunks.
    const WIDE_PRODUCTS: bool = false;

    /// How many weights a chunk has on an unknown device: 64 MiB of f32. More would raise the peak; fewer would need more launches, which
    /// take long on devices.
    const CHUNK: usize = 1 << 24;

    /// How many weights a chunk has, if there are enough: those of 64 queries, each with `keys` keys, for every multiprocessor.
    fn chunk(device: &Self::Device, keys: usize) -> usize {
        const SIZE: usize = size_of::<f32>();
        Self::busy_bytes(device, SIZE * Self::CHUNK, SIZE * ROWS * keys) / SIZE
    }

    /// In how many parts causal attention divides its queries at least. Each skips the keys that none of its queries sees.
    const CAUSAL_PARTS: usize = 2; // likewise

    /// The product of matrices `[batch, heads, rows, terms]` and `[batch, heads, terms, columns]`.
    fn product(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_matmul(lhs, rhs)
    }

    /// The weights, from the products of queries and keys `[batch, heads, rows, keys]`.
    fn attention_weights(products: FloatTensor<Self>, rows: &ScoreRows<Self>) -> FloatTensor<Self> {
        let dtype = products.dtype();
        let (scores, _) = score::<Self>(products, rows);
        Self::float_cast(softmax::<Self>(scores, rows.scores.quiet), dtype.into())
    }

    /// Whether parts wait for each other, so that they are put into place together.
    const PUTS_TOGETHER: bool = false;

    /// Puts up to three parts into their tensors.
    fn put_all(puts: Vec<Put<Self>>) {
        puts.into_iter().for_each(Put::put);
    }

    /// Recomputes the weights, and computes the gradients of the products from those of the weights; if `wants_bias`, also the gradients
    /// of the scores that the bias was added to.
    ///
    /// It reads no statistics of the forward pass: `max + ln(sum)` in one number would lose the sum where scores are large in magnitude,
    /// such as those of keys that are hidden by a large finite number.
    fn attention_weights_backward(
        products: FloatTensor<Self>,
        gradients: FloatTensor<Self>,
        rows: &ScoreRows<Self>,
        wants_bias: bool,
    ) -> ScoreGrads<Self> {
        composed_backward::<Self>(products, gradients, rows, wants_bias)
    }
}
composing_backends!(AttentionKernels);

/// See [`AttentionKernels::attention_weights_backward`].
pub(super) fn composed_backward<B: Backend>(
    products: FloatTensor<B>,
    gradients: FloatTensor<B>,
    rows: &ScoreRows<B>,
    wants_bias: bool,
) -> ScoreGrads<B> {
    let (dtype, shape) = (products.dtype(), products.shape());
    let (scores, slopes) = score::<B>(products, rows);
    let weights = softmax::<B>(scores, rows.scores.quiet);
    let gradients = widen::<B>(gradients);
    let mean_grad = B::float_sum_dim(B::float_mul(weights.clone(), gradients.clone()), 3);
    let score_grads = B::float_mul(weights.clone(), B::float_sub(gradients, mean_grad));
    let bias = wants_bias.then(|| score_grads.clone());
    let products = B::float_mul_scalar(score_grads, rows.scores.scale.into());
    let products = match slopes {
        Some(slopes) => B::float_mul(products, slopes),
        None => products,
    };
    let products = match rows.mask.clone() {
        Some(mask) => B::float_mask_fill(products, B::bool_expand(mask, shape), 0.0.into()),
        None => products,
    };
    let [weights, products] = [weights, products].map(|x| B::float_cast(x, dtype.into()));
    ScoreGrads { weights, products, bias }
}

/// The weights of scores. In a row whose keys are all hidden, they are 0.
fn softmax<B: Backend>(scores: FloatTensor<B>, quiet: bool) -> FloatTensor<B> {
    let (lowest, smallest) = match scores.dtype() {
        DType::F64 => (f64::MIN, f64::MIN_POSITIVE),
        _ => (f64::from(f32::MIN), f64::from(f32::MIN_POSITIVE)),
    };
    let max = B::float_clamp_min(B::float_max_dim(scores.clone(), 3), lowest.into());
    let exponentials = B::float_exp(B::float_sub(scores, max.clone()));
    let sums = B::float_sum_dim(exponentials.clone(), 3);
    let sums = match quiet {
        true => B::float_add(sums, B::float_exp(B::float_neg(max))),
        false => sums,
    };
    B::float_div(exponentials, B::float_clamp_min(sums, smallest.into()))
}

/// The keys that rows do not see, `[1, 1, rows, keys]`.
fn causally_hidden<B: Backend>(
    rows: &ScoreRows<B>,
    keys: usize,
    device: &B::Device,
) -> Option<BoolTensor<B>> {
    if !rows.scores.causal {
        return None;
    }
    let settings = get_or_init_device_settings::<B>(device);
    let offset = rows.all_keys as i64 - rows.all_queries as i64;
    let range = rows.queries.start as i64 + offset..rows.queries.end as i64 + offset;
    let shape = Shape::new([1, 1, rows.queries.len(), 1]);
    let last = B::int_reshape(B::int_arange(range, device, settings.int_dtype), shape);
    let keys_shape = Shape::new([1, 1, 1, keys]);
    let key = B::int_reshape(B::int_arange(0..keys as i64, device, settings.int_dtype), keys_shape);
    let shape = Shape::new([1, 1, rows.queries.len(), keys]);
    let (last, key) = (B::int_expand(last, shape.clone()), B::int_expand(key, shape));
    Some(B::int_lower(last, key, settings.bool_dtype))
}

/// The scores of products, and their slopes under a soft cap.
fn score<B: Backend>(
    products: FloatTensor<B>,
    rows: &ScoreRows<B>,
) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
    let Scores { scale, softcap, masked, .. } = rows.scores;
    let (device, shape) = (products.device(), products.shape());
    let scores = B::float_mul_scalar(widen::<B>(products), scale.into());
    let (scores, slopes) = match softcap {
        Some(cap) => {
            let tanh = B::float_tanh(B::float_div_scalar(scores, cap.into()));
            let square = B::float_mul(tanh.clone(), tanh.clone());
            let slopes = B::float_add_scalar(B::float_neg(square), 1.0.into());
            (B::float_mul_scalar(tanh, cap.into()), Some(slopes))
        }
        None => (scores, None),
    };
    let fill = |scores, mask: Option<BoolTensor<B>>, value: f64| match mask {
        Some(mask) => B::float_mask_fill(scores, B::bool_expand(mask, shape.clone()), value.into()),
        None => scores,
    };
    let scores = fill(scores, rows.mask.clone(), masked);
    let scores = fill(scores, causally_hidden::<B>(rows, shape[3], &device), f64::NEG_INFINITY);
    let scores = match rows.bias.clone() {
        Some(bias) => B::float_add(scores, widen::<B>(bias)),
        None => scores,
    };
    (scores, slopes)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::BoolTensorOps};
    use burn::tensor::TensorData;

    #[test]
    fn the_composed_attention_equals_the_kernels() {
        let bools = |shape: &[usize], seed: usize| {
            let hidden =
                (0..shape.iter().product()).map(|at: usize| (at * 7 + seed) % 5 == 1).collect::<Vec<_>>();
            Flex::bool_from_data(TensorData::new(hidden, shape.to_vec()), &Default::default())
        };
        for (softcap, causal, quiet, masked) in [
            (None, false, false, f64::NEG_INFINITY),
            (Some(1.5), true, false, -3.0),
            (None, true, true, -2.0),
        ] {
            let full = &[2, 3, 3, 6][..];
            for (mask, bias) in [
                (None, None),
                (Some(full), Some(full)),
                (Some(&[1, 3, 1, 6][..]), Some(&[2, 1, 3, 1][..])),
                (Some(&[2, 1, 3, 1]), None),
            ] {
                let rows = ScoreRows::<Flex> {
                    scores: Scores { scale: 0.7, softcap, causal, masked, quiet },
                    mask: mask.map(|shape| bools(shape, 3)),
                    bias: bias.map(random),
                    queries: 2..5,
                    all_queries: 6,
                    all_keys: 7,
                };
                let ScoreRows { scores, mask, bias, queries, all_queries, all_keys } = rows.clone();
                let bias = bias.as_ref().map(composed);
                let composed_rows =
                    ScoreRows::<Composed> { scores, mask, bias, queries, all_queries, all_keys };
                let (products, gradients) = (random(full), random(full));
                let weights = Flex::attention_weights(products.clone(), &rows);
                let found = Composed::attention_weights(composed(&products), &composed_rows);
                assert_close("weights", found, weights);
                let found = Composed::attention_weights_backward(
                    composed(&products),
                    composed(&gradients),
                    &composed_rows,
                    true,
                );
                let kernel = Flex::attention_weights_backward(products, gradients, &rows, true);
                assert_close("weights again", found.weights, kernel.weights);
                assert_close("products", found.products, kernel.products);
                assert_close("bias", found.bias.expect("wanted"), kernel.bias.expect("wanted"));
            }
        }
    }
}
