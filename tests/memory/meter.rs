//! Measures bytes, and accepts only measurements that can be repeated. Other tests that count bytes also use this.
use burn::tensor::{Device, Tensor};
use burn_memsave::measure::{LayerMeasurement, TrackingAllocator, measure_layer};
use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak};
use std::time::Duration;

/// The graph's own records of one layer: the slack of comparisons with stock, as they are of absolute sizes (what stock
/// keeps is not always proportional to the batch). The two sides record different steps, of a few hundred bytes each.
pub const RECORDS: i64 = 2048;

/// What a thread works in beside its tensors, whatever their size: tiles of matrix products, planes with their padding. Of Burn's own
/// products as of ours, for different ones of them: the slack of a peak that does not grow faster with the batch than stock's.
pub const SCRATCH: i64 = 1 << 16;

/// Runs until two agree. The first also pays for what is initialized lazily; now and then, or every other time, a table of the graph
/// doubles, or the harness of the tests allocates for one that has ended. After many other graphs, one of 281,000 bytes has needed 112 bytes
/// less in each of eight runs, and then the same: why is not known.
const ATTEMPTS: usize = 32;

/// Memory is counted for the whole process: every test of a program that measures holds this, also one that measures nothing but allocates
/// while others measure. So is the generator of random numbers: a test that holds this has the same ones in every run. In it is the
/// [`TURN`] of the thread that held it last.
static METER: Mutex<Weak<()>> = Mutex::new(Weak::new());

thread_local! {
    /// Alive from when this thread got the meter until it asks for it again or ends. At its end it is dropped after the thread-local buffers
    /// of kernels, since these are registered later.
    static TURN: RefCell<Option<Arc<()>>> = const { RefCell::new(None) };
}

/// How long nothing changes before a test begins.
const QUIET: Duration = Duration::from_millis(5);

pub fn alone() -> MutexGuard<'static, Weak<()>> {
    static ONE_THREAD: Once = Once::new();
    drop(TURN.take());
    let mut guard = METER.lock().unwrap_or_else(PoisonError::into_inner);
    // A thread that ends frees what it had for itself after it let go of the meter.
    while guard.strong_count() > 0 {
        std::thread::sleep(QUIET);
    }
    let turn = Arc::new(());
    *guard = Arc::downgrade(&turn);
    TURN.set(Some(turn));
    // How much kernels take at once must not depend on who comes first.
    ONE_THREAD.call_once(|| {
        rayon::ThreadPoolBuilder::new().num_threads(1).build_global().expect("nothing has run yet");
    });
    #[cfg(feature = "flex")]
    Device::flex().seed(24301);
    // Other threads, such as that of the harness, come to rest.
    let mut live = TrackingAllocator::live();
    loop {
        std::thread::sleep(QUIET);
        let now = TrackingAllocator::live();
        if now == live {
            return guard;
        }
        live = now;
    }
}

/// With Burn's gradient checkpointing and without.
#[cfg(feature = "flex")]
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
