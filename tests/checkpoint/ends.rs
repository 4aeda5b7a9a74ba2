//! The last operation of a segment, whose output nobody reads when the segment is computed again.
use super::misuse::message;
use super::*;
use burn::module::Lora;
use burn::nn::PaddingConfig2d;
use burn::tensor::Int;
use burn_memsave::checkpoint::tiled;
use burn_memsave::functional as F;
use burn_memsave::nn as ours;
use ours::conv::{Conv2d, Conv2dConfig};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Runs after which the end is left out: it was compared as often.
const COMPARED: usize = 2;

#[derive(Module, Debug)]
struct FeedForward {
    up: ours::Linear,
    down: ours::Linear,
}

impl FeedForward {
    fn new(device: &Device) -> Self {
        let linear = |from, to| ours::LinearConfig::new(from, to).init(device);
        Self { up: linear(6, 12), down: linear(12, 6) }
    }

    fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.down.forward(F::silu(self.up.forward(x)))
    }
}

/// How often a segment had an output without elements.
static BLANK: AtomicUsize = AtomicUsize::new(0);

/// Counts outputs that are one number: those of these tests have no two elements alike.
fn count<const D: usize>(y: Tensor<D>) -> Tensor<D> {
    let data = y.to_data();
    let first = data.iter::<f32>().next().expect("an element");
    let is_blank = data.iter::<f32>().all(|element| element == first || element.is_nan() && first.is_nan());
    BLANK.fetch_add(usize::from(is_blank), Ordering::Relaxed);
    y
}

/// Runs it some times, with the gradients that it has without a checkpoint; the end is left out from the third time on, or never.
#[track_caller]
fn leaves_out<M: Module, const D: usize>(
    left_out: bool,
    module: &M,
    x: &Tensor<D>,
    plain: impl Fn(&M, Tensor<D>) -> Tensor<D>,
    checked: impl Fn(&M, Tensor<D>) -> Tensor<D>,
) {
    const RUNS: usize = 5;
    BLANK.store(0, Ordering::Relaxed);
    for _ in 0..RUNS {
        same(module, x.clone(), true, &plain, &checked);
    }
    let found = BLANK.load(Ordering::Relaxed);
    assert_eq!(found, if left_out { RUNS - COMPARED } else { 0 });
}

#[test]
fn products_are_left_out() {
    let _alone = alone();
    let device = Device::flex().autodiff(); // counts are of functions, not of devices
    let x = random([2, 5, 6], &device);
    let both = FeedForward::new(&device);
    let forward = |block: &FeedForward, x: Tensor<3>| count(block.forward(x));
    leaves_out(true, &both, &x, forward, |block, x| checkpoint(block, x, |block, x| count(block.forward(x))));
    let frozen = both.clone().freeze();
    leaves_out(true, &frozen, &x, forward, |block, x| {
        checkpoint(block, x, |block, x| count(block.forward(x)))
    });
    let adapted = both.clone().apply_lora(Lora::new(2, 4.0));
    leaves_out(true, &adapted, &x, forward, |block, x| {
        checkpoint(block, x, |block, x| count(block.forward(x)))
    });
    // Only `b` is tracked: `x a` is kept.
    let dense = |block: &FeedForward, x: Tensor<3>| count(block.down.forward(block.up.forward(x)));
    let half = FeedForward { up: frozen.up.clone(), down: adapted.down.clone() };
    leaves_out(true, &half, &x, dense, |block, x| {
        checkpoint(block, x, |block, x| count(block.down.forward(block.up.forward(x))))
    });
}

/// What a residual block adds at its end is added outside; what else comes out is older.
#[test]
fn summands_are_left_out() {
    type Parts = (Tensor<2>, Option<Tensor<2>>, Tensor<2>);
    fn parts(block: &FeedForward, x: Tensor<2>) -> Parts {
        let y = count(block.forward(x.clone()));
        (x.clone() * 2.0, Some(F::silu(x)), y)
    }
    fn older(block: &FeedForward, x: Tensor<2>) -> Parts {
        let (x, silu) = (x.clone() * 2.0, F::silu(x.clone()));
        (x.clone(), Some(silu), count(block.forward(x)))
    }
    let sum = |(x, silu, y): Parts| x + silu.expect("it was there") * y;
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (block, x) = (FeedForward::new(&device), random([5, 6], &device));
    leaves_out(
        true,
        &block,
        &x,
        |block, x| sum(older(block, x)),
        |block, x| sum(checkpoint(block, x, older)),
    );
    leaves_out(
        false,
        &block,
        &x,
        |block, x| sum(parts(block, x)),
        |block, x| sum(checkpoint(block, x, parts)),
    );
}

/// An output that is not tracked may be computed from it, as nothing that comes out of the second run but gradients is used.
#[test]
fn beside_it_may_be_what_is_not_tracked() {
    fn parts(block: &FeedForward, x: Tensor<2>) -> (Tensor<2>, Tensor<2>, Tensor<1, Int>) {
        let y = block.forward(x);
        (y.clone(), y.clone().detach().set_require_grad(false), y.argmax(1).squeeze_dim(1))
    }
    let _alone = alone();
    for device in devices() {
        let (block, x) = (FeedForward::new(&device), random([5, 6], &device));
        for _ in 0..2 * COMPARED {
            let plain = |block: &FeedForward, x| {
                let (y, detached, largest) = parts(block, x);
                y * detached + largest.float().unsqueeze_dim(1)
            };
            same(&block, x.clone(), true, plain, |block, x| {
                let (y, detached, largest) = checkpoint(block, x, parts);
                y * detached + largest.float().unsqueeze_dim(1)
            });
        }
    }
}

#[test]
fn convolutions_are_left_out() {
    #[derive(Module, Debug)]
    struct Convs {
        first: Conv2d,
        second: Conv2d,
    }
    impl Convs {
        fn forward(&self, x: Tensor<4>) -> Tensor<4> {
            self.second.forward(F::relu(self.first.forward(x)))
        }
    }
    let _alone = alone();
    let device = Device::flex().autodiff();
    let config = Conv2dConfig::new([3, 3], [3, 3]).with_padding(PaddingConfig2d::Same);
    let convs = Convs { first: config.init(&device), second: config.init(&device) };
    let x = random([2, 3, 7, 6], &device);
    leaves_out(
        true,
        &convs,
        &x,
        |convs, x| count(convs.forward(x)),
        |convs, x| checkpoint(convs, x, |convs, x| count(convs.forward(x))),
    );
}

/// Every tile is a run, of which only the first two are compared.
#[test]
fn tiles() {
    let _alone = alone();
    for device in devices() {
        let (block, x) = (FeedForward::new(&device), random([2, 10, 6], &device).require_grad());
        let gradient =
            |y: Tensor<3>| x.grad(&(y.clone() * y).sum().backward()).expect("it is tracked").into_data();
        for _ in 0..3 {
            let exact = gradient(block.forward(x.clone()));
            let of_tiles = gradient(tiled(&block, x.clone(), 1, 3, |block, x| block.forward(x)));
            of_tiles.assert_approx_eq::<f32>(&exact, burn::tensor::Tolerance::default());
        }
    }
}

/// What is computed from the output of a product reads it, or may do so.
#[test]
fn what_is_read_is_not_left_out() {
    fn squared(block: &FeedForward, x: Tensor<2>) -> Tensor<2> {
        let y = block.forward(x);
        count(y.clone() * y)
    }
    fn residual(block: &FeedForward, x: Tensor<2>) -> Tensor<2> {
        count(x.clone() + block.forward(x))
    }
    fn both(block: &FeedForward, x: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let y = count(block.forward(x));
        (y.clone(), y.exp())
    }
    fn activated(block: &FeedForward, x: Tensor<2>) -> Tensor<2> {
        count(F::sigmoid(block.forward(x)))
    }
    fn first(block: &FeedForward, x: Tensor<2>) -> Tensor<2> {
        let y = count(block.up.forward(x));
        drop(block.down.forward(y.clone()));
        y
    }
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (block, x) = (FeedForward::new(&device), random([5, 6], &device));
    leaves_out(false, &block, &x, squared, |block, x| checkpoint(block, x, squared));
    leaves_out(false, &block, &x, residual, |block, x| checkpoint(block, x, residual));
    leaves_out(false, &block, &x, activated, |block, x| checkpoint(block, x, activated));
    let sum = |(y, z): (Tensor<2>, Tensor<2>)| y * z;
    leaves_out(false, &block, &x, |block, x| sum(both(block, x)), |block, x| sum(checkpoint(block, x, both)));
    let square = |y: Tensor<2>| y.clone().matmul(y.transpose()).matmul(Tensor::ones([5, 6], &device));
    leaves_out(
        false,
        &block,
        &x,
        |block, x| square(first(block, x)),
        |block, x| square(checkpoint(block, x, first)),
    );
}

/// Segments in segments: the inner ones end with a product.
#[test]
fn nested() {
    fn inner(block: &FeedForward, x: Tensor<2>) -> Tensor<2> {
        checkpoint(block, x, |block, x| block.forward(x))
    }
    fn twice(block: &FeedForward, x: Tensor<2>) -> Tensor<2> {
        inner(block, inner(block, x))
    }
    fn before(block: &FeedForward, x: Tensor<2>) -> Tensor<2> {
        block.forward(inner(block, x))
    }
    let _alone = alone();
    for device in devices() {
        let (block, x) = (FeedForward::new(&device), random([5, 6], &device));
        let plain = |block: &FeedForward, x| block.forward(block.forward(x));
        for _ in 0..2 * COMPARED {
            same(&block, x.clone(), true, plain, |block, x| checkpoint(block, x, twice));
            same(&block, x.clone(), true, plain, |block, x| checkpoint(block, x, before));
        }
    }
}

/// A segment that goes on where it ended before.
#[test]
fn an_end_that_is_none() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = FeedForward::new(&device);
    let run = || {
        let x = random([5, 6], &device).require_grad();
        checkpoint(&block, x, |block, x| {
            let y = block.forward(x);
            // Twice per step: not in the forward pass of the third, but in its backward pass.
            if RUNS.fetch_add(1, Ordering::Relaxed) == 2 * COMPARED + SEARCHED + 1 { y * 2.0 } else { y }
        })
    };
    (0..COMPARED).for_each(|_| drop(run().sum().backward()));
    let message = message(run());
    assert!(message.contains("goes on after its last operation"), "{message}");
}

/// Runs of the first step, for captured tensors.
const SEARCHED: usize = 1;
