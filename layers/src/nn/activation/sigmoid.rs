use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `1 / (1 + exp(-x))`, element by element.
///
/// Keeps for the backward pass its output, which a layer behind it shares; [`burn::nn::activation::Sigmoid`] keeps its input.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::Sigmoid;
///
/// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
/// let y = Sigmoid::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.5f32, 0.731059].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct Sigmoid;

drop_in!(Sigmoid = burn::nn::activation::Sigmoid, from_nn_sigmoid, into_nn_sigmoid {});

impl Sigmoid {
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
        functional::sigmoid(input)
    }
}
