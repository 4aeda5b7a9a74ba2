use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// The hyperbolic tangent, element by element.
///
/// Keeps for the backward pass its output, which a layer behind it shares; [`burn::nn::activation::Tanh`] keeps its input.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::Tanh;
///
/// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
/// let y = Tanh::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 0.761594].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct Tanh;

drop_in!(Tanh = burn::nn::activation::Tanh, from_nn_tanh, into_nn_tanh {});

impl Tanh {
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
        functional::tanh(input)
    }
}
