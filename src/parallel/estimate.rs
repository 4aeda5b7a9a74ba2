//! [`estimate_replicas`]: the bytes that replicas need on each device, and send in a step.
use super::frozen::{Weights, owned_weights, sharings};
use super::owners::Owners;
use super::{ParallelError, ReplicaOptions, Traffic, divide, in_training};
use crate::lazy_paths::lazy_paths;
use crate::parameters::{EachOnce, each_once};
use crate::plan::{OptimizerState, float_bytes};
use burn::module::{Module, Param, ParamId};
use burn::tensor::{Device, Tensor};
use std::collections::BTreeSet;

/// Bytes on one device of [`Replicas`](super::Replicas), without what a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceEstimate {
    /// Frozen weights.
    pub frozen: u64,
    /// The most that copies of frozen weights of other devices take between their uses, [the budget](super::FrozenOptions::with_budget).
    /// While a layer uses it, its own weight is there in addition.
    pub budget: u64,
    /// Trained parameters: all of them on every device.
    pub trained: u64,
    /// Gradients after a step, which are on the devices that own them.
    pub gradients: u64,
    /// The state of the optimizer.
    pub optimizer: u64,
}

impl DeviceEstimate {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.frozen + self.budget + self.trained + self.gradients + self.optimizer
    }
}

/// Bytes of replicas. Made by [`estimate_replicas`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReplicaEstimate {
    /// By device.
    pub devices: Vec<DeviceEstimate>,
    /// What is sent in a step in which every device has a part of the batch. Frozen weights count twice for every device but their owner, once
    /// for the forward and once for the backward pass. Weights whose backward pass does not need them, embeddings, of which rows
    /// are sent, and weights that stay within the budget are sent less often. A weight that is used several times is sent more often, as
    /// is one in a checkpointed segment, whose forward pass runs twice.
    pub sent: Traffic,
}

/// Reports what [`Replicas::with_options`](super::Replicas::with_options) needs on each device and sends in each step, before anything
/// is moved. With `N` devices that differ, `T` bytes of trained parameters and `F` of frozen weights that are divided:
///
/// ```text
///                     plain                          with_sharded_optimizer    with_sharded_frozen
/// gradients, state    T + state on the first         (T + state) / N
/// frozen weights      F                                                        F / N + budget
/// gradients sent      (N - 1) T, to the first        (N - 1) T, evenly
/// values sent         (N - 1) T, from the first      (N - 1) T, evenly
/// frozen sent         0                                                        2 (N - 1) F
/// ```
///
/// If devices of their own [own the frozen weights](super::FrozenOptions::with_owners), `2 N F` bytes are sent. Two devices of one server
/// count as two.
///
/// `optimizer` says what the optimizer keeps. Weights of the module that are on their owners already count there. Those in files, and those on
/// devices that are not among these, do not count.
///
/// ```
/// use burn::tensor::Device;
/// use burn_memsave::nn::LinearConfig;
/// use burn_memsave::parallel::{ReplicaOptions, estimate_replicas};
/// use burn_memsave::plan::OptimizerState;
///
/// let device = Device::flex().autodiff();
/// let model = [LinearConfig::new(64, 64).init(&device), LinearConfig::new(64, 64).init(&device)];
/// let devices = [device.clone(), device]; // as if they were two
/// let options = ReplicaOptions::new().with_sharded_optimizer();
/// let needed = estimate_replicas(&model.to_vec(), &devices, &options, OptimizerState::Two)?;
/// let one = (64 * 64 + 64) * 4;
/// assert!(needed.devices.iter().all(|device| (device.trained, device.optimizer) == (2 * one, 2 * one)));
/// assert_eq!((needed.sent.gradients, needed.sent.values), (2 * one, 2 * one));
/// # Ok::<(), burn_memsave::parallel::ParallelError>(())
/// ```
///
/// # Errors
///
/// As [`shard_frozen`](super::shard_frozen).
pub fn estimate_replicas<M: Module>(
    module: &M,
    devices: &[Device],
    options: &ReplicaOptions,
    optimizer: OptimizerState,
) -> Result<ReplicaEstimate, ParallelError> {
    let count = devices.len();
    if count == 0 {
        return Err(ParallelError::NoDevices);
    }
    let module = &in_training(module);
    let mut each = vec![DeviceEstimate::default(); count];
    let mut sent_frozen = 0;
    // By a device that may be none of these.
    let sent_by =
        |owner: Option<usize>, bytes: u64| 2 * (count - usize::from(owner.is_some())) as u64 * bytes;

    // Weights that are on their owners already, or will be.
    let lazy = lazy_paths(module);
    let owned = owned_weights(module, &lazy);
    for weight in owned.iter().filter_map(|weight| weight.on_device()) {
        let owner = devices.iter().position(|device| device == weight.device());
        if let Some(owner) = owner {
            each[owner].frozen += weight.bytes();
        }
        sent_frozen += sent_by(owner, weight.bytes());
    }
    let budget: u64 = sharings(&owned).iter().map(|sharing| sharing.budget()).sum();
    each.iter_mut().for_each(|device| device.budget = budget);
    let mut moved = 0;
    if let Some(frozen) = &options.frozen {
        let weights = Weights::of(module, frozen)?;
        moved = weights.bytes.iter().sum();
        each.iter_mut().for_each(|device| device.budget += frozen.budget);
        let owners = frozen.owners.as_deref().unwrap_or(devices);
        if owners.is_empty() {
            return Err(ParallelError::NoDevices);
        }
        for (bytes, owner) in weights.bytes.iter().zip(divide(&weights.bytes, owners.len())) {
            let position = match frozen.owners {
                None => Some(owner),
                Some(_) => devices.iter().position(|device| *device == owners[owner]),
            };
            if let Some(owner) = position {
                each[owner].frozen += bytes;
            }
            sent_frozen += sent_by(position, *bytes);
        }
    }

    let Parameters { trained, whole, .. } = Parameters::of(module, optimizer, &lazy);
    let of_trained: u64 = trained.iter().map(|(_, bytes, _)| bytes).sum();
    for device in &mut each {
        device.trained = of_trained;
        device.frozen += whole.saturating_sub(moved); // frozen weights with one id may differ
    }
    let owners = options.optimizer.then(|| Owners::of_module(module, count));
    for (id, bytes, state) in trained {
        let owner = owners.as_ref().map_or(0, |owners| owners.of(id));
        each[owner].gradients += bytes;
        each[owner].optimizer += state;
    }
    let others = count as u64 - 1;
    let sent = Traffic { gradients: others * of_trained, values: others * of_trained, frozen: sent_frozen };
    Ok(ReplicaEstimate { devices: each, sent })
}

/// The parameters of a module, each one once.
struct Parameters<'a> {
    optimizer: OptimizerState,
    lazy: &'a BTreeSet<String>,
    /// Those that require gradients: bytes, and bytes of the optimizer's state.
    trained: Vec<(ParamId, u64, u64)>,
    /// Bytes of those that do not, and are not lazy.
    whole: u64,
}

impl<'a> Parameters<'a> {
    fn of(module: &impl Module, optimizer: OptimizerState, lazy: &'a BTreeSet<String>) -> Self {
        let mut parameters = Self { optimizer, lazy, trained: vec![], whole: 0 };
        each_once(module, &mut parameters);
        parameters
    }
}

impl EachOnce for Parameters<'_> {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, path: &[String]) {
        let (dtype, elements) = (param.base().dtype(), param.lazy_shape().num_elements() as u64);
        if param.is_require_grad() {
            let (bytes, state) =
                (elements * dtype.size() as u64, self.optimizer.bytes(elements, dtype.size() as u64));
            self.trained.push((param.id, bytes, state));
        } else if !self.lazy.contains(&path.join(".")) {
            self.whole += float_bytes(dtype, elements);
        }
    }
}
