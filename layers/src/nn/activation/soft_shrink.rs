use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`SoftShrink`]; the same as [`burn::nn::activation::SoftShrinkConfig`].
#[derive(Config, Debug)]
pub struct SoftShrinkConfig {
    /// The lambda value for the Soft Shrink formulation. Default is 0.5
    #[config(default = "0.5")]
    pub lambda: f64,
}

config_twin!(SoftShrinkConfig = burn::nn::activation::SoftShrinkConfig { lambda });

/// `x - sign(x) lambda` if `|x| > lambda`, else 0.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::SoftShrink`] keeps tensors of the input's size.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct SoftShrink {
    /// The lambda value for the Soft Shrink formulation.
    pub lambda: f64,
}

drop_in!(SoftShrink = burn::nn::activation::SoftShrink, from_nn_soft_shrink, into_nn_soft_shrink { lambda });

impl SoftShrinkConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> SoftShrink {
        burn::nn::activation::SoftShrinkConfig::from(self.clone()).init().into()
    }
}

impl SoftShrink {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::soft_shrink(input, self.lambda)
    }
}
