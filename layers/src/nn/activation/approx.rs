//! Activations with approximate gradients, which keep two bits per element.
use super::elementwise::elementwise;
use crate::functional;
use burn::module::Module;
use burn::tensor::Tensor;

elementwise! {
    /// [`Gelu`](super::Gelu) with **approximate gradients**: the output is the same, but the slope of each element is rounded
    /// to one of four numbers. [arXiv 2406.16282](https://arxiv.org/abs/2406.16282) fine-tunes vision transformers and language
    /// models with such slopes.
    ///
    /// Keeps two bits per element for the backward pass; [`Gelu`](super::Gelu) keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::activation::{ApproxGelu, Gelu};
    ///
    /// let x = Tensor::<1>::from_floats([-4.0, -1.0, 1.0, 4.0], &Device::flex().autodiff()).require_grad();
    /// let y = ApproxGelu::new().forward(x.clone());
    /// assert_eq!(y.to_data(), Gelu::new().forward(x.clone()).into_data());
    /// let slopes = x.grad(&y.sum().backward()).unwrap().into_data();
    /// slopes.assert_approx_eq::<f32>(&[0.0f32, -0.04955, 1.04955, 1.0].into(), burn::tensor::Tolerance::default());
    /// ```
    pub struct ApproxGelu => functional::approx_gelu
}

elementwise! {
    /// [`SiLU`](super::SiLU) with **approximate gradients**: the output is the same, but the slope of each element is rounded
    /// to one of four numbers. [arXiv 2406.16282](https://arxiv.org/abs/2406.16282) fine-tunes vision transformers and language
    /// models with such slopes.
    ///
    /// Keeps two bits per element for the backward pass; [`SiLU`](super::SiLU) keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::activation::{ApproxSilu, SiLU};
    ///
    /// let x = Tensor::<1>::from_floats([-8.0, -1.0, 1.0, 8.0], &Device::flex().autodiff()).require_grad();
    /// let y = ApproxSilu::new().forward(x.clone());
    /// assert_eq!(y.to_data(), SiLU::new().forward(x.clone()).into_data());
    /// let slopes = x.grad(&y.sum().backward()).unwrap().into_data();
    /// slopes.assert_approx_eq::<f32>(&[0.0f32, -0.040513, 1.040513, 1.0].into(), burn::tensor::Tolerance::default());
    /// ```
    pub struct ApproxSilu => functional::approx_silu
}
