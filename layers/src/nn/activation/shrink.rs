use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`Shrink`]; the same as [`burn::nn::activation::ShrinkConfig`].
#[derive(Config, Debug)]
pub struct ShrinkConfig {
    /// The lambda value for the Shrink formulation. Default is 0.5
    #[config(default = "0.5")]
    pub lambda: f64,
    /// The bias value for the Shrink formulation. Default is 0.5.
    #[config(default = "0.5")]
    pub bias: f64,
}

config_twin!(ShrinkConfig = burn::nn::activation::ShrinkConfig { lambda, bias });

/// `x - sign(x) bias` if `|x| > lambda`, else 0.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::Shrink`] keeps tensors of the input's size.
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Shrink {
    /// The lambda value for the Shrink formulation.
    pub lambda: f64,
    /// The bias value for the Shrink formulation.
    // Usually bias = lambda, but need this to handle onnx spec https://onnx.ai/onnx/operators/onnx__Shrink.html
    pub bias: f64,
}

drop_in!(Shrink = burn::nn::activation::Shrink, from_nn_shrink, into_nn_shrink { lambda, bias });

impl ShrinkConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> Shrink {
        burn::nn::activation::ShrinkConfig::from(self.clone()).init().into()
    }
}

impl Shrink {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::shrink(input, self.lambda, self.bias)
    }
}
