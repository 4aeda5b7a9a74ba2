//! Tests steps that run at the same time in one thread pool. A thread that waits for a kernel may run another step meanwhile, which must
//! not see the scopes that the first one is in.
#![cfg(all(feature = "flex", feature = "rayon"))]
use burn::tensor::{Device, Distribution, Tensor, TensorData};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::functional as F;
use burn_memsave::measure::{TrackingAllocator, ledger};
use burn_memsave::nn::{Linear, LinearConfig};
use burn_memsave::parallel::apart;
use burn_memsave::plan::{Plan, ProfileOptions, block, profile};
use burn_memsave::saved::SavedPolicy;
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What profiles count with.
#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

const STEPS: usize = 2000;
const THREADS: usize = 4;
/// Kernels that divide their work among threads.
const ROWS: usize = 1024;
const WIDTH: usize = 128;

thread_local! {
    /// Steps that this thread is within.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// What a step computes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    /// Keeps tensors in half as many bits.
    Half,
    /// In a checkpointed segment, with random numbers.
    Segment,
    /// Lists what it keeps.
    Listed,
    /// Within a plan for its one block.
    Planned,
}

struct Steps {
    layer: Linear,
    x: Tensor<2>,
    plan: Plan,
}

impl Steps {
    fn new() -> Self {
        let device = Device::flex().autodiff();
        device.seed(7);
        let layer = LinearConfig::new(WIDTH, WIDTH).init(&device);
        layer.weight.val(); // initializes it
        let x = Tensor::<2>::random([ROWS, WIDTH], Distribution::Normal(0.0, 1.0), &device);
        let forward = |layer: &Linear, x: Tensor<2>| Self::block(layer, x).sum();
        let profile = profile(&layer, x.clone(), &ProfileOptions::new(), forward).unwrap();
        let plan = profile.plan(profile.most()).unwrap();
        Self { layer, x, plan }
    }

    fn block(layer: &Linear, x: Tensor<2>) -> Tensor<2> {
        block(layer, x, |layer, x| F::gelu(layer.forward(x)))
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        F::linear(F::silu(Self::block(&self.layer, x)), self.layer.weight.val(), None)
    }

    /// The gradient of the weight; of a segment, that of an input of ones, which is what its dropout leaves of them.
    fn run(&self, kind: Kind) -> TensorData {
        let of_weight = |y: Tensor<2>| self.layer.weight.grad(&y.sum().backward()).unwrap().into_data();
        match kind {
            Kind::Plain => of_weight(self.forward(self.x.clone())),
            Kind::Half => of_weight(SavedPolicy::Half.scope(|| self.forward(self.x.clone()))),
            Kind::Segment => {
                let ones = self.x.ones_like().require_grad();
                let y = checkpoint(&self.layer, ones.clone(), |layer, x| {
                    let _ = layer.forward(x.clone()); // a kernel within the segment
                    F::dropout(x, 0.5)
                });
                let gradients = y.clone().sum().backward();
                let difference = (y.inner() - ones.grad(&gradients).unwrap()).abs().max();
                difference.into_data()
            }
            Kind::Planned => of_weight(self.plan.scope(|| Self::block(&self.layer, self.x.clone()))),
            Kind::Listed => {
                let forward = |this: &Linear, x: Tensor<2>| F::gelu(this.forward(x)).sum();
                let (_, ledger) = ledger(&self.layer, self.x.clone(), forward);
                TensorData::from([ledger.rows.len() as i32])
            }
        }
    }
}

#[test]
fn steps_of_a_pool_see_nothing_of_one_another() {
    const KINDS: [Kind; 5] = [Kind::Plain, Kind::Half, Kind::Segment, Kind::Listed, Kind::Planned];
    let steps = Steps::new();
    let deepest = AtomicUsize::new(0);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(THREADS).stack_size(1 << 28).build().unwrap();
    // By as many threads: what is added up by each depends on that.
    let alone = KINDS.map(|kind| pool.install(|| steps.run(kind)));
    assert_ne!(alone[0], alone[1], "half of the bits are rounded");
    pool.scope(|scope| {
        for number in 0..STEPS {
            let (steps, alone, deepest) = (&steps, &alone, &deepest);
            scope.spawn(move |_| {
                let depth = DEPTH.get() + 1;
                DEPTH.set(depth);
                deepest.fetch_max(depth, Ordering::Relaxed);
                let kind = KINDS[number % KINDS.len()];
                let found = apart(|| steps.run(kind));
                assert_eq!(
                    found,
                    alone[number % KINDS.len()],
                    "step {number}, {kind:?}, within {depth} steps"
                );
                DEPTH.set(depth - 1);
            });
        }
    });
    assert!(deepest.into_inner() > 1, "no step ran within another");
}
