//! One module on several devices of this machine or of others: each computes the gradients of its part of a batch.
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
//! replicas.sync()?; // a device that failed, or a server that is gone, shows here or where the loss is read
//! # let _ = loss;
//! # Ok::<(), burn_memsave::parallel::ParallelError>(())
//! ```
//!
//! # What is sent
//!
//! Of every parameter that requires gradients, each step moves the gradient from each further device to the first, and the new
//! value back. Frozen parameters are sent once, when the replicas are made. Remote devices send to one another; nothing passes
//! through the program that drives them.
//!
//! Several steps in one pool of threads of a CPU are another matter: see [`apart`].
//!
//! # Beside `ExecutionStrategy::ddp`
//!
//! Burn's own strategy reduces gradients with NCCL, on the CUDA devices of one machine, also of one that serves them to others
//! ([`RemoteServer`](https://docs.rs/burn/0.22.1/burn/server/struct.RemoteServer.html)). To it our layers are like Burn's: they are
//! tested under it, and under the distributed training that it is made of, on a server whose devices reduce on the CPU
//! (`tests/distributed`; not what draws random numbers, nor quantized weights, which Burn's servers do not take), but not with NCCL,
//! for want of such a machine. It does not refuse a [`BatchNorm`](crate::nn::BatchNorm) in training mode, of which each device then
//! has statistics of its own part of the batch, running ones too: freeze it, or take another norm.
//! Burn 0.22.1 refuses to reduce across servers, and panics on every other backend. `ExecutionStrategy::multi` works anywhere
//! and moves the whole module, frozen weights too, to every device in every step.
mod apart;
mod error;

pub use apart::apart;
pub use error::{DeviceFailure, ParallelError};

use crate::lazy_paths::lazy_paths;
use crate::parameters::{EachOnce, each_once, tied};
use crate::plan::{PartWeight, PartsError, checked_weight, may_be_taken_in_parts};
use crate::strategy::{WithStrategy, with_strategy};
#[cfg(any(feature = "wgpu", feature = "cuda"))]
use burn::backend::DispatchDevice;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType, Tensor};
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
    /// Copies a module to each device. What requires gradients in it does so in the replicas.
    ///
    /// # Errors
    ///
    /// - Without devices, or with one that records no gradients.
    /// - If the module has a batch norm, or another part with running statistics, in training mode: a replica would normalize with the
    ///   statistics of its part, and Burn's running statistics are shared between the clones of a module.
    /// - If a parameter that requires gradients is in two places of the module with different values.
    /// - If it has lazy weights, and is neither on the device nor are both CUDA or WebGPU devices.
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
        // Through `valid`, as running statistics are shared with a clone.
        let replica =
            |device: &Device| tied(module.valid().train().fork(device).map(&mut WithStrategy { device }));
        let modules = devices.iter().map(replica).collect();
        Ok(Self { devices, modules })
    }

    /// Where the replicas are; the optimizer runs on the first.
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The replica on the first device.
    pub fn module(&self) -> &M {
        &self.modules[0]
    }

    /// The mean loss of a batch and its gradients, both on the first device: those that one device computes of the whole batch,
    /// to rounding.
    ///
    /// `parts`: for each replica, in the order of [`devices`](Self::devices), its part of the batch and its [weight](PartWeight): the
    /// number of items over which `loss` takes the mean, or of tokens, or the sum of class weights. There may be fewer parts than
    /// replicas. A part is on the device of its replica.
    ///
    /// # Errors
    ///
    /// If there are no parts, more than replicas, or no items in them; if a weight is negative or not finite.
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
        // Every device has all of its work before anything is moved.
        let (losses, gradients): (Vec<_>, Vec<_>) = self
            .modules
            .iter()
            .zip(parts)
            .filter(|(_, (_, weight))| *weight > 0.0) // the mean loss of another is not a number
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

    /// Replaces the replica on the first device, usually by what an optimizer makes of it, and gives its trainable parameters to
    /// the others. A parameter that is tied, in several places of the module, stays so: of these, Burn's optimizers change the first,
    /// whose value all get.
    ///
    /// # Panics
    ///
    /// If `step` returns a module with other parameters. If it panics itself, the replicas are lost: there is none left.
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
    /// The devices that failed; a server that is gone.
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

/// Whether what a lazy parameter holds in place of its weight takes no memory where it is moved to, either.
fn stays_lazy(from: &Device, to: &Device) -> bool {
    let [from, to] = [from, to].map(|device| device.clone().without_autodiff());
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    if let (DispatchDevice::Cube(_), DispatchDevice::Cube(_)) = (from.as_dispatch(), to.as_dispatch()) {
        return true;
    }
    from == to
}

/// Of tensors on any devices; in f32 at least, rounded once.
fn sum<const D: usize>(parts: Vec<Tensor<D>>, device: &Device) -> Option<Tensor<D>> {
    let dtype = parts.first()?.dtype();
    let is_one = parts.len() == 1;
    let wide = |part: Tensor<D>| match is_one || dtype.size() >= 4 {
        true => part,
        false => part.cast(FloatDType::F32),
    };
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
        // None for what is frozen or unused.
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

/// Gives them to a module on another device, which requires gradients of the same.
struct Assign<'a> {
    values: Peekable<std::slice::Iter<'a, Value>>,
    /// What has its value: one that is tied gets it once.
    given: HashSet<ParamId>,
    device: &'a Device,
}

impl ModuleMapper for Assign<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some((_, value)) = self.values.next_if(|(id, _)| *id == param.id) else {
            // A lazy weight offers itself once more, for an adapter.
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
