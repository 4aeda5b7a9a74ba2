use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `min(max(x, 0), 6)`.
///
/// Keeps one bit per element for the backward pass; [`burn::nn::activation::Relu6`] keeps tensors of its input's size.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::nn::activation::Relu6;
///
/// let x = Tensor::<1>::from_floats([-1.0, 0.0, 2.0], &Device::flex());
/// Relu6::new().forward(x).to_data().assert_eq(&[0.0f32, 0.0, 2.0].into(), true);
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct Relu6;

drop_in!(Relu6 = burn::nn::activation::Relu6, from_nn_relu6, into_nn_relu6 {});

impl Relu6 {
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
        functional::relu6(input)
    }
}
