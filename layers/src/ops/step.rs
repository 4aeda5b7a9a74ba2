//! The runner: records a step of the autodiff graph for an operation, once for all operations.
//!
//! An [`Operation`] says what it computes, which inputs its backward pass reads and why, and how the gradients follow. The
//! runner alone
//!
//! - hands the inputs to keep to Burn's checkpointer, so that the strategy of the device still applies;
//! - offers the output for [recomputation](super::recompute);
//! - reports what is kept to the [ledger](crate::ledger);
//! - registers the gradients.
//!
//! Without autodiff, [`Run::run`] is [`Operation::forward`] and nothing else.
use super::{
    held::{self, Held},
    kept::{Kept, Ledger},
    packing::PackingKernels,
    recompute::{self, Again, Offered, is_available, offer, recomputes},
    replay, update,
};
use crate::watch::{self, Alive, InputOfStep};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff, NodeId,
        checkpoint::{
            base::Checkpointer,
            strategy::{BalancedCheckpointing, CheckpointStrategy},
        },
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    tensor::FloatTensor,
};
use burn::tensor::Shape;
use core::marker::PhantomData;
use std::sync::Arc;

/// The inputs of an operation that gradients may flow to; `None` for an optional one that is not given.
pub type Inputs<B, const N: usize> = [Option<FloatTensor<B>>; N];

/// An input that is always given.
pub fn given<T>(input: Option<T>) -> T {
    input.expect("an input that is not optional")
}

/// An operation with a backward pass of its own, with `N` inputs that gradients may flow to.
///
/// The value holds the options, and inputs that no gradient flows to.
pub trait Operation<B: Backend, const N: usize>: Clone + Send + 'static {
    /// The names of the inputs in the ledger.
    const INPUTS: [&'static str; N];
    /// Which inputs are parameters of a module: all of which the backward pass may read. The ledger finds the module by the first one
    /// that is given; the [policy](crate::saved) leaves them as they are.
    const PARAMETERS: &'static [usize] = &[];

    /// The inputs whose shapes the backward pass reads for their gradients.
    const SHAPES: &'static [usize] = &[];

    /// What the backward pass reads besides inputs: masks, statistics, options.
    type Saved: Clone + Send + core::fmt::Debug + 'static;

    /// The name in the ledger.
    fn name(&self) -> &'static str;

    /// Which inputs the backward pass reads (it can take no others), and whether the output can be computed again from them.
    fn plan(&self, inputs: &Tracking<B, N>) -> Plan<N>;

    /// The output.
    ///
    /// An input that nothing else needs is the only handle of its tensor: the output may take its place.
    fn forward(&self, inputs: Inputs<B, N>) -> FloatTensor<B>;

    /// The output, and what the backward pass reads besides inputs, which is also reported to `recorder`.
    fn forward_saving(&self, inputs: Inputs<B, N>, recorder: &Recorder<N>) -> (FloatTensor<B>, Self::Saved);

    /// What [`forward_saving`](Self::forward_saving) saves, where it can be had without the output: a segment that ends with it is not
    /// run again to its end.
    fn saving(&self, _inputs: &Inputs<B, N>, _recorder: &Recorder<N>) -> Option<Self::Saved> {
        None
    }

    /// Computes the output again from the inputs.
    fn recompute(self, _saved: &Self::Saved) -> impl Fn(Inputs<B, N>) -> FloatTensor<B> + Send + 'static {
        move |inputs| self.forward(inputs)
    }

    /// Gives the gradients that are wanted, from `dy`, the gradient of the output.
    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, N>);
}

/// The inputs in the graph.
type InGraph<'a, B, const N: usize> = [Option<&'a FloatTensor<Autodiff<B>>>; N];

/// What is known of the inputs in the forward pass.
pub struct Tracking<'a, B: Backend, const N: usize> {
    inputs: InGraph<'a, B, N>,
    recomputes: bool,
}

impl<B: Backend, const N: usize> Tracking<'_, B, N> {
    /// Whether the input is tracked: part of a recorded graph.
    pub fn tracked(&self, input: usize) -> bool {
        self.inputs[input].is_some_and(|input| input.is_tracked())
    }

    /// Whether the backward pass can have the input without a byte being kept for it: another step keeps it, or it is
    /// computed again.
    pub fn available(&self, input: usize) -> bool {
        self.inputs[input].is_some_and(|input| is_available::<B>(input, self.recomputes))
    }
}

/// What a step keeps of its inputs.
pub struct Plan<const N: usize> {
    /// The reason to keep an input.
    reasons: [Option<&'static str>; N],
    offers: bool,
}

impl<const N: usize> Plan<N> {
    /// Nothing is kept.
    pub fn nothing() -> Self {
        Self { reasons: [None; N], offers: false }
    }

    /// Keeps an input if it is given and the backward pass reads it.
    pub fn keep_if(mut self, read: bool, input: usize, reason: &'static str) -> Self {
        if read {
            self.reasons[input] = Some(reason);
        }
        self
    }

    /// Offers the output for recomputation. Every input that is not small must be kept by this step, or be
    /// [available](Tracking::available).
    pub fn offer_if(mut self, offers: bool) -> Self {
        self.offers = offers;
        self
    }
}

/// Knows what a step keeps, and reports it to the ledger.
pub struct Recorder<const N: usize> {
    tracked: [bool; N],
    plan: Plan<N>,
    ledger: Ledger,
}

impl<const N: usize> Recorder<N> {
    /// Whether the input is tracked.
    pub fn tracked(&self, input: usize) -> bool {
        self.tracked[input]
    }

    /// Whether the input is kept.
    pub fn keeps(&self, input: usize) -> bool {
        self.plan.reasons[input].is_some()
    }

    /// Where the operation reports what it saves.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

/// The backward pass of a step.
pub struct BackwardPass<'a, B: Backend, const N: usize> {
    wanted: [Option<NodeId>; N],
    given: [bool; N],
    kept: [Option<Kept>; N],
    shapes: [Option<Box<Shape>>; N],
    checkpointer: &'a mut Checkpointer,
    gradients: &'a mut Gradients,
    /// The bytes of gradients, while the step is [watched](watch).
    watched: Option<Vec<(NodeId, usize)>>,
    backend: PhantomData<B>,
}

impl<B: Backend, const N: usize> BackwardPass<'_, B, N> {
    /// Whether the gradient of the input is wanted: whether it was tracked.
    pub fn wants(&self, input: usize) -> bool {
        self.wanted[input].is_some()
    }

    /// The shape of an input whose gradient is wanted, of those that [`Operation::SHAPES`] names.
    pub fn shape(&self, input: usize) -> Shape {
        Shape::clone(self.shapes[input].as_ref().expect("a tracked input, whose shape is asked for"))
    }

    /// An input, if it was kept; to be taken once. It may be computed only now, and is dropped with its last handle.
    pub fn take(&mut self, input: usize) -> Option<FloatTensor<B>> {
        Some(self.kept[input].take()?.get::<B>(self.checkpointer))
    }

    /// Gives the gradient of an input, if it is wanted: once, as Burn's distributed training counts the gradients of a parameter
    /// to know when it is complete.
    pub fn give(&mut self, input: usize, gradient: FloatTensor<B>) {
        if let Some(node) = self.wanted[input] {
            debug_assert!(!self.given[input], "a gradient is given twice");
            self.given[input] = true;
            if let Some(watched) = &mut self.watched {
                watched.push((node, gradient.shape().num_elements() * gradient.dtype().size()));
            }
            self.gradients.register::<B>(node, gradient);
        }
    }

    /// Gives the gradients that are there.
    pub fn give_all(&mut self, gradients: [Option<FloatTensor<B>>; N]) {
        for (input, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                self.give(input, gradient);
            }
        }
    }
}

/// A backend that runs operations: as they are, or recording them.
pub trait Run: Backend {
    /// The backend without autodiff.
    type Plain: PackingKernels;

    /// The output of an operation.
    fn run<O: Operation<Self::Plain, N>, const N: usize>(
        operation: O,
        inputs: [Option<FloatTensor<Self>>; N],
    ) -> FloatTensor<Self>;

    /// A tensor that no gradient flows to.
    ///
    /// # Panics
    ///
    /// Panics if it is tracked: its gradient would be lost.
    fn plain(tensor: FloatTensor<Self>) -> FloatTensor<Self::Plain>;

    /// The tensor on the backend without autodiff, of an input whose gradient a step takes care of.
    fn primitive(tensor: &FloatTensor<Self>) -> FloatTensor<Self::Plain>;

    /// A tensor of the backend without autodiff, untracked.
    fn untracked(tensor: FloatTensor<Self::Plain>) -> FloatTensor<Self>;

    /// Whether the strategy of the device computes some outputs again instead of keeping them.
    fn recomputes() -> bool;

    /// Whether the strategy of the device computes this tensor again when a backward pass asks for it.
    fn is_recomputed(tensor: &FloatTensor<Self>) -> bool;
}

crate::backend::plain_backends!(Run {
    type Plain = Self;

    fn run<O: Operation<Self, N>, const N: usize>(operation: O, inputs: Inputs<Self, N>) -> FloatTensor<Self> {
        operation.forward(inputs)
    }

    fn plain(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn primitive(tensor: &FloatTensor<Self>) -> FloatTensor<Self> {
        tensor.clone()
    }

    fn untracked(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
        tensor
    }

    fn recomputes() -> bool {
        false
    }

    fn is_recomputed(_: &FloatTensor<Self>) -> bool {
        false
    }
});

impl<B: PackingKernels, C: CheckpointStrategy> Run for Autodiff<B, C> {
    type Plain = B;

    fn run<O: Operation<B, N>, const N: usize>(operation: O, inputs: Inputs<Self, N>) -> FloatTensor<Self> {
        record::<B, O, N>(operation, inputs, recomputes::<C>())
    }

    fn plain(tensor: FloatTensor<Self>) -> FloatTensor<B> {
        assert!(!tensor.is_tracked(), "a tensor that no gradient flows to must not be tracked");
        tensor.into_primitive()
    }

    fn primitive(tensor: &FloatTensor<Self>) -> FloatTensor<B> {
        tensor.primitive().clone()
    }

    fn untracked(tensor: FloatTensor<B>) -> FloatTensor<Self> {
        FloatTensor::<Self>::new(tensor)
    }

    fn recomputes() -> bool {
        recomputes::<C>()
    }

    fn is_recomputed(tensor: &FloatTensor<Self>) -> bool {
        recomputes::<C>() && recompute::is_recomputed::<B>(tensor)
    }
}

/// Runs and records an operation. `recomputes`: whether the device's strategy computes some outputs again instead of keeping them.
fn record<B: PackingKernels, O: Operation<B, N>, const N: usize>(
    operation: O,
    inputs: Inputs<Autodiff<B>, N>,
    recomputes: bool,
) -> FloatTensor<Autodiff<B>> {
    let step = Step::<O>(PhantomData);
    let plain =
        |inputs: Inputs<Autodiff<B>, N>| inputs.map(|input| input.map(|input| input.into_primitive()));
    let tracked = inputs.each_ref().map(|input| input.as_ref().is_some_and(|input| input.is_tracked()));
    if !tracked.contains(&true) {
        let nodes = nodes(inputs.each_ref().map(Option::as_ref));
        let y = operation.forward(plain(inputs));
        // `did` is not told: a constant may be without autodiff when its segment is computed again, and nobody would tell it then.
        replay::gave(None, false);
        watch::computed(operation.name(), None);
        return match step.prepare::<BalancedCheckpointing>(nodes).compute_bound().stateful() {
            OpsKind::UnTracked(prep) => prep.finish(y),
            OpsKind::Tracked(_) => unreachable!("no input is tracked"),
        };
    }
    let device = given(inputs.iter().flatten().next()).device();
    held::pack_idle();
    let mut waiting = inputs.each_ref().map(|input| held::find(input.as_ref()?));
    let plan = operation.plan(&Tracking { inputs: in_graph(&inputs, &waiting), recomputes });
    let module = O::PARAMETERS.iter().find_map(|&input| Some(inputs[input].as_ref()?.id()));
    let ledger = Ledger::new(operation.name(), module);
    let shape = |input: usize| {
        let tensor =
            inputs[input].as_ref().filter(|tensor| tensor.is_tracked() && O::SHAPES.contains(&input))?;
        Some(Box::new(tensor.shape()))
    };
    let shapes = core::array::from_fn(shape);
    // What is kept, or may be asked for.
    let mut held: Inputs<Autodiff<B>, N> = [const { None }; N];
    let mut kept = [const { None }; N];
    for (input, tensor) in inputs.iter().enumerate() {
        let Some(tensor) = tensor else { continue };
        if let Some(reason) = plan.reasons[input] {
            kept[input] = Kept::frozen::<B>(tensor);
            // What offers its output needs an untracked tensor itself.
            let may_wait =
                kept[input].is_none() && !O::PARAMETERS.contains(&input) && (tracked[input] || !plan.offers);
            waiting[input] = if may_wait { held::hold(tensor, recomputes, true) } else { None };
            ledger.input::<B>(O::INPUTS[input], tensor, waiting[input].as_ref(), reason);
            if let Some(held) = &waiting[input]
                && held.stand_in().is_none()
            {
                kept[input] = Some(Kept::waiting(held));
            }
        }
        if plan.offers || plan.reasons[input].is_some() && kept[input].is_none() {
            held[input] = Some(waiting[input].as_ref().and_then(Held::stand_in).unwrap_or(tensor).clone());
        }
    }
    let watched_inputs = match watch::is_watching() {
        true => O::INPUTS
            .iter()
            .zip(&inputs)
            .filter_map(|(name, input)| Some(InputOfStep::of(name, input.as_ref()?)))
            .collect(),
        false => vec![],
    };
    // The graph takes handles of what is needed later, and no others: the forward pass may overwrite the rest.
    let prep = step.prepare::<BalancedCheckpointing>(nodes(in_graph(&inputs, &waiting)));
    drop(waiting);
    let again = Again::default();
    let prep = match plan.offers {
        true => offer(prep, &held, again.clone()),
        false => prep.compute_bound(),
    };
    let OpsKind::Tracked(mut prep) = prep.stateful() else { unreachable!("an input is tracked") };
    for (input, tensor) in held.iter().enumerate() {
        if let (Some(tensor), Some(_), None) = (tensor, plan.reasons[input], &kept[input]) {
            kept[input] = Some(Kept::node(&mut prep, tensor));
        }
    }
    drop(held);
    let recorder = Recorder { tracked, plan, ledger };
    let inputs = plain(inputs);
    let left_out = replay::leaves_out(operation.name()).and_then(|(shape, dtype)| {
        let saved = operation.saving(&inputs, &recorder)?;
        Some((B::shape_only(shape, dtype, &device), saved))
    });
    let is_left_out = left_out.is_some();
    let (y, saved) = left_out.unwrap_or_else(|| operation.forward_saving(inputs, &recorder));
    replay::did(operation.name(), &y);
    held::pack_idle();
    let Recorder { plan, ledger, .. } = recorder;
    let name = operation.name();
    if plan.offers {
        again.by(operation.recompute(&saved));
    }
    let offered = Offered::new(plan.offers);
    let alive = ledger.recorded(watched_inputs);
    let y = prep.finish(State { kept, shapes, saved, alive: alive.clone(), _offered: offered.clone() }, y);
    replay::gave(Some(y.id()), is_left_out);
    offered.promise(y.id());
    if let Some(alive) = alive {
        alive.made::<B>(&y);
    }
    watch::computed(name, module);
    y
}

/// The inputs, or what stands in for them.
fn in_graph<'a, B: PackingKernels, const N: usize>(
    inputs: &'a Inputs<Autodiff<B>, N>,
    waiting: &'a [Option<Held<B>>; N],
) -> InGraph<'a, B, N> {
    let stand_in = |input: usize| waiting[input].as_ref().and_then(Held::stand_in);
    core::array::from_fn(|input| stand_in(input).or(inputs[input].as_ref()))
}

/// The nodes of the inputs. In place of one that is not given, the node of an untracked input, or else a new one: no gradient
/// flows to either.
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
    /// Shapes of inputs that are tracked.
    shapes: [Option<Box<Shape>>; N],
    saved: S,
    /// Says that the step lives, while somebody watches.
    alive: Option<Arc<Alive>>,
    /// Says, as long as the step lives, that the output can be computed again.
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
