//! Servers that die or stop at any moment of a step: an error names them in time, nothing is half updated, and the run goes on from its
//! checkpoint with the servers that are left.
use super::checkpoint::Checkpoint;
use super::net::{Moments, Net, TRAINED, Values, parts};
use super::server::{Server, connect};
use super::wire::Wire;
use burn::optim::{AdamConfig, ModuleOptimizer};
use burn::tensor::Device;
use burn_memsave::nn::LinearConfig;
use burn_memsave::parallel::{
    DeviceFailure, FrozenOptions, ParallelError, ReplicaOptions, Replicas, shard_frozen,
};
use std::collections::BTreeSet;
use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

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

    /// Replicas of a module that is on these devices already, with another time-out.
    fn again(&self, module: &Net, devices: &[[Device; 2]], timeout: Duration) -> Replicas<Net> {
        settle(devices);
        let on = devices.iter().map(|[replica, _]| replica.clone().autodiff());
        let replicas = Replicas::with_options(module, on, &self.options(timeout)).expect("servers");
        settle(devices);
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

/// For steps that no time-out has to end, on a machine with much else to do.
const LONG: Duration = Duration::from_secs(240);

/// Waits until devices have done what they were given.
fn settle(devices: &[[Device; 2]]) {
    let module = LinearConfig::new(1, 1).init(&Device::flex().autodiff());
    let devices = devices.iter().flatten().map(|device| device.clone().autodiff());
    let all = Replicas::with_options(&module, devices, &ReplicaOptions::new().with_timeout(LONG));
    all.expect("servers").sync().expect("all servers live");
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
        let replicas = setting.again(replicas.module(), &devices, timeout);
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
    fn is_as_before(&self, part: Option<&str>) {
        let Some(part @ ("parts" | "passes" | "gradients")) = part else { return };
        let values = Values::of(self.replicas.module()).expect("the first device lives");
        assert_eq!(values.trained, self.before.trained);
        // The pass has succeeded when there are gradients.
        assert!(part == "gradients" || values.running == self.before.running, "{values:?}");
    }

    /// Goes on with these servers, as a program that has just been started.
    fn resume(&self, servers: &[Arc<Server>]) {
        let Self { setting, checkpoints, .. } = self;
        let expected = expected(*setting);
        let (model, mut optimizer, done) = checkpoints.load(setting.model(), adam()).expect("it is whole");
        assert!(done == 1 || done == 2, "{done}");
        let devices: Vec<[Device; 2]> =
            servers.iter().map(|server| [0, 1].map(|index| server.device(index))).collect();
        let mut replicas = setting.replicas(setting.with_norms(model), &devices);
        for (at, expected) in expected.into_iter().enumerate().skip(done) {
            let loss = step(&mut replicas, &mut optimizer, at, Moments::none()).expect("these servers live");
            assert!((loss - expected).abs() < 1e-5, "step {at}: {loss}, {expected}");
        }
    }
}

/// What happens to a server in the second step of a run. Each case has a process of its own, as Burn never ends the threads of a device.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Its position in [`SETTINGS`].
    setting: usize,
    servers: usize,
    /// To which of them.
    to: usize,
    fault: Fault,
    /// The moment of the program, or the bytes.
    at: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// It dies at a moment of the program, which is ahead of its servers.
    Dies,
    /// It dies when it has got so many bytes of the step.
    DiesAfterBytes,
    /// It does not go on before the error.
    Stops,
}

const FAULTS: [Fault; 3] = [Fault::Dies, Fault::DiesAfterBytes, Fault::Stops];
const CASE: &str = "MEMSAVE_TEST_CASE";

impl Case {
    /// Runs the case in a process of its own. Returns in which part of the step of the program something happened, if it is known.
    fn run(self) -> Option<String> {
        let mut otherwise = vec![];
        for timeout in self.timeouts() {
            let Self { setting, servers, to, fault, at } = self;
            let case = [setting, servers, to, fault as usize, at, timeout.as_secs() as usize];
            let output = Command::new(env::current_exe().expect("this program"))
                .args(["--exact", "faults::a_case", "--ignored", "--nocapture"])
                .env(CASE, case.map(|number| number.to_string()).join(" "))
                .output()
                .expect("this program runs");
            let [out, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
            assert!(output.status.success(), "{self:?}, {timeout:?}:\n{out}\n{errors}");
            let said = |what| out.lines().find_map(|line| line.strip_prefix(what)).map(str::to_string);
            match said("otherwise: ") {
                Some(what) => otherwise.push(what),
                None => return said("part: "),
            }
        }
        panic!("{self:?}: {otherwise:?}")
    }

    /// Where a time-out is needed, it may end a step on a busy machine before anything happens: then the next one is tried.
    fn timeouts(&self) -> Vec<Duration> {
        match (self.fault, self.servers) {
            // Whoever waits for a server that is gone ends at once. With three, one may wait for another one that lives, and has lost its
            // device.
            (Fault::Dies | Fault::DiesAfterBytes, 2) => vec![LONG],
            _ => [2, 16, 64].map(Duration::from_secs).to_vec(),
        }
    }
}

#[test]
#[ignore = "what `Case` runs"]
fn a_case() {
    let case = env::var(CASE).expect("a case");
    let numbers: Vec<usize> = case.split(' ').map(|number| number.parse().expect("a number")).collect();
    let &[setting, servers, to, fault, at, seconds] = &numbers[..] else { panic!("{case}") };
    let case = Case { setting, servers, to, fault: FAULTS[fault], at };
    let timeout = Duration::from_secs(seconds as u64);
    let ended = match case.fault {
        #[cfg(unix)]
        Fault::Stops => stopped(case, timeout),
        _ => killed(case, timeout),
    };
    match ended {
        Ok(Some(part)) => println!("\npart: {part}"),
        Ok(None) => (),
        Err(otherwise) => println!("\notherwise: {}", otherwise.replace('\n', " ")),
    }
}

/// Kills a server. Returns in which part of the step that was, if it is known, or what went otherwise than it should.
fn killed(case: Case, timeout: Duration) -> Result<Option<&'static str>, String> {
    let mut run = Run::begin(SETTINGS[case.setting], case.servers, timeout);
    let server = run.servers[case.to].clone();
    let moments = match case.fault {
        Fault::DiesAfterBytes => {
            run.wires[case.to].act_after(case.at as u64, move || server.kill());
            Moments::none()
        }
        _ => Moments::new(case.at, move || server.kill()),
    };
    let failed = match run.go_on(moments) {
        Err(ParallelError::Devices { failed }) => failed,
        ended => return Err(format!("{ended:?}")),
    };
    let is_of_server =
        |failure: &DeviceFailure| run.devices[case.to].contains(&failure.device.clone().without_autodiff());
    if !failed.iter().any(is_of_server) {
        return Err(format!("{failed:?}"));
    }
    let part = moments.done();
    // The first device may be lost with what it waited for.
    if failed.iter().all(|failure| failure.index != 0) {
        run.is_as_before(part.or(moments.last()));
    }
    let last = run.checkpoints.last();
    let may_be_saved = part.is_none_or(|part| part == "saved");
    assert!(last == Some(1) || may_be_saved && last == Some(2), "{last:?}");
    let mut left = run.servers.clone();
    left.remove(case.to);
    run.resume(&left);
    Ok(part)
}

/// Stops a server, which goes on after the error.
#[cfg(unix)]
fn stopped(case: Case, timeout: Duration) -> Result<Option<&'static str>, String> {
    let mut run = Run::begin(SETTINGS[case.setting], case.servers, timeout);
    let server = run.servers[case.to].clone();
    let moments = Moments::new(case.at, move || server.stop());
    let error = run.go_on(moments).expect_err("it does not answer");
    let Some(part) = moments.done() else { return Err(error.to_string()) };
    let is_of =
        |(index, device): &(usize, Device)| *index == case.to && run.devices[case.to].contains(device);
    let is_named = matches!(&error, ParallelError::TimedOut { devices, .. } if devices.iter().any(is_of));
    assert!(is_named, "{error}");
    // Tensors can be dropped meanwhile.
    let (module, (sender, receiver)) = (run.replicas.module().clone(), mpsc::channel());
    let replicas = std::mem::replace(&mut run.replicas, run.setting.here());
    thread::spawn(move || {
        drop(replicas);
        sender.send(())
    });
    receiver.recv_timeout(LONG).expect("nothing waits for the server");
    run.servers[case.to].go_on();
    run.replicas = run.setting.again(&module, &run.devices, LONG);
    run.is_as_before(Some(part));
    let done = if part == "update" { 2 } else { 1 };
    for (at, expected) in expected(run.setting).into_iter().enumerate().skip(done) {
        let loss = step(&mut run.replicas, &mut run.optimizer, at, Moments::none()).expect("they answer");
        assert!((loss - expected).abs() < 1e-5, "step {at}: {loss}, {expected}");
    }
    let mut left = run.servers.clone();
    left.remove(case.to);
    run.resume(&left);
    Ok(Some(part))
}

fn die_at_moments(setting: usize, servers: usize, to: &[usize], every: usize) {
    let moments = Run::moments(SETTINGS[setting], servers);
    assert!(moments >= 20, "{moments}");
    let mut parts = BTreeSet::new();
    for &to in to {
        for at in (0..moments).step_by(every) {
            let case = Case { setting, servers, to, fault: Fault::Dies, at };
            parts.extend(case.run());
        }
    }
    let all = ["gradients", "parts", "passes", "saved", "update"];
    assert!(every > 1 || parts.iter().eq(&all), "{parts:?}");
}

#[test]
fn servers_die() {
    die_at_moments(0, 2, &[0, 1], 1);
}

#[test]
fn servers_with_shards_die() {
    die_at_moments(1, 2, &[0, 1], 1);
}

#[test]
fn servers_with_shards_and_synchronized_batch_norms_die() {
    die_at_moments(2, 2, &[0, 1], 1);
}

#[test]
fn one_of_three_servers_dies() {
    die_at_moments(2, 3, &[1], 4);
}

/// In the middle of messages, too, of the program and of other servers.
#[test]
fn servers_die_while_they_get_bytes() {
    for setting in [0, 2] {
        let mut run = Run::begin(SETTINGS[setting], 2, LONG);
        let before: Vec<u64> = run.wires.iter().map(Wire::bytes).collect();
        run.go_on(Moments::none()).expect("all servers live");
        for (to, (wire, before)) in run.wires.iter().zip(before).enumerate() {
            let bytes = (wire.bytes() - before) as usize;
            for at in 0..20 {
                // Another step may take somewhat fewer.
                let at = bytes * (2 * at + 1) / 44;
                Case { setting, servers: 2, to, fault: Fault::DiesAfterBytes, at }.run();
            }
        }
    }
}

/// A server that does not answer is named in time, nobody waits for it, and when it answers again the step can be run again.
#[cfg(unix)]
#[test]
fn servers_stop() {
    for (setting, &of) in SETTINGS.iter().enumerate() {
        let moments = Run::moments(of, 2);
        // Nothing bounds the reads of a checkpoint, at the last moment.
        for at in (0..moments - 1).step_by(moments / 3) {
            for to in [0, 1] {
                Case { setting, servers: 2, to, fault: Fault::Stops, at }.run();
            }
        }
    }
}
