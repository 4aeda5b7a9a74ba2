//! The gated linear unit.
use crate::burn_internals::displayed;
use crate::functional;
use crate::nn::drop_in::drop_in;
use burn::module::Module;
use burn::tensor::{AsIndex, Tensor};

drop_in! {
    /// Gated linear unit, `a * sigmoid(b)`, where `a` and `b` are the two halves of its input along an axis, after
    /// [arXiv 1612.08083](https://arxiv.org/abs/1612.08083).
    ///
    /// Keeps the two halves for the backward pass; [`burn::nn::activation::GLU`] keeps several tensors of their size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::activation::GLU;
    ///
    /// let x = Tensor::<1>::from_floats([2.0, 0.0], &Device::flex());
    /// GLU::new(0).forward(x).to_data().assert_eq(&[1.0f32].into(), true);
    /// ```
    #[derive(Module, Debug, Default)]
    pub struct GLU as MemSaveGLU = burn::nn::activation::GLU,
        from_nn_glu = from_stock, into_nn_glu = into_stock {
        dim: isize,
    }
}

fn from_stock(stock: burn::nn::activation::GLU) -> GLU {
    GLU { dim: displayed(&stock, "dim") }
}

fn into_stock(ours: GLU) -> burn::nn::activation::GLU {
    burn::nn::activation::GLU::new(ours.dim)
}

impl GLU {
    /// Creates the module; `dim` is the axis to halve, counted from the end if negative.
    pub fn new(dim: impl AsIndex) -> Self {
        Self { dim: dim.as_index() }
    }

    /// Applies the function.
    ///
    /// # Shapes
    ///
    /// - input: any
    /// - output: the same, half as long along `dim`
    ///
    /// # Panics
    ///
    /// Panics if the axis does not exist or has an odd length.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        functional::glu(input, self.dim)
    }
}
