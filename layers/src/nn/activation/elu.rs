use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`Elu`]; the same as [`burn::nn::activation::EluConfig`].
#[derive(Config, Debug)]
pub struct EluConfig {
    /// The alpha value. Default is 1.0
    #[config(default = "1.0")]
    pub alpha: f64,
}

config_twin!(EluConfig = burn::nn::activation::EluConfig { alpha });

/// `x` if `x > 0`, else `alpha * (exp(x) - 1)`.
///
/// Keeps its input for the backward pass; [`burn::nn::activation::Elu`] keeps several tensors of that size.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::EluConfig;
///
/// let x = Tensor::<1>::from_floats([0.0, 2.0], &Device::flex());
/// let y = EluConfig::new().init().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 2.0].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Elu {
    /// The alpha value.
    pub alpha: f64,
}

drop_in!(Elu = burn::nn::activation::Elu, from_nn_elu, into_nn_elu { alpha });

impl EluConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> Elu {
        burn::nn::activation::EluConfig::from(self.clone()).init().into()
    }
}

impl Elu {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::elu(input, self.alpha)
    }
}
