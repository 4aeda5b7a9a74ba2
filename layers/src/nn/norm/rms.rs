//! RMS normalization over the last axis.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct RmsNormConfig = burn::nn::RmsNormConfig {
        /// The size of the input features.
        pub d_model: usize,
        /// A value required for numerical stability. Default: 1e-5
        #[config(default = 1e-5)]
        pub epsilon: f64,
    }
    pub fn init(&self, device: &Device) -> RmsNorm, or panics;
}

drop_in! {
    /// RMS normalization over the last axis, `y = x / sqrt(mean(x^2) + epsilon) * gamma`, after
    /// [arXiv 1910.07467](https://arxiv.org/abs/1910.07467).
    ///
    /// Keeps its input for the backward pass; [`burn::nn::RmsNorm`] keeps two tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::RmsNormConfig;
    ///
    /// let device = Device::flex();
    /// let norm = RmsNormConfig::new(2).init(&device);
    /// let y = norm.forward(Tensor::<1>::from_floats([1.0, 1.0], &device));
    /// y.to_data().assert_approx_eq::<f32>(&[1.0f32, 1.0].into(), Tolerance::absolute(1e-4));
    /// ```
    #[derive(Module, Debug)]
    pub struct RmsNorm as MemSaveRmsNorm = burn::nn::RmsNorm, from_nn_rms_norm, into_nn_rms_norm {
        /// The learnable parameter to scale the normalized tensor
        pub gamma: Param<Tensor<1>>,
        /// A value required for numerical stability
        pub epsilon: f64,
    }
}

impl RmsNorm {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_model]`
    /// - output: the same
    ///
    /// # Panics
    ///
    /// Panics if the last axis of the input is not `d_model`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let [d_model] = self.gamma.shape().dims();
        assert_shape!(x, [.., d_model]);
        functional::rms_norm(x, self.gamma.val(), self.epsilon)
    }
}
