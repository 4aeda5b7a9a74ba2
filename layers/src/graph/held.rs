//! Tensors that wait for the backward pass in fewer bits or elsewhere, as the [policy](crate::saved) says.
//!
//! Burn's checkpointer holds a tensor as it is, or else computes it again from its parents. Here it "computes it again" from
//! what was packed. For that, the input of a step is replaced in the graph, not in the forward pass, by a node of its own:
//!
//! ```text
//! x <- token <- stand-in <- step
//! ```
//!
//! Gradients pass through both as they are. The token is there because what computes a tensor again must find its parents in
//! the checkpointer: of `x` that would be the tensor itself, of the token it is one element.
//!
//! A tensor is packed only when this holds the last handle of it, which is looked at whenever a step is recorded on this thread:
//! packed earlier, it would take more memory, not less. Until then every step that keeps the tensor under the same policy shares the
//! stand-in; afterwards there is no tensor left for another step to take. The list of those to look at keeps no tensor alive: one
//! that was never packed, since others held it, is freed with the steps that keep it.
//!
//! What no gradient flows to, what a step makes for itself, and what a segment is computed again from waits outside of the graph. A
//! step that keeps the same tensor has a stand-in for it in the graph, and both take what waits once.
//!
//! Leaves stay as they are. Whoever made one has it, and Burn lets graphs that are used one after the other share a leaf, but no other
//! node.
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

/// How often a tensor is looked at before it is left as it is: somebody else may hold it for good.
const LOOKS: usize = 256;

/// Tensors that may be on their way to another place at the same time: until one is there, it takes memory here.
const ON_THEIR_WAY: usize = 2;

/// A tensor on its way to the backward pass, which takes it once.
struct Waiting<B: PackingKernels> {
    state: Mutex<State<B>>,
    policy: SavedPolicy,
    /// Held by those who take it outside of the graph.
    outside: Arc<()>,
}

enum State<B: PackingKernels> {
    Whole(FloatTensor<B>),
    Stored(Stored<B>),
    Taken,
}

impl<B: PackingKernels> Waiting<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // of a thread that panicked: `Taken`
    }

    /// Packs the tensor if nobody else holds it.
    fn pack(&self) -> Progress {
        let mut state = self.lock();
        if matches!(&*state, State::Whole(x) if !x.can_mut()) {
            return Progress::Held;
        }
        *state = match core::mem::replace(&mut *state, State::Taken) {
            // Another form of elements that are one in memory would take more.
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

    /// Waits until a tensor that is on its way is there.
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

    /// For the graph, which asks once.
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

/// How far a tensor is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Somebody else holds it.
    Held,
    /// It still takes memory where it was.
    OnItsWay,
    /// There is nothing more to do.
    Done,
}

/// A tensor that waits, outside of the graph, on any backend.
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

/// A tensor that waits, for steps that are about to keep it.
pub(crate) struct Held<B: PackingKernels> {
    waiting: Arc<Waiting<B>>,
    /// What stands in for it in the graph, if it is tracked.
    stand_in: Option<FloatTensor<Autodiff<B>>>,
}

impl<B: PackingKernels> Held<B> {
    /// What stands in for the tensor in the graph; `None` of one that is not tracked.
    pub(crate) fn stand_in(&self) -> Option<&FloatTensor<Autodiff<B>>> {
        self.stand_in.as_ref()
    }

    /// The tensor outside of the graph.
    pub(crate) fn outside(&self) -> Arc<dyn AnyWaiting> {
        Arc::new(Outside { waiting: self.waiting.clone(), _outside: self.waiting.outside.clone() })
    }

    /// How it waits.
    pub(crate) fn policy(&self) -> &SavedPolicy {
        &self.waiting.policy
    }
}

/// A tensor that somebody else may still hold.
struct Shared<B: PackingKernels> {
    /// `None` of what a step made for itself.
    node: Option<NodeId>,
    /// Held by the steps that keep it, and by the node that stands in for it.
    waiting: Weak<Waiting<B>>,
    stand_in: Option<FloatTensor<Autodiff<B>>>,
    looks: usize,
}

trait AnyShared: Send {
    /// See [`Waiting::pack`].
    fn pack(&mut self) -> Progress;
    /// See [`Waiting::arrive`].
    fn arrive(&self);
    /// The node of the tensor; `None` of what a step made for itself.
    fn node(&self) -> Option<NodeId>;
    /// A [`Held`]; `None` once the steps that keep it are done.
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

/// What a thread holds.
struct OfThread(RefCell<List>);

impl Drop for OfThread {
    /// Other threads go on.
    fn drop(&mut self) {
        leave(self.0.take());
    }
}

thread_local! {
    static SHARED: OfThread = const { OfThread(RefCell::new(vec![])) };
}

/// See [`apart`](crate::apart()). What the task holds in the end, any thread goes on with.
pub(crate) fn set_aside() -> impl Sized {
    struct Aside(List);
    impl Drop for Aside {
        fn drop(&mut self) {
            leave(SHARED.with(|shared| shared.0.replace(core::mem::take(&mut self.0))));
        }
    }
    Aside(SHARED.with(|shared| shared.0.take()))
}

/// What threads held when their scopes, or they themselves, ended. Any thread looks at it.
static LEFT: Mutex<List> = Mutex::new(vec![]);
/// How much that is.
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
    COUNT_OF_LEFT.store(0, Ordering::Relaxed); // under the lock, as whoever adds to it counts
    core::mem::take(&mut *left)
}

/// Has any thread go on with what this one holds.
pub(crate) fn leave_all() {
    leave(SHARED.with(|shared| shared.0.take()));
}

/// Packs what nobody else holds any more.
pub(crate) fn pack_idle() {
    if COUNT_OF_LEFT.load(Ordering::Relaxed) > 0 {
        leave(packed(take_left()));
    }
    if SHARED.with(|shared| !shared.0.borrow().is_empty()) {
        let mut list = packed(SHARED.with(|shared| shared.0.take()));
        // With what was held meanwhile: a thread of a pool that waits for a kernel runs other tasks.
        SHARED.with(|shared| {
            let mut shared = shared.0.borrow_mut();
            list.append(&mut shared);
            *shared = list;
        });
    }
}

/// What is left to do, after what nobody else holds was packed.
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

/// A scope that is left when this is dropped, also when the forward pass panics.
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
    /// Runs a forward pass whose kept tensors wait as this policy says.
    ///
    /// A scope belongs to its thread (in a pool of rayon's, see `parallel::apart`). Of nested scopes the innermost counts. Within a
    /// checkpointed segment none does: what a segment keeps, it keeps while it is computed.
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

/// Runs the forward pass of a segment, whose tensors stay as they are.
pub(super) fn in_segment<R>(forward: impl FnOnce() -> R) -> R {
    policy::enter_segment();
    let _entered = Entered;
    forward()
}

/// A tensor that waits, because a step keeps it, as the policy says.
pub(crate) fn find<B: PackingKernels>(x: &FloatTensor<Autodiff<B>>) -> Option<Held<B>> {
    let policy = policy::current()?;
    SHARED.with(|shared| {
        let shared = shared.0.borrow();
        // The last one, which has a stand-in where one before it has none.
        let mut of_node = shared.iter().rev().filter(|shared| shared.node() == Some(x.id()));
        of_node.find_map(|shared| {
            let held = *shared.held()?.downcast::<Held<B>>().ok()?;
            (*held.policy() == policy).then_some(held)
        })
    })
}

/// Has a tensor wait that a step is about to keep, if the policy says so; one that waits already does not begin anew.
/// `recomputes`: whether the device's strategy computes some tensors again. `in_graph`: whether one that is tracked has a stand-in.
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

/// Has a tensor wait that a step made for itself.
pub(crate) fn hold_made<B: PackingKernels>(x: FloatTensor<B>, policy: SavedPolicy) -> Arc<dyn AnyWaiting> {
    let held = Held { waiting: waiting::<B>(x, policy), stand_in: None };
    share(None, &held);
    held.outside()
}

fn waiting<B: PackingKernels>(x: FloatTensor<B>, policy: SavedPolicy) -> Arc<Waiting<B>> {
    policy::note(&policy);
    Arc::new(Waiting { state: Mutex::new(State::Whole(x)), policy, outside: Arc::default() })
}

/// Has it packed when nobody else holds it.
fn share<B: PackingKernels>(node: Option<NodeId>, Held { waiting, stand_in }: &Held<B>) {
    let shared = Shared { node, waiting: Arc::downgrade(waiting), stand_in: stand_in.clone(), looks: 0 };
    SHARED.with(|all| all.0.borrow_mut().push(Box::new(shared)));
}

/// A node that computes its tensor from what waits.
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

/// Takes a tensor that waits.
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
        drop(states.get_state::<FloatTensor<B>>(&self.token)); // Burn counts that it was asked for
        states.save(output, self.waiting.take());
    }
}
