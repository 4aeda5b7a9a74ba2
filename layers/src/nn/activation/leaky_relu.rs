use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`LeakyRelu`]; the same as [`burn::nn::activation::LeakyReluConfig`].
#[derive(Config, Debug)]
pub struct LeakyReluConfig {
    /// The negative slope. Default is 0.01
    #[config(default = "0.01")]
    pub negative_slope: f64,
}

config_twin!(LeakyReluConfig = burn::nn::activation::LeakyReluConfig { negative_slope });

/// `x` if `x >= 0`, else `negative_slope * x`.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::LeakyRelu`] keeps tensors of the input's size.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct LeakyRelu {
    /// The negative slope.
    pub negative_slope: f64,
}

drop_in!(
    LeakyRelu = burn::nn::activation::LeakyRelu,
    from_nn_leaky_relu,
    into_nn_leaky_relu { negative_slope }
);

impl LeakyReluConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> LeakyRelu {
        burn::nn::activation::LeakyReluConfig::from(self.clone()).init().into()
    }
}

impl LeakyRelu {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::leaky_relu(input, self.negative_slope)
    }
}
