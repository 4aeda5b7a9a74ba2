//! Any backend, by Burn's own operations: device backends, and remote ones.

mod cross_entropy;
mod element_loss;
mod softmax;

pub use cross_entropy::{log_sum_exp, logits_gradient, sum_log_probabilities};
pub use element_loss::{element_loss, element_loss_backward, element_loss_slopes, element_loss_sum, scale};
pub use softmax::{softmax_along, softmax_along_backward};

use burn::backend::{Distribution, tensor::FloatTensor};
use burn::tensor::Shape;

/// Implements [`MemBackend`](super::MemBackend) by the functions of this module.
#[allow(unused_macros)] // without a device backend there is nobody to implement it for
macro_rules! device_backend {
    ($backend:ty) => {
        impl super::MemBackend for $backend {
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
    use crate::backend::{ElementLoss, LogitsGradient, MemBackend, Side, Softmax};
    use burn::backend::{
        Flex,
        flex::FlexDevice,
        ops::{ActivationOps, FloatTensorOps},
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
}
