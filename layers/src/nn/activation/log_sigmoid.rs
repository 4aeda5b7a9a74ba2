use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

/// `log(sigmoid(x))`, element by element.
///
/// Keeps for the backward pass its input, as [`burn::nn::activation::LogSigmoid`].
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::nn::activation::LogSigmoid;
///
/// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
/// let y = LogSigmoid::new().forward(x);
/// y.to_data().assert_approx_eq::<f32>(&[-0.693147f32, -0.313262].into(), Tolerance::absolute(1e-5));
/// ```
#[derive(Module, Debug, Default)]
#[module(custom_display)]
pub struct LogSigmoid;

drop_in!(LogSigmoid = burn::nn::activation::LogSigmoid, from_nn_log_sigmoid, into_nn_log_sigmoid {});

impl LogSigmoid {
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
        functional::log_sigmoid(input)
    }
}
