use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `x * tanh(log(1 + exp(x)))`, element by element.
///
/// Keeps for the backward pass its input; [`burn::nn::activation::Mish`] keeps five tensors of that size.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::Mish;
///
/// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
/// let y = Mish::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 0.865098].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct Mish;

drop_in!(Mish = burn::nn::activation::Mish, from_nn_mish, into_nn_mish {});

impl Mish {
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
        functional::mish(input)
    }
}
