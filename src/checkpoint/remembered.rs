//! Modules as they were.
use crate::strategy::with_strategy;
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Device, Int, Tensor};
use std::collections::HashMap;

/// A module as it was: before its forward pass, which may change what it remembers.
#[derive(Clone)]
pub(super) struct Remembered<M> {
    /// Without autodiff, so that it holds no node of the graph.
    module: M,
    states: States,
}

/// What `Module::valid` takes, and `Module::train` does not always give back.
#[derive(Clone, Default)]
struct States {
    seen: Seen,
    floats: HashMap<(ParamId, usize), State>,
    flags: HashMap<(ParamId, usize), bool>,
}

#[derive(Clone, Copy)]
struct State {
    is_tracked: bool,
    is_autodiff: bool,
}

impl ModuleVisitor for States {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let state = State { is_tracked: value.is_tracked(), is_autodiff: value.is_autodiff() };
        self.floats.insert(self.seen.see(param.id), state);
    }
    fn visit_flag(&mut self, flag: &Param<Flag>) {
        self.flags.insert(self.seen.see(flag.id), flag.is_enabled());
    }
}

impl<M: Module> Remembered<M> {
    pub(super) fn of(module: &M) -> Self {
        let mut states = States::default();
        module.visit(&mut states);
        states.seen = Seen::default();
        Self { module: module.valid(), states }
    }

    /// The module with leaves of its own.
    pub(super) fn module(self, device: &Device) -> M {
        let Self { module, states } = self;
        module.map(&mut Restore { device, states })
    }
}

/// Gives parameters and flags the state that they had.
struct Restore<'a> {
    device: &'a Device,
    states: States,
}

impl ModuleMapper for Restore<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let States { seen, floats, .. } = &mut self.states;
        match floats.get(&seen.see(param.id)) {
            Some(State { is_tracked: true, .. }) => {
                param.map(|value| with_strategy(value, self.device).require_grad()).set_require_grad(true)
            }
            Some(State { is_autodiff: true, .. }) => param.map(|value| with_strategy(value, self.device)),
            // A lazy weight offers itself once more, for an adapter.
            _ => param,
        }
    }
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|value| with_strategy(value, self.device))
    }
    fn map_bool<const D: usize>(&mut self, param: Param<Tensor<D, Bool>>) -> Param<Tensor<D, Bool>> {
        param.map(|value| with_strategy(value, self.device))
    }
    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        let States { seen, flags, .. } = &mut self.states;
        match flags.get(&seen.see(flag.id)) {
            Some(&value) => flag.with_value(value),
            None => flag,
        }
    }
}

/// How often a parameter was seen.
#[derive(Clone, Default)]
pub(super) struct Seen(HashMap<ParamId, usize>);

impl Seen {
    /// A parameter, and how often it was seen before.
    pub(super) fn see(&mut self, id: ParamId) -> (ParamId, usize) {
        let seen = self.0.entry(id).or_default();
        *seen += 1;
        (id, *seen - 1)
    }
}
