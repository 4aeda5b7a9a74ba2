//! [`Remembered`]: a module as it was before its forward pass, to recompute that pass.
use crate::parameters::running_statistics;
use crate::strategy::with_strategy;
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Device, Int, Tensor};
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

/// A module as it was before its forward pass, which may change its state.
#[derive(Clone)]
pub(super) struct Remembered<M> {
    /// Its parameters are without autodiff, so that it holds no node of the graph.
    module: M,
    states: States,
    /// Whether it has running statistics. Then its other tensors are without autodiff, too.
    runs: bool,
}

/// State that `Module::valid` takes away, and `Module::train` does not always give back.
#[derive(Clone, Default)]
struct States {
    seen: Seen,
    floats: HashMap<(ParamId, usize), State>,
    flags: HashMap<(ParamId, usize), bool>,
    /// A hash of the ids of the parameters.
    hash: u64,
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
        let mut hasher = DefaultHasher::new();
        (self.hash, param.id).hash(&mut hasher);
        self.hash = hasher.finish();
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
        let runs = !running_statistics(module).is_empty();
        // `valid` gives a module running statistics of its own.
        let module = if runs { module.valid() } else { module.clone().map(&mut Inner) };
        Self { module, states, runs }
    }

    /// The module, with its trainable parameters as new leaves.
    pub(super) fn module(self, device: &Device) -> M {
        let Self { module, states, .. } = self;
        module.map(&mut Restore { device, states, tracks: true })
    }

    /// The module with untracked parameters. Tensors in it that are not parameters stay as they are. Running it does not change the state
    /// of the original.
    pub(super) fn untracked(&self, module: &M, device: &Device) -> M {
        let states = self.states.clone();
        // Like `valid`, `train` gives a module running statistics of its own, but it leaves other tensors as they are.
        let module = match self.runs {
            true if is_default(device) => module.clone().map(&mut Untracked).train(),
            true => self.module.clone(),
            false => module.clone().map(&mut Untracked),
        };
        module.map(&mut Restore { device, states, tracks: false })
    }

    /// A hash that is the same for the same parameters.
    pub(super) fn hash(&self) -> u64 {
        self.states.hash
    }
}

/// Whether the strategy of a device is the one that `Module::train` gives to tensors without autodiff.
fn is_default(device: &Device) -> bool {
    device.gradient_checkpointing_strategy() == Some(Default::default())
}

/// Takes autodiff from parameters.
struct Inner;

impl ModuleMapper for Inner {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if param.base().is_autodiff() { param.map(Tensor::inner) } else { param }
    }
}

/// Takes parameters out of their graph, and keeps `Module::train` from requiring their gradients.
struct Untracked;

impl ModuleMapper for Untracked {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let param = match param.base().is_tracked() {
            true => param.map(|value| value.detach().set_require_grad(false)),
            false => param,
        };
        param.set_require_grad(false)
    }
}

/// Gives parameters and flags the state that they had.
struct Restore<'a> {
    device: &'a Device,
    states: States,
    /// Whether parameters are tracked again.
    tracks: bool,
}

impl ModuleMapper for Restore<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let States { seen, floats, .. } = &mut self.states;
        match floats.get(&seen.see(param.id)) {
            Some(State { is_tracked: true, .. }) if self.tracks => {
                param.map(|value| with_strategy(value, self.device).require_grad()).set_require_grad(true)
            }
            Some(State { is_autodiff: true, .. }) => param.map(|value| with_strategy(value, self.device)),
            Some(_) => param.map(Tensor::inner),
            // A lazy weight is offered a second time, for an adapter.
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
