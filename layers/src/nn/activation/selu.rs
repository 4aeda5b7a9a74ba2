use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `1.0507 * (x if x > 0, else 1.6733 * (exp(x) - 1))`, element by element.
///
/// Keeps for the backward pass its input; [`burn::nn::activation::Selu`] keeps more than that.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::Selu;
///
/// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
/// let y = Selu::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 1.050701].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct Selu;

drop_in!(Selu = burn::nn::activation::Selu, from_nn_selu, into_nn_selu {});

impl Selu {
    /// Creates the module.
    pub fn new() -> Self {
        Self
    }

    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::selu(input)
    }
}
