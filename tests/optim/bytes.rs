//! Memory of a step.
use super::*;
use burn::nn as stock;
use burn::optim::AdamWConfig;
use burn_memsave::measure::Scope;
use burn_memsave::nn::{Linear, LinearConfig};
use burn_memsave::optim::{AdamW8bitConfig, step_in_backward};
use burn_memsave::parallel::{ReplicaOptions, Replicas};

/// Matrices of a chain, in elements: the largest is neither the first nor the last.
const WIDTHS: [usize; 6] = [320, 256, 512, 384, 128, 256];

/// Of the steps that look, and of the activations: a row of every width, and what a product works in.
const SLACK: i64 = 3 * meter::RECORDS + meter::SCRATCH;

fn gradients() -> Vec<i64> {
    WIDTHS.windows(2).map(|pair| 4 * (pair[0] * pair[1]) as i64).collect()
}

trait Layer: Module {
    fn of(d_input: usize, d_output: usize, device: &Device) -> Self;
    fn run(&self, x: Tensor<2>) -> Tensor<2>;
}

macro_rules! layer {
    ($linear:ty, $config:ty) => {
        impl Layer for $linear {
            fn of(d_input: usize, d_output: usize, device: &Device) -> Self {
                <$config>::new(d_input, d_output).with_bias(false).init(device)
            }
            fn run(&self, x: Tensor<2>) -> Tensor<2> {
                self.forward(x)
            }
        }
    };
}
layer!(Linear, LinearConfig);
layer!(stock::Linear, stock::LinearConfig);

fn loss<L: Layer>(chain: &[L], x: &Tensor<2>) -> Tensor<1> {
    chain.iter().fold(x.clone(), |x, layer| layer.run(x).tanh()).mean()
}

/// The peak of a step beyond what lives before and after it, in bytes, when two runs agree.
fn peak<L: Layer>(is_within: bool, config: fn() -> ModuleOptimizer) -> i64 {
    let device = device();
    let x = random([1, WIDTHS[0]], &device);
    let chain = WIDTHS.windows(2).map(|pair| L::of(pair[0], pair[1], &device)).collect::<Vec<L>>();
    let mut optimizer = config();
    let mut chain = Some(chain);
    let mut step = || {
        let module = chain.take().expect("put back");
        let scope = Scope::start();
        let module = match is_within {
            true => {
                step_in_backward(module, &mut optimizer, 1e-3, |chain| loss(chain, &x)).expect("a step").0
            }
            false => {
                let gradients = GradientsParams::from_grads(loss(&module, &x).backward(), &module);
                optimizer.step(1e-3, module, gradients)
            }
        };
        chain = Some(module);
        scope.peak() as i64
    };
    step(); // weights and states begin to be
    let mut seen = vec![];
    for _ in 0..8 {
        let next = step();
        if seen.contains(&next) {
            return next;
        }
        seen.push(next);
    }
    panic!("no two runs agree: {seen:?}")
}

/// All gradients but the largest are saved, to the bytes of the graph's records.
#[test]
fn gradients_never_coexist() {
    let _alone = alone();
    let config = || AdamW8bitConfig::new().init();
    let (all, largest) = (gradients().iter().sum::<i64>(), *gradients().iter().max().expect("some"));
    let [after, within] = [false, true].map(|is_within| peak::<Linear>(is_within, config));
    assert!((all..all + SLACK).contains(&after), "{after}, gradients {all}");
    assert!((largest..largest + SLACK).contains(&within), "{within}, largest {largest}");
    assert!((after - within - (all - largest)).abs() <= SLACK, "{after} - {within}, not {}", all - largest);
}

/// Replicas that divide their optimizer send each gradient to its owner as soon as it is complete. Here all are in one memory: then no more
/// exists at once than the sums so far, the gradients of one parameter, and their sum.
#[test]
fn gradients_of_replicas_are_summed_as_they_come() {
    const REPLICAS: usize = 4;
    let _alone = alone();
    let device = device();
    let chain: Vec<Linear> = WIDTHS.windows(2).map(|pair| Layer::of(pair[0], pair[1], &device)).collect();
    let x = random([1, WIDTHS[0]], &device);
    let peak = |options: &ReplicaOptions| {
        let replicas =
            Replicas::with_options(&chain, vec![device.clone(); REPLICAS], options).expect("replicas");
        let mut seen = vec![];
        for _ in 0..8 {
            let scope = Scope::start();
            let parts = vec![(x.clone(), 1); REPLICAS];
            let gradients = replicas.backward(parts, |chain, x| loss(chain, &x)).expect("parts");
            let next = scope.peak() as i64;
            drop(gradients);
            if seen.contains(&next) {
                return next;
            }
            seen.push(next);
        }
        panic!("no two runs agree: {seen:?}")
    };
    let (of_one, replicas) = (gradients(), REPLICAS as i64);
    let after = |at: usize| of_one[at + 1..].iter().sum::<i64>();
    let most = (0..of_one.len()).map(|at| after(at) + (replicas + 1) * of_one[at]).max().expect("some");
    let [plain, divided] =
        [ReplicaOptions::new(), ReplicaOptions::new().with_sharded_optimizer()].map(|options| peak(&options));
    let all = replicas * of_one.iter().sum::<i64>();
    assert!(plain >= all, "{plain}, gradients {all}");
    assert!(divided <= most + replicas * SLACK && most < all, "{divided}, not above {most}, of {all}");
}

/// With Burn's layers likewise, one above the other as they are here; their gradients are views that the step has to copy.
#[test]
fn stock_layers_free_their_gradients() {
    let _alone = alone();
    let config = || AdamW8bitConfig::new().init();
    let [after, within] = [false, true].map(|is_within| peak::<stock::Linear>(is_within, config));
    let (all, largest) = (gradients().iter().sum::<i64>(), *gradients().iter().max().expect("some"));
    assert!((2 * largest..2 * largest + SLACK).contains(&within), "{within}, largest {largest}");
    assert!(
        (all + gradients()[0]..all + gradients()[0] + SLACK).contains(&after),
        "{after}, gradients {all}"
    );
}

/// Our fused step is in place; Burn's AdamW makes temporaries of the largest parameter.
#[test]
fn steps_are_in_place() {
    let _alone = alone();
    let [burn, ours] = [
        peak::<Linear>(false, || AdamWConfig::new().init()),
        peak::<Linear>(false, || AdamW8bitConfig::new().init()),
    ];
    assert!(ours < burn, "{ours}, Burn's {burn}");
}
