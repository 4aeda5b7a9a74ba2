use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `x * min(max(x / 6 + 1/2, 0), 1)`, element by element.
///
/// Keeps for the backward pass its input; [`burn::nn::activation::HardSwish`] keeps more than two tensors of that size.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::HardSwish;
///
/// let x = Tensor::<1>::from_floats([-4.0, 3.0], &Device::flex());
/// let y = HardSwish::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 3.0].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct HardSwish;

drop_in!(HardSwish = burn::nn::activation::HardSwish, from_nn_hard_swish, into_nn_hard_swish {});

impl HardSwish {
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
        functional::hard_swish(input)
    }
}
