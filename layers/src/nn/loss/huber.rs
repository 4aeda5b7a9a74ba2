//! Huber loss.
use super::Reduction;
use super::mse::{is_recorded, mean_or_sum};
use crate::functional::{element_loss, element_loss_sum};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::ops::ElementLoss;
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

config_twin! {
    #[derive(Config, Debug)]
    pub struct HuberLossConfig = burn::nn::loss::HuberLossConfig {
        /// The bound where the Huber loss function changes from quadratic to linear behaviour.
        pub delta: f32,
    }
    pub fn init(&self) -> HuberLoss, or panics;
}

drop_in! {
    /// Huber loss of the residual `r = t - x` of every element: `r^2 / 2` if `|r| <= delta`, else `delta |r| - delta^2 / 2`.
    ///
    /// Keeps the residuals for the backward pass and computes the gradient in their place; [`burn::nn::loss::HuberLoss`]
    /// keeps several tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::loss::{HuberLossConfig, Reduction};
    ///
    /// let device = Device::flex();
    /// let [x, t] = [[1.0, 2.0], [1.5, 6.0]].map(|x| Tensor::<1>::from_floats(x, &device));
    /// let loss = HuberLossConfig::new(1.0).init().forward(x, t, Reduction::Sum);
    /// assert_eq!(loss.into_scalar::<f32>(), 0.125 + 3.5);
    /// ```
    #[derive(Module, Debug)]
    pub struct HuberLoss as MemSaveHuberLoss = burn::nn::loss::HuberLoss,
        from_nn_huber_loss, into_nn_huber_loss {
        /// The bound where the Huber loss function changes from quadratic to linear behaviour.
        pub delta: f32,
        /// Precomputed value for the linear bias.
        pub lin_bias: f32,
    }
}

impl HuberLoss {
    /// Computes the loss, reduced to one number; `Reduction::Auto` is the mean.
    ///
    /// # Shapes
    ///
    /// - predictions: any
    /// - targets: the same
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// Panics for `Reduction::BatchMean`.
    pub fn forward<const D: usize>(
        &self,
        predictions: Tensor<D>,
        targets: Tensor<D>,
        reduction: Reduction,
    ) -> Tensor<1> {
        if !is_recorded("huber_loss", [&predictions, &targets]) {
            return self.clone().into_nn_huber_loss().forward(predictions, targets, reduction);
        }
        let residuals = targets.sub(predictions);
        let scale = mean_or_sum(&residuals, reduction);
        element_loss_sum(residuals, None, self.loss(), scale)
    }

    /// Computes the loss of every element.
    pub fn forward_no_reduction<const D: usize>(
        &self,
        predictions: Tensor<D>,
        targets: Tensor<D>,
    ) -> Tensor<D> {
        self.forward_residuals(targets.sub(predictions))
    }

    /// Computes the loss of every residual.
    pub fn forward_residuals<const D: usize>(&self, residuals: Tensor<D>) -> Tensor<D> {
        match is_recorded("huber_loss", [&residuals]) {
            true => element_loss(residuals, None, self.loss()),
            false => self.clone().into_nn_huber_loss().forward_residuals(residuals),
        }
    }

    fn loss(&self) -> ElementLoss {
        ElementLoss::Huber { delta: f64::from(self.delta), bias: f64::from(self.lin_bias) }
    }
}
