use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`HardSigmoid`]; the same as [`burn::nn::activation::HardSigmoidConfig`].
#[derive(Config, Debug)]
pub struct HardSigmoidConfig {
    /// The alpha value. Default is 0.2
    #[config(default = "0.2")]
    pub alpha: f64,
    /// The beta value. Default is 0.5
    #[config(default = "0.5")]
    pub beta: f64,
}

config_twin!(HardSigmoidConfig = burn::nn::activation::HardSigmoidConfig { alpha, beta });

/// `min(max(alpha x + beta, 0), 1)`.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::HardSigmoid`] keeps tensors of the input's size.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct HardSigmoid {
    /// The alpha value.
    pub alpha: f64,
    /// The beta value.
    pub beta: f64,
}

drop_in!(
    HardSigmoid = burn::nn::activation::HardSigmoid,
    from_nn_hard_sigmoid,
    into_nn_hard_sigmoid { alpha, beta }
);

impl HardSigmoidConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> HardSigmoid {
        burn::nn::activation::HardSigmoidConfig::from(self.clone()).init().into()
    }
}

impl HardSigmoid {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::hard_sigmoid(input, self.alpha, self.beta)
    }
}
