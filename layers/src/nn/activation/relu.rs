use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// Rectified linear unit, `max(x, 0)`.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::Relu`] keeps its input.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::nn::activation::Relu;
///
/// let x = Tensor::<1>::from_floats([-1.0, 0.0, 2.0], &Device::flex());
/// Relu::new().forward(x).to_data().assert_eq(&[0.0f32, 0.0, 2.0].into(), true);
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct Relu;

drop_in!(Relu = burn::nn::activation::Relu, from_nn_relu, into_nn_relu {});

impl Relu {
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
        functional::relu(input)
    }
}
