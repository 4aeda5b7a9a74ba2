//! The contract between an operation and the engine.
//!
//! An [`Operation`] says what it computes, which inputs its backward pass reads and why, and how the gradients follow. The engine does the
//! rest:
//!
//! - It keeps these inputs, in Burn's checkpointer unless they are held or frozen, so that the strategy of the device still applies.
//! - It offers the output for [recomputation](super::recompute).
//! - It reports what is kept to the [ledger](crate::ledger).
//! - It registers the gradients.
//!
//! Without autodiff, [`Run::run`](super::run::Run::run) is just [`Operation::forward`].
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

/// An operation with its own backward pass, and with `N` inputs that gradients may flow to.
///
/// A value of this type has the options, and any inputs that no gradient flows to.
pub trait Operation<B: Backend, const N: usize>: Clone + Send + 'static {
    /// The names of the inputs in the ledger.
    const INPUTS: [&'static str; N];
    /// The inputs that are parameters of a module, as far as the backward pass may read them. The ledger finds the module by the first one
    /// that is given. A [policy](crate::saved) leaves them as they are.
    const PARAMETERS: &'static [usize] = &[];

    /// The inputs whose shapes the backward pass reads to compute their gradients.
    const SHAPES: &'static [usize] = &[];

    /// What the backward pass reads besides inputs: masks, statistics, options.
    type Saved: Clone + Send + core::fmt::Debug + 'static;

    /// The name in the ledger.
    fn name(&self) -> &'static str;

    /// Which inputs the backward pass reads (it can take no others), and whether the output is offered.
    fn plan(&self, inputs: &Tracking<B, N>) -> KeepPlan<N>;

    /// The output.
    ///
    /// An input that nothing else needs is the only handle of its tensor, so the output may overwrite it.
    fn forward(&self, inputs: Inputs<B, N>) -> FloatTensor<B>;

    /// The output, and what the backward pass reads besides inputs. Reports the latter to `recorder`.
    fn forward_saving(&self, inputs: Inputs<B, N>, recorder: &Recorder<N>) -> (FloatTensor<B>, Self::Saved);

    /// What [`forward_saving`](Self::forward_saving) saves, if it can be computed without the output. A recomputed segment that ends with
    /// this operation can then leave out the output.
    fn saving(&self, _inputs: &Inputs<B, N>, _recorder: &Recorder<N>) -> Option<Self::Saved> {
        None
    }

    /// Recomputes the output from the inputs.
    fn recompute(self, _saved: &Self::Saved) -> impl Fn(Inputs<B, N>) -> FloatTensor<B> + Send + 'static {
        move |inputs| self.forward(inputs)
    }

    /// Computes the wanted gradients from `dy`, the gradient of the output, and gives them to `pass`.
    fn backward(saved: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, N>);
}

/// The inputs as the graph has them: a stand-in for each tracked one that is held.
pub(super) type InGraph<'a, B, const N: usize> = [Option<&'a FloatTensor<Autodiff<B>>>; N];

/// What the forward pass knows of the inputs.
pub struct Tracking<'a, B: Backend, const N: usize> {
    pub(super) inputs: InGraph<'a, B, N>,
    pub(super) recomputes: bool,
}

impl<B: Backend, const N: usize> Tracking<'_, B, N> {
    /// Whether the input is tracked: part of a recorded graph.
    pub fn tracked(&self, input: usize) -> bool {
        self.inputs[input].is_some_and(|input| input.is_tracked())
    }

    /// Whether the backward pass can have the input without keeping another byte for it: another step keeps it, or it is recomputed.
    pub fn available(&self, input: usize) -> bool {
        self.inputs[input].is_some_and(|input| is_available::<B>(input, self.recomputes))
    }
}

/// What a step keeps of its inputs.
pub struct KeepPlan<const N: usize> {
    /// The reason to keep each input; `None` if it is not kept.
    pub(super) reasons: [Option<&'static str>; N],
    pub(super) offers: bool,
}

impl<const N: usize> KeepPlan<N> {
    /// Keeps nothing.
    pub fn nothing() -> Self {
        Self { reasons: [None; N], offers: false }
    }

    /// Keeps an input if the backward pass reads it and it is given. `reason` is for the ledger.
    pub fn keep_if(mut self, read: bool, input: usize, reason: &'static str) -> Self {
        if read {
            self.reasons[input] = Some(reason);
        }
        self
    }

    /// Offers the output. Every input that is not small must be kept by this step or be [available](Tracking::available).
    pub fn offer_if(mut self, offers: bool) -> Self {
        self.offers = offers;
        self
    }
}

/// What a step keeps, and where it reports that.
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
    /// The nodes and bytes of the gradients that were given, while the step is [watched](watch).
    pub(super) watched: Option<Vec<(NodeId, usize)>>,
    pub(super) backend: PhantomData<B>,
}

impl<B: Backend, const N: usize> BackwardPass<'_, B, N> {
    /// Whether the gradient of the input is wanted, that is, whether the input was tracked.
    pub fn wants(&self, input: usize) -> bool {
        self.wanted[input].is_some()
    }

    /// The shape of an input whose gradient is wanted, and which [`Operation::SHAPES`] names.
    pub fn shape(&self, input: usize) -> Shape {
        Shape::clone(self.shapes[input].as_ref().expect("a tracked input, whose shape is asked for"))
    }

    /// An input, if it was kept. To be called once: this may compute the input only now, and the last handle frees it.
    pub fn take(&mut self, input: usize) -> Option<FloatTensor<B>> {
        Some(self.kept[input].take()?.get::<B>(self.checkpointer))
    }

    /// Gives the gradient of an input, if it is wanted. To be called once per input, since Burn's distributed training counts the
    /// gradients of a parameter to know when they are complete.
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

    /// Gives those gradients that are `Some`.
    pub fn give_all(&mut self, gradients: [Option<FloatTensor<B>>; N]) {
        for (input, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                self.give(input, gradient);
            }
        }
    }
}
