use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`HardShrink`]; the same as [`burn::nn::activation::HardShrinkConfig`].
#[derive(Config, Debug)]
pub struct HardShrinkConfig {
    /// The lambda value for the Hard Shrink formulation. Default is 0.5
    #[config(default = "0.5")]
    pub lambda: f64,
}

config_twin!(HardShrinkConfig = burn::nn::activation::HardShrinkConfig { lambda });

/// `x` if `|x| > lambda`, else 0.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::HardShrink`] keeps tensors of the input's size.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct HardShrink {
    /// The lambda value for the Hard Shrink formulation.
    pub lambda: f64,
}

drop_in!(HardShrink = burn::nn::activation::HardShrink, from_nn_hard_shrink, into_nn_hard_shrink { lambda });

impl HardShrinkConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> HardShrink {
        burn::nn::activation::HardShrinkConfig::from(self.clone()).init().into()
    }
}

impl HardShrink {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::hard_shrink(input, self.lambda)
    }
}
