use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`ThresholdedRelu`]; the same as [`burn::nn::activation::ThresholdedReluConfig`].
#[derive(Config, Debug)]
pub struct ThresholdedReluConfig {
    /// The alpha threshold. Default is 1.0
    #[config(default = "1.0")]
    pub alpha: f64,
}

config_twin!(ThresholdedReluConfig = burn::nn::activation::ThresholdedReluConfig { alpha });

/// `x` if `x > alpha`, else 0.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::ThresholdedRelu`] keeps tensors of the input's size.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct ThresholdedRelu {
    /// The alpha threshold.
    pub alpha: f64,
}

drop_in!(
    ThresholdedRelu = burn::nn::activation::ThresholdedRelu,
    from_nn_thresholded_relu,
    into_nn_thresholded_relu { alpha }
);

impl ThresholdedReluConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> ThresholdedRelu {
        burn::nn::activation::ThresholdedReluConfig::from(self.clone()).init().into()
    }
}

impl ThresholdedRelu {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::thresholded_relu(input, self.alpha)
    }
}
