//! [`checkpoint`]: one segment, from its first run to its recomputation.
//!
//! The first run has a graph of its own, which is dropped at its end. Instead, the caller's graph gets steps for the segment ([`Parents`]).
//! When the gradients of the outputs arrive, they run the segment once more ([`Segment::replay`]), and then the backward pass of that run.
use super::compared::{CHECKS, SameSegments, Samples};
use super::mappers::{Collect, Filled, Finished, Fresh, Outputs, Refuse, Seeds, Skeleton, WithoutGraph};
use super::parents::{Finish, Parameters, Parents};
use super::remembered::{Remembered, Seen};
use super::tensors::Tensors;
use crate::measure::{is_dry, is_host};
use crate::strategy::token;
use burn::backend::Dispatch;
use burn::module::Module;
use burn::tensor::Device;
use burn_memsave_layers::graph::tape::{self, Tape};
use burn_memsave_layers::graph::{ReplayOnce, SegmentOps, Slots, is_exact};
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
    let same = SameSegments::of::<M, F>(remembered.hash());
    let of_search = same.are_to_be_searched().then(|| input.clone());
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
    let [with_any, with_these] = same.recomputed();
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
        same.note_search();
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
        let same = SameSegments::of::<M, F>(module.hash());
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
        if !is_dry() {
            same.note_recomputation();
        }
        if seeds.root.is_tracked() {
            let found = seeds.root.backward();
            let Self { parameters, gradients, is_part, .. } = self;
            module.visit(&mut Collect { found, seen: Seen::default(), parameters, gradients, is_part });
        }
    }
}
