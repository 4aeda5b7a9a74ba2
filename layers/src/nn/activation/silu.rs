use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `x * sigmoid(x)`, element by element.
///
/// Keeps for the backward pass its input; [`burn::nn::activation::SiLU`] keeps two tensors of that size.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::SiLU;
///
/// let x = Tensor::<1>::from_floats([0.0, 2.0], &Device::flex());
/// let y = SiLU::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 1.761594].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct SiLU;

drop_in!(SiLU = burn::nn::activation::SiLU, from_nn_silu, into_nn_silu {});

impl SiLU {
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
        functional::silu(input)
    }
}
