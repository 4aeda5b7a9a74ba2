use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`Threshold`]; the same as [`burn::nn::activation::ThresholdConfig`].
#[derive(Config, Debug)]
pub struct ThresholdConfig {
    /// The value to threshold at.
    pub threshold: f64,
    /// The value to replace with where the input is at or below the threshold.
    pub value: f64,
}

config_twin!(ThresholdConfig = burn::nn::activation::ThresholdConfig { threshold, value });

/// `x` if `x > threshold`, else `value`.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::Threshold`] keeps tensors of the input's size.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Threshold {
    /// The value to threshold at.
    pub threshold: f64,
    /// The value to replace with where the input is at or below the threshold.
    pub value: f64,
}

drop_in!(
    Threshold = burn::nn::activation::Threshold,
    from_nn_threshold,
    into_nn_threshold { threshold, value }
);

impl ThresholdConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> Threshold {
        burn::nn::activation::ThresholdConfig::from(self.clone()).init().into()
    }
}

impl Threshold {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::threshold(input, self.threshold, self.value)
    }
}
