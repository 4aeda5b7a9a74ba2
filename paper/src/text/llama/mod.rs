//! Llama-style language models: those of the example `finetune_lm`, the same with the feed-forward block and the loss written out, and
//! variants with checkpointed or planned blocks.
#[path = "../../../../examples/finetune_lm/llama.rs"]
mod example;

pub use example::{LanguageModel, Size, memsave, stock};

/// The model of Burn's layers as a user may write it: `silu(gate) * up` by hand, and the loss of all logits.
pub mod written_out {
    use burn::nn;
    use burn::tensor::module::attention;
    include!("written_out.rs");
    include!("../../../../examples/finetune_lm/model.rs");
}

/// The same files with the `use` lines changed, and nothing else.
pub mod swapped {
    use burn_memsave::functional::attention;
    use burn_memsave::nn;
    include!("written_out.rs");
    include!("../../../../examples/finetune_lm/model.rs");

    impl Llama {
        /// The loss, with logits that are computed in chunks.
        pub fn head_and_loss(&self, tokens: Tensor<2, Int>, next: Tensor<2, Int>) -> Tensor<1> {
            let x = self.hidden(tokens);
            nn::loss::FusedLinearCrossEntropyConfig::new().init(&x.device()).forward(&self.head, x, next)
        }
    }
}

/// The model of our layers, with blocks that are recomputed in the backward pass.
pub mod checkpointed {
    use burn_memsave::checkpoint::{EarlyStop, checkpoint};
    use burn_memsave::functional::attention;
    use burn_memsave::nn::{self, loss::FusedLinearCrossEntropyConfig};
    use nn::activation::{SwiGlu, SwiGluConfig};
    include!("../../../../examples/finetune_lm/model.rs");

    fn run_block(block: &Block, x: Tensor<3>, rotary: &RotaryEncoding) -> [Tensor<3>; 2] {
        let (x, EarlyStop(y)) = checkpoint(&(block.clone(), rotary.clone()), x, |(block, rotary), x| {
            let [x, y] = block.forward(x, rotary);
            (x, EarlyStop(y))
        });
        [x, y]
    }

    fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
        FusedLinearCrossEntropyConfig::new().init(&x.device()).forward(head, x, next)
    }
}

/// The model of our layers, with blocks that a plan may recompute or keep in fewer bits.
pub mod planned {
    use burn_memsave::checkpoint::EarlyStop;
    use burn_memsave::functional::attention;
    use burn_memsave::nn::{self, loss::FusedLinearCrossEntropyConfig};
    use burn_memsave::plan;
    use nn::activation::{SwiGlu, SwiGluConfig};
    include!("../../../../examples/finetune_lm/model.rs");

    fn run_block(block: &Block, x: Tensor<3>, rotary: &RotaryEncoding) -> [Tensor<3>; 2] {
        let (x, EarlyStop(y)) = plan::block(&(block.clone(), rotary.clone()), x, |(block, rotary), x| {
            let [x, y] = block.forward(x, rotary);
            (x, EarlyStop(y))
        });
        [x, y]
    }

    fn next_token_loss(head: &Linear, x: Tensor<3>, next: Tensor<2, Int>) -> Tensor<1> {
        FusedLinearCrossEntropyConfig::new().init(&x.device()).forward(head, x, next)
    }
}
