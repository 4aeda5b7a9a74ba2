//! [`shard_frozen`]: frozen weights, each of which is on one device.
use super::{FrozenOptions, ParallelError, divide};
use crate::parameters::running_statistics;
use crate::plan::float_bytes;
use burn::module::{
    Module, ModuleMapper, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer,
};
use burn::tensor::{DType, Device, Tensor};
use burn_memsave_layers::burn_internals::REPARAMETERIZATION;
use burn_memsave_layers::frozen::{DeviceWeight, FrozenWeight, LazyWeight, Recorded, Sharing, unplaced};
use burn_memsave_layers::node::node_id;
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::any::Any;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// Divides the frozen weights of a module among devices, so that each is on one device, its owner. Returns the module.
///
/// A layer on another device copies its weight from the owner when it runs, in the forward pass and again in the backward pass, and drops
/// it afterwards, as a [lazy weight](crate::lazy) is read from its file. Copies go from device to device. An embedding copies the rows that
/// its indices name. Layers of this library copy a weight again in the backward pass; Burn's keep the first copy until then.
///
/// Weights with less than two or more than five axes, with less than [`FrozenOptions::with_min_bytes`], or outside of
/// [`FrozenOptions::with_group`] stay where they are, as do running statistics and weights that are lazy already.
///
/// Freeze the module before, and attach adapters after it. [`Replicas`](super::Replicas) then holds no more than its part of the weights on
/// each device.
///
/// ```
/// use burn::module::{Lora, Module};
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::nn::LinearConfig;
/// use burn_memsave::parallel::{FrozenOptions, Replicas, shard_frozen};
///
/// let device = Device::flex().autodiff();
/// let devices = [device.clone(), device.clone()]; // here: one device, twice
/// let frozen = LinearConfig::new(256, 256).init(&device).freeze();
/// let model = shard_frozen(frozen, &devices, &FrozenOptions::new())?.apply_lora(Lora::new(4, 8.0));
/// let replicas = Replicas::new(&model, devices)?;
/// # let x = Tensor::<2>::ones([2, 256], &device);
/// # replicas.backward([(x, 2)], |model, x| model.forward(x).mean())?;
/// # Ok::<(), burn_memsave::parallel::ParallelError>(())
/// ```
///
/// # Records
///
/// A record of the module has the weights. [`Module::materialize`] makes it an ordinary module.
///
/// # Errors
///
/// - If there are no devices.
/// - If a weight has an adapter or another reparameterization already.
/// - If a weight is quantized: leave it out of the group, and it stays on every device.
pub fn shard_frozen<M: Module>(
    module: M,
    devices: &[Device],
    options: &FrozenOptions,
) -> Result<M, ParallelError> {
    let owners = options.owners.as_deref().unwrap_or(devices);
    if owners.is_empty() {
        return Err(ParallelError::NoDevices);
    }
    let Weights { at, bytes } = Weights::of(&module, options)?;
    let owner_of =
        divide(&bytes, owners.len()).into_iter().map(|owner| owners[owner].clone().without_autodiff());
    let mut attach = Attach {
        at,
        owner_of: owner_of.collect(),
        made: HashMap::new(),
        sharing: Sharing::new(options.budget, options.read_ahead.unwrap_or(u64::MAX)),
    };
    Ok(module.apply_reparameterization(&mut attach))
}

/// The weights of a module that are divided.
pub(super) struct Weights {
    /// The number of the weight at a path. A tied weight has several.
    at: HashMap<String, usize>,
    /// The bytes of each weight.
    pub bytes: Vec<u64>,
}

impl Weights {
    pub fn of(module: &impl Module, options: &FrozenOptions) -> Result<Self, ParallelError> {
        let mut search = Search {
            path: VisitPath::default(),
            options,
            running: running_statistics(module),
            found: vec![],
            reparameterized: HashMap::new(),
        };
        module.visit(&mut search);
        let Search { found, reparameterized, .. } = search;
        let (mut weights, mut first) =
            (Self { at: HashMap::new(), bytes: vec![] }, Vec::<(usize, Found)>::new());
        for found in found {
            match reparameterized.get(&found.path) {
                Some(name) if name == LazyWeight::NAME => continue,
                Some(_) => return Err(ParallelError::Adapted { path: found.path }),
                None => (),
            }
            if let DType::QFloat(_) = found.dtype {
                return Err(ParallelError::Quantized { path: found.path });
            }
            let before = first.iter().find(|(_, first)| first.is_tied_to(&found));
            let number = before.map_or(weights.bytes.len(), |(number, _)| *number);
            weights.at.insert(found.path.clone(), number);
            if before.is_none() {
                weights.bytes.push(found.bytes);
                first.push((number, found));
            }
        }
        Ok(weights)
    }
}

/// A weight at one place.
struct Found {
    path: String,
    id: ParamId,
    node: Option<u64>,
    dtype: DType,
    bytes: u64,
    /// A `Tensor<D>`.
    value: Box<dyn Any>,
    /// Whether two values are equal.
    equal: fn(&dyn Any, &dyn Any) -> bool,
}

impl Found {
    /// Whether it is the same parameter with the same value. (Frozen parameters with one id may have several.)
    fn is_tied_to(&self, other: &Self) -> bool {
        let is_node = self.node.is_some() && self.node == other.node;
        self.id == other.id && (is_node || (self.equal)(&*self.value, &*other.value))
    }
}

fn equal<const D: usize>(a: &dyn Any, b: &dyn Any) -> bool {
    let [a, b] = [a, b].map(|tensor| tensor.downcast_ref::<Tensor<D>>());
    a.zip(b).is_some_and(|(a, b)| a.shape() == b.shape() && a.to_data() == b.to_data())
}

/// Finds the weights that may be divided, and which of them have a reparameterization.
struct Search<'a> {
    path: VisitPath,
    options: &'a FrozenOptions,
    running: HashSet<ParamId>,
    found: Vec<Found>,
    /// The name of the reparameterization at a path.
    reparameterized: HashMap<String, String>,
}

impl ModuleVisitor for Search<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        if container == REPARAMETERIZATION {
            self.reparameterized.entry(self.path.joined()).or_insert_with(|| name.into());
        }
        self.path.enter(name, container);
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.exit();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let path = self.path.joined();
        let is_chosen = (2..=5).contains(&D)
            && !param.is_require_grad()
            && !self.running.contains(&param.id)
            && self.options.group.matches(&param.id, Some(&path));
        if !is_chosen {
            return;
        }
        let value = param.base();
        let (dtype, elements) = (value.dtype(), value.shape().num_elements() as u64);
        let bytes = float_bytes(dtype, elements);
        if bytes < self.options.min_bytes || elements == 0 {
            return;
        }
        let node = node_id(value.clone()).map(|node| node.value);
        let (id, value, equal) = (param.id, Box::new(value), equal::<D>);
        self.found.push(Found { path, id, node, dtype, bytes, value, equal });
    }
}

/// Moves the weights to their owners, and makes their parameters lazy.
struct Attach {
    at: HashMap<String, usize>,
    /// By the number of a weight.
    owner_of: Vec<Device>,
    made: HashMap<usize, Arc<DeviceWeight>>,
    sharing: Arc<Sharing>,
}

impl Reparameterizer for &mut Attach {
    type Reparam = LazyWeight;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<LazyWeight>) {
        // A weight that was lazy before is offered for an adapter.
        let Some(&number) = self.at.get(path).filter(|_| param.reparameterization::<LazyWeight>().is_none())
        else {
            return (param, None);
        };
        let weight = match self.made.get(&number) {
            Some(weight) => weight.clone(),
            None => {
                let Recorded::Value(value) = Recorded::of(&param) else { return (param, None) };
                let (value, owner) = (value.without_autodiff(), &self.owner_of[number]);
                let value = if value.device() == *owner { value } else { value.to_device(owner) };
                let weight = Arc::new(DeviceWeight::new(value, self.sharing.clone()));
                self.made.insert(number, weight.clone());
                weight
            }
        };
        let (param, lazy) = LazyWeight::attach(param, weight);
        (param, Some(lazy))
    }
}

/// The weights of a module that are on the devices that own them, once each. `lazy`: the paths of its lazy parameters.
pub(super) fn owned_weights(module: &impl Module, lazy: &BTreeSet<String>) -> Vec<Arc<dyn FrozenWeight>> {
    struct Owned<'a> {
        path: VisitPath,
        lazy: &'a BTreeSet<String>,
        found: Vec<Arc<dyn FrozenWeight>>,
    }
    impl ModuleVisitor for Owned<'_> {
        follow_path!();
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if !self.lazy.contains(&self.path.joined()) {
                return;
            }
            if let Recorded::Frozen(weight) = Recorded::of(param)
                && weight.on_device().is_some()
                && !self.found.iter().any(|found| Arc::ptr_eq(found, &weight))
            {
                self.found.push(weight);
            }
        }
    }
    let mut owned = Owned { path: VisitPath::default(), lazy, found: vec![] };
    module.visit(&mut owned);
    owned.found
}

/// What these weights share, each once.
pub(super) fn sharings(weights: &[Arc<dyn FrozenWeight>]) -> Vec<&Arc<Sharing>> {
    let mut sharings: Vec<&Arc<Sharing>> = vec![];
    for weight in weights.iter().filter_map(|weight| weight.on_device()) {
        if !sharings.iter().any(|other| Arc::ptr_eq(other, weight.sharing())) {
            sharings.push(weight.sharing());
        }
    }
    sharings
}

/// Has the placeholders of lazy parameters made on the device that they are moved to next.
pub(super) struct Unplaced<'a> {
    pub path: VisitPath,
    /// The paths of lazy parameters.
    pub lazy: &'a BTreeSet<String>,
}

impl ModuleMapper for Unplaced<'_> {
    follow_path!();
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // The parameter is offered a second time, for an adapter.
        let is_base = param.reparameterization::<LazyWeight>().is_none();
        if is_base && self.lazy.contains(&self.path.joined()) { unplaced(param) } else { param }
    }
}
