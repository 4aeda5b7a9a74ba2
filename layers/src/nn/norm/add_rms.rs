//! A residual sum and its RMS normalization, fused.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct AddRmsNormConfig = burn::nn::RmsNormConfig {
        /// The size of the input features.
        pub d_model: usize,
        /// A value required for numerical stability. Default: 1e-5
        #[config(default = 1e-5)]
        pub epsilon: f64,
    }
    pub fn init(&self, device: &Device) -> AddRmsNorm, or panics;
}

drop_in! {
    /// Residual sum and [RMS norm](super::RmsNorm) in one pass: `s = x + residual` and `y = s / sqrt(mean(s^2) + epsilon) * gamma`
    /// over the last axis.
    ///
    /// Keeps `s` for the backward pass. A sum and a [`burn::nn::RmsNorm`] keep two tensors of that size; the module converts
    /// from and to [`burn::nn::RmsNorm`].
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::norm::AddRmsNormConfig;
    ///
    /// let device = Device::flex();
    /// let norm = AddRmsNormConfig::new(8).init(&device);
    /// let [x, residual] = [(); 2].map(|()| Tensor::<3>::ones([2, 3, 8], &device));
    /// let (sum, y) = norm.forward(x, residual);
    /// assert_eq!((sum.dims(), y.dims()), ([2, 3, 8], [2, 3, 8]));
    /// ```
    #[derive(Module, Debug)]
    pub struct AddRmsNorm as MemSaveAddRmsNorm = burn::nn::RmsNorm, from_nn_rms_norm, into_nn_rms_norm {
        /// The learnable parameter to scale the normalized tensor
        pub gamma: Param<Tensor<1>>,
        /// A value required for numerical stability
        pub epsilon: f64,
    }
}

impl AddRmsNorm {
    /// Returns the sum `s` and its norm `y`.
    ///
    /// # Shapes
    ///
    /// - x, residual: `[..., d_model]`
    /// - outputs: the same
    ///
    /// # Panics
    ///
    /// Panics if the last axis of `x` is not `d_model`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>, residual: Tensor<D>) -> (Tensor<D>, Tensor<D>) {
        let [d_model] = self.gamma.shape().dims();
        assert_shape!(x, [.., d_model]);
        functional::add_rms_norm(x, residual, self.gamma.val(), self.epsilon)
    }
}
