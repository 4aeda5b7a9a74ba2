//! How an operation becomes a step: [`record`] decides which inputs the step keeps, computes the output, and puts the step into Burn's
//! graph; [`Step`] is the backward pass.
use super::{
    held::{self, Held},
    inputs::{Inputs, given},
    kept::{Kept, Report},
    operation::{BackwardPass, InGraph, Operation, Recorder, Tracking},
    recompute::{Again, Offered, offer},
    tape, update,
    watch::{self, Alive, InputOfStep},
};
use crate::saved::packing::PackingKernels;
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff, NodeId,
        checkpoint::{base::Checkpointer, strategy::BalancedCheckpointing},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    tensor::FloatTensor,
};
use burn::tensor::Shape;
use core::marker::PhantomData;
use std::sync::Arc;

/// Runs an operation, and records it if an input is tracked. `recomputes`: whether the device's strategy recomputes some outputs instead of
/// keeping them.
pub(super) fn record<B: PackingKernels, O: Operation<B, N>, const N: usize>(
    operation: O,
    inputs: Inputs<Autodiff<B>, N>,
    recomputes: bool,
) -> FloatTensor<Autodiff<B>> {
    if !inputs.iter().flatten().any(|input| input.is_tracked()) {
        return run_untracked(operation, inputs);
    }
    held::pack_idle();
    let Keeping { recorder, module, shapes, mut kept, in_checkpointer, nodes, watched } =
        keep_inputs(&operation, &inputs, recomputes);
    let again = Again::default();
    let prep = Step::<O>(PhantomData).prepare::<BalancedCheckpointing>(nodes);
    let prep = match recorder.plan.offers {
        true => offer(prep, &in_checkpointer, again.clone()),
        false => prep.compute_bound(),
    };
    let OpsKind::Tracked(mut prep) = prep.stateful() else { unreachable!("an input is tracked") };
    for (input, tensor) in in_checkpointer.iter().enumerate() {
        if let (Some(tensor), true, None) = (tensor, recorder.keeps(input), &kept[input]) {
            kept[input] = Some(Kept::node(&mut prep, tensor));
        }
    }
    drop(in_checkpointer);
    let (y, saved, is_left_out) = compute(&operation, plain(inputs), &recorder);
    let Recorder { plan, report, .. } = recorder;
    let name = operation.name();
    if plan.offers {
        again.by(operation.recompute(&saved));
    }
    let offered = Offered::new(plan.offers);
    let alive = report.recorded(watched);
    let y = prep.finish(State { kept, shapes, saved, alive: alive.clone(), _offered: offered.clone() }, y);
    tape::gave(Some(y.id()), is_left_out);
    offered.promise(y.id());
    if let Some(alive) = alive {
        alive.made::<B>(&y);
    }
    watch::computed(name, module);
    y
}

fn plain<B: Backend, const N: usize>(inputs: Inputs<Autodiff<B>, N>) -> Inputs<B, N> {
    inputs.map(|input| input.map(|input| input.into_primitive()))
}

/// Runs an operation without a tracked input: nothing is kept.
fn run_untracked<B: PackingKernels, O: Operation<B, N>, const N: usize>(
    operation: O,
    inputs: Inputs<Autodiff<B>, N>,
) -> FloatTensor<Autodiff<B>> {
    let nodes = nodes(inputs.each_ref().map(Option::as_ref));
    let y = operation.forward(plain(inputs));
    // Does not call `did`: a constant may be without autodiff when its segment is recomputed, and then nothing would call it.
    tape::gave(None, false);
    watch::computed(operation.name(), None);
    match Step::<O>(PhantomData).prepare::<BalancedCheckpointing>(nodes).compute_bound().stateful() {
        OpsKind::UnTracked(prep) => prep.finish(y),
        OpsKind::Tracked(_) => unreachable!("no input is tracked"),
    }
}

/// What a step will keep of its inputs, before the step is in the graph.
struct Keeping<B: Backend, const N: usize> {
    recorder: Recorder<N>,
    /// The node of a parameter, by which its module is found.
    module: Option<NodeId>,
    shapes: [Option<Box<Shape>>; N],
    /// The kept inputs that Burn's checkpointer does not have.
    kept: [Option<Kept>; N],
    /// The inputs, or their stand-ins, to keep in the checkpointer, and those that a recomputation of the output reads.
    in_checkpointer: Inputs<Autodiff<B>, N>,
    nodes: [NodeGuard; N],
    /// The inputs, while steps are [watched](watch).
    watched: Vec<InputOfStep>,
}

/// Decides which inputs a step keeps, and how. The graph takes handles only of what is needed later, so that the forward pass may overwrite
/// the rest.
fn keep_inputs<B: PackingKernels, O: Operation<B, N>, const N: usize>(
    operation: &O,
    inputs: &Inputs<Autodiff<B>, N>,
    recomputes: bool,
) -> Keeping<B, N> {
    let tracked = inputs.each_ref().map(|input| input.as_ref().is_some_and(|input| input.is_tracked()));
    let mut waiting = inputs.each_ref().map(|input| held::find(input.as_ref()?));
    let plan = operation.plan(&Tracking { inputs: in_graph(inputs, &waiting), recomputes });
    let module = O::PARAMETERS.iter().find_map(|&input| Some(inputs[input].as_ref()?.id()));
    let report = Report::new(operation.name(), module);
    let mut in_checkpointer: Inputs<Autodiff<B>, N> = [const { None }; N];
    let mut kept = [const { None }; N];
    for (input, tensor) in inputs.iter().enumerate() {
        let Some(tensor) = tensor else { continue };
        if let Some(reason) = plan.reasons[input] {
            kept[input] = Kept::frozen::<B>(tensor);
            // The recomputation of an offered output has a handle of every untracked input, so packing one would only take more memory.
            let may_wait =
                kept[input].is_none() && !O::PARAMETERS.contains(&input) && (tracked[input] || !plan.offers);
            waiting[input] = if may_wait { held::hold(tensor, recomputes, true) } else { None };
            report.input::<B>(O::INPUTS[input], tensor, waiting[input].as_ref(), reason);
            if let Some(held) = &waiting[input]
                && held.stand_in().is_none()
            {
                kept[input] = Some(Kept::waiting(held));
            }
        }
        if plan.offers || plan.reasons[input].is_some() && kept[input].is_none() {
            let stand_in = waiting[input].as_ref().and_then(Held::stand_in);
            in_checkpointer[input] = Some(stand_in.unwrap_or(tensor).clone());
        }
    }
    let shape = |input: usize| {
        let tensor = inputs[input].as_ref()?;
        (tracked[input] && O::SHAPES.contains(&input)).then(|| Box::new(tensor.shape()))
    };
    let named = O::INPUTS.iter().zip(inputs);
    Keeping {
        module,
        shapes: core::array::from_fn(shape),
        kept,
        in_checkpointer,
        nodes: nodes(in_graph(inputs, &waiting)),
        watched: match watch::is_watching() {
            true => named.filter_map(|(name, input)| Some(InputOfStep::of(name, input.as_ref()?))).collect(),
            false => vec![],
        },
        recorder: Recorder { tracked, plan, report },
    }
}

/// Returns the output, what is saved besides inputs, and whether the output was left out. It is left out at the end of a recomputed
/// segment, if nobody reads it.
fn compute<B: PackingKernels, O: Operation<B, N>, const N: usize>(
    operation: &O,
    inputs: Inputs<B, N>,
    recorder: &Recorder<N>,
) -> (FloatTensor<B>, O::Saved, bool) {
    let left_out = tape::leaves_out(operation.name()).and_then(|(shape, dtype)| {
        let device = given(inputs.iter().flatten().next()).device();
        let saved = operation.saving(&inputs, recorder)?;
        Some((B::shape_only(shape, dtype, &device), saved))
    });
    let is_left_out = left_out.is_some();
    let (y, saved) = left_out.unwrap_or_else(|| operation.forward_saving(inputs, recorder));
    tape::did(operation.name(), &y);
    held::pack_idle();
    (y, saved, is_left_out)
}

/// The inputs, or their stand-ins.
fn in_graph<'a, B: PackingKernels, const N: usize>(
    inputs: &'a Inputs<Autodiff<B>, N>,
    waiting: &'a [Option<Held<B>>; N],
) -> InGraph<'a, B, N> {
    let stand_in = |input: usize| waiting[input].as_ref().and_then(Held::stand_in);
    core::array::from_fn(|input| stand_in(input).or(inputs[input].as_ref()))
}

/// The nodes of the inputs. An input that is not given gets the node of an untracked input, or else a new node: no gradient flows
/// to either.
fn nodes<B: Backend, const N: usize>(inputs: InGraph<B, N>) -> [NodeGuard; N] {
    let given = || inputs.iter().flatten();
    let placeholder = inputs.iter().any(Option::is_none).then(|| {
        given().find(|input| !input.is_tracked()).map(|&input| input.clone()).unwrap_or_else(|| {
            let input = given().next().expect("an operation has an input");
            FloatTensor::<Autodiff<B>>::new(input.primitive().clone())
        })
    });
    let node = |input: Option<&FloatTensor<Autodiff<B>>>| input.or(placeholder.as_ref()).map(|x| x.node());
    inputs.map(|input| node(input).expect("given, or in its place"))
}

/// The recorded step of an operation.
struct Step<O>(PhantomData<fn() -> O>);

impl<O> core::fmt::Debug for Step<O> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(core::any::type_name::<O>())
    }
}

/// What a step keeps.
#[derive(Clone, Debug)]
struct State<S, const N: usize> {
    /// The inputs that the backward pass reads.
    kept: [Option<Kept>; N],
    /// Shapes of tracked inputs, those that [`Operation::SHAPES`] names.
    shapes: [Option<Box<Shape>>; N],
    saved: S,
    /// Tells the [watch], if there is one, that the step is alive.
    alive: Option<Arc<Alive>>,
    /// Says, as long as the step is alive, that the output is offered.
    _offered: Offered,
}

impl<B: Backend, O: Operation<B, N>, const N: usize> Backward<B, N> for Step<O> {
    type State = State<O::Saved, N>;

    fn backward(self, ops: Ops<Self::State, N>, gradients: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = gradients.consume::<B>(&ops.node);
        let State { kept, shapes, saved, alive, _offered } = ops.state;
        let wanted = ops.parents.map(|parent| parent.map(|node| node.id));
        let given = [false; N];
        let watched = alive.is_some().then(Vec::new);
        let mut pass = BackwardPass {
            wanted,
            given,
            kept,
            shapes,
            checkpointer,
            gradients,
            watched,
            backend: PhantomData,
        };
        O::backward(saved, dy, &mut pass);
        debug_assert!(pass.wanted.map(|node| node.is_some()) == pass.given, "a gradient is not given");
        debug_assert!(pass.kept.iter().all(Option::is_none), "an input is kept that nobody reads");
        let given = pass.watched.take();
        update::look::<B>(gradients);
        if let Some((alive, given)) = alive.zip(given) {
            watch::ran_backward(alive, given);
        }
    }
}
