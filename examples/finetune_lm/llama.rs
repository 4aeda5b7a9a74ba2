//! The Llama-style language model, with Burn's layers and with ours. Other examples and the paper use this file, too.
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

/// The size of a language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// The number of different tokens.
    pub vocabulary: usize,
    /// Features.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Features between the two layers of a feed-forward block.
    pub hidden: usize,
    /// Blocks of attention and feed-forward layers.
    pub blocks: usize,
    /// The longest sequence.
    pub length: usize,
}

/// A model that predicts the next token.
pub trait LanguageModel: Module {
    /// With random weights.
    fn new(size: &Size, device: &Device) -> Self;
    /// Logits `[batch, length, vocabulary]`.
    fn logits(&self, tokens: Tensor<2, Int>) -> Tensor<3>;
    /// The mean cross entropy of the tokens that follow.
    fn loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1>;
}

/// The model with Burn's layers.
pub mod stock {
    use burn::nn::{self, loss::CrossEntropyLossConfig};
    use burn::tensor::module::attention;
    use nn::activation::{SwiGlu, SwiGluConfig};
    include!("model.rs");

    fn run_block(block: &Block, x: Tensor<3>, rotary: &RotaryEncoding) -> [Tensor<3>; 2] {
        block.forward(x, rotary)
    }

    fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
        let logits = head.forward(x).flatten(0, 1);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, next.flatten(0, 1))
    }
}

/// The same file with these lines changed.
pub mod memsave {
    use burn_memsave::functional::attention;
    use burn_memsave::nn::{self, loss::FusedLinearCrossEntropyConfig};
    use nn::activation::{SwiGlu, SwiGluConfig};
    include!("model.rs");

    fn run_block(block: &Block, x: Tensor<3>, rotary: &RotaryEncoding) -> [Tensor<3>; 2] {
        block.forward(x, rotary)
    }

    fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
        FusedLinearCrossEntropyConfig::new().init(&x.device()).forward(head, x, next)
    }
}
