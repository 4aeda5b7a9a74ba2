use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`Hardtanh`]; the same as [`burn::nn::activation::HardtanhConfig`].
#[derive(Config, Debug)]
pub struct HardtanhConfig {
    /// The finite minimum value of the linear region range. Default is -1.0.
    /// Must be less than or equal to `max_val`.
    #[config(default = "-1.0")]
    pub min_val: f64,
    /// The finite maximum value of the linear region range. Default is 1.0.
    /// Must be greater than or equal to `min_val`.
    #[config(default = "1.0")]
    pub max_val: f64,
}

config_twin!(HardtanhConfig = burn::nn::activation::HardtanhConfig { min_val, max_val });

/// `min(max(x, min_val), max_val)`.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::Hardtanh`] keeps tensors of the input's size.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Hardtanh {
    /// The minimum value of the linear region range.
    pub min_val: f64,
    /// The maximum value of the linear region range.
    pub max_val: f64,
}

drop_in!(Hardtanh = burn::nn::activation::Hardtanh, from_nn_hardtanh, into_nn_hardtanh { min_val, max_val });

impl HardtanhConfig {
    /// Initializes the module, as the stock config does.
    ///
    /// # Panics
    ///
    /// Panics for the values that the stock config refuses, with its message.
    pub fn init(&self) -> Hardtanh {
        burn::nn::activation::HardtanhConfig::from(self.clone()).init().into()
    }
}

impl Hardtanh {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::hardtanh(input, self.min_val, self.max_val)
    }
}
