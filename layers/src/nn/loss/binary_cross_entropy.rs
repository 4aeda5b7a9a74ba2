//! Binary cross entropy of probabilities or logits.
use crate::functional::{
    element_loss, element_loss_sum,
    guard::{Misfit, NO_WEIGHT, accepts, is_tracked, require, require_floats},
};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::ops::ElementLoss;
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};

config_twin! {
    #[derive(Config, Debug)]
    pub struct BinaryCrossEntropyLossConfig = burn::nn::loss::BinaryCrossEntropyLossConfig {
        /// A weight for each class: the loss of a sample is multiplied by the weight of its label.
        pub weights: Option<Vec<f32>>,

        /// Label smoothing, [arXiv 1906.02629](https://arxiv.org/abs/1906.02629): labels `y` become `y (1 - a) + a / num_classes`.
        pub smoothing: Option<f32>,

        /// Treat the inputs as logits, applying a sigmoid activation when computing the loss.
        #[config(default = false)]
        pub logits: bool,
    }
    pub fn init(&self, device: &Device) -> BinaryCrossEntropyLoss, or panics;
}

drop_in! {
    /// Binary cross entropy, the mean of `-t log(p) - (1 - t) log(1 - p)`, where `p` is the input or its sigmoid.
    /// Logarithms are clamped at -100.
    ///
    /// Keeps one tensor for the backward pass, the derivative of every element's loss;
    /// [`burn::nn::loss::BinaryCrossEntropyLoss`] keeps several of that size. Where Burn's gradient is NaN (at a probability of
    /// exactly 0 or 1), the gradient here is finite. In f16, labels above 255 overflow.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::loss::BinaryCrossEntropyLossConfig;
    ///
    /// let device = Device::flex();
    /// let loss = BinaryCrossEntropyLossConfig::new().with_logits(true).init(&device);
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &device);
    /// let loss = loss.forward(x, Tensor::<1, Int>::from_ints([0, 1], &device));
    /// loss.to_data().assert_approx_eq::<f32>(&[0.5032044f32].into(), Tolerance::default());
    /// ```
    #[derive(Module, Debug)]
    pub struct BinaryCrossEntropyLoss as MemSaveBinaryCrossEntropyLoss =
        burn::nn::loss::BinaryCrossEntropyLoss, from_nn_binary_cross_entropy_loss, into_nn_binary_cross_entropy_loss {
        /// Weights for cross-entropy.
        pub weights: Option<Tensor<1>>,
        /// Label smoothing alpha.
        pub smoothing: Option<f32>,
        /// Treat the inputs as logits
        pub logits: bool,
    }
}

impl BinaryCrossEntropyLoss {
    /// Computes the mean loss.
    ///
    /// # Shapes
    ///
    /// - logits: `[batch_size]`, or `[..., num_classes]`
    /// - targets: the same
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// Panics if the shapes differ, or if there are not as many weights as classes.
    pub fn forward<const D: usize>(&self, logits: Tensor<D>, targets: Tensor<D, Int>) -> Tensor<1> {
        let weights_tracked = is_tracked(&self.weights);
        let tracked = logits.is_tracked() || weights_tracked;
        let shapes = logits.dims() == targets.dims()
            && self.weights.as_ref().is_none_or(|weights| self.are_of_classes(weights, &logits));
        let fit = require_floats(&logits)
            .and(require(shapes, Misfit::Shapes))
            .and(require(!weights_tracked, Misfit::TrackedClassWeights));
        // Burn's loss computes in f32 only.
        let is_burns = !tracked && logits.dtype() == DType::F32;
        if is_burns || !accepts("binary_cross_entropy", fit, tracked, NO_WEIGHT) {
            return self.clone().into_nn_binary_cross_entropy_loss().forward(logits, targets);
        }
        let soft = self.soft(&targets, &logits);
        let f = if self.logits { ElementLoss::BinaryLogits } else { ElementLoss::BinaryProbabilities };
        let Some(weights) = self.weights.clone() else {
            let scale = (logits.shape().num_elements() as f64).recip();
            return element_loss_sum(logits, Some(soft), f, scale);
        };
        let weights = weights.cast(logits.dtype());
        let weights = match D {
            1 => weights.gather(0, targets.flatten(0, 0)),
            _ => weights,
        };
        let shape = logits.dims();
        (element_loss(logits, Some(soft), f) * weights.expand(shape)).mean()
    }

    /// Whether there is one weight per class. With a single axis, the targets themselves are the classes.
    fn are_of_classes<const D: usize>(&self, weights: &Tensor<1>, logits: &Tensor<D>) -> bool {
        D == 1 || weights.dims()[0] == logits.dims()[D - 1]
    }

    /// The smoothed targets, in the dtype of the logits.
    fn soft<const D: usize>(&self, targets: &Tensor<D, Int>, logits: &Tensor<D>) -> Tensor<D> {
        let soft = targets.clone().float().cast(logits.dtype());
        let Some(alpha) = self.smoothing else {
            return soft;
        };
        let classes = if D > 1 { logits.dims()[D - 1] } else { 2 };
        soft * (1.0 - alpha) + alpha / classes as f32
    }
}
