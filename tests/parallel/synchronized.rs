//! Batch norms with the statistics of the whole batch, over all replicas.
use super::shards::{adam, difference, mixed, sharded, tensors};
use super::{device, devices};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::nn::conv::{Conv2d, Conv2dConfig};
use burn_memsave::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, PaddingConfig2d, Relu};
use burn_memsave::optim::InBackwardError;
use burn_memsave::parallel::{ParallelError, ReplicaOptions, Replicas};
use burn_memsave::saved::SavedPolicy;
use std::process::Command;
use std::time::Duration;

pub fn synchronized() -> ReplicaOptions {
    ReplicaOptions::new().with_synchronized_batch_norm()
}

#[derive(Module, Debug)]
pub struct Block {
    convs: Vec<Conv2d>,
    norms: Vec<BatchNorm>,
    relu: Relu,
}

impl Block {
    fn new(channels: usize, device: &Device) -> Self {
        let conv = || {
            Conv2dConfig::new([channels, channels], [3, 3])
                .with_padding(PaddingConfig2d::Explicit(1, 1, 1, 1))
                .with_bias(false)
        };
        Self {
            convs: vec![conv().init(device), conv().init(device)],
            norms: vec![
                BatchNormConfig::new(channels).init(device),
                BatchNormConfig::new(channels).init(device),
            ],
            relu: Relu::new(),
        }
    }

    pub fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        let y = self.relu.forward(self.norms[0].forward(self.convs[0].forward(x.clone())));
        self.relu.forward(self.norms[1].forward(self.convs[1].forward(y)) + x)
    }
}

/// A residual network for small images, whose blocks may be checkpointed.
#[derive(Module, Debug)]
pub struct Net {
    pub stem: Conv2d,
    pub norm: BatchNorm,
    pub blocks: Vec<Block>,
    pub head: Linear,
    pub checkpointed: bool,
}

pub type Item = (Tensor<4>, Tensor<2>);

impl Net {
    pub fn new(checkpointed: bool) -> Self {
        let device = device();
        device.seed(7);
        Self {
            stem: Conv2dConfig::new([2, 4], [3, 3]).init(&device),
            norm: BatchNormConfig::new(4).init(&device),
            blocks: vec![Block::new(4, &device), Block::new(4, &device)],
            head: LinearConfig::new(4, 3).init(&device),
            checkpointed,
        }
    }

    pub fn with_frozen_norms(mut self) -> Self {
        self.norm = self.norm.freeze();
        for block in &mut self.blocks {
            block.norms = std::mem::take(&mut block.norms).freeze();
        }
        self
    }

    pub fn loss(&self, (x, target): Item) -> Tensor<1> {
        let x = self.norm.forward(self.stem.forward(x));
        let x = self.blocks.iter().fold(x, |x, block| match self.checkpointed {
            true => checkpoint(block, x, Block::forward),
            false => block.forward(x),
        });
        let features = x.mean_dim(3).mean_dim(2).flatten::<2>(1, 3);
        (self.head.forward(features) - target).powf_scalar(2.0).mean()
    }
}

/// A batch of so many items.
pub fn batch(items: usize) -> Item {
    let device = device();
    let x = Tensor::random([items, 2, 8, 8], Distribution::Normal(0.5, 2.0), &device);
    let target = Tensor::random([items, 3], Distribution::Normal(0.0, 1.0), &device);
    (x, target)
}

/// Its parts, on these devices.
pub fn divided((x, target): &Item, items: &[usize], devices: &[Device]) -> Vec<(Item, usize)> {
    let mut start = 0;
    let part = |(&items, device): (&usize, &Device)| {
        let rows = start..start + items;
        start += items;
        let rows = if items == 0 { 0..1 } else { rows }; // not used
        let x = x.clone().slice(rows.clone()).to_device(device);
        ((x, target.clone().slice(rows).to_device(device)), items)
    };
    items.iter().zip(devices).map(part).collect()
}

/// All parameters and running statistics, these with all updates.
pub fn everything(module: &impl Module) -> Vec<Vec<f32>> {
    struct All(Vec<Vec<f32>>);
    impl ModuleVisitor for All {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.base().into_data().convert::<f32>().iter().collect());
        }
    }
    let mut all = All(vec![]);
    module.valid().visit(&mut all);
    all.0
}

/// Trains on several devices and on one, with whole batches, and compares losses, gradients, values and running statistics.
fn train(devices: &[Device], parts: &[&[usize]], options: &ReplicaOptions, checkpointed: bool, steps: usize) {
    let mut one = Net::new(checkpointed);
    let mut replicas = Replicas::with_options(&one, devices.to_vec(), options).expect("replicas");
    let (mut of_one, mut of_replicas) = (adam(), adam());
    for step in 0..steps {
        let parts = parts[step % parts.len()];
        let batch = batch(parts.iter().sum());
        let loss = one.loss(batch.clone());
        let whole = GradientsParams::from_grads(loss.clone().backward(), &one);
        let (mean, gradients) =
            replicas.backward(divided(&batch, parts, devices), Net::loss).expect("valid parts");
        let [loss, mean] = [loss, mean].map(|loss| loss.into_scalar::<f32>());
        assert!((loss - mean).abs() < 1e-5 * loss.max(1.0), "step {step}: {loss}, {mean}");
        let found = difference(&tensors(&one, Some(&gradients)), &tensors(&one, Some(&whole)));
        assert!(found < 1e-5, "gradients of step {step}: {found}");
        one = of_one.step(1e-2, one, whole);
        replicas.update(|model| of_replicas.step(1e-2, model, gradients));
        replicas.sync().expect("nothing can fail here");
    }
    let found = difference(&everything(replicas.module()), &everything(&one));
    assert!(found < 1e-5, "values and running statistics: {found}");
}

#[test]
fn twenty_steps_of_a_residual_network_equal_one_device() {
    let of_two: [&[usize]; 3] = [&[3, 3], &[5, 1], &[0, 4]];
    let of_three: [&[usize]; 3] = [&[2, 2, 2], &[4, 1, 1], &[2, 0, 3]];
    let of_four: [&[usize]; 3] = [&[2, 2, 2, 2], &[1, 4, 1, 2], &[3, 3]];
    for options in [synchronized(), sharded().with_synchronized_batch_norm()] {
        train(&mixed(2), &of_two, &options, false, 20);
        train(&mixed(3), &of_three, &options, false, 20);
        train(&mixed(4), &of_four, &options, false, 20);
    }
}

/// Recomputed segments exchange statistics again.
#[test]
fn checkpointed_segments_synchronize() {
    for options in [synchronized(), sharded().with_synchronized_batch_norm()] {
        train(&mixed(3), &[&[2, 3, 1], &[4, 0, 2]], &options, true, 5);
    }
}

/// No replica waits on a thread that another one needs.
#[test]
fn a_pool_of_one_thread_is_enough() {
    let this = std::env::current_exe().expect("a test");
    for test in ["twenty_steps_of_a_residual_network_equal_one_device", "checkpointed_segments_synchronize"] {
        let name = format!("synchronized::{test}");
        let run = Command::new(&this)
            .args(["--exact", &name])
            .env("RAYON_NUM_THREADS", "1")
            .output()
            .expect("runs");
        let output = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && output.contains("1 passed"), "{output}");
    }
}

/// The policy of the calling thread applies: rounded inputs change gradients, but not by much.
#[test]
fn policies_apply_to_replicas() {
    let model = Net::new(false);
    let replicas = Replicas::with_options(&model, devices(2), &synchronized()).expect("replicas");
    let batch = batch(128); // small tensors are not rounded
    let parts = || divided(&batch, &[64, 64], &devices(2));
    let (_, exact) = replicas.backward(parts(), Net::loss).expect("parts");
    let (_, rounded) = SavedPolicy::Half.scope(|| replicas.backward(parts(), Net::loss)).expect("parts");
    let found = difference(&tensors(&model, Some(&rounded)), &tensors(&model, Some(&exact)));
    assert!(found > 1e-6 && found < 0.05, "{found}");
}

#[test]
fn what_cannot_be_synchronized_is_refused() {
    let batch = batch(4);
    let replicas = Replicas::with_options(&Net::new(false), devices(2), &synchronized()).expect("replicas");
    let before = everything(replicas.module());
    let parts = || divided(&batch, &[3, 1], &devices(2));
    // One replica leaves a batch norm out.
    let skips = |model: &Net, (x, target): Item| match x.dims()[0] {
        1 => {
            (model.head.forward(model.stem.forward(x).mean_dim(3).mean_dim(2).flatten(1, 3)) - target).mean()
        }
        _ => model.loss((x, target)),
    };
    let refused = replicas.backward(parts(), skips).expect_err("another network");
    assert!(matches!(&refused, ParallelError::Differ { index: 0, others } if others == &[1]), "{refused}");
    // Also on replicas that own their gradients; the loss that needs no gradient is named, not the replica that waits.
    let options = sharded().with_synchronized_batch_norm();
    let owned = Replicas::with_options(&Net::new(false), devices(2), &options).expect("replicas");
    let untracked = |model: &Net, item: Item| match item.0.dims()[0] {
        1 => model.loss(item).detach(),
        _ => model.loss(item),
    };
    let refused = owned.backward(parts(), untracked).expect_err("no gradient");
    let expected = |refused: &ParallelError| {
        matches!(refused, ParallelError::Loss { part: 1, error: InBackwardError::Untracked })
    };
    assert!(expected(&refused), "{refused}");

    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().expect("a pool");
    let refused =
        pool.install(|| replicas.backward(parts(), Net::loss).map(drop)).expect_err("a thread of a pool");
    assert!(matches!(refused, ParallelError::ThreadOfPool), "{refused}");
    assert_eq!(everything(replicas.module()), before);

    let stock = (burn::nn::BatchNormConfig::new(2).init(&device()), LinearConfig::new(2, 2).init(&device()));
    let replicas = Replicas::with_options(&stock, devices(2), &synchronized()).expect("found when it runs");
    let x = || (Tensor::<2>::random([3, 2], Distribution::Default, &device()), 3);
    type Stock = (burn::nn::BatchNorm, Linear);
    let refused =
        replicas.backward([x(), x()], |(norm, linear): &Stock, x| linear.forward(norm.forward(x)).sum());
    let refused = refused.expect_err("Burn's");
    assert!(matches!(&refused, ParallelError::NotSynchronized { path } if path == "0"), "{refused}");
}

/// A replica that takes too long is named.
#[test]
fn slow_replicas_are_named() {
    let options = synchronized().with_timeout(Duration::from_millis(200));
    let replicas = Replicas::with_options(&Net::new(false), devices(3), &options).expect("replicas");
    let batch = batch(4);
    let slow = |model: &Net, item: Item| {
        if item.0.dims()[0] == 2 {
            std::thread::sleep(Duration::from_secs(2));
        }
        model.loss(item)
    };
    let refused = replicas.backward(divided(&batch, &[1, 2, 1], &devices(3)), slow).expect_err("too slow");
    assert!(
        matches!(&refused, ParallelError::TimedOut { devices, .. } if matches!(devices[..], [(1, _)])),
        "{refused}"
    );
}
