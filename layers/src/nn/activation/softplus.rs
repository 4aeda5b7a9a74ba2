use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`Softplus`]; the same as [`burn::nn::activation::SoftplusConfig`].
#[derive(Config, Debug)]
pub struct SoftplusConfig {
    /// The beta value. Default is 1.0
    #[config(default = "1.0")]
    pub beta: f64,
    /// The threshold above which the function is the identity. Default is 20.0
    #[config(default = "20.0")]
    pub threshold: f64,
}

config_twin!(SoftplusConfig = burn::nn::activation::SoftplusConfig { beta, threshold });

/// `log(1 + exp(beta * x)) / beta`, and `x` where `beta * x` is above the threshold.
///
/// Keeps its input for the backward pass; [`burn::nn::activation::Softplus`] keeps several tensors of that size.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::SoftplusConfig;
///
/// let x = Tensor::<1>::from_floats([0.0, 30.0], &Device::flex());
/// let y = SoftplusConfig::new().init().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.693147f32, 30.0].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug)]
#[module(custom_display)]
pub struct Softplus {
    /// The beta value.
    pub beta: f64,
    /// The threshold above which the function is the identity.
    pub threshold: f64,
}

drop_in!(Softplus = burn::nn::activation::Softplus, from_nn_softplus, into_nn_softplus { beta, threshold });

impl SoftplusConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> Softplus {
        burn::nn::activation::SoftplusConfig::from(self.clone()).init().into()
    }
}

impl Softplus {
    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::softplus_with_threshold(input, self.beta, self.threshold)
    }
}
