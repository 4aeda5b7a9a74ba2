//! Any backend, by Burn's own operations: device backends, and remote ones.
//!
//! Bits are packed in 32-bit words of an integer tensor, so that they stay on the device.
use super::Saved;

mod attention;
mod cross_entropy;
mod element_loss;
mod rotary;
mod softmax;

pub use attention::{attention_weights, attention_weights_backward};
pub use cross_entropy::{log_sum_exp, logits_gradient, sum_log_probabilities};
pub use element_loss::{element_loss, element_loss_backward, element_loss_slopes, element_loss_sum, scale};
pub use rotary::rotate;
pub use softmax::{softmax_along, softmax_along_backward};

use burn::backend::{
    Backend, Distribution, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{IntDType, Shape, Slice, TensorData};

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

/// Packs a tensor of booleans. Sums of distinct powers of two never overflow, nor does a part of such a sum.
pub fn pack<B: Backend>(bits: BoolTensor<B>) -> DeviceMask<B> {
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
    /// The booleans that were packed.
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

/// See [`Masks::scale_by_mask`](super::Masks::scale_by_mask).
pub fn scale_by_mask<B: Backend>(
    x: FloatTensor<B>,
    mask: &DeviceMask<B>,
    slopes: [f64; 2],
) -> FloatTensor<B> {
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

/// See [`Masks::bernoulli_mask`](super::Masks::bernoulli_mask).
pub fn bernoulli_mask<B: Backend>(like: &FloatTensor<B>, probability: f64) -> DeviceMask<B> {
    let device = like.device();
    let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
    let bernoulli = Distribution::Bernoulli(probability);
    let drawn = B::float_random(like.shape(), bernoulli, &device, like.dtype().into());
    pack::<B>(B::float_not_equal_elem(drawn, 0.into(), bools))
}

/// Implements [`MemBackend`](super::MemBackend) by the functions of this module.
#[allow(unused_macros)] // without a device backend there is nobody to implement it for
macro_rules! device_backend {
    ($backend:ty) => {
        impl super::MemBackend for $backend {
            fn rotate(x: FloatTensor<Self>, factors: FloatTensor<Self>, adjoint: bool) -> FloatTensor<Self> {
                rotate::<Self>(x, factors, adjoint)
            }

            const ATTENTION_CHUNK: usize = 1 << 24; // launching kernels takes longer than on a CPU

            fn attention_weights(
                products: FloatTensor<Self>,
                rows: &crate::backend::ScoreRows<Self>,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                attention_weights::<Self>(products, rows)
            }
            fn attention_weights_backward(
                products: FloatTensor<Self>,
                gradients: FloatTensor<Self>,
                log_sums: FloatTensor<Self>,
                rows: &crate::backend::ScoreRows<Self>,
                wants_bias: bool,
            ) -> crate::backend::ScoreGrads<Self> {
                attention_weights_backward::<Self>(products, gradients, log_sums, rows, wants_bias)
            }
            fn softmax_along(
                x: FloatTensor<Self>,
                f: crate::backend::Softmax,
                dim: usize,
            ) -> FloatTensor<Self> {
                softmax_along::<Self>(x, f, dim)
            }
            fn softmax_along_backward(
                y: FloatTensor<Self>,
                f: crate::backend::Softmax,
                dim: usize,
                dy: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                softmax_along_backward::<Self>(y, f, dim, dy)
            }
            fn log_sum_exp(x: FloatTensor<Self>) -> FloatTensor<Self> {
                log_sum_exp::<Self>(x)
            }
            fn sum_log_probabilities(
                x: FloatTensor<Self>,
                log_sum_exp: FloatTensor<Self>,
                weights: Option<FloatTensor<Self>>,
            ) -> FloatTensor<Self> {
                sum_log_probabilities::<Self>(x, log_sum_exp, weights)
            }
            fn logits_gradient(
                x: FloatTensor<Self>,
                gradient: crate::backend::LogitsGradient<Self>,
            ) -> FloatTensor<Self> {
                logits_gradient::<Self>(x, gradient)
            }
            fn element_loss(
                x: FloatTensor<Self>,
                targets: Option<FloatTensor<Self>>,
                f: crate::backend::ElementLoss,
            ) -> FloatTensor<Self> {
                element_loss::<Self>(x, targets, f)
            }
            fn element_loss_sum(
                x: FloatTensor<Self>,
                targets: Option<FloatTensor<Self>>,
                f: crate::backend::ElementLoss,
                scale: f64,
            ) -> FloatTensor<Self> {
                element_loss_sum::<Self>(x, targets, f, scale)
            }
            fn element_loss_slopes(
                x: FloatTensor<Self>,
                targets: Option<FloatTensor<Self>>,
                f: crate::backend::ElementLoss,
                side: crate::backend::Side,
                factor: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                element_loss_slopes::<Self>(x, targets, f, side, factor)
            }
            fn element_loss_backward(
                x: FloatTensor<Self>,
                targets: Option<FloatTensor<Self>>,
                f: crate::backend::ElementLoss,
                side: crate::backend::Side,
                dy: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                element_loss_backward::<Self>(x, targets, f, side, dy)
            }
            fn scale(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
                scale::<Self>(x, factor)
            }
        }
    };
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
device_backend!(burn::backend::Cube);
#[cfg(feature = "remote")]
device_backend!(burn::backend::Remote);

/// These functions run on any backend, so their results on Flex must be those of its own kernels.
#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::{
        ElementLoss, LogitsGradient, MemBackend, ScoreGrads, ScoreRows, Scores, Side, Softmax,
    };
    use burn::backend::{
        Flex,
        flex::FlexDevice,
        ops::{ActivationOps, BoolTensorOps, FloatTensorOps},
        read_sync,
    };
    use burn::tensor::FloatDType;

    type Float = FloatTensor<Flex>;

    fn random(shape: &[usize]) -> Float {
        let shape = Shape::from(shape.to_vec());
        Flex::float_random(shape, Distribution::Normal(0.0, 1.0), &FlexDevice, FloatDType::F32)
    }

    fn assert_close(what: &str, device: Float, cpu: Float) {
        let [device, cpu] = [device, cpu].map(|x| read_sync(Flex::float_into_data(x)).expect("a CPU tensor"));
        assert_eq!(device.shape(), cpu.shape(), "{what}");
        for (device, cpu) in device.iter::<f32>().zip(cpu.iter::<f32>()) {
            assert!((device - cpu).abs() <= 3e-5 * cpu.abs().max(1.0), "{what}: {device}, kernel {cpu}");
        }
    }

    #[test]
    fn cross_entropies_equal_the_kernels() {
        let x = Flex::float_mul_scalar(random(&[5, 19]), 3.0.into());
        let (weights, rows) = (random(&[19]), || random(&[5, 1]));
        let log = Flex::log_sum_exp(x.clone());
        assert_close("log_sum_exp", log_sum_exp::<Flex>(x.clone()), log.clone());
        for weights in [None, Some(weights)] {
            let device = sum_log_probabilities::<Flex>(x.clone(), log.clone(), weights.clone());
            let cpu = Flex::sum_log_probabilities(x.clone(), log.clone(), weights.clone());
            assert_close("sum of the logarithms", device, cpu);
            for of_weight in [None, Some(rows())] {
                let of_probability = rows();
                let gradient = || LogitsGradient::<Flex> {
                    log_sum_exp: log.clone(),
                    of_probability: of_probability.clone(),
                    of_weight: of_weight.clone(),
                    weights: weights.clone(),
                };
                let cpu = Flex::logits_gradient(x.clone(), gradient());
                assert_close("dx", logits_gradient::<Flex>(x.clone(), gradient()), cpu.clone());
                let unique = Flex::float_mul_scalar(x.clone(), 1.0.into());
                assert_close("dx in place", Flex::logits_gradient(unique, gradient()), cpu);
            }
        }
    }

    #[test]
    fn losses_of_elements_equal_the_kernels() {
        let probabilities =
            || <Flex as ActivationOps<Flex>>::sigmoid(Flex::float_mul_scalar(random(&[5, 13]), 3.0.into()));
        let alone = [
            ElementLoss::Square,
            ElementLoss::Huber { delta: 0.5, bias: 0.125 },
            ElementLoss::LogAbove { min: 0.3 },
        ];
        let with_targets = [
            ElementLoss::BinaryLogits,
            ElementLoss::BinaryProbabilities,
            ElementLoss::Divergence { min: 0.3 },
            ElementLoss::LogDivergence,
        ];
        let cases = alone.map(|f| (f, None)).into_iter();
        for (f, targets) in cases.chain(with_targets.map(|f| (f, Some(probabilities())))) {
            let (x, dy) = (probabilities(), random(&[5, 13]));
            let arguments = || (x.clone(), targets.clone());
            let ((x1, t1), (x2, t2)) = (arguments(), arguments());
            assert_close("loss", element_loss::<Flex>(x1, t1, f), Flex::element_loss(x2, t2, f));
            let ((x1, t1), (x2, t2)) = (arguments(), arguments());
            let device = element_loss_sum::<Flex>(x1, t1, f, 0.5);
            assert_close("sum", device, Flex::element_loss_sum(x2, t2, f, 0.5));
            let sides = if targets.is_some() { &[Side::X, Side::Target][..] } else { &[Side::X] };
            for &side in sides {
                let binary = matches!(f, ElementLoss::BinaryLogits | ElementLoss::BinaryProbabilities);
                if binary && side == Side::Target {
                    continue; // has no gradient
                }
                let ((x1, t1), (x2, t2)) = (arguments(), arguments());
                let device = element_loss_backward::<Flex>(x1, t1, f, side, dy.clone());
                assert_close("dx", device, Flex::element_loss_backward(x2, t2, f, side, dy.clone()));
                let (factor, (x1, t1), (x2, t2)) = (random(&[1]), arguments(), arguments());
                let device = element_loss_slopes::<Flex>(x1, t1, f, side, factor.clone());
                assert_close("slope", device, Flex::element_loss_slopes(x2, t2, f, side, factor));
            }
        }
        let (x, factor) = (random(&[5, 13]), random(&[1]));
        assert_close("scaled", scale::<Flex>(x.clone(), factor.clone()), Flex::scale(x, factor));
    }

    #[test]
    fn softmaxes_equal_the_kernels() {
        for f in [Softmax::Softmax, Softmax::LogSoftmax, Softmax::Softmin, Softmax::QuietSoftmax] {
            for dim in 0..3 {
                let x = Flex::float_mul_scalar(random(&[4, 5, 19]), 3.0.into());
                let (y, dy) = (Flex::softmax_along(x.clone(), f, dim), random(&[4, 5, 19]));
                assert_close("y", softmax_along::<Flex>(x, f, dim), y.clone());
                let device = softmax_along_backward::<Flex>(y.clone(), f, dim, dy.clone());
                assert_close("dx", device, Flex::softmax_along_backward(y, f, dim, dy));
            }
        }
    }

    #[test]
    fn attention_equals_the_kernels() {
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
            let rows = |mask: Option<&[usize]>, bias: Option<&[usize]>| ScoreRows::<Flex> {
                scores: Scores { scale: 0.7, softcap, causal, masked, quiet },
                mask: mask.map(|shape| bools(shape, 3)),
                bias: bias.map(random),
                queries: 2..5,
                all_queries: 6,
                all_keys: 7,
            };
            let full = &[2, 3, 3, 6][..];
            for rows in [
                rows(None, None),
                rows(Some(full), Some(full)),
                rows(Some(&[1, 3, 1, 6]), Some(&[2, 1, 3, 1])),
                rows(Some(&[2, 1, 3, 1]), None),
            ] {
                let (products, gradients) = (random(full), random(full));
                let device = attention_weights::<Flex>(products.clone(), &rows);
                let cpu = Flex::attention_weights(products.clone(), &rows);
                assert_close("weights", device.0, cpu.0);
                assert_close("sums", device.1, cpu.1.clone());
                let run = |backward: ScoresBackward| {
                    backward(products.clone(), gradients.clone(), cpu.1.clone(), &rows, true)
                };
                let device = run(attention_weights_backward::<Flex>);
                let cpu = run(Flex::attention_weights_backward);
                assert_close("weights again", device.weights, cpu.weights);
                assert_close("products", device.products, cpu.products);
                assert_close("bias", device.bias.expect("wanted"), cpu.bias.expect("wanted"));
            }
        }
    }

    type ScoresBackward = fn(Float, Float, Float, &ScoreRows<Flex>, bool) -> ScoreGrads<Flex>;

    #[test]
    fn rotation_equals_the_kernel() {
        for adjoint in [false, true] {
            let (x, factors) = (random(&[2, 3, 5, 4]), random(&[5, 4, 2]));
            let device = rotate::<Flex>(x.clone(), factors.clone(), adjoint);
            assert_close("rotation", device, Flex::rotate(x, factors, adjoint));
        }
    }
}
