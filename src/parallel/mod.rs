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
//! ones too, of its own part of the batch: freeze it, or use another norm. Burn 0.22.1 refuses to reduce across servers, and panics on
//! every other backend. `ExecutionStrategy::multi` works anywhere, but moves the whole module, frozen weights too, to every device in every
//! step.
mod apart;
mod error;

pub use apart::apart;
pub use error::{DeviceFailure, ParallelError};

use crate::lazy_paths::lazy_paths;
use crate::parameters::{EachOnce, each_once, tied};
use crate::plan::{PartWeight, PartsError, checked_weight, may_be_taken_in_parts};
use crate::strategy::{WithStrategy, with_strategy};
use crate::widened::widened;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::DispatchDevice;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use std::any::Any;
use std::collections::HashSet;
use std::iter::Peekable;

/// One module on several devices, with the same parameters on each.
///
/// The optimizer runs on the first device alone, so its state exists once.
#[derive(Debug)]
pub struct Replicas<M> {
    devices: Vec<Device>,
    modules: Vec<M>,
}

impl<M: Module> Replicas<M> {
    /// Copies a module to each device. Parameters that require gradients do so in the replicas, too.
    ///
    /// # Errors
    ///
    /// - If there are no devices, or if one records no gradients.
    /// - If the module has a batch norm, or another part with running statistics, in training mode: a replica would normalize with the
    ///   statistics of its part, and Burn's running statistics are shared between the clones of a module.
    /// - If a parameter that requires gradients is in two places of the module with different values.
    /// - If the module has lazy weights and a device is not the module's own, unless both are CUDA or WebGPU devices.
    pub fn new(module: &M, devices: impl IntoIterator<Item = Device>) -> Result<Self, ParallelError> {
        let devices: Vec<Device> = devices.into_iter().collect();
        if devices.is_empty() {
            return Err(ParallelError::NoDevices);
        }
        if let Some(index) = devices.iter().position(|device| !device.is_autodiff()) {
            return Err(ParallelError::NotAutodiff { index });
        }
        may_be_taken_in_parts(module)?;
        if let Some(path) = lazy_paths(module).into_iter().next() {
            let from = module.devices();
            let far = |to: &Device| from.iter().any(|from| !stays_lazy(from, to));
            if let Some(index) = devices.iter().position(far) {
                return Err(ParallelError::Lazy { path, index });
            }
        }
        // Through `valid`, since a clone shares running statistics.
        let replica =
            |device: &Device| tied(module.valid().train().fork(device).map(&mut WithStrategy { device }));
        let modules = devices.iter().map(replica).collect();
        Ok(Self { devices, modules })
    }

    /// The devices of the replicas. The optimizer runs on the first.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The replica on the first device.
    pub fn module(&self) -> &M {
        &self.modules[0]
    }

    /// Computes the mean loss of a batch and its gradients, both on the first device. Up to rounding, they are what one device computes
    /// from the whole batch.
    ///
    /// `parts` has one part of the batch per replica, in the order of [`devices`](Self::devices), with its [weight](PartWeight): the number
    /// of items, or of tokens, over which `loss` takes the mean, or the sum of class weights. There may be fewer parts than replicas. A
    /// part must be on the device of its replica.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no parts, more parts than replicas, or no items in the parts, or if a weight is negative or not
    /// finite.
    pub fn backward<T, W: PartWeight>(
        &self,
        parts: impl IntoIterator<Item = (T, W)>,
        loss: impl Fn(&M, T) -> Tensor<1>,
    ) -> Result<(Tensor<1>, GradientsParams), ParallelError> {
        let weighted = parts.into_iter().map(|(part, weight)| Ok((part, checked_weight(weight)?)));
        let parts: Vec<(T, f64)> = weighted.collect::<Result<_, PartsError>>()?;
        if parts.is_empty() || parts.len() > self.modules.len() {
            return Err(ParallelError::PartCount { parts: parts.len(), replicas: self.modules.len() });
        }
        let total: f64 = parts.iter().map(|(_, weight)| weight).sum();
        if total == 0.0 {
            return Err(PartsError::NoItems.into());
        }
        // Every device gets all of its work before anything is moved.
        let (losses, gradients): (Vec<_>, Vec<_>) = self
            .modules
            .iter()
            .zip(parts)
            .filter(|(_, (_, weight))| *weight > 0.0) // the mean loss of no items is NaN
            .map(|(module, (part, weight))| {
                let loss = loss(module, part).mul_scalar(weight / total);
                let gradients = GradientsParams::from_grads(loss.backward(), module);
                (loss.inner(), gradients)
            })
            .unzip();
        let device = self.devices[0].clone().without_autodiff();
        let loss = sum(losses, &device).expect("at least one part");
        let mut sums = Sums { parts: gradients, device, sums: GradientsParams::new() };
        each_once(self.module(), &mut sums);
        Ok((loss, sums.sums))
    }

    /// Replaces the replica on the first device, usually by what an optimizer makes of it, and copies its trainable parameters to the other
    /// replicas. Tied parameters, which are in several places of the module, stay tied: Burn's optimizers change only the first place,
    /// whose value all places get.
    ///
    /// # Panics
    ///
    /// Panics if `step` returns a module with other parameters. If `step` itself panics, all replicas are lost.
    pub fn update(&mut self, step: impl FnOnce(M) -> M) {
        // Taken, not cloned, so that parameters can change in place.
        let mut modules = std::mem::take(&mut self.modules).into_iter();
        let first = tied(step(modules.next().expect("a replica per device")));
        let mut trained = Trained::default();
        first.visit(&mut trained);
        let others = modules.zip(&self.devices[1..]).map(|(module, device)| {
            let values = trained.values.iter().peekable();
            tied(module.map(&mut Assign { values, given: HashSet::new(), device }))
        });
        self.modules = std::iter::once(first).chain(others).collect();
    }

    /// Waits for every device.
    ///
    /// # Errors
    ///
    /// Returns the devices that failed, or whose server is gone.
    pub fn sync(&self) -> Result<(), ParallelError> {
        let failure = |(index, device): (usize, &Device)| {
            let error = device.sync().err()?;
            Some(DeviceFailure { index, device: device.clone(), error })
        };
        let failed: Vec<_> = self.devices.iter().enumerate().filter_map(failure).collect();
        if failed.is_empty() { Ok(()) } else { Err(ParallelError::Devices { failed }) }
    }

    /// The replica on the first device.
    pub fn into_module(mut self) -> M {
        self.modules.swap_remove(0)
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

/// The sum of tensors on any devices, in f32 at least and rounded once; `None` of none.
fn sum<const D: usize>(parts: Vec<Tensor<D>>, device: &Device) -> Option<Tensor<D>> {
    let dtype = parts.first()?.dtype();
    let is_one = parts.len() == 1;
    let wide = |part: Tensor<D>| if is_one { part } else { widened(part) };
    let sum = parts.into_iter().map(|part| wide(part.to_device(device))).reduce(|a, b| a + b)?;
    Some(if sum.dtype() == dtype { sum } else { sum.cast(dtype) })
}

/// Sums the gradients of every parameter that it visits.
struct Sums {
    parts: Vec<GradientsParams>,
    device: Device,
    sums: GradientsParams,
}

impl EachOnce for Sums {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
        let parts = self.parts.iter_mut().filter_map(|part| part.remove::<D>(param.id)).collect();
        // Frozen and unused parameters have no gradient.
        if let Some(sum) = sum(parts, &self.device) {
            self.sums.register(param.id, sum);
        }
    }
}

/// A parameter, and its value (a tensor) if it requires gradients.
type Value = (ParamId, Option<Box<dyn Any>>);

/// All parameters in order, and the values of those that require gradients.
#[derive(Default)]
struct Trained {
    values: Vec<Value>,
}

impl ModuleVisitor for Trained {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.is_require_grad().then(|| Box::new(param.base().inner()) as Box<dyn Any>);
        self.values.push((param.id, value));
    }
}

/// Gives these values to a replica on another device, whose trainable parameters are then the same.
struct Assign<'a> {
    values: Peekable<std::slice::Iter<'a, Value>>,
    /// The parameters that have their value: a tied one gets it once.
    given: HashSet<ParamId>,
    device: &'a Device,
}

impl ModuleMapper for Assign<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((_, value)) = self.values.next_if(|(id, _)| *id == param.id) else {
            // A lazy weight is offered a second time, for an adapter.
            assert!(!param.is_require_grad(), "a step changes the values of parameters, not which there are");
            return param;
        };
        if value.is_some() && !self.given.insert(param.id) && param.is_require_grad() {
            return param;
        }
        let value = value.as_ref().map(|value| {
            let value = value.downcast_ref::<Tensor<D>>().expect("a parameter keeps its rank").clone();
            with_strategy(value.to_device(&self.device.clone().without_autodiff()), self.device)
        });
        match value {
            Some(value) => param.map(|_| value.require_grad()).set_require_grad(true),
            None if param.is_require_grad() => param.set_require_grad(false),
            None => param,
        }
    }
}
