//! Held tensors: they wait for the backward pass in fewer bits or elsewhere, as the [policy](crate::saved) says.
//!
//! Burn's checkpointer either has a tensor as it is, or recomputes it from its parents. Here it "recomputes" a tensor from its packed
//! form. For that, a stand-in takes the place of the input of a step in the graph, though not in the forward pass:
//!
//! ```text
//! x <- token <- stand-in <- step
//! ```
//!
//! Gradients pass through both nodes unchanged. The token is there because the checkpointer needs the parents of a node that it
//! recomputes: as a parent, `x` would be the whole tensor, and the token is one element.
//!
//! A tensor is packed only when the last handle of it is here: packed earlier, it would take more memory, not less. Whenever a step is
//! recorded on this thread, the tensors that are still whole are checked for this. Until a tensor is packed, all steps that keep it under
//! the same policy share its stand-in; afterwards no other step can need it, since nothing else has it. The list of tensors to check
//! keeps none of them alive: a tensor that is never packed is freed with the steps that keep it.
//!
//! Untracked tensors, tensors that a step makes for itself, and inputs of segments wait outside of the graph. If a step keeps an input of
//! a segment, too, the step has a stand-in for it in the graph, and each of them takes what waits once.
//!
//! Leaves are never held. Whoever made a leaf has a handle of it, and Burn lets graphs that are used one after the other share a leaf,
//! but no other node.
use super::policy;
use super::recompute::is_available;
use crate::saved::packing::PackingKernels;
use crate::saved::{SavedPolicy, Stored};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff, NodeId,
        checkpoint::{
            base::Checkpointer, retro_forward::RetroForward, state::BackwardStates,
            strategy::BalancedCheckpointing,
        },
        grads::Gradients,
        ops::{Backward, Ops},
    },
    ops::FloatTensorOps,
    tensor::FloatTensor,
};
use burn::tensor::{FloatDType, Shape};
use core::any::Any;
use core::cell::RefCell;
use core::fmt;
use std::collections::VecDeque;
use std::sync::{
    Arc, Mutex, MutexGuard, PoisonError, Weak,
    atomic::{AtomicUsize, Ordering},
};

/// After so many checks a tensor is left as it is, since something else may have a handle of it for good.
const LOOKS: usize = 256;

/// How many tensors may be on their way to another place at the same time. Until one has arrived, it takes memory here.
const ON_THEIR_WAY: usize = 2;

/// A held tensor while it waits.
struct Waiting<B: PackingKernels> {
    state: Mutex<State<B>>,
    policy: SavedPolicy,
    /// Cloned by those who take the tensor outside of the graph.
    outside: Arc<()>,
}

enum State<B: PackingKernels> {
    Whole(FloatTensor<B>),
    Stored(Stored<B>),
    Taken,
}

impl<B: PackingKernels> Waiting<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // after a panic: `Taken`
    }

    /// Packs the tensor if nothing else has a handle of it.
    fn pack(&self) -> Progress {
        let mut state = self.lock();
        if matches!(&*state, State::Whole(x) if !x.can_mut()) {
            return Progress::Held;
        }
        *state = match core::mem::replace(&mut *state, State::Taken) {
            // Several elements are one in memory, so another form would take more.
            State::Whole(x) if B::is_expanded(&x) => {
                *state = State::Whole(x);
                return Progress::Done;
            }
            State::Whole(x) => State::Stored(self.policy.store::<B>(x)),
            other => other,
        };
        match &*state {
            State::Stored(stored) => match stored.is_there() {
                true => Progress::Done,
                false => Progress::OnItsWay,
            },
            State::Whole(_) | State::Taken => Progress::Done,
        }
    }

    /// Blocks until a tensor that is on its way has arrived.
    fn arrive(&self) {
        if let State::Stored(stored) = &*self.lock() {
            stored.arrive();
        }
    }

    fn get(&self) -> FloatTensor<B> {
        match &*self.lock() {
            State::Whole(x) => x.clone(),
            State::Stored(stored) => stored.load(),
            State::Taken => unreachable!("taken by the last one who asks"),
        }
    }

    /// Takes the tensor for the graph, which asks once.
    fn take(&self) -> FloatTensor<B> {
        if Arc::strong_count(&self.outside) > 1 {
            return self.get();
        }
        match core::mem::replace(&mut *self.lock(), State::Taken) {
            State::Whole(x) => x,
            State::Stored(stored) => stored.load(),
            State::Taken => unreachable!("the checkpointer computes a tensor once"),
        }
    }
}

/// How far a tensor is from being packed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Something else has a handle of it.
    Held,
    /// It is being moved, and still takes memory where it was.
    OnItsWay,
    /// There is nothing more to do.
    Done,
}

/// A tensor that waits outside of the graph, on any backend.
pub(crate) trait AnyWaiting: fmt::Debug + Send + Sync {
    /// The `FloatTensor<B>`.
    fn tensor(&self) -> Box<dyn Any>;
}

struct Outside<B: PackingKernels> {
    waiting: Arc<Waiting<B>>,
    _outside: Arc<()>,
}

impl<B: PackingKernels> AnyWaiting for Outside<B> {
    fn tensor(&self) -> Box<dyn Any> {
        Box::new(self.waiting.get())
    }
}

impl<B: PackingKernels> fmt::Debug for Outside<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Outside")
    }
}

/// A held tensor, for steps that are about to keep it.
pub(crate) struct Held<B: PackingKernels> {
    waiting: Arc<Waiting<B>>,
    /// Its stand-in, if it has one.
    stand_in: Option<FloatTensor<Autodiff<B>>>,
}

impl<B: PackingKernels> Held<B> {
    /// The stand-in of the tensor; `None` if the tensor waits only outside of the graph.
    pub(crate) fn stand_in(&self) -> Option<&FloatTensor<Autodiff<B>>> {
        self.stand_in.as_ref()
    }

    /// Takes the tensor outside of the graph.
    pub(crate) fn outside(&self) -> Arc<dyn AnyWaiting> {
        Arc::new(Outside { waiting: self.waiting.clone(), _outside: self.waiting.outside.clone() })
    }

    /// The policy by which it waits.
    pub(crate) fn policy(&self) -> &SavedPolicy {
        &self.waiting.policy
    }
}

/// A held tensor that is to be packed. Something else may still have a handle of it.
struct Shared<B: PackingKernels> {
    /// The node of the tensor; `None` if a step made it for itself.
    node: Option<NodeId>,
    /// Kept alive by the steps that keep the tensor, and by its stand-in.
    waiting: Weak<Waiting<B>>,
    stand_in: Option<FloatTensor<Autodiff<B>>>,
    looks: usize,
}

trait AnyShared: Send {
    /// See [`Waiting::pack`].
    fn pack(&mut self) -> Progress;
    /// See [`Waiting::arrive`].
    fn arrive(&self);
    /// The node of the tensor; `None` if a step made it for itself.
    fn node(&self) -> Option<NodeId>;
    /// A [`Held`]; `None` once all steps that keep the tensor have run.
    fn held(&self) -> Option<Box<dyn Any>>;
}

impl<B: PackingKernels> AnyShared for Shared<B> {
    fn pack(&mut self) -> Progress {
        self.looks += 1;
        match self.waiting.upgrade().map(|waiting| waiting.pack()) {
            Some(Progress::Held) if self.looks > LOOKS => Progress::Done,
            Some(progress) => progress,
            None => Progress::Done,
        }
    }

    fn arrive(&self) {
        if let Some(waiting) = self.waiting.upgrade() {
            waiting.arrive();
        }
    }

    fn node(&self) -> Option<NodeId> {
        self.node
    }

    fn held(&self) -> Option<Box<dyn Any>> {
        Some(Box::new(Held { waiting: self.waiting.upgrade()?, stand_in: self.stand_in.clone() }))
    }
}

type List = Vec<Box<dyn AnyShared>>;

/// The tensors that a thread has to pack.
struct OfThread(RefCell<List>);

impl Drop for OfThread {
    /// Leaves them to other threads.
    fn drop(&mut self) {
        leave(self.0.take());
    }
}

thread_local! {
    static SHARED: OfThread = const { OfThread(RefCell::new(vec![])) };
}

/// See [`apart`](crate::apart()). Tensors that the task did not pack are left to any thread.
pub(crate) fn set_aside() -> impl Sized {
    struct Aside(List);
    impl Drop for Aside {
        fn drop(&mut self) {
            leave(SHARED.with(|shared| shared.0.replace(core::mem::take(&mut self.0))));
        }
    }
    Aside(SHARED.with(|shared| shared.0.take()))
}

/// What threads had not packed when their scopes, or they themselves, ended. Any thread packs it.
static LEFT: Mutex<List> = Mutex::new(vec![]);
/// How many tensors that is.
static COUNT_OF_LEFT: AtomicUsize = AtomicUsize::new(0);

fn leave(list: List) {
    if !list.is_empty() {
        let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
        left.extend(list);
        COUNT_OF_LEFT.store(left.len(), Ordering::Relaxed);
    }
}

fn take_left() -> List {
    let mut left = LEFT.lock().unwrap_or_else(PoisonError::into_inner);
    COUNT_OF_LEFT.store(0, Ordering::Relaxed); // under the lock, like the count of whoever adds to it
    core::mem::take(&mut *left)
}

/// Leaves what this thread has not packed to any thread.
pub(crate) fn leave_all() {
    leave(SHARED.with(|shared| shared.0.take()));
}

/// Packs the tensors that nothing else has a handle of any more.
pub(crate) fn pack_idle() {
    if COUNT_OF_LEFT.load(Ordering::Relaxed) > 0 {
        leave(packed(take_left()));
    }
    if SHARED.with(|shared| !shared.0.borrow().is_empty()) {
        let mut list = packed(SHARED.with(|shared| shared.0.take()));
        // Other tensors may have been added meanwhile: while a thread of a pool blocks on a kernel, it runs other tasks.
        SHARED.with(|shared| {
            let mut shared = shared.0.borrow_mut();
            list.append(&mut shared);
            *shared = list;
        });
    }
}

/// Packs what it can, and returns the tensors that it could not pack yet.
fn packed(list: List) -> List {
    let mut waiting = vec![];
    let mut on_their_way = VecDeque::new();
    for mut shared in list {
        match shared.pack() {
            Progress::Held => waiting.push(shared),
            Progress::OnItsWay => on_their_way.push_back(shared),
            Progress::Done => {}
        }
    }
    while on_their_way.len() > ON_THEIR_WAY
        && let Some(first) = on_their_way.pop_front()
    {
        first.arrive();
    }
    waiting.extend(on_their_way);
    waiting
}

/// Leaves a scope when it is dropped, also when the forward pass panics.
struct Entered;

impl Drop for Entered {
    fn drop(&mut self) {
        let is_without_policy = policy::leave();
        if !std::thread::panicking() {
            pack_idle();
        }
        if is_without_policy {
            leave_all();
        }
    }
}

impl SavedPolicy {
    /// Runs a forward pass that stores the tensors it keeps as this policy says.
    ///
    /// A scope applies to its own thread (in a rayon pool, see `parallel::apart`). If scopes are nested, the innermost one applies.
    /// Within a checkpointed segment no policy applies, since a segment keeps tensors only while it is computed.
    ///
    /// ```
    /// use burn_memsave_layers::saved::SavedPolicy;
    ///
    /// assert_eq!(SavedPolicy::Int8.scope(|| 1 + 1), 2);
    /// ```
    pub fn scope<R>(&self, forward: impl FnOnce() -> R) -> R {
        policy::enter(self.clone());
        let _entered = Entered;
        forward()
    }
}

/// Runs the forward pass of a segment, to which no policy applies.
pub(super) fn in_segment<R>(forward: impl FnOnce() -> R) -> R {
    policy::enter_segment();
    let _entered = Entered;
    forward()
}

/// Finds a tensor that is held already, because another step keeps it under the policy of this thread.
pub(crate) fn find<B: PackingKernels>(x: &FloatTensor<Autodiff<B>>) -> Option<Held<B>> {
    let policy = policy::current()?;
    SHARED.with(|shared| {
        let shared = shared.0.borrow();
        // From the last one, which has a stand-in if any has: an earlier one may have none.
        let mut of_node = shared.iter().rev().filter(|shared| shared.node() == Some(x.id()));
        of_node.find_map(|shared| {
            let held = *shared.held()?.downcast::<Held<B>>().ok()?;
            (*held.policy() == policy).then_some(held)
        })
    })
}

/// Holds a tensor that a step is about to keep, if the policy says so. A tensor that is held already is shared. `recomputes`: whether
/// the device's strategy recomputes some tensors. `in_graph`: whether a tracked tensor gets a stand-in.
pub(crate) fn hold<B: PackingKernels>(
    x: &FloatTensor<Autodiff<B>>,
    recomputes: bool,
    in_graph: bool,
) -> Option<Held<B>> {
    let policy = policy::current()?;
    let needs_stand_in = in_graph && x.is_tracked();
    let found = find(x);
    if found.as_ref().is_some_and(|held| held.stand_in.is_some() || !needs_stand_in) {
        return found;
    }
    let elements = x.shape().num_elements();
    let is_leaf = <Autodiff<B> as FloatTensorOps<Autodiff<B>>>::float_is_require_grad(x);
    if is_leaf || policy.bytes::<B>(elements, x.dtype()).is_none() || is_available::<B>(x, recomputes) {
        return None;
    }
    let waiting = found.map_or_else(|| waiting::<B>(x.primitive().clone(), policy), |held| held.waiting);
    let stand_in = needs_stand_in.then(|| stand_in(x, waiting.clone()));
    let held = Held { waiting, stand_in };
    share(Some(x.id()), &held);
    Some(held)
}

/// Holds a tensor that a step made for itself.
pub(crate) fn hold_made<B: PackingKernels>(x: FloatTensor<B>, policy: SavedPolicy) -> Arc<dyn AnyWaiting> {
    let held = Held { waiting: waiting::<B>(x, policy), stand_in: None };
    share(None, &held);
    held.outside()
}

fn waiting<B: PackingKernels>(x: FloatTensor<B>, policy: SavedPolicy) -> Arc<Waiting<B>> {
    policy::note(&policy);
    Arc::new(Waiting { state: Mutex::new(State::Whole(x)), policy, outside: Arc::default() })
}

/// Lists a held tensor as one to pack.
fn share<B: PackingKernels>(node: Option<NodeId>, Held { waiting, stand_in }: &Held<B>) {
    let shared = Shared { node, waiting: Arc::downgrade(waiting), stand_in: stand_in.clone(), looks: 0 };
    SHARED.with(|all| all.0.borrow_mut().push(Box::new(shared)));
}

/// Makes the stand-in of a tensor, a node that computes its tensor from what waits.
fn stand_in<B: PackingKernels>(
    x: &FloatTensor<Autodiff<B>>,
    waiting: Arc<Waiting<B>>,
) -> FloatTensor<Autodiff<B>> {
    let pass = |parent: &FloatTensor<Autodiff<B>>| {
        Backward::<B, 1>::prepare::<BalancedCheckpointing>(Pass, [parent.node()])
    };
    let one = || B::float_empty(Shape::new([1]), &x.device(), FloatDType::F32);
    let token = pass(x).compute_bound().stateless(one());
    let unpack = Unpack { waiting, token: token.id() };
    pass(&token).memory_bound().retro_forward(unpack).parents([&token]).stateless(one())
}

/// Passes a gradient on.
#[derive(Debug)]
struct Pass;

impl<B: Backend> Backward<B, 1> for Pass {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        if let [Some(parent)] = ops.parents {
            gradients.register::<B>(parent.id, gradient);
        }
    }
}

/// Computes the tensor of a stand-in: takes what waits.
struct Unpack<B: PackingKernels> {
    waiting: Arc<Waiting<B>>,
    token: NodeId,
}

impl<B: PackingKernels> fmt::Debug for Unpack<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Unpack")
    }
}

impl<B: PackingKernels> RetroForward for Unpack<B> {
    fn forward(&self, states: &mut BackwardStates, output: NodeId) {
        drop(states.get_state::<FloatTensor<B>>(&self.token)); // Burn counts the requests
        states.save(output, self.waiting.take());
    }
}
