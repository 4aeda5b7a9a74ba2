//! One segment.
use super::tensors::{TensorMapper, Tensors};
use crate::measure::is_host;
use crate::ops::replay::{self, Tape};
use crate::ops::{Replay, SegmentOps, Slots, is_entered, node_id};
use crate::saved::is_exact;
use crate::strategy::with_strategy;
use burn::backend::Dispatch;
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, DType, Device, FloatDType, Gradients, Int, Shape, Slice, Tensor, TensorData};
use std::any::{TypeId, type_name};
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// Only floats have gradients.
macro_rules! untouched {
    () => {
        fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
            tensor
        }
        fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
            tensor
        }
    };
}

/// `forward(module, input)`, of which nothing is kept but the inputs that are tracked: it is computed again in the backward pass.
/// See the [module](super) for what that means.
///
/// If neither an input nor a parameter is tracked, it is just that.
///
/// # Panics
///
/// In the backward pass, if the segment does something else when it is computed again.
pub fn checkpoint<M, I, O, F>(module: &M, input: I, forward: F) -> O
where
    M: Module + 'static,
    I: Tensors,
    O: Tensors,
    F: Fn(&M, I) -> O + Copy + Send + Sync + 'static,
{
    checkpoint_around(module, input, forward, |replay| replay())
}

/// [`checkpoint`], whose replay in the backward pass is run by `around`.
pub(crate) fn checkpoint_around<M, I, O, F>(
    module: &M,
    input: I,
    forward: F,
    around: impl FnOnce(Box<dyn FnOnce() + Send>) + Send + 'static,
) -> O
where
    M: Module + 'static,
    I: Tensors,
    O: Tensors,
    F: Fn(&M, I) -> O + Copy + Send + Sync + 'static,
{
    let mut parents = Parents::default();
    module.visit(&mut parents);
    let input = input.map_tensors(&mut parents);
    let Some(device) = parents.device.clone() else {
        return forward(module, input);
    };
    let of_replay = Remembered::of(module);
    let FirstRun { output, tracked, samples, tape } = first_run(module, input.clone(), &device, forward);
    if !tracked.contains(&true) {
        return output;
    }
    let [gradients, inputs, of_outputs] = [(); 3].map(|()| Slots::default());
    let plain = device.clone().without_autodiff();
    let mut skeleton = Skeleton { plain: &plain, tracked: vec![] };
    let segment = Segment {
        module: of_replay,
        input: input.map_tensors(&mut skeleton),
        tracked: skeleton.tracked,
        forward,
        tape,
        device: device.clone(),
        parameters: std::mem::take(&mut parents.parameters),
        zeros: std::mem::take(&mut parents.zeros),
        first_input: parents.first_input,
        gradients: gradients.clone(),
        inputs: inputs.clone(),
        of_outputs: of_outputs.clone(),
        samples,
    };
    let replay = Replay::new(move || around(Box::new(move || segment.replay())));
    let token = parents.chain(&device, gradients, inputs, replay);
    output.map_tensors(&mut Outputs { token, tracked: tracked.into_iter(), of_outputs, number: 0 })
}

/// What carries no value along a chain of steps.
pub(crate) fn token(device: &Device) -> Tensor<1> {
    with_strategy(Tensor::zeros([1], &device.clone().without_autodiff()), device)
}

/// What a segment does the first time.
pub(super) struct FirstRun<O> {
    /// Not tracked.
    pub(super) output: O,
    /// Which of the floats in it are by right.
    pub(super) tracked: Vec<bool>,
    pub(super) samples: Samples,
    pub(super) tape: Tape,
}

/// A few elements of every float in the output, if it is to be compared.
pub(super) type Samples = Vec<Option<TensorData>>;

/// As without a checkpoint, on a graph of its own, which ends here.
pub(super) fn first_run<M, I, O, F>(module: &M, input: I, device: &Device, forward: F) -> FirstRun<O>
where
    M: Module + 'static,
    I: Tensors,
    O: Tensors,
    F: Fn(&M, I) -> O + 'static,
{
    let mut fresh = Fresh { probe: token(device).require_grad(), leaves: vec![], device };
    let (output, tape) = {
        let module = module.clone().map(&mut fresh);
        let input = input.map_tensors(&mut fresh);
        replay::record(|| forward(&module, input))
    };
    // From inputs that come back rounded nothing is the same.
    let is_checked = is_exact() && (is_host(device) || times::<(M, F)>(0) < CHECKS);
    let mut finished = Finished { device, is_checked, tracked: vec![], samples: vec![] };
    let output = output.map_tensors(&mut finished);
    let Finished { tracked, samples, .. } = finished;
    fresh.forget();
    FirstRun { output, tracked, samples, tape }
}

/// What is needed to compute a segment again.
struct Segment<M, I, F> {
    module: Remembered<M>,
    /// With placeholders for what is tracked.
    input: I,
    /// Which of the floats in the input are tracked.
    tracked: Vec<bool>,
    forward: F,
    tape: Tape,
    device: Device,
    parameters: Parameters,
    zeros: Vec<Finish>,
    /// The slot of the gradient of the first tracked input.
    first_input: usize,
    /// Of parameters and tracked inputs.
    gradients: Slots,
    /// The tracked inputs.
    inputs: Slots,
    /// The gradients of the outputs.
    of_outputs: Slots,
    samples: Samples,
}

impl<M, I, F> Segment<M, I, F> {
    fn replay<O>(self)
    where
        M: Module + 'static,
        I: Tensors,
        O: Tensors,
        F: Fn(&M, I) -> O + 'static,
    {
        let device = &self.device;
        let mut filled = Filled {
            probe: token(device).require_grad(),
            device,
            tracked: self.tracked.into_iter(),
            inputs: self.inputs,
            number: 0,
            gradients: self.gradients.clone(),
            slot: self.first_input,
        };
        let input = self.input.map_tensors(&mut filled);
        let (parameters, gradients, of_outputs) = (&self.parameters, &self.gradients, &self.of_outputs);
        Again { device, parameters, gradients, of_outputs, is_part: false }.run(
            self.module,
            input,
            self.forward,
            self.tape,
            self.samples,
        );
        let like = token(device).inner();
        self.zeros.into_iter().for_each(|fill| fill(&like, gradients));
    }
}

/// Runs a segment again, with its backward pass.
pub(super) struct Again<'a> {
    pub(super) device: &'a Device,
    pub(super) parameters: &'a Parameters,
    /// Of the parameters.
    pub(super) gradients: &'a Slots,
    pub(super) of_outputs: &'a Slots,
    /// Whether gradients are parts of sums, which are made in f32 at least.
    pub(super) is_part: bool,
}

impl Again<'_> {
    pub(super) fn run<M, I, O, F>(
        self,
        module: Remembered<M>,
        input: I,
        forward: F,
        tape: Tape,
        samples: Samples,
    ) where
        M: Module + 'static,
        O: Tensors,
        F: Fn(&M, I) -> O + 'static,
    {
        let module = module.module(self.device);
        let output = replay::replay(tape, || forward(&module, input));
        let mut seeds = Seeds {
            root: token(self.device),
            of_outputs: self.of_outputs.clone(),
            number: 0,
            samples: samples.into_iter(),
            name: type_name::<F>(),
        };
        drop(output.map_tensors(&mut seeds));
        assert!(
            seeds.samples.next().is_none(),
            "checkpoint: computed again, {} has fewer outputs",
            seeds.name
        );
        times::<(M, F)>(1);
        if seeds.root.is_tracked() {
            let found = seeds.root.backward();
            module.visit(&mut Collect { found, seen: Seen::default(), again: &self });
        }
    }
}

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
    fn module(self, device: &Device) -> M {
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
struct Seen(HashMap<ParamId, usize>);

impl Seen {
    /// A parameter, and how often it was seen before.
    fn see(&mut self, id: ParamId) -> (ParamId, usize) {
        let seen = self.0.entry(id).or_default();
        *seen += 1;
        (id, *seen - 1)
    }
}

/// The slots of the gradients of parameters. One that is in several places of a module may be one leaf of the graph, or several.
pub(super) type Parameters = HashMap<(ParamId, usize), usize>;

/// Records a step on a token.
type Link = Box<dyn FnOnce(Tensor<1>, Slots, usize) -> Tensor<1>>;

/// One token of all parents, by a tree of steps: Burn walks through graphs recursively.
fn join(device: &Device, links: Vec<Link>, gradients: &Slots) -> Tensor<1> {
    let link = |(slot, link): (usize, Link)| link(token(device), gradients.clone(), slot);
    let mut tokens: Vec<Tensor<1>> = links.into_iter().enumerate().map(link).collect();
    while tokens.len() > 1 {
        let pair = |pair: &[Tensor<1>]| match pair {
            [a, b] => self::link(b.clone())(a.clone(), Slots::default(), 0),
            rest => rest[0].clone(),
        };
        tokens = tokens.chunks(2).map(pair).collect();
    }
    tokens.swap_remove(0)
}

fn link<const D: usize>(parent: Tensor<D>) -> Link {
    Box::new(|token, slots, slot| {
        let (token, parent) = (token.into_dispatch(), parent.into_dispatch());
        Tensor::from_dispatch(Dispatch::memsave_segment_parent(token, parent, slots, slot))
    })
}

/// Completes the gradients: what was summed in f32 gets the type of its parameter, what is missing zeros. With any tensor of the
/// backend.
pub(super) type Finish = Box<dyn FnOnce(&Tensor<1>, &Slots) + Send>;

/// Fills the slot of a gradient with zeros if there is none.
fn fill<const D: usize>(shape: Shape, dtype: DType, like: &Tensor<1>, gradients: &Slots, slot: usize) {
    if !gradients.has(slot) {
        put(Tensor::<D>::zeros(shape, (&like.device(), dtype)), gradients, slot);
    }
}

/// Finds what is tracked.
#[derive(Default)]
pub(super) struct Parents {
    /// Of the first one.
    pub(super) device: Option<Device>,
    seen: Seen,
    pub(super) parameters: Parameters,
    pub(super) first_input: usize,
    /// To make them parents of the segment: parameters, then inputs.
    links: Vec<Link>,
    /// To keep the inputs.
    keeps: Vec<Link>,
    /// Of parameters in half precision.
    pub(super) narrow: Vec<Finish>,
    /// Of parameters that are no leaves, and of inputs.
    pub(super) zeros: Vec<Finish>,
    nodes: HashMap<u64, usize>,
}

impl Parents {
    /// The token from which the outputs of a segment come.
    pub(super) fn chain(self, device: &Device, gradients: Slots, inputs: Slots, replay: Replay) -> Tensor<1> {
        let token = join(device, self.links, &gradients).into_dispatch();
        let mut token = Tensor::from_dispatch(Dispatch::memsave_segment_replay(token, replay));
        for (number, keep) in self.keeps.into_iter().enumerate() {
            token = keep(token, inputs.clone(), number);
        }
        token
    }
}

impl ModuleVisitor for Parents {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let place = self.seen.see(param.id);
        let leaf = param.base();
        if !leaf.is_tracked() {
            return;
        }
        assert!(
            !leaf.is_distributed(),
            "checkpoint: Burn 0.22.1 waits for other devices at the end of every backward pass, also of those of segments: use \
             parallel::Replicas instead of ExecutionStrategy::ddp"
        );
        self.device.get_or_insert_with(|| leaf.device());
        let node = node_id(leaf.clone()).expect("a tracked tensor is a node").value;
        let slot = *self.nodes.entry(node).or_insert(self.links.len());
        if slot == self.links.len() {
            let (shape, dtype) = (leaf.shape(), leaf.dtype());
            if !leaf.is_require_grad() && !is_entered(node) {
                // No leaf: the step that made it waits for a gradient.
                self.zeros.push(Box::new(move |like, gradients| {
                    fill::<D>(shape, dtype, like, gradients, slot);
                }));
            }
            if dtype.size() < 4 {
                self.narrow.push(Box::new(move |like, gradients| {
                    if gradients.has(slot) {
                        let sum: Tensor<D> = take(like, gradients, slot);
                        put(sum.cast(FloatDType::from(dtype)), gradients, slot);
                    }
                }));
            }
            self.links.push(link(leaf));
        }
        self.parameters.insert(place, slot);
        self.first_input = self.links.len();
    }
}

impl TensorMapper for Parents {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if tensor.is_tracked() {
            self.device.get_or_insert_with(|| tensor.device());
            let (shape, dtype, slot) = (tensor.shape(), tensor.dtype(), self.links.len());
            self.zeros.push(Box::new(move |like, gradients| fill::<D>(shape, dtype, like, gradients, slot)));
            self.links.push(link(tensor.clone()));
            let kept = tensor.clone();
            self.keeps.push(Box::new(|token, slots, slot| {
                let (token, kept) = (token.into_dispatch(), kept.into_dispatch());
                Tensor::from_dispatch(Dispatch::memsave_segment_input(token, kept, slots, slot))
            }));
        }
        tensor
    }
    untouched!();
}

/// Gives a forward pass leaves of its own.
struct Fresh<'a> {
    device: &'a Device,
    /// Tracked: what inputs come from.
    probe: Tensor<1>,
    /// To make the leaves parents of a step.
    leaves: Vec<Link>,
}

impl Fresh<'_> {
    /// Drops the graph: Burn frees graphs in backward passes only, so here is one that reaches every leaf and nothing else.
    fn forget(self) {
        let leaves = std::iter::once(link(self.probe)).chain(self.leaves);
        drop(join(self.device, leaves.collect(), &Slots::default()).backward());
    }
}

impl ModuleMapper for Fresh<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.base().is_tracked() {
            true => param.map(|value| {
                let leaf = with_strategy(value.inner(), self.device).require_grad();
                self.leaves.push(link(leaf.clone()));
                leaf
            }),
            false => param,
        }
    }
}

impl TensorMapper for Fresh<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        match tensor.is_tracked() {
            true => from_probe(tensor.detach().set_require_grad(false), &self.probe, Slots::default(), 0),
            false => tensor,
        }
    }
    untouched!();
}

/// A tensor whose gradient goes into a slot.
pub(super) fn from_probe<const D: usize>(
    tensor: Tensor<D>,
    probe: &Tensor<1>,
    gradients: Slots,
    slot: usize,
) -> Tensor<D> {
    let (tensor, probe) = (tensor.into_dispatch(), probe.clone().into_dispatch());
    Tensor::from_dispatch(Dispatch::memsave_segment_output(tensor, probe, gradients, slot))
}

/// Takes outputs from their graph.
struct Finished<'a> {
    device: &'a Device,
    is_checked: bool,
    /// Which outputs are.
    tracked: Vec<bool>,
    samples: Samples,
}

impl TensorMapper for Finished<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.tracked.push(tensor.is_tracked());
        self.samples.push(self.is_checked.then(|| sample(&tensor)));
        if tensor.is_autodiff() { with_strategy(tensor.inner(), self.device) } else { tensor }
    }
    untouched!();
}

/// Replaces what is tracked by placeholders.
struct Skeleton<'a> {
    plain: &'a Device,
    tracked: Vec<bool>,
}

impl TensorMapper for Skeleton<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.tracked.push(tensor.is_tracked());
        if tensor.is_tracked() { Tensor::zeros([1; D], self.plain) } else { tensor }
    }
    untouched!();
}

/// Makes what is tracked outputs of a segment.
struct Outputs {
    token: Tensor<1>,
    tracked: std::vec::IntoIter<bool>,
    of_outputs: Slots,
    number: usize,
}

impl TensorMapper for Outputs {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let number = self.number;
        self.number += 1;
        match self.tracked.next() {
            Some(true) => from_probe(tensor, &self.token, self.of_outputs.clone(), number),
            _ => tensor,
        }
    }
    untouched!();
}

/// Puts the inputs in the place of the placeholders.
struct Filled<'a> {
    probe: Tensor<1>,
    device: &'a Device,
    tracked: std::vec::IntoIter<bool>,
    inputs: Slots,
    number: usize,
    gradients: Slots,
    slot: usize,
}

impl TensorMapper for Filled<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if self.tracked.next() != Some(true) {
            return tensor;
        }
        let (number, slot, gradients) = (self.number, self.slot, self.gradients.clone());
        self.number += 1;
        self.slot += 1;
        let input: Tensor<D> = take(&tensor, &self.inputs, number);
        from_probe(with_strategy(input, self.device), &self.probe, gradients, slot)
    }
    untouched!();
}

pub(super) fn put<const D: usize>(gradient: Tensor<D>, slots: &Slots, slot: usize) {
    Dispatch::memsave_segment_put(gradient.into_dispatch(), slots.clone(), slot);
}

/// `like`: any tensor of the backend.
pub(super) fn take<const D: usize, const E: usize>(
    like: &Tensor<D>,
    slots: &Slots,
    slot: usize,
) -> Tensor<E> {
    let like = like.clone().into_dispatch();
    Tensor::from_dispatch(Dispatch::memsave_segment_take(like, slots.clone(), slot))
}

/// Seeds the gradients of outputs, after a look at these.
struct Seeds {
    root: Tensor<1>,
    of_outputs: Slots,
    number: usize,
    samples: std::vec::IntoIter<Option<TensorData>>,
    name: &'static str,
}

impl TensorMapper for Seeds {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let (number, name) = (self.number, self.name);
        self.number += 1;
        let Some(sampled) = self.samples.next() else {
            panic!("checkpoint: computed again, {name} has more outputs")
        };
        if let Some(before) = sampled {
            assert!(
                is_same(&sample(&tensor), &before),
                "checkpoint: computed again, output {number} of {name} is another: it draws random numbers that are not this \
                 library's, or reads something that has changed since",
            );
        }
        if self.of_outputs.has(number) {
            assert!(
                tensor.is_tracked(),
                "checkpoint: computed again, output {number} of {name} is not tracked"
            );
            self.root = link(tensor.clone())(self.root.clone(), self.of_outputs.clone(), number);
        }
        tensor
    }
    untouched!();
}

/// Collects the gradients of parameters.
struct Collect<'a> {
    found: Gradients,
    seen: Seen,
    again: &'a Again<'a>,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let slot = self.again.parameters.get(&self.seen.see(param.id));
        let Some(&slot) = slot else { return };
        if let Some(gradient) = param.base().grad_remove(&mut self.found) {
            let widens = self.again.is_part && gradient.dtype().size() < 4;
            let gradient = if widens { gradient.cast(FloatDType::F32) } else { gradient };
            put(gradient, self.again.gradients, slot);
        }
    }
}

/// Some elements of a tensor, spread over it.
fn sample<const D: usize>(tensor: &Tensor<D>) -> TensorData {
    const PER_AXIS: [usize; 4] = [256, 16, 6, 4];
    let most = PER_AXIS.get(D - 1).copied().unwrap_or(3);
    let mut some = if tensor.is_autodiff() { tensor.clone().inner() } else { tensor.clone() };
    for (axis, len) in tensor.dims().into_iter().enumerate() {
        if len > most {
            some = some.slice_dim(axis, Slice::new(0, None, len.div_ceil(most) as isize));
        }
    }
    some.into_data()
}

/// Whether two samples are those of one computation, but for rounding: sums may be made in another order the second time.
fn is_same(now: &TensorData, before: &TensorData) -> bool {
    let rounding = if before.dtype().size() < 4 { 1e-2 } else { 1e-5 };
    let scale = before.iter::<f64>().filter(|v| v.is_finite()).fold(0.0, |scale: f64, v| scale.max(v.abs()));
    let close = |(now, before): (f64, f64)| {
        now == before || (now - before).abs() <= rounding * scale || !before.is_finite() && !now.is_finite()
    };
    now.shape() == before.shape()
        && now.dtype() == before.dtype()
        && now.iter::<f64>().zip(before.iter::<f64>()).all(close)
}

/// How often the outputs of a segment are compared where that takes time.
const CHECKS: usize = 2;

/// How often segments with a module and a function were computed again; counts some more times.
fn times<F: 'static>(more: usize) -> usize {
    static TIMES: LazyLock<Mutex<HashMap<TypeId, usize>>> = LazyLock::new(Mutex::default);
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner); // counts are whole
    let times = times.entry(TypeId::of::<F>()).or_default();
    *times += more;
    *times
}
