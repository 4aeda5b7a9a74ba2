//! Servers that die or stop at any moment of a step: an error names them in time, nothing is half updated, and the run goes on from its
//! checkpoint with the servers that are left.
use super::checkpoint::Checkpoint;
use super::server::{Server, connect};
use super::wire::Wire;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::nn::{BatchNorm, BatchNormConfig, Embedding, EmbeddingConfig, Linear, LinearConfig, Relu};
use burn_memsave::parallel::{
    DeviceFailure, FrozenOptions, ParallelError, ReplicaOptions, Replicas, shard_frozen,
};
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

#[derive(Module, Debug)]
struct Block {
    linear: Linear,
    norm: BatchNorm,
    relu: Relu,
}

impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.relu.forward(self.norm.forward(self.linear.forward(x.clone()))) + x
    }
}

/// A network whose embedding and stem are frozen, and whose blocks are recomputed in the backward pass.
#[derive(Module, Debug)]
struct Net {
    embedding: Embedding,
    stem: Vec<Linear>,
    blocks: Vec<Block>,
    head: Linear,
}

const TRAINED: &str = r"^(blocks|head)\.";
const ITEMS: usize = 5;
type Item = (Tensor<2, Int>, Tensor<2>);

impl Net {
    /// With weights that do not depend on what other tests draw.
    fn new(device: &Device) -> Self {
        let block = || Block {
            linear: LinearConfig::new(8, 8).init(device),
            norm: BatchNormConfig::new(8).init(device),
            relu: Relu::new(),
        };
        let frozen = || LinearConfig::new(8, 8).init(device).freeze();
        let net = Self {
            embedding: EmbeddingConfig::new(13, 8).init(device).freeze(),
            // A weight for each of three servers.
            stem: vec![frozen(), frozen()],
            blocks: vec![block(), block()],
            head: LinearConfig::new(8, 3).init(device),
        };
        net.map(&mut Fill::default())
    }

    fn with_frozen_norms(mut self) -> Self {
        for block in &mut self.blocks {
            block.norm = block.norm.clone().freeze();
        }
        self
    }

    /// With moments between its parts, in the forward and, since blocks are recomputed, in the backward pass.
    fn loss(&self, (tokens, target): Item, moments: &'static Moments) -> Tensor<1> {
        moments.pass("passes");
        let [items, length] = tokens.dims();
        let x = self.embedding.forward(tokens).reshape([items * length, 8]);
        let x = self.stem.iter().fold(x, |x, linear| linear.forward(x));
        let x = self.blocks.iter().fold(x, |x, block| {
            checkpoint(block, x, move |block: &Block, x| {
                moments.pass("passes");
                let x = block.forward(x);
                moments.pass("passes");
                x
            })
        });
        moments.pass("passes");
        let y = self.head.forward(x).reshape([items, length, 3]).mean_dim(1).reshape([items, 3]);
        (y - target).powf_scalar(2.0).mean()
    }
}

/// Fills weights of two axes with numbers of both signs.
#[derive(Default)]
struct Fill {
    weights: i64,
}

impl ModuleMapper for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if D != 2 {
            return param;
        }
        self.weights += 1;
        let shift = self.weights * 31;
        param.map(|old| {
            let numbers = Tensor::<1, Int>::arange(
                0..old.shape().num_elements() as i64,
                &old.device().without_autodiff(),
            );
            let new = ((numbers * 7919 + shift) % 2003).float().div_scalar(2003.0).sub_scalar(0.5);
            let new = new.reshape(old.shape()).autodiff();
            if old.is_require_grad() { new.require_grad() } else { new }
        })
    }
}

/// The moments of a step so far, and what is done at one of them.
struct Moments {
    count: AtomicUsize,
    at: usize,
    act: Mutex<Option<Box<dyn FnOnce() + Send>>>,
    /// In which part of the step it was done.
    done: Mutex<Option<&'static str>>,
}

impl Moments {
    /// For as long as the process lives, since what is checkpointed cannot own them.
    fn new(at: usize, act: impl FnOnce() + Send + 'static) -> &'static Self {
        let (count, done) = Default::default();
        Box::leak(Box::new(Self { count, at, act: Mutex::new(Some(Box::new(act))), done }))
    }

    fn none() -> &'static Self {
        Self::new(usize::MAX, || ())
    }

    fn pass(&self, part: &'static str) {
        if self.count.fetch_add(1, SeqCst) == self.at
            && let Some(act) = self.act.lock().expect("no panic").take()
        {
            // Servers work through what they were given: some have done all of it, and some have not.
            thread::sleep(Duration::from_millis(10 * (self.at as u64 % 3)));
            act();
            *self.done.lock().expect("no panic") = Some(part);
        }
    }

    fn done(&self) -> Option<&'static str> {
        *self.done.lock().expect("no panic")
    }
}

/// What is divided in a run.
#[derive(Clone, Copy, Debug)]
struct Setting {
    sharded: bool,
    synchronized: bool,
}

const SETTINGS: [Setting; 3] = [
    Setting { sharded: false, synchronized: false },
    Setting { sharded: true, synchronized: false },
    Setting { sharded: true, synchronized: true },
];

impl Setting {
    fn model(&self) -> Net {
        self.with_norms(Net::new(&Device::flex().autodiff()))
    }

    /// The model with its batch norms frozen, unless they are synchronized. (What is loaded is trained.)
    fn with_norms(&self, model: Net) -> Net {
        if self.synchronized { model } else { model.with_frozen_norms() }
    }

    /// On this machine.
    fn here(&self) -> Replicas<Net> {
        self.replicas(self.model(), &[[Device::flex(), Device::flex()]])
    }

    fn options(&self, timeout: Duration) -> ReplicaOptions {
        let mut options = ReplicaOptions::new().with_timeout(timeout);
        if self.synchronized {
            options = options.with_synchronized_batch_norm();
        }
        if self.sharded { options.with_sharded_optimizer() } else { options }
    }

    /// Replicas of a module that is on these devices already, when all have answered.
    fn again(&self, module: &Net, devices: &[Device], timeout: Duration) -> Replicas<Net> {
        let replicas = Replicas::with_options(module, devices.to_vec(), &self.options(timeout)).expect("servers");
        // Each waits no longer than the time-out.
        (0..100).find(|_| replicas.sync().is_ok()).expect("all servers live");
        replicas
    }

    /// Replicas on devices whose servers have stores for frozen weights.
    fn replicas(&self, model: Net, devices: &[[Device; 2]]) -> Replicas<Net> {
        let [replicas, stores] = [0, 1].map(|index| devices.iter().map(move |of| of[index].clone()));
        let replicas: Vec<Device> = replicas.map(Device::autodiff).collect();
        let frozen = FrozenOptions::new().with_min_bytes(0).with_owners(stores);
        let model = match self.sharded {
            false => model,
            true => shard_frozen(model, &replicas, &frozen).expect("floats"),
        };
        Replicas::with_options(&model, replicas, &self.options(LONG)).expect("servers")
    }
}

fn adam() -> ModuleOptimizer {
    AdamConfig::new().init()
}

/// The parts of the batch of a step, on devices.
fn parts(at: usize, devices: &[Device]) -> Vec<(Item, usize)> {
    let host = Device::flex().autodiff();
    let tokens: Vec<i64> = (0..ITEMS * 4).map(|index| ((at + index * 7 + index / 4) % 13) as i64).collect();
    let tokens = Tensor::<1, Int>::from_data(tokens.as_slice(), &host).reshape([ITEMS, 4]);
    let target = tokens.clone().float().slice([0..ITEMS, 0..3]) / 13.0;
    let count = devices.len();
    let part = |(index, device): (usize, &Device)| {
        let rows = ITEMS * index / count..ITEMS * (index + 1) / count;
        let part = (
            tokens.clone().slice(rows.clone()).to_device(device),
            target.clone().slice(rows.clone()).to_device(device),
        );
        (part, rows.len())
    };
    devices.iter().enumerate().map(part).collect()
}

/// A step with Adam, with moments before, in and after everything that devices do; the loss, if they live.
fn step(
    replicas: &mut Replicas<Net>,
    optimizer: &mut ModuleOptimizer,
    at: usize,
    moments: &'static Moments,
) -> Result<f32, ParallelError> {
    moments.pass("parts");
    let parts = parts(at, replicas.devices());
    let (loss, gradients) = replicas.backward(parts, |model, item| model.loss(item, moments))?;
    moments.pass("gradients");
    replicas.sync()?;
    // A server that dies now shows after the update.
    let loss = loss.try_into_data().map_or(f32::NAN, |data| data.iter::<f32>().next().expect("a number"));
    replicas.update(|model| {
        moments.pass("update");
        let model = optimizer.step(1e-2, model, gradients);
        moments.pass("update");
        model
    });
    moments.pass("update");
    replicas.sync()?;
    Ok(loss)
}

/// The losses of a run on this machine.
fn expected(setting: Setting) -> Vec<f32> {
    let (mut replicas, mut optimizer) = (setting.here(), adam());
    (0..3).map(|at| step(&mut replicas, &mut optimizer, at, Moments::none()).expect("Flex lives")).collect()
}

/// What steps change.
#[derive(Debug, PartialEq)]
struct Values {
    trained: Vec<f32>,
    /// Of batch norms.
    running: Vec<f32>,
}

impl Values {
    /// `None` if the device of the module is gone.
    fn of(module: &Net) -> Option<Self> {
        struct Trained(Option<Vec<f32>>);
        impl ModuleVisitor for Trained {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if param.is_require_grad() {
                    self.0 = self.0.take().zip(numbers(param.val().inner())).map(|(all, more)| [all, more].concat());
                }
            }
        }
        let mut trained = Trained(Some(vec![]));
        module.visit(&mut trained);
        let norms = module.blocks.iter().map(|block| &block.norm);
        let running = norms.flat_map(|norm| [norm.running_mean.value(), norm.running_var.value()]);
        let running = running.map(|statistic| numbers(statistic.inner())).collect::<Option<Vec<_>>>()?.concat();
        Some(Self { trained: trained.0?, running })
    }
}

fn numbers<const D: usize>(tensor: Tensor<D>) -> Option<Vec<f32>> {
    Some(tensor.try_into_data().ok()?.iter::<f32>().collect())
}

/// For steps that no time-out has to end, on a machine with much else to do.
const LONG: Duration = Duration::from_secs(240);

/// Attempts with longer and longer time-outs, until nothing but what is tested is late.
fn patiently<T>(attempt: impl Fn(Duration) -> Result<T, String>) -> T {
    let mut errors = vec![];
    for seconds in [2, 16, 64] {
        match attempt(Duration::from_secs(seconds)) {
            Ok(result) => return result,
            Err(error) => errors.push(error),
        }
    }
    panic!("{errors:?}")
}

/// A run on servers.
struct Run {
    setting: Setting,
    servers: Vec<Arc<Server>>,
    /// To each server, and its devices.
    wires: Vec<Wire>,
    devices: Vec<[Device; 2]>,
    replicas: Replicas<Net>,
    optimizer: ModuleOptimizer,
    checkpoints: Checkpoint,
    _folder: tempfile::TempDir,
    /// The values after the first step.
    before: Values,
}

impl Run {
    /// Trains and saves one step. The next ones have this time-out.
    fn begin(setting: Setting, count: usize, timeout: Duration) -> Self {
        let servers: Vec<Arc<Server>> = (0..count).map(|_| Arc::new(Server::start())).collect();
        let folder = tempfile::tempdir().expect("a folder");
        let checkpoints = Checkpoint::new(folder.path().join("run"), format!("{setting:?}"), TRAINED);
        let wires: Vec<Wire> = servers.iter().cloned().map(Wire::to).collect();
        let of_wire = |wire: &Wire| [0, 1].map(|index| connect(wire.address(), index));
        let devices: Vec<[Device; 2]> = wires.iter().map(of_wire).collect();
        let (mut replicas, mut optimizer) = (setting.replicas(setting.model(), &devices), adam());
        step(&mut replicas, &mut optimizer, 0, Moments::none()).expect("all servers live");
        checkpoints.save(replicas.module(), &optimizer, 1).expect("saved");
        let before = Values::of(replicas.module()).expect("all servers live");
        let replicas = setting.again(replicas.module(), replicas.devices(), timeout);
        Self { setting, servers, wires, devices, replicas, optimizer, checkpoints, _folder: folder, before }
    }

    /// The second step, and its checkpoint.
    fn go_on(&mut self, moments: &'static Moments) -> Result<(), ParallelError> {
        step(&mut self.replicas, &mut self.optimizer, 1, moments)?;
        moments.pass("saved");
        // Without a server, it may succeed or not.
        let save = || self.checkpoints.save(self.replicas.module(), &self.optimizer, 2).is_ok();
        let _ = catch_unwind(AssertUnwindSafe(save));
        self.replicas.sync()
    }

    /// The moments of the second step.
    fn moments(setting: Setting, count: usize) -> usize {
        let moments = Moments::none();
        Self::begin(setting, count, LONG).go_on(moments).expect("all servers live");
        moments.count.load(SeqCst)
    }

    /// Checks that a failed step changed nothing, if it failed in a part before the update.
    fn is_as_before(&self, part: Option<&str>, what: &str) {
        let Some(part @ ("parts" | "passes" | "gradients")) = part else { return };
        let values = Values::of(self.replicas.module()).expect("the first device lives");
        assert_eq!(values.trained, self.before.trained, "{what}");
        // The pass has succeeded when there are gradients.
        assert!(part == "gradients" || values.running == self.before.running, "{what}: {values:?}");
    }

    /// Goes on with these servers, as a program that has just been started.
    fn resume(&self, expected: &[f32], servers: &[Arc<Server>]) {
        let Self { setting, checkpoints, .. } = self;
        let (model, mut optimizer, done) = checkpoints.load(setting.model(), adam()).expect("it is whole");
        assert!(done == 1 || done == 2, "{done}");
        let devices: Vec<[Device; 2]> =
            servers.iter().map(|server| [0, 1].map(|index| server.device(index))).collect();
        let mut replicas = setting.replicas(setting.with_norms(model), &devices);
        for at in done..expected.len() {
            let loss = step(&mut replicas, &mut optimizer, at, Moments::none()).expect("these servers live");
            assert!((loss - expected[at]).abs() < 1e-5, "step {at}: {loss}, {}", expected[at]);
        }
    }
}

/// When a server dies.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// At a moment of the program, which is ahead of its servers.
    Program(usize),
    /// When it has got so many bytes of the step.
    Bytes(u64),
}

/// Kills a server at a moment. Returns in which part of the step of the program that was, if it is known, or what went otherwise than it
/// should.
fn killed(
    setting: Setting,
    [dies, count]: [usize; 2],
    at: Moment,
    expected: &[f32],
    timeout: Duration,
) -> Result<Option<&'static str>, String> {
    let what = format!("{setting:?}, server {dies} of {count} dies at {at:?}");
    let mut run = Run::begin(setting, count, timeout);
    let server = run.servers[dies].clone();
    let moments = match at {
        Moment::Program(moment) => Moments::new(moment, move || server.kill()),
        Moment::Bytes(bytes) => {
            run.wires[dies].act_after(bytes, move || server.kill());
            Moments::none()
        }
    };
    let failed = match run.go_on(moments) {
        Err(ParallelError::Devices { failed }) => failed,
        ended => return Err(format!("{what}: {ended:?}")),
    };
    let is_of_server =
        |failure: &DeviceFailure| run.devices[dies].contains(&failure.device.clone().without_autodiff());
    if !failed.iter().any(is_of_server) {
        return Err(format!("{what}: {failed:?}"));
    }
    let part = moments.done();
    // The first device may be lost with what it waited for.
    if failed.iter().all(|failure| failure.index != 0) {
        run.is_as_before(part, &what);
    }
    let last = run.checkpoints.last();
    let may_be_saved = part.is_none_or(|part| part == "saved");
    assert!(last == Some(1) || may_be_saved && last == Some(2), "{what}: {last:?}");
    let mut left = run.servers.clone();
    left.remove(dies);
    run.resume(expected, &left);
    Ok(part)
}

fn killed_at_moments(setting: Setting, count: usize, dies: &[usize], every: usize) {
    let (expected, moments) = (expected(setting), Run::moments(setting, count));
    assert!(moments >= 20, "{moments}");
    let mut parts = BTreeSet::new();
    for &dies in dies {
        for at in (0..moments).step_by(every).map(Moment::Program) {
            let killed = |timeout| killed(setting, [dies, count], at, &expected, timeout);
            parts.extend(match count {
                // Whoever waits for a server that is gone ends at once.
                2 => killed(LONG).unwrap_or_else(|error| panic!("{error}")),
                // One may wait for another one that lives, and has lost its device.
                _ => patiently(killed),
            });
        }
    }
    let all = ["gradients", "parts", "passes", "saved", "update"];
    assert!(every > 1 || parts.iter().eq(&all), "{parts:?}");
}

#[test]
fn servers_die() {
    killed_at_moments(SETTINGS[0], 2, &[0, 1], 1);
}

#[test]
fn servers_with_shards_die() {
    killed_at_moments(SETTINGS[1], 2, &[0, 1], 1);
}

#[test]
fn servers_with_shards_and_synchronized_batch_norms_die() {
    killed_at_moments(SETTINGS[2], 2, &[0, 1], 1);
}

#[test]
fn one_of_three_servers_dies() {
    killed_at_moments(SETTINGS[2], 3, &[1], 4);
}

/// In the middle of messages, too, of the program and of other servers.
#[test]
fn servers_die_while_they_get_bytes() {
    for setting in [SETTINGS[0], SETTINGS[2]] {
        let expected = expected(setting);
        let mut run = Run::begin(setting, 2, LONG);
        let before: Vec<u64> = run.wires.iter().map(Wire::bytes).collect();
        run.go_on(Moments::none()).expect("all servers live");
        let after: Vec<u64> = run.wires.iter().map(Wire::bytes).collect();
        for (dies, (after, before)) in after.into_iter().zip(before).enumerate() {
            for at in 0..20 {
                // Another step may take somewhat fewer.
                let bytes = (after - before) * (2 * at + 1) / 44;
                let killed = killed(setting, [dies, 2], Moment::Bytes(bytes), &expected, LONG);
                killed.unwrap_or_else(|error| panic!("{error}"));
            }
        }
    }
}

/// A server that does not answer is named in time, nobody waits for it, and when it answers again the step can be run again.
#[cfg(unix)]
#[test]
fn servers_stop() {
    for setting in SETTINGS {
        let (expected, moments) = (expected(setting), Run::moments(setting, 2));
        // Nothing bounds the reads of a checkpoint, at the last moment.
        for at in (0..moments - 1).step_by(moments / 3) {
            for stops in [0, 1] {
                patiently(|timeout| stopped(setting, stops, at, &expected, timeout));
            }
        }
    }
}

#[cfg(unix)]
fn stopped(
    setting: Setting,
    stops: usize,
    at: usize,
    expected: &[f32],
    timeout: Duration,
) -> Result<(), String> {
    let what = format!("{setting:?}, server {stops} stops at moment {at}");
    let mut run = Run::begin(setting, 2, timeout);
    let server = run.servers[stops].clone();
    let moments = Moments::new(at, move || server.stop());
    let error = run.go_on(moments).expect_err(&what);
    let Some(part) = moments.done() else { return Err(format!("{what}: before, {error}")) };
    let is_named = matches!(&error, ParallelError::TimedOut { devices, .. } if devices.contains(&stops));
    assert!(is_named, "{what}: {error}");
    // Tensors can be dropped meanwhile.
    let (module, on) = (run.replicas.module().clone(), run.replicas.devices().to_vec());
    let (sender, receiver) = mpsc::channel();
    let replicas = std::mem::replace(&mut run.replicas, setting.here());
    thread::spawn(move || {
        drop(replicas);
        sender.send(())
    });
    receiver.recv_timeout(LONG).unwrap_or_else(|error| panic!("{what}: {error}"));
    run.servers[stops].go_on();
    run.replicas = setting.again(&module, &on, LONG);
    run.is_as_before(Some(part), &what);
    let next = if part == "update" { 2 } else { 1 };
    for at in next..expected.len() {
        let loss = step(&mut run.replicas, &mut run.optimizer, at, Moments::none()).expect("they answer");
        assert!((loss - expected[at]).abs() < 1e-5, "{what}: step {at}: {loss}, {}", expected[at]);
    }
    let left = [run.servers[1 - stops].clone()];
    run.resume(expected, &left);
    Ok(())
}
