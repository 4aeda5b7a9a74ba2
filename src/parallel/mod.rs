//! Data parallelism: one module on several devices of this machine or of others, each of which computes the gradients of its part of a
//! batch.
//!
//! ```
//! use burn::nn::LinearConfig;
//! use burn::optim::SgdConfig;
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::parallel::Replicas;
//!
//! let device = Device::flex().autodiff(); // with compute servers: `Device::remote_options(&host).init()?.autodiff()`
//! let devices = [device.clone(), device.clone()];
//! let mut replicas = Replicas::new(&LinearConfig::new(8, 4).init(&device), devices)?;
//! let mut optimizer = SgdConfig::new().init();
//!
//! let x = Tensor::<2>::ones([3, 8], &device);
//! let parts = [(x.clone().slice(0..2), 2), (x.slice(2..3), 1)]; // on the devices of the replicas
//! let (loss, gradients) = replicas.backward(parts, |model, x| model.forward(x).powf_scalar(2.0).mean())?;
//! replicas.update(|model| optimizer.step(0.1, model, gradients));
//! replicas.sync()?; // a failed device or a lost server shows here, or where the loss is read
//! # let _ = loss;
//! # Ok::<(), burn_memsave::parallel::ParallelError>(())
//! ```
//!
//! # What is sent
//!
//! In each step, every other device sends the gradients of its trainable parameters to the first device, which sends the new values back.
//! Frozen parameters are sent once, when the replicas are made. Remote devices send to one another; nothing passes through the program that
//! drives them.
//!
//! # What else can be divided
//!
//! [`ReplicaOptions`] divides gradients and the state of the optimizer (ZeRO-2), and frozen weights. [`estimate_replicas`] says what that
//! saves and sends, and [the guide](crate::guide::devices) has the table. The step is the same:
//!
//! ```
//! # use burn::tensor::{Device, Tensor};
//! # use burn::optim::AdamConfig;
//! # use burn_memsave::nn::LinearConfig;
//! use burn_memsave::parallel::{ReplicaOptions, Replicas};
//!
//! # let device = Device::flex().autodiff();
//! # let (model, devices) = (LinearConfig::new(8, 4).init(&device), [device.clone(), device.clone()]);
//! let mut replicas = Replicas::with_options(&model, devices, &ReplicaOptions::new().with_sharded_optimizer())?;
//! let mut optimizer = AdamConfig::new().init(); // one for all: each state is on the device of its gradient
//! # let x = Tensor::<2>::ones([3, 8], &device);
//! # let parts = [(x.clone().slice(0..2), 2), (x.slice(2..3), 1)];
//! let (_, gradients) = replicas.backward(parts, |model, x| model.forward(x).powf_scalar(2.0).mean())?;
//! replicas.update(|model| optimizer.step(0.1, model, gradients));
//! # Ok::<(), burn_memsave::parallel::ParallelError>(())
//! ```
//!
//! A batch norm has the statistics of the whole batch if replicas
//! [synchronize](ReplicaOptions::with_synchronized_batch_norm) it.
//!
//! To run several steps in one thread pool on a CPU, see [`apart`].
//!
//! # Beside `ExecutionStrategy::ddp`
//!
//! Burn's own strategy reduces gradients with NCCL, on the CUDA devices of one machine, which may also serve them to others
//! ([`RemoteServer`](https://docs.rs/burn/0.22.1/burn/server/struct.RemoteServer.html)). The layers of this library work under it as Burn's
//! do. `tests/distributed` tests them under it, and under the distributed training that it is built on, on a server whose devices reduce on
//! the CPU. Not tested are layers that draw random numbers, quantized weights, which Burn's servers do not take, and NCCL, for want of such
//! a machine.
//!
//! Burn's strategy does not refuse a [`BatchNorm`](crate::nn::BatchNorm) in training mode, but then each device has the statistics, running
//! ones too, of its own part of the batch: freeze it, use another norm, or synchronize it here. Burn 0.22.1 refuses to reduce across
//! servers, and panics on every other backend. `ExecutionStrategy::multi` works anywhere, but moves the whole module, frozen weights too, to
//! every device in every step.
mod apart;
mod divide;
mod error;
mod estimate;
mod frozen;
mod gradients;
mod options;
mod owners;
mod servers;
mod synchronized;
mod traffic;
mod values;
mod wait;

pub use apart::apart;
pub use divide::divide;
pub use error::{DeviceFailure, ParallelError};
pub use estimate::{DeviceEstimate, ReplicaEstimate, estimate_replicas};
pub use frozen::shard_frozen;
pub use options::{FrozenOptions, ReplicaOptions};
pub use traffic::Traffic;

use crate::gradient_steps::{Enter, leave};
use crate::lazy_paths::lazy_paths;
use crate::optim::InBackwardError;
use crate::parameters::{each_once, running_in_training, running_statistics, tied};
use crate::plan::{PartWeight, PartsError, all_tied, checked_weight, may_be_taken_in_parts};
use crate::strategy::WithStrategy;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::DispatchDevice;
use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_memsave_layers::frozen::FrozenWeight;
use burn_memsave_layers::graph::Updates;
use burn_memsave_layers::visit::VisitPath;
use frozen::{Unplaced, owned_weights, sharings};
use gradients::{Collected, Sums, sum};
use owners::Owners;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use traffic::Sent;
use values::{Assign, Borrow, Lend, Lent, Trained};

/// One module on several devices, with the same parameters on each.
///
/// The optimizer runs on the first device alone, so its state exists once. With
/// [`with_sharded_optimizer`](ReplicaOptions::with_sharded_optimizer), it runs for each parameter on the device that owns it.
#[derive(Debug)]
pub struct Replicas<M> {
    devices: Vec<Device>,
    modules: Vec<M>,
    /// The owners of trained parameters, if gradients and the state of the optimizer are divided.
    owners: Option<Owners>,
    /// Frozen weights that are on one device each.
    frozen: Vec<Arc<dyn FrozenWeight>>,
    /// All running statistics.
    running: HashSet<ParamId>,
    /// Those in training, if batch norms are synchronized.
    synchronized: Option<HashSet<ParamId>>,
    timeout: Option<Duration>,
    gradients_sent: Sent,
    values_sent: Sent,
    /// What had been sent of the frozen weights when the replicas were made.
    frozen_sent_before: u64,
}

impl<M: Module> Replicas<M> {
    /// Copies a module to each device. Parameters that require gradients do so in the replicas, too.
    ///
    /// # Errors
    ///
    /// - If there are no devices, or if one records no gradients.
    /// - If the module has a batch norm, or another part with running statistics, in training mode: a replica would normalize with the
    ///   statistics of its part. Replicas can [synchronize](ReplicaOptions::with_synchronized_batch_norm) batch norms.
    /// - If a parameter that requires gradients is in two places of the module with different values.
    /// - If the module has lazy weights in files and a device is not the module's own, unless both are CUDA or WebGPU devices, or the module
    ///   also has weights that are [on other devices](shard_frozen): then this program reads the files, and sends the weights.
    pub fn new(module: &M, devices: impl IntoIterator<Item = Device>) -> Result<Self, ParallelError> {
        Self::with_options(module, devices, &ReplicaOptions::new())
    }

    /// Copies a module to each device, or divides it among them, as the options say.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new) and [`shard_frozen`].
    pub fn with_options(
        module: &M,
        devices: impl IntoIterator<Item = Device>,
        options: &ReplicaOptions,
    ) -> Result<Self, ParallelError> {
        let devices: Vec<Device> = devices.into_iter().collect();
        if devices.is_empty() {
            return Err(ParallelError::NoDevices);
        }
        if let Some(index) = devices.iter().position(|device| !device.is_autodiff()) {
            return Err(ParallelError::NotAutodiff { index });
        }
        let strategy = Device::gradient_checkpointing_strategy;
        if options.optimizer
            && let Some(index) = devices.iter().position(|device| strategy(device) != strategy(&devices[0]))
        {
            return Err(ParallelError::Strategy { index });
        }
        let module = in_training(module);
        match options.synchronized {
            true => all_tied(&module)?,
            false => may_be_taken_in_parts(&module)?,
        }
        match &options.frozen {
            None => Self::copied(&module, devices, options),
            Some(frozen) => Self::copied(&shard_frozen(module, &devices, frozen)?, devices, options),
        }
    }

    /// Copies a module, in which everything is divided that is to be, to each device.
    fn copied(module: &M, devices: Vec<Device>, options: &ReplicaOptions) -> Result<Self, ParallelError> {
        let (lazy, from) = (lazy_paths(module), module.devices());
        let far = |to: &Device| !lazy.is_empty() && from.iter().any(|from| !stays_lazy(from, to));
        let frozen = owned_weights(module, &lazy);
        if let (Some(path), true) = (lazy.first(), frozen.is_empty())
            && let Some(index) = devices.iter().position(far)
        {
            return Err(ParallelError::Lazy { path: path.clone(), index });
        }
        let replica = |device: &Device| {
            // Through `valid`, since a clone shares running statistics.
            let module = module.valid().train();
            let module = match far(device) {
                true => module.map(&mut Unplaced { path: VisitPath::default(), lazy: &lazy }),
                false => module,
            };
            tied(module.fork(device).map(&mut WithStrategy { device }))
        };
        let modules = devices.iter().map(replica).collect();
        let owners = options.optimizer.then(|| Owners::of_module(module, devices.len()));
        let in_training = || running_in_training(module).into_iter().map(|statistic| statistic.id).collect();
        let synchronized = options.synchronized.then(in_training);
        let (gradients_sent, values_sent) = Default::default();
        let (timeout, running) = (options.timeout, running_statistics(module));
        let frozen_sent_before = frozen_sent(&frozen);
        Ok(Self {
            devices,
            modules,
            owners,
            frozen,
            running,
            synchronized,
            timeout,
            gradients_sent,
            values_sent,
            frozen_sent_before,
        })
    }

    /// The devices of the replicas. The optimizer runs on the first, unless its state is divided.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The replica on the first device.
    ///
    /// # Panics
    ///
    /// Panics if an update panicked.
    pub fn module(&self) -> &M {
        self.modules.first().unwrap_or_else(|| panic!("{}", ParallelError::Lost))
    }

    /// What was sent from device to device since the replicas were made.
    pub fn traffic(&self) -> Traffic {
        let frozen = frozen_sent(&self.frozen) - self.frozen_sent_before;
        Traffic { gradients: self.gradients_sent.bytes(), values: self.values_sent.bytes(), frozen }
    }

    /// Computes the mean loss of a batch and its gradients. Up to rounding, they are what one device computes from the whole batch. The loss
    /// is on the first device. So are the gradients, or, if the [optimizer is divided](ReplicaOptions::with_sharded_optimizer), each is on
    /// the device that owns its parameter.
    ///
    /// `parts` has one part of the batch per replica, in the order of [`devices`](Self::devices), with its [weight](PartWeight): the number
    /// of items, or of tokens, over which `loss` takes the mean, or the sum of class weights. There may be fewer parts than replicas. A
    /// part must be on the device of its replica.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no parts, more parts than replicas, or no items in the parts, or if a weight is negative or not
    /// finite, or if the loss of a part requires no gradient. If the optimizer is divided, also if a loss is not one number. If batch norms are
    /// [synchronized](ReplicaOptions::with_synchronized_batch_norm), also if a replica panics, if replicas do not run the same batch norms,
    /// or if one does not come to a batch norm in time. An error, or a panic of `loss`, leaves parameters and running statistics as they
    /// were, but for those of Burn's own batch norms, and the next step may be run.
    ///
    /// On devices of servers, it is also an error if `loss` or a frozen weight reads from a server that is gone, or a frozen weight from one
    /// that does not answer in [time](ReplicaOptions::with_timeout). It names every device that does not answer.
    ///
    /// `loss` may be called by several threads: what it writes to, such as a metric, belongs behind a `Mutex`.
    pub fn backward<T: Send, W: PartWeight>(
        &self,
        parts: impl IntoIterator<Item = (T, W)>,
        loss: impl Fn(&M, T) -> Tensor<1> + Sync,
    ) -> Result<(Tensor<1>, GradientsParams), ParallelError> {
        if self.modules.is_empty() {
            return Err(ParallelError::Lost);
        }
        let weighted = parts.into_iter().map(|(part, weight)| Ok((part, checked_weight(weight)?)));
        let parts: Vec<(T, f64)> = weighted.collect::<Result<_, PartsError>>()?;
        if parts.is_empty() || parts.len() > self.modules.len() {
            return Err(ParallelError::PartCount { parts: parts.len(), replicas: self.modules.len() });
        }
        // The sum of weights may not be finite, but that of their ratios is.
        let largest = parts.iter().map(|(_, weight)| *weight).fold(0.0, f64::max);
        if largest == 0.0 {
            return Err(PartsError::NoItems.into());
        }
        let total: f64 = parts.iter().map(|(_, weight)| weight / largest).sum();
        // The mean loss of no items is NaN.
        let parts = parts.into_iter().enumerate().filter(|(_, (_, weight))| *weight > 0.0);
        let parts: Vec<_> =
            parts.map(|(index, (part, weight))| (index, part, weight / largest / total)).collect();
        self.naming_servers(|| match (&self.synchronized, &self.owners) {
            (Some(running), _) => self.backward_at_once(running, parts, loss),
            (None, None) => self.backward_to_first(parts, loss),
            (None, Some(owners)) => self.backward_to_owners(owners, parts, loss),
        })
    }

    /// The loss, and the gradients on the first device. `parts`: the replica of each part, and its share of the loss.
    fn backward_to_first<T>(
        &self,
        parts: Vec<(usize, T, f64)>,
        loss: impl Fn(&M, T) -> Tensor<1>,
    ) -> Result<(Tensor<1>, GradientsParams), ParallelError> {
        // Every device gets all of its work before anything is moved.
        let (mut losses, mut gradients) = (vec![], vec![]);
        for (index, part, share) in parts {
            let given = passes(&self.modules[index], part, share, &loss);
            let (loss, of_part) = given.map_err(|error| ParallelError::Loss { part: index, error })?;
            losses.push(loss);
            gradients.push(of_part);
        }
        Ok((self.sum_of_losses(losses), self.sum_on_first(gradients)))
    }

    /// The loss, and the gradients on the devices that own them, to which they are sent as soon as they are complete.
    ///
    /// One backward pass runs through the graphs of all replicas, since Burn runs the steps of a graph by their depth: so all replicas give
    /// the gradient of a parameter at about the same time, and no device waits long for another one.
    fn backward_to_owners<T>(
        &self,
        owners: &Owners,
        parts: Vec<(usize, T, f64)>,
        loss: impl Fn(&M, T) -> Tensor<1>,
    ) -> Result<(Tensor<1>, GradientsParams), ParallelError> {
        let (updates, mut entered) = (Updates::default(), 0);
        let collected =
            Collected::new(owners.clone(), &self.devices, parts.len(), self.gradients_sent.clone());
        let mut all = vec![];
        for (index, part, share) in parts {
            let enter = Enter::new(updates.clone(), entered);
            let loss = |module: &M| loss(module, part).mul_scalar(share);
            let (module, enter, loss) =
                forward_entered(self.modules[index].clone(), enter, &self.devices[index], loss)
                    .map_err(|error| ParallelError::Loss { part: index, error })?;
            entered += enter.places.len();
            all.push((index, module, enter, loss));
        }
        // Only now: a graph that parameters have left, and whose backward pass does not run, would stay in memory.
        let (mut losses, mut whole) = (vec![], None::<Tensor<1>>);
        for (index, module, enter, loss) in all {
            losses.push(loss.clone().inner());
            let (_, loss) = leave(module, enter, loss, collected.of_replica(index));
            whole = Some(match whole {
                None => loss,
                Some(sum) => {
                    let loss = on_device(loss, &sum.device());
                    sum + loss
                }
            });
        }
        let whole = whole.expect("at least one part");
        drop(updates.during(|| whole.backward()));
        Ok((self.sum_of_losses(losses), collected.sums()))
    }

    fn sum_of_losses(&self, losses: Vec<Tensor<1>>) -> Tensor<1> {
        let device = self.devices[0].clone().without_autodiff();
        sum(losses, &device, &Sent::default()).expect("at least one part")
    }

    /// The sums of the gradients of parts, on the first device.
    fn sum_on_first(&self, parts: Vec<GradientsParams>) -> GradientsParams {
        let device = self.devices[0].clone().without_autodiff();
        let mut sums = Sums { parts, device, sent: &self.gradients_sent, sums: GradientsParams::new() };
        each_once(self.module(), &mut sums);
        sums.sums
    }

    /// Replaces the replica on the first device, usually by what an optimizer makes of it, and copies its trainable parameters to the other
    /// replicas, with the frozen ones that `step` changed, such as the weights of a teacher that are averages of others. Tied parameters,
    /// which are in several places of the module, stay tied: Burn's optimizers change only the first place, whose value all places get.
    ///
    /// Running statistics, flags, and parameters of integers are not copied. A step that makes frozen parameters anew, as `no_grad` and
    /// `freeze` do, sends all of them: [`traffic`](Self::traffic) shows it.
    ///
    /// If the [optimizer is divided](ReplicaOptions::with_sharded_optimizer), each trainable parameter of the module that `step` gets is on
    /// the device that owns it, where its gradient is. An optimizer of Burn's or of this library's then keeps its state there. Its record is
    /// whole, and may be read by replicas on another number of devices. An optimizer that computes with several parameters at once, as
    /// L-BFGS does, needs them on one device.
    ///
    /// # Panics
    ///
    /// Panics if `step` returns a module with other parameters, or if the replicas are lost. If `step` itself panics, all replicas are lost:
    /// their module was moved into it, and the optimizer may have changed states of some parameters and not of others. Then
    /// [`backward`](Self::backward) returns [`ParallelError::Lost`].
    pub fn update(&mut self, step: impl FnOnce(M) -> M) {
        // Taken, not cloned, so that parameters can change in place.
        assert!(!self.modules.is_empty(), "{}", ParallelError::Lost);
        let mut modules = std::mem::take(&mut self.modules);
        let mut trained = Trained::before(&modules[0], &self.running);
        if let Some(owners) = &self.owners {
            modules = owned_by_first(modules, owners);
        }
        let mut modules = modules.into_iter();
        let first = tied(step(modules.next().expect("a replica per device")));
        first.visit(&mut trained);
        // What is divided is not on the first device yet.
        let is_first_complete = self.owners.is_none();
        let sent = &self.values_sent;
        let assigned = |(module, device): (M, &Device)| {
            tied(module.map(&mut Assign::new(&trained.values, device, sent)))
        };
        let others: Vec<M> = modules.zip(&self.devices[1..]).map(assigned).collect();
        let first = if is_first_complete { first } else { assigned((first, &self.devices[0])) };
        if self.owners.is_some() {
            self.owners = Some(Owners::of_module(&first, self.devices.len()));
        }
        self.modules = std::iter::once(first).chain(others).collect();
    }

    /// The replica on the first device.
    ///
    /// # Panics
    ///
    /// Panics if an update panicked.
    pub fn into_module(self) -> M {
        self.modules.into_iter().next().unwrap_or_else(|| panic!("{}", ParallelError::Lost))
    }
}

/// Has the first replica borrow the parameters that others own, for a step of the optimizer.
fn owned_by_first<M: Module>(modules: Vec<M>, owners: &Owners) -> Vec<M> {
    let mut lent = Lent::new();
    let mut lending = modules.into_iter().enumerate().map(|(replica, module)| match replica {
        0 => module,
        _ => module.map(&mut Lend { owners, replica, lent: &mut lent }),
    });
    let first = lending.next().expect("a replica per device");
    let others: Vec<M> = lending.collect();
    let first = first.map(&mut Borrow(lent));
    std::iter::once(first).chain(others).collect()
}

/// A tensor on a device.
fn on_device<const D: usize>(x: Tensor<D>, device: &Device) -> Tensor<D> {
    if x.device() == *device { x } else { x.to_device(device) }
}

/// The module as replicas are made of it: one on devices that record no gradients, or in validation, is trained as if it had never been
/// there.
fn in_training<M: Module>(module: &M) -> M {
    match module.devices().iter().all(Device::is_autodiff) {
        true => module.clone(),
        false => module.valid().train(),
    }
}

/// What was sent of frozen weights that are on one device each.
fn frozen_sent(weights: &[Arc<dyn FrozenWeight>]) -> u64 {
    sharings(weights).iter().map(|sharing| sharing.sent()).sum()
}

/// What a replica gives: its share of the loss, and its gradients, unless they were sent in the backward pass.
type Given = Result<(Tensor<1>, GradientsParams), InBackwardError>;

/// The forward and the backward pass of a part.
fn passes<M: Module, T>(module: &M, part: T, share: f64, loss: &impl Fn(&M, T) -> Tensor<1>) -> Given {
    let loss = loss(module, part).mul_scalar(share);
    if !loss.is_tracked() {
        return Err(InBackwardError::Untracked);
    }
    let gradients = GradientsParams::from_grads(loss.backward(), module);
    Ok((loss.inner(), gradients))
}

/// The forward pass with parameters that enter: the module, what entered, and the loss, on the device.
fn forward_entered<M: Module>(
    module: M,
    mut enter: Enter,
    device: &Device,
    loss: impl FnOnce(&M) -> Tensor<1>,
) -> Result<(M, Enter, Tensor<1>), InBackwardError> {
    let module = module.map(&mut enter);
    let loss = on_device(loss(&module), device);
    match refusal(&loss) {
        Some(error) => Err(error),
        None => Ok((module, enter, loss)),
    }
}

/// Why the gradients of a loss cannot be sent in the backward pass.
fn refusal(loss: &Tensor<1>) -> Option<InBackwardError> {
    match (loss.shape().num_elements(), loss.is_tracked()) {
        (1, true) => None,
        (1, false) => Some(InBackwardError::Untracked),
        (elements, _) => Some(InBackwardError::NoScalar { elements }),
    }
}

/// Whether the placeholder that a lazy parameter holds in place of its weight still takes no memory after a move.
fn stays_lazy(from: &Device, to: &Device) -> bool {
    let [from, to] = [from, to].map(|device| device.clone().without_autodiff());
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let (DispatchDevice::Cube(_), DispatchDevice::Cube(_)) = (from.as_dispatch(), to.as_dispatch()) {
        return true;
    }
    from == to
}
