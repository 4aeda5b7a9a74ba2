//! Moves the values of trained parameters from replica to replica.
use super::owners::Owners;
use super::traffic::Sent;
use crate::strategy::with_strategy;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn_memsave_layers::node::node_id;
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::iter::Peekable;

/// A parameter after a step.
pub(super) struct Value {
    id: ParamId,
    /// The id of the parameter at this place before the step, as other replicas still have it.
    id_before: ParamId,
    requires_grad: bool,
    /// Whether the step changed it though it is frozen.
    is_frozen_and_new: bool,
    /// A tensor without autodiff; `None` if every replica has it.
    tensor: Option<Box<dyn Any>>,
}

/// All parameters in order, with the values of those that require gradients, or did so before the step, or that it changed.
pub(super) struct Trained<'a> {
    pub values: Vec<Value>,
    before: Vec<Place>,
    /// Running statistics, which steps do not change.
    running: &'a HashSet<ParamId>,
}

/// What is at a place of a module.
#[derive(PartialEq, Eq)]
struct Place {
    id: ParamId,
    requires_grad: bool,
    /// The number of the autodiff node of its value.
    node: Option<u64>,
}

impl Place {
    fn of<const D: usize>(param: &Param<Tensor<D>>) -> Self {
        let node = node_id(param.base()).map(|node| node.value);
        Self { id: param.id, requires_grad: param.is_require_grad(), node }
    }
}

impl<'a> Trained<'a> {
    /// For a step that begins with this module.
    pub fn before(module: &impl Module, running: &'a HashSet<ParamId>) -> Self {
        struct Places(Vec<Place>);
        impl ModuleVisitor for Places {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                self.0.push(Place::of(param));
            }
        }
        let mut places = Places(vec![]);
        module.visit(&mut places);
        Self { values: vec![], before: places.0, running }
    }
}

impl ModuleVisitor for Trained<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let now = Place::of(param);
        let before = self.before.get(self.values.len()).unwrap_or(&now);
        let is_frozen = !now.requires_grad && !before.requires_grad;
        let is_frozen_and_new = is_frozen && now != *before && !self.running.contains(&param.id);
        let tensor =
            (!is_frozen || is_frozen_and_new).then(|| Box::new(param.base().inner()) as Box<dyn Any>);
        let (id, requires_grad, id_before) = (param.id, now.requires_grad, before.id);
        self.values.push(Value { id, id_before, requires_grad, is_frozen_and_new, tensor });
    }
}

/// Gives these values to a replica, whose trainable parameters are then the same.
pub(super) struct Assign<'a> {
    values: Peekable<std::slice::Iter<'a, Value>>,
    /// The parameters that have their value: a tied one gets it once.
    given: HashSet<ParamId>,
    device: &'a Device,
    sent: &'a Sent,
}

impl<'a> Assign<'a> {
    pub fn new(values: &'a [Value], device: &'a Device, sent: &'a Sent) -> Self {
        Self { values: values.iter().peekable(), given: HashSet::new(), device, sent }
    }
}

impl ModuleMapper for Assign<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let is_here =
            |value: &&Value| value.id == param.id || value.is_frozen_and_new && value.id_before == param.id;
        let Some(value) = self.values.next_if(is_here) else {
            // A lazy weight is offered a second time, for an adapter.
            assert!(!param.is_require_grad(), "a step changes the values of parameters, not which there are");
            return param;
        };
        let Some(tensor) = &value.tensor else {
            return if param.is_require_grad() { param.set_require_grad(false) } else { param };
        };
        // A tied parameter has its value already; what was frozen before has it, too.
        let is_given = match value.requires_grad {
            true => !self.given.insert(param.id) && param.is_require_grad(),
            false if value.is_frozen_and_new => false,
            false => !param.is_require_grad() && param.is_autodiff() && param.device() == *self.device,
        };
        if is_given {
            return param;
        }
        let tensor = tensor.downcast_ref::<Tensor<D>>().expect("a parameter keeps its rank").clone();
        let moved = self.sent.moved(tensor, &self.device.clone().without_autodiff());
        let tensor = with_strategy(moved, self.device);
        match value.requires_grad {
            true => param.map(|_| tensor.require_grad()).set_require_grad(true),
            false => {
                let (_, _, mapper) = param.consume();
                Param::from_mapped_value(value.id, tensor, mapper).set_require_grad(false)
            }
        }
    }
}

/// Values that replicas lend to the one that the optimizer gets: tensors of the parameters that they own, without autodiff, by parameter.
pub(super) type Lent = HashMap<ParamId, (Box<dyn Any>, Device)>;

/// Takes the parameters that a replica owns out of it.
pub(super) struct Lend<'a> {
    pub owners: &'a Owners,
    /// The position of the replica.
    pub replica: usize,
    pub lent: &'a mut Lent,
}

impl ModuleMapper for Lend<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() || self.owners.get(param.id) != Some(self.replica) {
            return param;
        }
        let (id, value, mapper) = param.consume();
        let device = value.device();
        let none = Tensor::<D>::zeros([1; D], &device.clone().without_autodiff());
        self.lent.entry(id).or_insert_with(|| (Box::new(value.inner()), device));
        Param::from_mapped_value(id, none, mapper)
    }
}

/// Puts what was lent into a replica in place of its own values.
pub(super) struct Borrow(pub Lent);

impl ModuleMapper for Borrow {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !param.is_require_grad() {
            return param;
        }
        let Some((value, device)) = self.0.get_mut(&param.id) else { return param };
        let value = value.downcast_mut::<Tensor<D>>().expect("a parameter keeps its rank");
        if !value.is_require_grad() {
            *value = with_strategy(value.clone(), device).require_grad();
        }
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, value.clone(), mapper)
    }
}
