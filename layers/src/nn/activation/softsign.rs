use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `x / (1 + |x|)`, element by element.
///
/// Keeps for the backward pass its input; [`burn::nn::activation::Softsign`] keeps three tensors of that size.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::Softsign;
///
/// let x = Tensor::<1>::from_floats([-1.0, 3.0], &Device::flex());
/// let y = Softsign::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[-0.5f32, 0.75].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct Softsign;

drop_in!(Softsign = burn::nn::activation::Softsign, from_nn_softsign, into_nn_softsign {});

impl Softsign {
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
        functional::softsign(input)
    }
}
