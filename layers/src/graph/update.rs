//! Parameters that change in the backward pass, each when its gradient is complete.
//!
//! | steps | in the backward pass |
//! | --- | --- |
//! | *enter*, one per parameter: the parameter as the network uses it | last: what is left to do, of parameters that nothing uses, too |
//! | *enroll*, one per parameter, after the loss | first: remembers who waits for the gradient of the parameter |
//! | *watch*, one per depth of the graph, along an empty token | looks which gradients are complete |
//!
//! Burn runs steps by their depth, the deepest first, and a parameter is at the bottom: a step right above it would run after all others,
//! when all gradients are there. So others look whether a gradient is complete: it is when no step is left that has the parameter as a
//! parent. A step owns a handle of the node of each parent until it runs, so that this is the number of handles. The steps of this
//! library look, too, each when it has run.
//!
//! What nobody can have, a gradient that comes after the update, is looked for, and is a panic.
use super::aside::Aside;
use super::bare::recorded;
use super::slots::Slots;
use crate::backend::plain_backends;
use crate::burn_internals::depth;
use crate::burn_next::routed;
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops},
    },
    tensor::FloatTensor,
};
use burn::tensor::{DType, Shape};
use core::any::Any;
use core::cell::RefCell;
use core::fmt;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The slot of a parameter in what an update is given.
pub const PARAMETER: usize = 0;
/// The slot of its gradient, if it has one.
pub const GRADIENT: usize = 1;

/// Handles of the node of a parameter that no other step uses: of the tensor, of the step that made it, and that by which they are
/// counted.
const OWN_HANDLES: usize = 3;

type Update = Box<dyn FnOnce(Slots) + Send>;

/// The nodes of parameters that entered. Of all threads: a forward pass may have several.
static ENTERED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

fn entered() -> MutexGuard<'static, BTreeSet<u64>> {
    ENTERED.lock().unwrap_or_else(PoisonError::into_inner) // a set of numbers
}

/// A parameter whose gradient is not complete.
struct Waiting {
    /// The tensor of the graph, the only handle: an `AutodiffTensor<B>`.
    parameter: Box<dyn Any + Send>,
    /// The number of handles of its node, as soon as it is known.
    handles: Option<Box<dyn Fn() -> usize + Send>>,
    update: Update,
}

/// Parameters by number, whose gradients are waited for. An update is given the parameter and its gradient, without autodiff.
#[derive(Clone, Default)]
pub struct Updates(Arc<All>);

#[derive(Default)]
struct All {
    waiting: Mutex<Vec<Option<Waiting>>>,
    /// The nodes of parameters that entered, to be forgotten.
    nodes: Mutex<Vec<u64>>,
}

impl Drop for All {
    fn drop(&mut self) {
        let nodes = self.nodes.get_mut().unwrap_or_else(PoisonError::into_inner); // numbers
        let mut entered = entered();
        for node in nodes {
            entered.remove(node);
        }
    }
}

impl fmt::Debug for Updates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Updates")
    }
}

/// What is done with a parameter and its gradient, to be given once.
#[derive(Clone)]
pub struct UpdateOnce(Arc<Mutex<Option<Update>>>);

impl UpdateOnce {
    /// Runs a function.
    pub fn new(update: impl FnOnce(Slots) + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(update)))))
    }
}

impl Updates {
    fn lock(&self) -> MutexGuard<'_, Vec<Option<Waiting>>> {
        self.0.waiting.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
    }

    fn remember(&self, node: u64) {
        self.0.nodes.lock().unwrap_or_else(PoisonError::into_inner).push(node);
        entered().insert(node);
    }

    /// While `pass` runs, a backward pass, the steps of this library look which gradients are complete.
    pub fn during<T>(&self, pass: impl FnOnce() -> T) -> T {
        let _outer = set_aside();
        CURRENT.set(Some(self.clone()));
        pass()
    }

    fn enroll<B: Backend>(&self, number: usize, parameter: FloatTensor<Autodiff<B>>, update: UpdateOnce) {
        let update = update.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let update = update.expect("an update is given once");
        let mut all = self.lock();
        let count = all.len().max(number + 1);
        all.resize_with(count, || None);
        all[number] = Some(Waiting { parameter: Box::new(parameter), handles: None, update });
    }

    /// Changes the parameters whose gradients are complete.
    fn look<B: Backend>(&self, gradients: &mut Gradients) {
        let complete =
            |waiting: &Waiting| waiting.handles.as_ref().is_some_and(|handles| handles() == OWN_HANDLES);
        let numbers: Vec<usize> = {
            let all = self.lock();
            let all = all.iter().enumerate();
            all.filter(|(_, waiting)| waiting.as_ref().is_some_and(complete))
                .map(|(number, _)| number)
                .collect()
        };
        for number in numbers {
            self.finish::<B>(number, gradients, false);
        }
    }

    /// Changes a parameter if there is a gradient. If it `is_last`, nothing more is waited for. Whether it had been changed before,
    /// which it is not in a backward pass within the forward pass, where nothing is enrolled.
    fn finish<B: Backend>(&self, number: usize, gradients: &mut Gradients, is_last: bool) -> bool {
        let waiting = match self.lock().get_mut(number) {
            None => return false,
            Some(waiting) => waiting.take(),
        };
        let Some(waiting) = waiting else { return true };
        // Of a graph with several backends, one of them has the gradient.
        let parameter = waiting.parameter.downcast_ref::<FloatTensor<Autodiff<B>>>();
        // It may be in another container: a graph within a step has its own.
        let gradient = parameter.and_then(|parameter| parameter.grad_remove(gradients));
        if gradient.is_none() && !is_last {
            self.lock()[number] = Some(waiting);
            return false;
        }
        let Waiting { parameter, handles, update } = waiting;
        drop(handles);
        let parameter =
            parameter.downcast::<FloatTensor<Autodiff<B>>>().expect("a tensor of its own backend");
        let slots = Slots::default();
        slots.add::<B>(PARAMETER, parameter.into_primitive());
        if let Some(gradient) = gradient {
            slots.add::<B>(GRADIENT, gradient);
        }
        update(slots);
        false
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Updates>> = const { RefCell::new(None) };
}

/// See [`apart`](crate::apart()).
pub(crate) fn set_aside() -> impl Sized {
    Aside::new(&CURRENT)
}

/// Whether a node is a parameter that entered: like a leaf, it may be left without a gradient.
pub fn is_entered(node: u64) -> bool {
    entered().contains(&node)
}

/// Changes the parameters whose gradients are complete, in a backward pass that does that: after a step has run.
pub(crate) fn look<B: Backend>(gradients: &mut Gradients) {
    let current = CURRENT.with_borrow(Clone::clone);
    if let Some(updates) = current {
        updates.look::<B>(gradients);
    }
}

routed! {
    [Autodiff]
    /// Parameters that change in the backward pass. Without autodiff, tensors pass unchanged.
    pub trait UpdateOps: Backend {
        /// A parameter as the network uses it.
        fn memsave_update_enter(
            parameter: FloatTensor<Self>,
            updates: Updates,
            number: usize,
        ) -> FloatTensor<Self>;

        /// The loss, with a parameter that [entered](Self::memsave_update_enter), of which this takes the only handle.
        fn memsave_update_enroll(
            loss: FloatTensor<Self>,
            parameter: FloatTensor<Self>,
            updates: Updates,
            number: usize,
            update: UpdateOnce,
        ) -> FloatTensor<Self>;

        /// The loss, with steps that look at every depth. `token` is a leaf that requires a gradient.
        fn memsave_update_watch(
            loss: FloatTensor<Self>,
            token: FloatTensor<Self>,
            updates: Updates,
        ) -> FloatTensor<Self>;
    }
}

plain_backends!(UpdateOps {
    fn memsave_update_enter(parameter: FloatTensor<Self>, _: Updates, _: usize) -> FloatTensor<Self> {
        parameter
    }
    fn memsave_update_enroll(
        loss: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: Updates,
        _: usize,
        _: UpdateOnce,
    ) -> FloatTensor<Self> {
        loss
    }
    fn memsave_update_watch(
        loss: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: Updates,
    ) -> FloatTensor<Self> {
        loss
    }
});

impl<B: UpdateOps, C: CheckpointStrategy> UpdateOps for Autodiff<B, C> {
    fn memsave_update_enter(
        parameter: FloatTensor<Self>,
        updates: Updates,
        number: usize,
    ) -> FloatTensor<Self> {
        let (shape, dtype) = (parameter.shape(), parameter.dtype());
        let state = Entered { updates: updates.clone(), number, shape, dtype, device: parameter.device() };
        let (primitive, node) = parameter.into_parts();
        let entered = recorded::<B, _, 1>(EnterStep, [node], state, primitive);
        updates.remember(entered.id().value);
        entered
    }

    fn memsave_update_enroll(
        loss: FloatTensor<Self>,
        parameter: FloatTensor<Self>,
        updates: Updates,
        number: usize,
        update: UpdateOnce,
    ) -> FloatTensor<Self> {
        let (primitive, node) = loss.into_parts();
        let nodes = [node, parameter.node()];
        updates.enroll::<B>(number, parameter, update);
        recorded::<B, _, 2>(EnrollStep, nodes, (updates, number), primitive)
    }

    fn memsave_update_watch(
        loss: FloatTensor<Self>,
        token: FloatTensor<Self>,
        updates: Updates,
    ) -> FloatTensor<Self> {
        let (primitive, node) = loss.into_parts();
        let watched = (0..depth(&node)).fold(token, |token, _| {
            let (primitive, node) = token.into_parts();
            recorded::<B, _, 1>(LookStep, [node], updates.clone(), primitive)
        });
        recorded::<B, _, 2>(JoinStep, [node, watched.node()], (), primitive)
    }
}

#[derive(Debug)]
struct EnterStep;

/// What is known of a parameter that entered.
#[derive(Clone, Debug)]
struct Entered<Device> {
    updates: Updates,
    number: usize,
    shape: Shape,
    dtype: DType,
    device: Device,
}

impl<B: Backend> Backward<B, 1> for EnterStep {
    type State = Entered<B::Device>;

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let Entered { updates, number, shape, dtype, device } = ops.state;
        if updates.finish::<B>(number, gradients, true) && shape.num_elements() > 1 {
            // Added to a gradient that is there, a single zero takes its shape.
            let zero = Shape::from(vec![1; shape.num_dims()]);
            gradients
                .register::<B>(ops.node.id, B::float_full(zero.clone(), 0.0.into(), &device, dtype.into()));
            let left = gradients.consume::<B>(&ops.node).shape();
            assert!(
                left == zero,
                "a gradient of a parameter {shape:?} came after the parameter was changed by it: a step of the graph is not \
                 counted"
            );
        }
    }
}

#[derive(Debug)]
struct EnrollStep;

impl<B: Backend> Backward<B, 2> for EnrollStep {
    type State = (Updates, usize);

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let (updates, number) = ops.state;
        let gradient = gradients.consume::<B>(&ops.node);
        let [loss, parameter] = ops.parents;
        if let Some(loss) = loss {
            gradients.register::<B>(loss.id, gradient);
        }
        if let (Some(node), Some(waiting)) = (parameter, &mut updates.lock()[number]) {
            waiting.handles = Some(Box::new(move || Arc::strong_count(&node)));
        }
    }
}

#[derive(Debug)]
struct LookStep;

impl<B: Backend> Backward<B, 1> for LookStep {
    type State = Updates;

    fn backward(self, ops: Ops<Updates, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        ops.state.look::<B>(gradients);
    }
}

#[derive(Debug)]
struct JoinStep;

impl<B: Backend> Backward<B, 2> for JoinStep {
    type State = ();

    fn backward(self, ops: Ops<(), 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        if let [Some(loss), _] = ops.parents {
            gradients.register::<B>(loss.id, gradient);
        }
    }
}
