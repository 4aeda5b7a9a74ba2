//! [`checkpoint`]: one segment, from its first run to its recomputation.
//!
//! The first run has a graph of its own, which is dropped at its end. Instead, the caller's graph gets steps for the segment ([`Parents`]).
//! When the gradients of the outputs arrive, they run the segment once more ([`Segment::replay`]), and then the backward pass of that run.
use super::compared::{CHECKS, Sample, Samples, is_new, is_searched, sample, times};
use super::parents::{Finish, Link, Parameters, Parents, from_probe, join, link, put, take, token};
use super::remembered::{Remembered, Seen};
use super::tensors::{TensorMapper, Tensors, untouched};
use crate::measure::{is_dry, is_host};
use crate::strategy::with_strategy;
use burn::backend::{Dispatch, autodiff::NodeId};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Device, FloatDType, Gradients, Int, Tensor};
use burn_memsave_layers::graph::tape::{self, Tape};
use burn_memsave_layers::graph::{ReplayOnce, SegmentOps, Slots, is_exact};
use burn_memsave_layers::node::node_id;
use std::any::type_name;

/// Runs `forward(module, input)`, and keeps nothing of it but the inputs: it is recomputed in the backward pass. See the [module](super)
/// for what that means.
///
/// If neither an input nor a parameter is tracked, it just calls `forward`.
///
/// # Panics
///
/// Panics if an output is computed from a tracked tensor that is neither in the input nor a parameter of the module, and under Burn's
/// distributed training. The backward pass panics if the segment does something else when it is recomputed.
pub fn checkpoint<M, I, O, F>(module: &M, input: I, forward: F) -> O
where
    M: Module + 'static,
    I: Tensors,
    O: Tensors,
    F: Fn(&M, I) -> O + Copy + Send + Sync + 'static,
{
    checkpoint_around(module, input, forward, |replay| replay())
}

/// [`checkpoint`], with a function `around` that runs the recomputation in the backward pass.
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
    let FirstRun { output, tracked, samples, tape } =
        first_run(module, &of_replay, input.clone(), &device, forward);
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
    let replay = ReplayOnce::new(move || around(Box::new(move || segment.replay())));
    let token = parents.chain(&device, gradients, inputs, replay);
    output.map_tensors(&mut Outputs { token, tracked: tracked.into_iter(), of_outputs, number: 0 })
}

/// What the first run of a segment gives.
pub(super) struct FirstRun<O> {
    /// The output, not tracked.
    pub(super) output: O,
    /// Which float tensors in the output were tracked.
    pub(super) tracked: Vec<bool>,
    pub(super) samples: Samples,
    pub(super) tape: Tape,
}

/// Runs a segment as without a checkpoint, on a graph of its own, which is dropped at the end. `remembered`: the module before this run.
///
/// # Panics
///
/// Panics if an output is tracked though no parameter and no input is, and under Burn's distributed training.
pub(super) fn first_run<M, I, O, F>(
    module: &M,
    remembered: &Remembered<M>,
    input: I,
    device: &Device,
    forward: F,
) -> FirstRun<O>
where
    M: Module + 'static,
    I: Tensors,
    O: Tensors,
    F: Fn(&M, I) -> O + 'static,
{
    let of_search = is_new::<(M, F)>(remembered.hash()).then(|| input.clone());
    let mut fresh = Fresh { probe: token(device).require_grad(), leaves: vec![], device };
    assert!(
        !Dispatch::memsave_segment_waits(fresh.probe.clone().into_dispatch()),
        "checkpoint: Burn 0.22.1 waits for other devices at the end of every backward pass, also of those of segments: use \
         parallel::Replicas instead of ExecutionStrategy::ddp"
    );
    let (output, mut tape) = {
        let module = module.clone().map(&mut fresh);
        let input = input.map_tensors(&mut fresh);
        tape::record(|| forward(&module, input))
    };
    let [with_any, with_these] = times::<(M, F)>(remembered.hash(), 0);
    // With inputs that come back rounded, outputs differ.
    let is_checked = is_exact() && !is_dry() && (is_host(device) || with_any < CHECKS);
    let mut finished =
        Finished { device, is_checked, tracked: vec![], samples: vec![], latest: None, unread: None };
    let output = output.map_tensors(&mut finished);
    let Finished { tracked, mut samples, latest, unread, .. } = finished;
    // Other outputs are older, so they are not computed from it, and the segment has been recomputed to the same outputs before.
    if unread == latest && tape.ends_with(unread) && with_these >= CHECKS {
        tape.leave_out_end();
    }
    samples.shrink_to_fit(); // they stay until the backward pass, for every tile
    fresh.forget();
    // A captured tensor shows only if nothing else is tracked, so finding it takes a forward pass, once.
    if let Some(input) = of_search.filter(|_| tracked.contains(&true)) {
        let (module, input) = (remembered.untracked(module, device), input.map_tensors(&mut WithoutGraph));
        let output = tape::probe(&mut tape, || forward(&module, input));
        drop(output.map_tensors(&mut Refuse { number: 0, name: type_name::<F>() }));
        is_searched::<(M, F)>(remembered.hash());
    }
    FirstRun { output, tracked, samples, tape }
}

/// What is needed to recompute a segment.
struct Segment<M, I, F> {
    module: Remembered<M>,
    /// The input, with placeholders for tracked tensors.
    input: I,
    /// Which float tensors in the input are tracked.
    tracked: Vec<bool>,
    forward: F,
    tape: Tape,
    device: Device,
    parameters: Parameters,
    zeros: Vec<Finish>,
    /// The slot of the gradient of the first tracked input.
    first_input: usize,
    /// The gradients of parameters and tracked inputs.
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

/// Recomputes a segment and runs its backward pass.
pub(super) struct Again<'a> {
    pub(super) device: &'a Device,
    pub(super) parameters: &'a Parameters,
    /// The gradients of the parameters.
    pub(super) gradients: &'a Slots,
    pub(super) of_outputs: &'a Slots,
    /// Whether gradients are parts of sums, which are computed in f32 at least.
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
        let hash = module.hash();
        let module = module.module(self.device);
        let (output, left_out) = tape::replay(tape, || forward(&module, input));
        let mut seeds = Seeds {
            root: token(self.device),
            left_out,
            of_outputs: self.of_outputs.clone(),
            number: 0,
            output: 0,
            samples: samples.into_iter(),
            name: type_name::<F>(),
        };
        drop(output.map_tensors(&mut seeds));
        assert!(
            seeds.samples.next().is_none(),
            "checkpoint: computed again, {} has fewer outputs",
            seeds.name
        );
        times::<(M, F)>(hash, usize::from(!is_dry()));
        if seeds.root.is_tracked() {
            let found = seeds.root.backward();
            module.visit(&mut Collect { found, seen: Seen::default(), again: &self });
        }
    }
}

/// Gives a forward pass leaves of its own.
struct Fresh<'a> {
    device: &'a Device,
    /// A tracked tensor, which inputs come from.
    probe: Tensor<1>,
    /// Steps that have the leaves as parents.
    leaves: Vec<Link>,
}

impl Fresh<'_> {
    /// Drops the graph. Burn frees graphs only in backward passes, so this runs one that reaches every leaf and nothing else.
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

/// Takes tracked tensors out of their graph.
struct WithoutGraph;

impl TensorMapper for WithoutGraph {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if tensor.is_tracked() { tensor.detach().set_require_grad(false) } else { tensor }
    }
    untouched!();
}

/// Refuses outputs that are tracked though no parameter and no input is.
struct Refuse {
    number: usize,
    name: &'static str,
}

impl TensorMapper for Refuse {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let Self { number, name } = self;
        assert!(
            !tensor.is_tracked(),
            "checkpoint: output {number} of {name} is computed from a captured tracked tensor: one in the closure, in a static, or in \
             a field of the module that is no parameter. It would get no gradient: make it an argument"
        );
        *number += 1;
        tensor
    }
    fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.number += 1;
        tensor
    }
    fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.number += 1;
        tensor
    }
}

/// The node of a tracked tensor. Nodes are numbered in the order in which they are made.
fn tracked_node<const D: usize>(tensor: &Tensor<D>) -> Option<NodeId> {
    if tensor.is_tracked() { node_id(tensor.clone()) } else { None }
}

/// Takes outputs out of their graph.
struct Finished<'a> {
    device: &'a Device,
    /// Whether values are compared.
    is_checked: bool,
    /// Which float tensors are tracked.
    tracked: Vec<bool>,
    samples: Samples,
    /// The latest node of tracked outputs.
    latest: Option<NodeId>,
    /// The node of an [`Unread`](super::Unread) output.
    unread: Option<NodeId>,
}

impl TensorMapper for Finished<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.tracked.push(tensor.is_tracked());
        self.latest = self.latest.into_iter().chain(tracked_node(&tensor)).max_by_key(|node| node.value);
        self.samples.push(Sample::of(&tensor, self.is_checked.then(|| sample(&tensor))));
        if tensor.is_autodiff() { with_strategy(tensor.inner(), self.device) } else { tensor }
    }
    fn map_unread<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.unread = tracked_node(&tensor);
        self.map_float(tensor)
    }
    fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.samples.push(Sample::of(&tensor, None));
        tensor
    }
    fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.samples.push(Sample::of(&tensor, None));
        tensor
    }
}

/// Replaces tracked tensors by placeholders.
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

/// Makes tracked tensors outputs of a segment.
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

/// Replaces the placeholders by the inputs.
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

/// Compares outputs with those of the first run, and seeds their gradients.
struct Seeds {
    root: Tensor<1>,
    /// The output whose elements mean nothing.
    left_out: Option<NodeId>,
    of_outputs: Slots,
    /// The number of the next float tensor.
    number: usize,
    /// The number of the next tensor.
    output: usize,
    samples: std::vec::IntoIter<Sample>,
    name: &'static str,
}

impl Seeds {
    /// The number of the next tensor, and what is remembered of it.
    fn next(&mut self) -> (usize, Sample) {
        let Some(before) = self.samples.next() else {
            panic!("checkpoint: computed again, {} has more outputs", self.name)
        };
        self.output += 1;
        (self.output - 1, before)
    }
}

impl TensorMapper for Seeds {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let ((output, before), name) = (self.next(), self.name);
        let mut compares = before.has_values();
        if let Some(left_out) = self.left_out {
            let node = tracked_node(&tensor);
            assert!(
                node.is_none_or(|node| node.value <= left_out.value),
                "checkpoint: computed again, {name} goes on after its last operation"
            );
            compares &= node.is_some_and(|node| node.value < left_out.value);
        }
        let values = compares.then(|| sample(&tensor));
        before.check(Sample::of(&tensor, values), output, name);
        let number = self.number;
        self.number += 1;
        if self.of_outputs.has(number) {
            assert!(
                tensor.is_tracked(),
                "checkpoint: computed again, output {output} of {name} is not tracked"
            );
            self.root = link(tensor.clone())(self.root.clone(), self.of_outputs.clone(), number);
        }
        tensor
    }
    fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        let (output, before) = self.next();
        before.check(Sample::of(&tensor, None), output, self.name);
        tensor
    }
    fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        let (output, before) = self.next();
        before.check(Sample::of(&tensor, None), output, self.name);
        tensor
    }
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
