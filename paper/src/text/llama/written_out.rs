// What a language model uses instead of `SwiGlu` and `FusedLinearCrossEntropy`, written once. The module that includes this file chooses
// `nn`.
use burn::config::Config;
use nn::{activation::SiLU, loss::CrossEntropyLossConfig};

/// Configuration of [`SwiGlu`].
#[derive(Config, Debug)]
pub struct SwiGluConfig {
    d_input: usize,
    d_output: usize,
    #[config(default = true)]
    bias: bool,
}

impl SwiGluConfig {
    fn init(&self, device: &Device) -> SwiGlu {
        let linear = || LinearConfig::new(self.d_input, self.d_output).with_bias(self.bias).init(device);
        SwiGlu { gate: linear(), up: linear(), silu: SiLU::new() }
    }
}

/// `silu(gate(x)) * up(x)`
#[derive(Module, Debug)]
pub struct SwiGlu {
    gate: Linear,
    up: Linear,
    silu: SiLU,
}

impl SwiGlu {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        self.silu.forward(self.gate.forward(x.clone())) * self.up.forward(x)
    }
}

fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
    let logits = head.forward(x).flatten(0, 1);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, next.flatten(0, 1))
}

fn run_block(block: &Block, x: Tensor<3>, rotary: &RotaryEncoding) -> [Tensor<3>; 2] {
    block.forward(x, rotary)
}
