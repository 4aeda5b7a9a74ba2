//! Updates parameters in the backward pass, each one as soon as its gradient is complete.
//!
//! | steps | what they do in the backward pass |
//! | --- | --- |
//! | *enter*, one per parameter: its output is the parameter as the network uses it | runs last: finishes a parameter that is not updated yet, even if nothing uses it |
//! | *enroll*, one per parameter, after the loss | runs first: begins to count the handles of the parameter's node |
//! | *look*, one per depth of the graph, along a token | updates the parameters whose gradients are complete |
//!
//! Burn runs steps by depth, the deepest first. A step right above a parameter would run after all others, when all gradients exist. So
//! other steps have to check whether a gradient is complete. It is complete when no step is left that has the parameter as a parent.
//! Until a step runs, it has a handle of the node of each parent, so the number of handles tells. The look steps check this, and so does
//! every step of this library after it has run.
//!
//! A gradient that came after the update would be lost. The enter step checks for one, and panics.
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

/// The slot in which an update is given the parameter.
pub const PARAMETER: usize = 0;
/// The slot in which it is given the gradient, if there is one.
pub const GRADIENT: usize = 1;

/// The handles of the node of a parameter that no other step uses: one of the tensor, one of the step that made it, and the one by
/// which handles are counted.
const OWN_HANDLES: usize = 3;

type Update = Box<dyn FnOnce(Slots) + Send>;

/// The nodes of parameters that entered, on all threads, since a forward pass may have several.
static ENTERED: Mutex<BTreeSet<u64>> = Mutex::new(BTreeSet::new());

fn entered() -> MutexGuard<'static, BTreeSet<u64>> {
    ENTERED.lock().unwrap_or_else(PoisonError::into_inner) // a set of numbers
}

/// A parameter whose gradient is not complete yet.
struct Waiting {
    /// The only handle of the tensor in the graph, an `AutodiffTensor<B>`.
    parameter: Box<dyn Any + Send>,
    /// Counts the handles of its node, as soon as the enroll step has run.
    handles: Option<Box<dyn Fn() -> usize + Send>>,
    update: Update,
}

/// Parameters whose gradients are not complete yet, by number. An update is given the parameter and its gradient, without autodiff.
#[derive(Clone, Default)]
pub struct Updates(Arc<All>);

#[derive(Default)]
struct All {
    waiting: Mutex<Vec<Option<Waiting>>>,
    /// The nodes of parameters that entered, to be removed from [`ENTERED`] in the end.
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

/// The update of one parameter. Runs once.
#[derive(Clone)]
pub struct UpdateOnce(Arc<Mutex<Option<Update>>>);

impl UpdateOnce {
    /// An update that runs this function on the [`PARAMETER`] and the [`GRADIENT`].
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

    /// Runs a backward pass, in which the steps of this library also update the parameters whose gradients are complete.
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

    /// Updates the parameters whose gradients are complete.
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

    /// Updates a parameter if it has a gradient, or, if this check `is_last`, without one. Returns whether the parameter was updated
    /// before. (In a backward pass within the forward pass it was not, since nothing is enrolled yet.)
    fn finish<B: Backend>(&self, number: usize, gradients: &mut Gradients, is_last: bool) -> bool {
        let waiting = match self.lock().get_mut(number) {
            None => return false,
            Some(waiting) => waiting.take(),
        };
        let Some(waiting) = waiting else { return true };
        // In a graph with several backends, one of them has the gradient.
        let parameter = waiting.parameter.downcast_ref::<FloatTensor<Autodiff<B>>>();
        // The gradient may be in another container, since a graph within a step has its own.
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

/// Called after a step has run: updates the parameters whose gradients are complete, in a backward pass within [`Updates::during`].
pub(crate) fn look<B: Backend>(gradients: &mut Gradients) {
    let current = CURRENT.with_borrow(Clone::clone);
    if let Some(updates) = current {
        updates.look::<B>(gradients);
    }
}

routed! {
    [Autodiff]
    /// Updates parameters in the backward pass. Without autodiff, tensors pass unchanged.
    pub trait UpdateOps: Backend {
        /// Enters a parameter: returns it as the network uses it.
        fn memsave_update_enter(
            parameter: FloatTensor<Self>,
            updates: Updates,
            number: usize,
        ) -> FloatTensor<Self>;

        /// The loss, with a step that enrolls a parameter that [entered](Self::memsave_update_enter). Takes the only handle of it.
        fn memsave_update_enroll(
            loss: FloatTensor<Self>,
            parameter: FloatTensor<Self>,
            updates: Updates,
            number: usize,
            update: UpdateOnce,
        ) -> FloatTensor<Self>;

        /// The loss, with a look step for every depth. `token` is a leaf that requires a gradient.
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
            // Added to an existing gradient, a single zero takes its shape; without one it stays single.
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
