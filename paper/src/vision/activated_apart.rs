// Activations as layers of their own.
use nn::{Relu, activation::SiLU};

impl ConvNorm {
    /// `relu(norm(conv(x)))`.
    pub fn forward_relu(&self, x: Tensor<4>, relu: &Relu) -> Tensor<4> {
        relu.forward(self.forward(x))
    }

    /// `silu(norm(conv(x)))`.
    pub fn forward_silu(&self, x: Tensor<4>, silu: &SiLU) -> Tensor<4> {
        silu.forward(self.forward(x))
    }
}
