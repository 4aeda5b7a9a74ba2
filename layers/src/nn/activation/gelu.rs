//! The Gaussian error linear unit.
use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::Tensor;

drop_in! {
    /// Gaussian error linear unit, `x / 2 * (1 + erf(x / sqrt(2)))`, or its tanh approximation, after
    /// [arXiv 1606.08415](https://arxiv.org/abs/1606.08415).
    ///
    /// Keeps its input for the backward pass, as [`burn::nn::activation::Gelu`] does; Burn's approximation keeps several
    /// tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::Gelu;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
    /// let y = Gelu::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 0.841345].into(), Tolerance::absolute(1e-5));
    /// ```
    #[derive(Module, Debug, Default)]
    pub struct Gelu as MemSaveGelu = burn::nn::activation::Gelu, from_nn_gelu, into_nn_gelu {
        /// Whether to use the tanh approximation.
        pub approximate: bool,
    }
}

impl Gelu {
    /// Creates the module.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates the module with the tanh approximation.
    pub fn new_approximate() -> Self {
        Self { approximate: true }
    }

    /// Applies the function element by element.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        match self.approximate {
            true => functional::gelu_approximate(input),
            false => functional::gelu(input),
        }
    }
}
