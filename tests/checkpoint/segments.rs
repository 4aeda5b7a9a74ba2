//! What a segment may be.
use super::*;
use burn::nn;
use burn::tensor::{Bool, DType, Int};
use burn_memsave::checkpoint::{TensorMapper, Tensors};
use burn_memsave::nn as ours;

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, burn::tensor::Distribution::Normal(0.0, 1.0), device)
}

#[derive(Module, Debug)]
struct Block {
    norm: ours::RmsNorm,
    up: ours::Linear,
    down: ours::Linear,
    dropout: ours::Dropout,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self {
            norm: ours::RmsNormConfig::new(6).init(device),
            up: ours::LinearConfig::new(6, 12).init(device),
            down: ours::LinearConfig::new(12, 6).init(device),
            dropout: ours::DropoutConfig::new(0.3).init(),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = ours::activation::Relu::new().forward(self.up.forward(self.norm.forward(x.clone())));
        x + self.down.forward(self.dropout.forward(hidden))
    }
}

/// Runs both ways from the same seed, and compares the output and all gradients, bit by bit.
#[track_caller]
fn same<M: Module>(
    module: &M,
    x: Tensor<2>,
    plain: impl Fn(&M, Tensor<2>) -> Tensor<2>,
    checked: impl Fn(&M, Tensor<2>) -> Tensor<2>,
) {
    let device = x.device();
    drop(plain(module, x.clone())); // initializes the parameters
    let run = |forward: &dyn Fn(&M, Tensor<2>) -> Tensor<2>| {
        let x = x.clone().detach().require_grad();
        device.seed(7);
        let y = forward(module, x.clone());
        let gradients = (y.clone() * y.clone()).sum().backward();
        let after = random([3], &device.clone().without_autodiff()).into_data();
        (y.into_data(), x.grad(&gradients).map(Tensor::into_data), gradients_of(module, &gradients), after)
    };
    assert_eq!(run(&plain), run(&checked));
}

#[test]
fn a_block() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(&device);
        let x = random([5, 6], &device);
        same(&block, x.clone(), Block::forward, |block, x| checkpoint(block, x, Block::forward));
        // Twice, and nested.
        let twice = |block: &Block, x| block.forward(block.forward(x));
        same(&block, x.clone(), twice, |block, x| {
            checkpoint(block, checkpoint(block, x, Block::forward), Block::forward)
        });
        same(&block, x.clone(), twice, |block, x| checkpoint(block, x, twice));
        same(&block, x.clone(), twice, |block, x| {
            checkpoint(block, x, |block, x| block.forward(checkpoint(block, x, Block::forward)))
        });
        // Parameters that are used outside, too, and frozen ones.
        same(
            &block,
            x.clone(),
            |block, x| block.up.forward(block.forward(x)),
            |block, x| block.up.forward(checkpoint(block, x, Block::forward)),
        );
        let frozen = Block { up: block.up.clone().freeze(), ..block.clone() };
        same(&frozen, x.clone(), Block::forward, |block, x| checkpoint(block, x, Block::forward));
        same(&block.freeze(), x, Block::forward, |block, x| checkpoint(block, x, Block::forward));
    }
}
