//! Layer normalization over the last axis.
use crate::burn_internals::displayed;
use crate::functional::{
    self,
    guard::{Misfit, accepts, require},
};
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{DType, Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct LayerNormConfig = burn::nn::LayerNormConfig {
        /// The size of the input features.
        pub d_model: usize,
        /// A value required for numerical stability. Default: 1e-5
        #[config(default = 1e-5)]
        pub epsilon: f64,
        /// If a bias (beta) should be applied during the normalization. Default: true
        #[config(default = true)]
        pub bias: bool,
    }
    pub fn init(&self, device: &Device) -> LayerNorm = from_config;
}

drop_in! {
    /// Layer normalization over the last axis, `y = (x - mean) / sqrt(variance + epsilon) * gamma + beta`, after
    /// [arXiv 1607.06450](https://arxiv.org/abs/1607.06450).
    ///
    /// Keeps its input for the backward pass; [`burn::nn::LayerNorm`] keeps two tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::LayerNormConfig;
    ///
    /// let device = Device::flex();
    /// let norm = LayerNormConfig::new(2).init(&device);
    /// let y = norm.forward(Tensor::<1>::from_floats([1.0, 3.0], &device));
    /// y.to_data().assert_approx_eq::<f32>(&[-1.0f32, 1.0].into(), Tolerance::default());
    /// ```
    #[derive(Module, Debug)]
    pub struct LayerNorm as MemSaveLayerNorm = burn::nn::LayerNorm,
        from_nn_layer_norm = from_stock, into_nn_layer_norm = into_stock {
        /// The learnable weight (scale).
        pub gamma: Param<Tensor<1>>,
        /// The learnable bias (optional).
        pub beta: Option<Param<Tensor<1>>>,
        /// A value required for numerical stability.
        epsilon: f64,
    }
}

fn from_config(config: &LayerNormConfig, stock: burn::nn::LayerNorm) -> LayerNorm {
    LayerNorm { gamma: stock.gamma, beta: stock.beta, epsilon: config.epsilon }
}

fn from_stock(stock: burn::nn::LayerNorm) -> LayerNorm {
    let epsilon = displayed(&stock, "epsilon");
    LayerNorm { gamma: stock.gamma, beta: stock.beta, epsilon }
}

fn into_stock(ours: LayerNorm) -> burn::nn::LayerNorm {
    let LayerNorm { gamma, beta, epsilon } = ours;
    let config = LayerNormConfig { d_model: gamma.shape()[0], epsilon, bias: false };
    let mut stock = burn::nn::LayerNormConfig::from(config).init(&gamma.lazy_device());
    (stock.gamma, stock.beta) = (gamma, beta);
    stock
}

impl LayerNorm {
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
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let gamma = self.gamma.val();
        let [d_model] = gamma.dims();
        assert_shape!(input, [.., d_model]);
        let beta = self.beta.as_ref().map(Param::val);
        let tracked =
            input.is_tracked() || gamma.is_tracked() || beta.as_ref().is_some_and(Tensor::is_tracked);
        let fit = require(gamma.dtype() == input.dtype(), Misfit::Dtypes);
        match accepts("layer_norm", fit, tracked, Some(&gamma)) && (tracked || input.dtype() != DType::F16) {
            true => functional::layer_norm(input, gamma, beta, self.epsilon),
            false => self.clone().into_nn_layer_norm().forward(input), // widens where sums could overflow
        }
    }
}
