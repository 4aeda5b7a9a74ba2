//! Tests the last operation of a segment, if the function says that its output is not read when the segment is recomputed.
use super::misuse::message;
use super::*;
use burn::module::Lora;
use burn::nn::PaddingConfig2d;
use burn::tensor::{Int, Tolerance};
use burn_memsave::checkpoint::{EarlyStop, checkpoint_tiled};
use burn_memsave::functional as F;
use burn_memsave::lora::Dora;
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

/// How often a segment had an output whose elements mean nothing.
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

/// `checkpoint` of a function whose output nobody reads.
fn unread<M: Module + 'static, const D: usize>(
    module: &M,
    x: Tensor<D>,
    forward: impl Fn(&M, Tensor<D>) -> Tensor<D> + Copy + Send + Sync + 'static,
) -> Tensor<D> {
    checkpoint(module, x, move |module, x| EarlyStop(count(forward(module, x)))).0
}

#[test]
fn products_are_left_out() {
    let _alone = alone();
    let device = Device::flex().autodiff(); // counts are of functions, not of devices
    let x = random([2, 5, 6], &device);
    let both = FeedForward::new(&device);
    let forward = |block: &FeedForward, x: Tensor<3>| block.forward(x);
    leaves_out(true, &both, &x, forward, |block, x| unread(block, x, |block, x| block.forward(x)));
    // The same parameters, in another function.
    let frozen = both.clone().freeze();
    leaves_out(true, &frozen, &x, forward, |block, x| unread(block, x, |block, x| block.forward(x)));
    let adapted = both.clone().apply_lora(Lora::new(2, 4.0));
    leaves_out(true, &adapted, &x, forward, |block, x| unread(block, x, |block, x| block.forward(x)));
    // Only `b` is tracked: `x a` is kept.
    let dense = |block: &FeedForward, x: Tensor<3>| block.down.forward(block.up.forward(x));
    let half = FeedForward { up: frozen.up.clone(), down: adapted.down.clone() };
    leaves_out(true, &half, &x, dense, move |block, x| unread(block, x, dense));
}

/// A module with other parameters may be another one: what it gives is compared, too.
#[test]
fn other_parameters_are_compared() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let forward = |block: &FeedForward, x: Tensor<2>| block.forward(x);
    for _ in 0..3 {
        let (block, x) = (FeedForward::new(&device), random([5, 6], &device));
        leaves_out(true, &block, &x, forward, move |block, x| unread(block, x, forward));
    }
}

/// The gradients of magnitudes read the product.
#[test]
fn with_magnitudes() {
    let _alone = alone();
    for device in devices() {
        let x = random([2, 5, 6], &device);
        let forward = |block: &FeedForward, x: Tensor<3>| block.forward(x);
        let block = FeedForward::new(&device).apply_reparameterization(Dora::new(Lora::new(2, 4.0)));
        for _ in 0..2 * COMPARED {
            same(&block, x.clone(), true, forward, |block, x| unread(block, x, forward));
        }
    }
}

/// What a residual block adds at its end is added outside; what else comes out is older.
#[test]
fn summands_are_left_out() {
    type Parts = (Tensor<2>, Option<Tensor<2>>, EarlyStop<2>);
    fn older(block: &FeedForward, x: Tensor<2>) -> Parts {
        let (twice, silu) = (x.clone() * 2.0, F::silu(x.clone()));
        (twice, Some(silu), EarlyStop(count(block.forward(x))))
    }
    fn newer(block: &FeedForward, x: Tensor<2>) -> Parts {
        let y = count(block.forward(x.clone()));
        (x.clone() * 2.0, Some(F::silu(x)), EarlyStop(y))
    }
    let sum = |(x, silu, EarlyStop(y)): Parts| x + silu.expect("it was there") * y;
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
        |block, x| sum(newer(block, x)),
        |block, x| sum(checkpoint(block, x, newer)),
    );
}

/// A function that does not say that it reads nothing may do what it likes.
#[test]
fn what_may_be_read_is_not_left_out() {
    fn chosen(block: &FeedForward, x: Tensor<2>) -> (Tensor<2>, Tensor<2>) {
        let (a, b) = (x.clone() * 2.0, F::silu(x.clone()));
        let y = count(block.forward(x));
        assert!(y.clone().abs().max().into_scalar::<f32>() > 0.0);
        (if y.clone().mean().into_scalar::<f32>() > 0.0 { a } else { b }, y)
    }
    fn selected(block: &FeedForward, x: Tensor<2>) -> (Tensor<2>, Tensor<2, Int>) {
        let y = count(block.forward(x));
        (y.clone(), y.greater_elem(0.0).argwhere())
    }
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = FeedForward::new(&device);
    for _ in 0..4 {
        let x = random([5, 6], &device);
        let sum = |(a, y): (Tensor<2>, Tensor<2>)| a * y;
        leaves_out(
            false,
            &block,
            &x,
            |block, x| sum(chosen(block, x)),
            |block, x| sum(checkpoint(block, x, chosen)),
        );
        leaves_out(
            false,
            &block,
            &x,
            |block, x| selected(block, x).0,
            |block, x| checkpoint(block, x, selected).0,
        );
    }
}

/// What is computed from the output of a product reads it, or may do so, whatever the function says.
#[test]
fn what_is_read_is_not_left_out() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (block, x) = (FeedForward::new(&device), random([5, 6], &device));
    let squared = |block: &FeedForward, x: Tensor<2>| {
        let y = block.forward(x);
        y.clone() * y
    };
    let residual = |block: &FeedForward, x: Tensor<2>| x.clone() + block.forward(x);
    let activated = |block: &FeedForward, x: Tensor<2>| F::sigmoid(block.forward(x));
    let first = |block: &FeedForward, x: Tensor<2>| {
        let y = block.up.forward(x);
        drop(block.down.forward(y.clone()));
        y.slice_dim(1, 0..6)
    };
    leaves_out(false, &block, &x, squared, move |block, x| unread(block, x, squared));
    leaves_out(false, &block, &x, residual, move |block, x| unread(block, x, residual));
    leaves_out(false, &block, &x, activated, move |block, x| unread(block, x, activated));
    leaves_out(false, &block, &x, first, move |block, x| unread(block, x, first));
}

/// An output that is not tracked may be computed from it if it has the same shape whatever the elements: nothing that comes out of
/// the second run but gradients is used.
#[test]
fn beside_it_may_be_what_is_not_tracked() {
    type Parts = (EarlyStop<2>, Tensor<2>, Tensor<1, Int>);
    fn parts(block: &FeedForward, x: Tensor<2>) -> Parts {
        let y = block.forward(x);
        let detached = y.clone().detach().set_require_grad(false);
        (EarlyStop(y.clone()), detached, y.argmax(1).squeeze_dim(1))
    }
    let whole = |(EarlyStop(y), detached, largest): Parts| y * detached + largest.float().unsqueeze_dim(1);
    let _alone = alone();
    for device in devices() {
        let (block, x) = (FeedForward::new(&device), random([5, 6], &device));
        for _ in 0..2 * COMPARED {
            same(
                &block,
                x.clone(),
                true,
                |block, x| whole(parts(block, x)),
                |block, x| whole(checkpoint(block, x, parts)),
            );
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
    let forward = |convs: &Convs, x: Tensor<4>| convs.second.forward(F::relu(convs.first.forward(x)));
    let _alone = alone();
    let device = Device::flex().autodiff();
    let config = Conv2dConfig::new([3, 3], [3, 3]).with_padding(PaddingConfig2d::Same);
    let convs = Convs { first: config.init(&device), second: config.init(&device) };
    let x = random([2, 3, 7, 6], &device);
    leaves_out(true, &convs, &x, forward, move |convs, x| unread(convs, x, forward));
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
            let of_tiles =
                gradient(checkpoint_tiled(&block, x.clone(), 1, 3, |block, x| EarlyStop(block.forward(x))));
            of_tiles.assert_approx_eq::<f32>(&exact, Tolerance::default());
        }
    }
}

/// Segments in segments: the inner ones end with a product.
#[test]
fn nested() {
    fn inner(block: &FeedForward, x: Tensor<2>) -> EarlyStop<2> {
        checkpoint(block, x, |block, x| EarlyStop(block.forward(x)))
    }
    fn twice(block: &FeedForward, x: Tensor<2>) -> EarlyStop<2> {
        inner(block, inner(block, x).0)
    }
    fn before(block: &FeedForward, x: Tensor<2>) -> EarlyStop<2> {
        EarlyStop(block.forward(inner(block, x).0))
    }
    let _alone = alone();
    for device in devices() {
        let (block, x) = (FeedForward::new(&device), random([5, 6], &device));
        let plain = |block: &FeedForward, x| block.forward(block.forward(x));
        for _ in 0..2 * COMPARED {
            same(&block, x.clone(), true, plain, |block, x| checkpoint(block, x, twice).0);
            same(&block, x.clone(), true, plain, |block, x| checkpoint(block, x, before).0);
        }
    }
}

/// A segment that goes on where it ended before.
#[test]
fn an_end_that_is_none() {
    /// Runs of the first step, for captured tensors.
    const SEARCHED: usize = 1;
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = FeedForward::new(&device);
    let run = || {
        let x = random([5, 6], &device).require_grad();
        let EarlyStop(y) = checkpoint(&block, x, |block, x| {
            let y = block.forward(x);
            // Twice per step: not in the forward pass of the third, but in its backward pass.
            EarlyStop(match RUNS.fetch_add(1, Ordering::Relaxed) == 2 * COMPARED + SEARCHED + 1 {
                true => y * 2.0,
                false => y,
            })
        });
        y
    };
    (0..COMPARED).for_each(|_| drop(run().sum().backward()));
    let message = message(run());
    assert!(message.contains("goes on after its last operation"), "{message}");
}
