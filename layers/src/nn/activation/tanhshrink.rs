use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `x - tanh(x)`, element by element.
///
/// Keeps for the backward pass its input, as [`burn::nn::activation::Tanhshrink`].
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::Tanhshrink;
///
/// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
/// let y = Tanhshrink::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 0.238406].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct Tanhshrink;

drop_in!(Tanhshrink = burn::nn::activation::Tanhshrink, from_nn_tanhshrink, into_nn_tanhshrink {});

impl Tanhshrink {
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
        functional::tanhshrink(input)
    }
}
