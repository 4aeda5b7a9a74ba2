// Activations in the passes of batch norms.
use burn_memsave::functional::{PiecewiseLinear, Smooth};
use nn::{Relu, activation::SiLU};

impl ConvNorm {
    /// `relu(norm(conv(x)))`.
    pub fn forward_relu(&self, x: Tensor<4>, _: &Relu) -> Tensor<4> {
        self.norm.forward_activated(self.conv.forward(x), PiecewiseLinear::Relu)
    }

    /// `silu(norm(conv(x)))`.
    pub fn forward_silu(&self, x: Tensor<4>, _: &SiLU) -> Tensor<4> {
        self.norm.forward_activated(self.conv.forward(x), Smooth::Silu)
    }
}
