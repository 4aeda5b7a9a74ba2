use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`Celu`]; the same as [`burn::nn::activation::CeluConfig`].
#[derive(Config, Debug)]
pub struct CeluConfig {
    /// The alpha value for the Celu formulation. Default is 1.0
    #[config(default = "1.0")]
    pub alpha: f64,
}

config_twin!(CeluConfig = burn::nn::activation::CeluConfig { alpha });

/// `x` if `x > 0`, else `alpha * (exp(x / alpha) - 1)`.
///
/// Keeps its input for the backward pass; [`burn::nn::activation::Celu`] keeps several tensors of that size.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::CeluConfig;
///
/// let x = Tensor::<1>::from_floats([0.0, 2.0], &Device::flex());
/// let y = CeluConfig::new().init().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 2.0].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Celu {
    /// The alpha value for the Celu formulation.
    pub alpha: f64,
}

drop_in!(Celu = burn::nn::activation::Celu, from_nn_celu, into_nn_celu { alpha });

impl CeluConfig {
    /// Initializes the module, as the stock config does.
    ///
    /// # Panics
    ///
    /// Panics for the values that the stock config refuses, with its message.
    pub fn init(&self) -> Celu {
        burn::nn::activation::CeluConfig::from(self.clone()).init().into()
    }
}

impl Celu {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::celu(input, self.alpha)
    }
}
