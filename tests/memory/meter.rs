//! Measurements that count only if they can be repeated. Other tests that count bytes use them, too.
use burn::tensor::{Device, Tensor};
use burn_memsave::measure::{LayerMeasurement, measure_layer};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

/// The graph's own records of one layer: the slack of comparisons with stock, as they are of absolute sizes (what stock
/// keeps is not always proportional to the batch). The two sides record different steps, of a few hundred bytes each.
pub const RECORDS: i64 = 2048;

/// What a thread works in beside its tensors, whatever their size: tiles of matrix products, planes with their padding. Of Burn's own
/// products as of ours, for different ones of them: the slack of a peak that does not grow faster with the batch than stock's.
pub const SCRATCH: i64 = 1 << 16;

/// Runs until two agree. The first also pays for what is initialized lazily; now and then, or every other time, a table of the graph
/// doubles, or the harness of the tests allocates for one that has ended.
const ATTEMPTS: usize = 8;

/// Memory is counted for the whole process: a test that measures holds this. So is the generator of random numbers: a test that holds
/// this has the same ones in every run.
static METER: Mutex<()> = Mutex::new(());

pub fn alone() -> MutexGuard<'static, ()> {
    static ONE_THREAD: Once = Once::new();
    let guard = METER.lock().unwrap_or_else(PoisonError::into_inner);
    // How much kernels take at once must not depend on who comes first.
    ONE_THREAD.call_once(|| {
        rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("nothing has run yet");
    });
    Device::flex().seed(24301);
    guard
}

/// With Burn's gradient checkpointing and without.
pub fn devices() -> [Device; 2] {
    [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()]
}

/// What two runs agree about. `device` is that of the graph.
pub fn measure<const D: usize, const O: usize>(
    device: &Device,
    input: impl Fn() -> Tensor<D>,
    forward: impl Fn(Tensor<D>) -> Tensor<O>,
) -> LayerMeasurement {
    let run = || {
        // Burn frees the graph of a dropped tensor in the next backward pass.
        drop(Tensor::<1>::ones([1], device).require_grad().backward());
        measure_layer(&input, &forward)
    };
    let mut seen: Vec<LayerMeasurement> = vec![];
    for _ in 0..ATTEMPTS {
        let next = run();
        if seen.iter().any(|earlier| (earlier.kept, earlier.peak) == (next.kept, next.peak)) {
            return next;
        }
        seen.push(next);
    }
    panic!("no two runs agree: {seen:?}");
}

pub fn bytes(measured: Option<u64>) -> i64 {
    measured.expect("the allocator counts") as i64
}
