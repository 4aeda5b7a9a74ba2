use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, assert_shape};

/// Configuration of [`RmsNorm`]; the same as [`burn::nn::RmsNormConfig`].
#[derive(Config, Debug)]
pub struct RmsNormConfig {
    /// The size of the input features.
    pub d_model: usize,
    /// A value required for numerical stability. Default: 1e-5
    #[config(default = 1e-5)]
    pub epsilon: f64,
}

config_twin!(RmsNormConfig = burn::nn::RmsNormConfig { d_model, epsilon });

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
#[module(custom_display)]
pub struct RmsNorm {
    /// The learnable parameter to scale the normalized tensor
    pub gamma: Param<Tensor<1>>,
    /// A value required for numerical stability
    pub epsilon: f64,
}

drop_in!(RmsNorm = burn::nn::RmsNorm, from_nn_rms_norm, into_nn_rms_norm { gamma, epsilon });

impl RmsNormConfig {
    /// Initializes the module, as the stock config does.
    ///
    /// # Panics
    ///
    /// Panics for the values that the stock config refuses, with its message.
    pub fn init(&self, device: &Device) -> RmsNorm {
        burn::nn::RmsNormConfig::from(self.clone()).init(device).into()
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
