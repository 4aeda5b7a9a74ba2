//! Steps that fail at any moment leave parameters, running statistics and checkpoints as they were, and nobody waits for ever.
use super::shards::{adam, difference, sharded, tensors};
use super::synchronized::{Item, Net, batch, divided, everything, synchronized};
use super::{device, devices};
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::Tensor;
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::nn::LinearConfig;
use burn_memsave::parallel::{ParallelError, ReplicaOptions, Replicas};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The moments of a step so far, and the one at which it fails.
static MOMENTS: AtomicUsize = AtomicUsize::new(0);
static FAILS_AT: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Tests that count moments run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn moment() {
    let moment = MOMENTS.fetch_add(1, SeqCst);
    assert!(moment != FAILS_AT.load(SeqCst), "moment {moment}");
}

/// Runs a step that fails at a moment; returns how many moments there were.
fn failing_at<R>(moment: usize, step: impl FnOnce() -> R) -> (R, usize) {
    MOMENTS.store(0, SeqCst);
    FAILS_AT.store(moment, SeqCst);
    let result = step();
    FAILS_AT.store(usize::MAX, SeqCst);
    (result, MOMENTS.load(SeqCst))
}

/// A loss with moments before and after the parts of checkpointed blocks, in the forward and in the backward pass.
fn loss(model: &Net, (x, target): Item) -> Tensor<1> {
    moment();
    let x = model.norm.forward(model.stem.forward(x));
    let x = model.blocks.iter().fold(x, |x, block| {
        checkpoint(block, x, |block, x| {
            moment();
            let x = block.forward(x);
            moment();
            x
        })
    });
    let features = x.mean_dim(3).mean_dim(2).flatten::<2>(1, 3);
    moment();
    (model.head.forward(features) - target).powf_scalar(2.0).mean()
}

const PARTS: [usize; 2] = [3, 2];

/// A state of training that was written before a step failed.
struct Checkpoint {
    model: Net,
    optimizer: burn::tensor::Bytes,
}

impl Checkpoint {
    fn of(replicas: &Replicas<Net>, optimizer: &ModuleOptimizer) -> Self {
        // Through `valid`, as a record has the values alone.
        let model = replicas.module().valid().train();
        Self { model, optimizer: optimizer.into_bytes().expect("a record") }
    }
}

/// Trains one step, and returns all values.
fn step(mut replicas: Replicas<Net>, optimizer: &mut ModuleOptimizer, batch: &Item) -> Vec<Vec<f32>> {
    let count = replicas.devices().len();
    let items: Vec<usize> = (0..count).map(|part| if part == 0 { 6 - count } else { 1 }).collect();
    let parts = divided(batch, &items, &devices(count));
    let (_, gradients) = replicas.backward(parts, loss).expect("nothing fails");
    replicas.update(|model| optimizer.step(1e-2, model, gradients));
    everything(replicas.module())
}

/// A replica panics at every moment of a step: an error names it, nothing has changed, and the step can be run again, or on fewer or more
/// devices from a checkpoint.
#[test]
fn steps_that_fail_change_nothing() {
    let _alone = alone();
    let batch = batch(5);
    for options in [synchronized(), sharded().with_synchronized_batch_norm()] {
        let mut optimizer = adam();
        let mut replicas = Replicas::with_options(&Net::new(true), devices(2), &options).expect("replicas");
        let parts = || divided(&batch, &PARTS, &devices(2));
        // The first step also searches segments for captured tensors.
        let (_, gradients) = replicas.backward(parts(), loss).expect("nothing fails");
        replicas.update(|model| optimizer.step(1e-2, model, gradients));
        let (first, moments) = failing_at(usize::MAX, || replicas.backward(parts(), loss));
        assert!(moments >= 20, "{moments}");
        let (_, gradients) = first.expect("nothing fails");
        replicas.update(|model| optimizer.step(1e-2, model, gradients));

        let before = everything(replicas.module());
        let checkpoint = Checkpoint::of(&replicas, &optimizer);
        for moment in 0..moments {
            let (failed, _) = failing_at(moment, || replicas.backward(parts(), loss));
            let failed = failed.expect_err("a replica panics");
            let message = format!("moment {moment}");
            assert!(
                matches!(&failed, ParallelError::Replica { message: of, .. } if *of == message),
                "{failed}"
            );
            assert_eq!(everything(replicas.module()), before, "{message}");
        }
        let mut again = adam().from_bytes(checkpoint.optimizer.clone()).expect("a whole record");
        let expected = step(replicas, &mut again, &batch);
        for count in [1, 2, 3] {
            let resumed =
                Replicas::with_options(&checkpoint.model, devices(count), &options).expect("replicas");
            let mut optimizer = adam().from_bytes(checkpoint.optimizer.clone()).expect("a whole record");
            let found = difference(&step(resumed, &mut optimizer, &batch), &expected);
            assert!(found < 1e-5, "on {count} devices: {found}");
        }
    }
}

/// Without batch norms, replicas run one after the other. A panic then passes through `backward`, and nothing has changed.
#[test]
fn panics_pass_and_change_nothing() {
    let _alone = alone();
    let batch = batch(5);
    let model = Net::new(true).with_frozen_norms();
    for options in [ReplicaOptions::new(), sharded()] {
        let replicas = Replicas::with_options(&model, devices(2), &options).expect("replicas");
        let parts = || divided(&batch, &PARTS, &devices(2));
        let step = || replicas.backward(parts(), loss).expect("valid parts").1;
        let values = |gradients: &GradientsParams| tensors(&model, Some(gradients));
        let expected = values(&step());
        let (_, moments) = failing_at(usize::MAX, step);
        assert!(moments >= 20, "{moments}");
        let before = everything(replicas.module());
        for moment in 0..moments {
            let (failed, _) = failing_at(moment, || catch_unwind(AssertUnwindSafe(step)));
            assert!(failed.is_err(), "moment {moment}");
            assert_eq!(everything(replicas.module()), before, "moment {moment}");
        }
        assert_eq!(values(&step()), expected);
    }
}

/// An update that panics takes the replicas with it, and says so.
#[test]
fn replicas_are_lost_when_an_update_panics() {
    let mut replicas = Replicas::new(&LinearConfig::new(2, 2).init(&device()), devices(2)).expect("replicas");
    assert!(catch_unwind(AssertUnwindSafe(|| replicas.update(|_| panic!("of the optimizer")))).is_err());
    let part = (Tensor::<2>::ones([1, 2], &device()), 1);
    let lost = replicas.backward([part], |model, x| model.forward(x).sum()).expect_err("no module");
    assert!(matches!(lost, ParallelError::Lost), "{lost}");
}
