//! Segments that are computed again, on a device.
use crate::{alone, assert_close, gpu, tensor, values};
use burn::module::Module;
use burn::tensor::{Tensor, Tolerance};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::functional as F;
use burn_memsave::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn_memsave::nn::{Dropout, DropoutConfig, RmsNorm, RmsNormConfig};

#[derive(Module, Debug)]
struct Block {
    norm: RmsNorm,
    attention: MultiHeadAttention,
}

impl Block {
    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.attention.forward(MhaInput::self_attn(self.norm.forward(x.clone()))).context;
        F::silu(x + F::relu(y))
    }
}

#[test]
fn gradients_are_those_without_segments() {
    let _alone = alone();
    for device in [gpu().autodiff(), gpu().autodiff().gradient_checkpointing()] {
        let attention = MultiHeadAttentionConfig::new(16, 2).with_dropout(0.0).init(&device);
        let block = Block { norm: RmsNormConfig::new(16).init(&device), attention };
        let run = |forward: &dyn Fn(&Block, Tensor<3>) -> Tensor<3>| {
            let x = tensor(values([2, 9, 16], 1), &device).require_grad();
            let y = forward(&block, forward(&block, x.clone()));
            let gradients = (y.clone() * y.clone()).sum().backward();
            let weight = block.attention.query.weight.grad(&gradients).expect("trainable");
            let gamma = block.norm.gamma.grad(&gradients).expect("trainable");
            let x = x.grad(&gradients).expect("tracked");
            [y.into_data(), x.into_data(), weight.into_data(), gamma.into_data()]
        };
        let plain = run(&Block::forward);
        let checked = run(&|block, x| checkpoint(block, x, Block::forward));
        for (what, (checked, plain)) in
            ["y", "dx", "dweight", "dgamma"].iter().zip(checked.iter().zip(&plain))
        {
            assert_close(what, checked, plain);
        }
    }
}

/// What is dropped the second time is what was the first time.
#[test]
fn draws_are_the_same() {
    let _alone = alone();
    let device = gpu().autodiff();
    let dropout = DropoutConfig::new(0.4).init();
    for rrelu in [false, true] {
        let x: Tensor<3> = tensor(values([3, 5, 7], 1), &device).require_grad();
        let forward = move |dropout: &Dropout, (x, rrelu): (Tensor<3>, bool)| {
            if rrelu { F::rrelu(x, 0.1, 0.3) } else { dropout.forward(x) }
        };
        let y = checkpoint(&dropout, (x.clone(), rrelu), forward);
        let dx = x.grad(&y.clone().sum().backward()).expect("tracked");
        (dx * x.inner()).into_data().assert_approx_eq::<f32>(&y.into_data(), Tolerance::default());
    }
}
