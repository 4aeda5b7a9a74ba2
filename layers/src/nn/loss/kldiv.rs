//! Kullback-Leibler divergence.
use super::Reduction;
use crate::functional::{
    element_loss, element_loss_sum,
    guard::{NO_WEIGHT, accepts, require_alike},
};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::ops::ElementLoss;
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{FloatDType, Tensor};

config_twin! {
    #[derive(Config, Debug)]
    pub struct KLDivLossConfig = burn::nn::loss::KLDivLossConfig {
        /// Whether the targets are log probabilities. Default: false.
        #[config(default = false)]
        pub log_target: bool,
    }
    pub fn init(&self) -> KLDivLoss;
}

drop_in! {
    /// Kullback-Leibler divergence of every element, `t (log(t) - x)`, where the predictions `x` are log probabilities. With
    /// `log_target`, the targets are log probabilities, too: `exp(t) (t - x)`.
    ///
    /// Keeps the targets for the backward pass, and the predictions if the targets are tracked; [`burn::nn::loss::KLDivLoss`]
    /// keeps several tensors of that size if the targets are tracked.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::loss::{KLDivLossConfig, Reduction};
    ///
    /// let device = Device::flex();
    /// let [x, t] = [[-0.5, -1.0], [1.0, 0.5]].map(|x| Tensor::<1>::from_floats(x, &device));
    /// let loss = KLDivLossConfig::new().init().forward(x, t, Reduction::Sum);
    /// loss.to_data().assert_approx_eq::<f32>(&[0.6534264f32].into(), Tolerance::default());
    /// ```
    #[derive(Module, Debug)]
    pub struct KLDivLoss as MemSaveKLDivLoss = burn::nn::loss::KLDivLoss,
        from_nn_kl_div_loss, into_nn_kl_div_loss {
        /// Whether the targets are log probabilities. Default: false.
        pub log_target: bool,
    }
}

impl KLDivLoss {
    /// Computes the loss, reduced to one number; `Reduction::Auto` is `Reduction::BatchMean`.
    ///
    /// # Shapes
    ///
    /// - predictions: `[batch_size, num_targets]`, or any other with the batch first
    /// - targets: the same
    /// - output: `[1]`
    pub fn forward<const D: usize>(
        &self,
        predictions: Tensor<D>,
        targets: Tensor<D>,
        reduction: Reduction,
    ) -> Tensor<1> {
        if !is_recorded(&predictions, &targets) {
            return self.clone().into_nn_kl_div_loss().forward(predictions, targets, reduction);
        }
        let scale = match reduction {
            Reduction::BatchMean | Reduction::Auto => (predictions.dims()[0] as f64).recip(),
            Reduction::Mean => (predictions.shape().num_elements() as f64).recip(),
            Reduction::Sum => 1.0,
        };
        let f = self.loss(&targets);
        element_loss_sum(predictions, Some(targets), f, scale)
    }

    /// Computes the loss of every element.
    pub fn forward_no_reduction<const D: usize>(
        &self,
        predictions: Tensor<D>,
        targets: Tensor<D>,
    ) -> Tensor<D> {
        if !is_recorded(&predictions, &targets) {
            return self.clone().into_nn_kl_div_loss().forward_no_reduction(predictions, targets);
        }
        let f = self.loss(&targets);
        element_loss(predictions, Some(targets), f)
    }

    fn loss<const D: usize>(&self, targets: &Tensor<D>) -> ElementLoss {
        let info = targets.dtype().finfo().unwrap_or(FloatDType::F32.finfo());
        match self.log_target {
            true => ElementLoss::LogDivergence,
            false => ElementLoss::Divergence { min: info.min_positive },
        }
    }
}

fn is_recorded<const D: usize>(predictions: &Tensor<D>, targets: &Tensor<D>) -> bool {
    let tracked = predictions.is_tracked() || targets.is_tracked();
    tracked && accepts("kl_div_loss", require_alike(predictions, targets), tracked, NO_WEIGHT)
}
