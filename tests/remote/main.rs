//! Layers on Burn's compute servers, and replicas of a module on several of them.
//!
//! `cargo test -p burn-memsave --features remote-server --test remote`; the servers are on this machine and compute on Flex.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamConfig, GradientsParams, ModuleOptimizer};
use burn::server::{
    RemoteServer, WebSocketTransport,
    telemetry::{TelemetryEvent, TelemetryProbe, TelemetrySubscription, TransferPhase},
};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::functional as F;
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::parallel::{FrozenOptions, ParallelError, ReplicaOptions, Replicas, Traffic, shard_frozen};
use burn_memsave::saved::SavedPolicy;
use burn_memsave_paper::text::llama::{LanguageModel, memsave::Llama};
use checkpoint::{ADAPTERS, Checkpoint};
use model::{ADAPTER_FACTORS, Batch, SIZE, Shift, adapted, language_model, tokens};
use server::{Server, connect};
use std::net::TcpListener;
use std::sync::OnceLock;
use std::{env, fs, thread};

#[path = "../../examples/finetune_ddp/checkpoint.rs"]
mod checkpoint;
mod faults;
mod model;
mod net;
mod server;
#[path = "../table/mod.rs"]
mod table;
#[path = "../wgpu/table_walk.rs"]
mod table_walk;
mod wire;

/// A server in a thread of this process, until it ends.
fn serve(server: RemoteServer) -> Device {
    connect(&listen(server), 0)
}

/// The address of a server in a thread of this process, until it ends.
fn listen(server: RemoteServer) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("ws://{}", listener.local_addr().expect("its address"));
    thread::spawn(move || server.serve(WebSocketTransport::from_listener(listener)));
    address
}

/// What the rows of the table are computed on.
fn gpu() -> Device {
    static SERVER: OnceLock<Device> = OnceLock::new();
    SERVER.get_or_init(|| serve(RemoteServer::new([Device::flex()]))).clone()
}

/// How far results of matrix products may differ.
fn of_products() -> f32 {
    1e-4
}

/// Nothing here measures or seeds what others use.
fn among_others() -> impl Sized {
    thread::current()
}

/// What is kept in fewer bits on a server, or comes here or goes into a file, comes back there.
#[test]
fn kept_tensors_in_fewer_bits_and_elsewhere() {
    let device = gpu().autodiff();
    let tensor = |shape: [usize; 2], divisor: f32| {
        let x = Tensor::<1, Int>::arange(0..(shape[0] * shape[1]) as i64, &device);
        (x * 7919 % 2003).float().div_scalar(divisor).sub_scalar(1.0).reshape(shape)
    };
    let (x, weight) = (tensor([130, 60], 1001.5), tensor([60, 24], 1001.5).require_grad());
    let gradient = |policy: &SavedPolicy| {
        let y = policy.scope(|| {
            // Nobody else holds what this gives.
            let x = F::linear(x.clone().require_grad(), Tensor::eye(60, &device), None);
            F::linear(x, weight.clone(), None)
        });
        weight.grad(&y.sum().backward()).expect("tracked").into_data()
    };
    let exact = gradient(&SavedPolicy::Keep);
    let disk = SavedPolicy::disk(env::temp_dir()).expect("a directory");
    assert_eq!(gradient(&SavedPolicy::Host), exact);
    assert_eq!(gradient(&disk), exact);
    for (policy, bound) in [
        (SavedPolicy::Half, 130.0 / 256.0),
        (SavedPolicy::HalfF16, 130.0 / 2048.0),
        (SavedPolicy::Int8, 130.0 / 127.0),
    ] {
        let found = gradient(&policy);
        let errors = exact.iter::<f32>().zip(found.iter::<f32>()).map(|(a, b)| (a - b).abs());
        let largest = errors.fold(0.0, worse);
        assert!(largest > 0.0 && largest < bound, "{policy:?}: {largest}");
    }
}

/// Three passages on the first device, two on the second.
fn divide((input, next): &Batch, devices: &[Device]) -> [(Batch, usize); 2] {
    [(0, 0..3), (1, 3..5)].map(|(device, rows)| {
        let part = |tensor: &Tensor<2, Int>| tensor.clone().slice(rows.clone()).to_device(&devices[device]);
        ((part(input), part(next)), rows.len())
    })
}

/// The larger number, or NaN if one is.
fn worse(a: f32, b: f32) -> f32 {
    if a.is_nan() || a > b { a } else { b }
}

/// Relative to the largest gradient; all adapter factors have gradients, and nothing else.
fn difference(module: &impl Module, ours: &GradientsParams, whole: &GradientsParams) -> f32 {
    struct Compare<'a> {
        ours: &'a GradientsParams,
        whole: &'a GradientsParams,
        largest: f32,
        difference: f32,
    }
    impl ModuleVisitor for Compare<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(whole) = self.whole.get::<D>(param.id) {
                let ours = self.ours.get::<D>(param.id).expect("a gradient").to_device(&whole.device());
                let max = |tensor: Tensor<D>| tensor.abs().max().into_scalar::<f32>();
                self.largest = worse(self.largest, max(whole.clone()));
                self.difference = worse(self.difference, max(ours - whole));
            }
        }
    }
    assert_eq!((ours.len(), whole.len()), (ADAPTER_FACTORS, ADAPTER_FACTORS));
    let mut compare = Compare { ours, whole, largest: 0.0, difference: 0.0 };
    module.visit(&mut compare);
    assert!(compare.largest > 0.0, "there are gradients");
    compare.difference / compare.largest
}

/// Transfers that a server began since it was last asked.
fn transfers(subscription: &mut TelemetrySubscription) -> usize {
    let mut events = vec![];
    subscription.drain_into(&mut events);
    let began = |event: &TelemetryEvent| {
        matches!(event, TelemetryEvent::Transfer { phase: TransferPhase::Started, .. })
    };
    events.iter().filter(|event| began(event)).count()
}

/// A step of Adam is its gradient divided by about its size. A larger epsilon keeps rounding errors of tiny ones from becoming whole steps.
fn robust_adam() -> ModuleOptimizer {
    AdamConfig::new().with_epsilon(1e-3).init()
}

/// Gradients of twenty steps, and what is sent from server to server in them.
#[test]
fn two_servers_equal_one_device() {
    let (probes, mut subscriptions): (Vec<_>, Vec<_>) =
        (0..2).map(|_| TelemetryProbe::channel(1 << 20)).unzip();
    let devices = probes
        .into_iter()
        .map(|probe| serve(RemoteServer::new([Device::flex()]).with_telemetry(probe)).autodiff());
    let host = Device::flex().autodiff();
    let mut one = language_model(&host);
    let mut replicas = Replicas::new(&one, devices).expect("two servers");
    let (mut optimizer, mut of_replicas) = (robust_adam(), robust_adam());
    let mut fewest = [usize::MAX; 2];
    let mut of_first = None;
    for step in 0..20 {
        let batch = tokens(step, 5, &host);
        let (loss, gradients) = replicas
            .backward(divide(&batch, replicas.devices()), |model, (input, next)| model.loss(input, next))
            .expect("two parts");
        replicas.sync().expect("both servers");
        let (input, next) = batch;
        let whole_loss = one.loss(input, next);
        let whole = GradientsParams::from_grads(whole_loss.clone().backward(), &one);
        assert!((loss.into_scalar::<f32>() - whole_loss.into_scalar::<f32>()).abs() < 1e-5);
        let difference = difference(&one, &gradients, &whole);
        // Sums of other parts, whose rounding Adam passes on from step to step; a wrong weight of a part would be 0.1.
        assert!(difference < 1e-5, "step {step}: {difference}");

        one = optimizer.step(1e-2, one, whole);
        replicas.update(|model| of_replicas.step(1e-2, model, gradients));
        replicas.sync().expect("both servers");
        for (fewest, subscription) in fewest.iter_mut().zip(&mut subscriptions) {
            *fewest = transfers(subscription).min(*fewest);
        }
        let Traffic { gradients, values, frozen } = replicas.traffic();
        let of_steps = (step as u64 + 1) * *of_first.get_or_insert(gradients);
        assert!(gradients > 0 && [gradients, values, frozen] == [of_steps, of_steps, 0], "step {step}");
    }
    // Gradients and the loss to the first, values to the second: nothing of what is frozen. (Both ends report. In some steps a slow server
    // also gets the numbers that wake others, and telemetry does not tell how large a transfer is. So a step without them is compared.)
    assert_eq!(fewest, [2 * ADAPTER_FACTORS + 1; 2]);
}

/// A server with a second device, for frozen weights.
fn with_store() -> [Device; 2] {
    let address = listen(RemoteServer::new([Device::flex(), Device::flex()]));
    [0, 1].map(|index| connect(&address, index))
}

/// Frozen weights, gradients and the state of Adam in parts on two and four servers: gradients and values of twenty steps.
#[test]
fn divided_servers_equal_one_device() {
    let host = Device::flex().autodiff();
    for count in [2, 4] {
        let servers: Vec<[Device; 2]> = (0..count).map(|_| with_store()).collect();
        let devices: Vec<Device> = servers.iter().map(|[device, _]| device.clone().autodiff()).collect();
        let owners = servers.iter().map(|[_, store]| store.clone());
        let options = FrozenOptions::new().with_min_bytes(0).with_budget(1200).with_owners(owners);
        let frozen = Llama::new(&SIZE, &host).freeze();
        let divided = shard_frozen(frozen.clone(), &devices, &options).expect("floats");
        let divided = adapted(divided).map(&mut Shift);
        let adapters = ParamGroup::from_regex(r"(^|\.)lora\.").expect("a regular expression");
        let record = divided.clone().into_record_group(adapters).allow_partial(true);
        let mut one = adapted(frozen).load_record(record);

        let options = ReplicaOptions::new().with_sharded_optimizer();
        let mut replicas = Replicas::with_options(&divided, devices, &options).expect("servers");
        let (mut optimizer, mut of_replicas) = (robust_adam(), robust_adam());
        for step in 0..20 {
            let batch = tokens(step, 5, &host);
            // Uneven parts, and a batch that is smaller than the number of servers.
            let lengths = if step % 3 == 0 { vec![5] } else { vec![2, 3] };
            let [inputs, next] =
                [&batch.0, &batch.1].map(|tensor| tensor.clone().split_with_sizes(lengths.clone(), 0));
            let parts: Vec<_> = inputs
                .into_iter()
                .zip(next)
                .zip(replicas.devices())
                .map(|((input, next), device)| {
                    let rows = input.dims()[0];
                    ((input.to_device(device), next.to_device(device)), rows)
                })
                .collect();
            let (loss, gradients) =
                replicas.backward(parts, |model, (input, next)| model.loss(input, next)).expect("parts");
            replicas.sync().expect("all servers");
            let whole_loss = one.loss(batch.0, batch.1);
            let whole = GradientsParams::from_grads(whole_loss.clone().backward(), &one);
            assert!((loss.into_scalar::<f32>() - whole_loss.into_scalar::<f32>()).abs() < 1e-5);
            let difference = difference(&one, &gradients, &whole);
            assert!(difference < 1e-5, "{count} servers, step {step}: {difference}");
            one = optimizer.step(1e-2, one, whole);
            replicas.update(|model| of_replicas.step(1e-2, model, gradients));
            replicas.sync().expect("all servers");
        }
        let sent = replicas.traffic();
        assert!(sent.gradients > 0 && sent.values > 0 && sent.frozen > 0, "{sent:?}");
    }
}

/// On a server it would be in memory as a whole.
#[test]
fn lazy_weights_of_another_backend_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.bpk");
    let host = Device::flex().autodiff();
    language_model(&host).freeze().save_file(&path).expect("a burnpack");
    let file = WeightFile::open(&path).expect("what was written");
    let options = LazyOptions::new().with_min_bytes(0).with_allow_partial(true);
    let (model, _) = Llama::new(&SIZE, &host).freeze().lazy_load(&file, &options).expect("the same module");
    let refused = Replicas::new(&model, [host, gpu().autodiff()]).expect_err("another backend");
    assert!(matches!(&refused, ParallelError::Lazy { index: 1, .. }), "{refused}");
}

/// A step with Adam; the loss, if the servers live.
fn step(
    replicas: &mut Replicas<Llama>,
    optimizer: &mut ModuleOptimizer,
    at: usize,
) -> Result<f32, ParallelError> {
    let parts = divide(&tokens(at, 5, &Device::flex().autodiff()), replicas.devices());
    let (loss, gradients) = replicas.backward(parts, |model, (input, next)| model.loss(input, next))?;
    replicas.sync()?;
    replicas.update(|model| optimizer.step(1e-2, model, gradients));
    replicas.sync()?;
    Ok(loss.into_scalar::<f32>())
}

fn two_servers() -> (Vec<Server>, Vec<Device>) {
    let start = |_| {
        let server = Server::start();
        let device = server.device(0).autodiff();
        (server, device)
    };
    (0..2).map(start).unzip()
}

/// The error names the server that is gone, nothing waits for it, and the run goes on from its checkpoint as if nothing had been.
#[test]
fn a_run_goes_on_after_a_server_died() {
    let host = Device::flex().autodiff();
    let model = language_model(&host);
    let adam = || AdamConfig::new().init();
    let (mut whole, mut optimizer) = (Replicas::new(&model, [host.clone(), host]).expect("replicas"), adam());
    let expected: Vec<f32> =
        (0..6).map(|at| step(&mut whole, &mut optimizer, at).expect("Flex lives")).collect();

    let divided = ReplicaOptions::new().with_sharded_optimizer();
    for (dies, options) in
        [(0, ReplicaOptions::new()), (1, ReplicaOptions::new()), (0, divided.clone()), (1, divided)]
    {
        let on = |devices| Replicas::with_options(&model, devices, &options).expect("two servers");
        let folder = tempfile::tempdir().expect("a folder");
        let checkpoints = Checkpoint::new(folder.path().join("run"), "a run".into(), ADAPTERS);
        assert!(checkpoints.last().is_none() && checkpoints.load(model.clone(), adam()).is_err());
        let (mut servers, devices) = two_servers();
        let (mut replicas, mut optimizer) = (on(devices), adam());
        let mut losses = vec![];
        for at in 0..3 {
            losses.push(step(&mut replicas, &mut optimizer, at).expect("both servers live"));
            checkpoints.save(replicas.module(), &optimizer, at + 1).expect("saved");
        }
        drop(servers.remove(dies));
        let error = step(&mut replicas, &mut optimizer, 3).expect_err("one server is gone");
        let ParallelError::Devices { failed } = error else { panic!("{error}") };
        assert!(failed.iter().any(|failure| failure.index == dies), "{failed:?}");
        // Neither a checkpoint of what is lost, nor one that was not finished, is in the way.
        let saving = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            checkpoints.save(replicas.module(), &optimizer, 4).is_ok()
        }));
        assert!(!saving.unwrap_or(false), "what is lost cannot be saved");
        let entries = |path| fs::read_dir(path).expect("a folder").count();
        assert!(entries(folder.path().join("run").join("step-3")) == 3 && checkpoints.last() == Some(3));
        let another = Checkpoint::new(folder.path().join("run"), "another run".into(), ADAPTERS);
        assert!(another.load(model.clone(), adam()).is_err());

        let (model, mut optimizer, done) = checkpoints.load(model.clone(), adam()).expect("the checkpoint");
        let (_servers, devices) = two_servers();
        let mut replicas = Replicas::with_options(&model, devices, &options).expect("two servers");
        for at in done..6 {
            losses.push(step(&mut replicas, &mut optimizer, at).expect("both servers live"));
            checkpoints.save(replicas.module(), &optimizer, at + 1).expect("saved");
        }
        assert_eq!(entries(folder.path().join("run")), 1, "the last checkpoint");
        for (at, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            assert!((loss - expected).abs() < 1e-5, "step {at}: {loss}, {expected}");
        }
    }
}
