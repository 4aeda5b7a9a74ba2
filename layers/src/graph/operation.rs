//! What an operation says of itself, and what the engine tells it.
//!
//! An [`Operation`] says what it computes, which inputs its backward pass reads and why, and how the gradients follow. The engine alone
//!
//! - hands the inputs to keep to Burn's checkpointer, so that the strategy of the device still applies;
//! - offers the output for [recomputation](super::recompute);
//! - reports what is kept to the [ledger](crate::ledger);
//! - registers the gradients.
//!
//! Without autodiff, [`Run::run`](super::run::Run::run) is [`Operation::forward`] and nothing else.
use super::{
    inputs::Inputs,
    kept::{Kept, Report},
    recompute::is_available,
};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{Autodiff, NodeId, checkpoint::base::Checkpointer, grads::Gradients},
    tensor::FloatTensor,
};
use burn::tensor::Shape;
use core::marker::PhantomData;

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
    fn plan(&self, inputs: &Tracking<B, N>) -> KeepPlan<N>;

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
pub(super) type InGraph<'a, B, const N: usize> = [Option<&'a FloatTensor<Autodiff<B>>>; N];

/// What is known of the inputs in the forward pass.
pub struct Tracking<'a, B: Backend, const N: usize> {
    pub(super) inputs: InGraph<'a, B, N>,
    pub(super) recomputes: bool,
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
pub struct KeepPlan<const N: usize> {
    /// The reason to keep an input.
    pub(super) reasons: [Option<&'static str>; N],
    pub(super) offers: bool,
}

impl<const N: usize> KeepPlan<N> {
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
    pub(super) tracked: [bool; N],
    pub(super) plan: KeepPlan<N>,
    pub(super) report: Report,
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
    pub fn report(&self) -> &Report {
        &self.report
    }
}

/// The backward pass of a step.
pub struct BackwardPass<'a, B: Backend, const N: usize> {
    pub(super) wanted: [Option<NodeId>; N],
    pub(super) given: [bool; N],
    pub(super) kept: [Option<Kept>; N],
    pub(super) shapes: [Option<Box<Shape>>; N],
    pub(super) checkpointer: &'a mut Checkpointer,
    pub(super) gradients: &'a mut Gradients,
    /// The bytes of gradients, while the step is [watched](watch).
    pub(super) watched: Option<Vec<(NodeId, usize)>>,
    pub(super) backend: PhantomData<B>,
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
