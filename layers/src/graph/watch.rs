//! Watches the steps of graphs: which are alive, what they keep, and when they run.
//!
//! While off, it costs one thread-local read per operation. `burn_memsave::measure::watch_graphs` and `timeline` switch it on.
use super::aside::Aside;
use super::ledger::Entry;
use crate::burn_internals::parents;
use burn::backend::{Backend, TensorMetadata, autodiff::Autodiff, tensor::FloatTensor};
use burn::tensor::{DType, Shape, try_read_sync};
use burn_autodiff::NodeId;
use core::cell::RefCell;
use core::fmt;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A step that was recorded, and has not run backward yet.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveStep {
    /// The operation.
    pub operation: &'static str,
    /// The node of the operation's weight, by which its module is found.
    pub weight: Option<NodeId>,
    /// The inputs of the operation.
    pub inputs: Vec<InputOfStep>,
    /// The node of its output, once there is one.
    pub output: Option<NodeId>,
    /// What it keeps.
    pub entries: Vec<Entry>,
    /// If the watch [compares](Watch::comparing): what its output would be after an activation.
    pub after: Activated,
}

/// Hashes of the outputs that activations would give for a tensor; `None` if the watch does not [compare](Watch::comparing).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Activated {
    /// `min(max(x, 0), 6)`, if a value is above 6. Otherwise the same output may come from a ReLU, or from no activation at all.
    pub relu6: Option<u64>,
    /// `x sigmoid(x)`
    pub silu: Option<u64>,
}

impl Activated {
    fn of<B: Backend>(x: &FloatTensor<B>) -> Self {
        let (relu, sigmoid) = (B::relu(x.clone()), B::sigmoid(x.clone()));
        let relu6 = hash::<B>(B::float_clamp_max(relu.clone(), 6.0.into()));
        Self {
            relu6: relu6.filter(|_| relu6 != hash::<B>(relu)),
            silu: hash::<B>(B::float_mul(x.clone(), sigmoid)),
        }
    }
}

/// A hash of the shape and the values of a tensor (FNV-1a), equal for both zeros.
fn hash<B: Backend>(x: FloatTensor<B>) -> Option<u64> {
    let data = try_read_sync(B::float_into_data(x))?.ok()?;
    let add = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x0100_0000_01b3);
    let shape = data.shape().iter().fold(0xcbf2_9ce4_8422_2325, |hash, &size| add(hash, size as u64));
    Some(data.iter::<f64>().fold(shape, |hash, value| add(hash, (value + 0.0).to_bits())))
}

/// An input of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct InputOfStep {
    /// Its name.
    pub name: &'static str,
    /// Its node.
    pub node: NodeId,
    /// The nodes that it is computed from.
    pub parents: Vec<NodeId>,
    /// Its shape.
    pub shape: Shape,
    /// Its dtype.
    pub dtype: DType,
    /// Whether it is tracked.
    pub tracked: bool,
    /// If the watch [compares](Watch::comparing): a hash of its values, to compare with those in [`Activated`].
    pub values: Option<u64>,
}

impl InputOfStep {
    pub(crate) fn of<B: Backend>(name: &'static str, tensor: &FloatTensor<Autodiff<B>>) -> Self {
        Self {
            name,
            node: tensor.id(),
            parents: parents(&tensor.node()),
            shape: tensor.shape(),
            dtype: tensor.dtype(),
            tracked: tensor.is_tracked(),
            values: is_comparing().then(|| hash::<B>(tensor.primitive().clone())).flatten(),
        }
    }
}

/// What an operation did.
#[derive(Clone, Debug, PartialEq)]
pub enum Phase {
    /// It computed its output.
    Forward,
    /// It gave these gradients: nodes and bytes.
    Backward(Vec<(NodeId, usize)>),
}

/// An operation that did something.
#[derive(Clone, Debug, PartialEq)]
pub struct Happened {
    /// The operation.
    pub operation: &'static str,
    /// The node of the operation's weight.
    pub weight: Option<NodeId>,
    /// What it did.
    pub phase: Phase,
}

/// Is told what happened, and which steps are alive then, in the order in which they were recorded.
pub type OnEvent = Box<dyn FnMut(Happened, &mut dyn Iterator<Item = &LiveStep>) + Send>;

/// Watches the steps that operations on a thread record.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::{functional, graph::watch::Watch};
///
/// let watch = Watch::default();
/// let x = Tensor::<1>::ones([640], &Device::flex().autodiff()).require_grad();
/// let y = watch.during(|| functional::relu(x));
/// assert_eq!(watch.alive()[0].operation, "relu");
/// y.backward();
/// assert!(watch.alive().is_empty());
/// ```
#[derive(Clone, Default)]
pub struct Watch(Arc<Watched>);

#[derive(Default)]
struct Watched {
    /// The next number, and the steps that are alive, by number.
    steps: Mutex<(u64, BTreeMap<u64, LiveStep>)>,
    /// The nodes of all outputs, including those of steps that are not operations, if the watch compares.
    made: Mutex<BTreeSet<NodeId>>,
    compares: bool,
    on_event: Option<Mutex<OnEvent>>,
}

impl fmt::Debug for Watched {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watched")
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watch")
    }
}

thread_local! {
    static WATCH: RefCell<Option<Watch>> = const { RefCell::new(None) };
}

/// See [`apart`](crate::apart()).
pub(crate) fn set_aside() -> impl Sized {
    Aside::new(&WATCH)
}

impl Watch {
    /// A watch that also tells what happens, including backward passes after the watch has ended.
    pub fn telling(on_event: OnEvent) -> Self {
        Self(Arc::new(Watched { on_event: Some(Mutex::new(on_event)), ..Default::default() }))
    }

    /// A watch that also hashes values, and remembers all outputs. It reads every tensor, so it is meant for one training step.
    pub fn comparing() -> Self {
        Self(Arc::new(Watched { compares: true, ..Default::default() }))
    }

    /// Watches this thread in place of another watch, which is returned.
    pub fn start(&self) -> Option<Self> {
        WATCH.replace(Some(self.clone()))
    }

    /// Ends what [`start`](Self::start) began, and resumes the watch before.
    pub fn end(before: Option<Self>) {
        WATCH.set(before);
    }

    /// Watches this thread while `f` runs.
    pub fn during<R>(&self, f: impl FnOnce() -> R) -> R {
        let _outer = set_aside();
        self.start();
        f()
    }

    /// The steps that are alive, in the order in which they were recorded.
    pub fn alive(&self) -> Vec<LiveStep> {
        self.0.steps().1.values().cloned().collect()
    }

    /// The nodes of all outputs of this library's steps, including steps that have run backward, if it [compares](Self::comparing).
    pub fn made(&self) -> BTreeSet<NodeId> {
        self.0.made().clone()
    }
}

impl Watched {
    fn steps(&self) -> MutexGuard<'_, (u64, BTreeMap<u64, LiveStep>)> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
    }

    fn made(&self) -> MutexGuard<'_, BTreeSet<NodeId>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner) // numbers
    }

    fn tell(&self, happened: Happened) {
        if let Some(on_event) = &self.on_event {
            let mut on_event = on_event.lock().unwrap_or_else(PoisonError::into_inner);
            on_event(happened, &mut self.steps().1.values());
        }
    }
}

/// Whether steps are watched on this thread.
pub(crate) fn is_watching() -> bool {
    WATCH.with_borrow(Option::is_some)
}

fn is_comparing() -> bool {
    WATCH.with_borrow(|watch| watch.as_ref().is_some_and(|Watch(watched)| watched.compares))
}

/// Tells the watch the output of a step of this library.
pub(crate) fn made(output: NodeId) {
    WATCH.with_borrow(|watch| {
        if let Some(Watch(watched)) = watch
            && watched.compares
        {
            watched.made().insert(output);
        }
    });
}

/// Part of the state of a watched step. When it is dropped with the step, the watch forgets the step.
#[derive(Debug)]
pub(crate) struct Alive {
    watched: Arc<Watched>,
    number: u64,
}

/// Tells the watch that a step is recorded now. `None` if nobody watches.
pub(crate) fn recorded(step: impl FnOnce() -> LiveStep) -> Option<Arc<Alive>> {
    let Watch(watched) = WATCH.with_borrow(Option::clone)?;
    let mut steps = watched.steps();
    let number = steps.0;
    steps.0 += 1;
    steps.1.insert(number, step());
    drop(steps);
    Some(Arc::new(Alive { watched, number }))
}

impl Alive {
    /// Tells the watch the output of the step.
    pub(crate) fn made<B: Backend>(&self, output: &FloatTensor<Autodiff<B>>) {
        made(output.id());
        let after = match self.watched.compares {
            true => Activated::of::<B>(output.primitive()),
            false => Activated::default(),
        };
        if let Some(step) = self.watched.steps().1.get_mut(&self.number) {
            (step.output, step.after) = (Some(output.id()), after);
        }
    }
}

impl Drop for Alive {
    fn drop(&mut self) {
        let step = self.watched.steps().1.remove(&self.number);
        drop(step);
    }
}

/// Tells the watch that an operation computed its output.
pub(crate) fn computed(operation: &'static str, weight: Option<NodeId>) {
    if let Some(Watch(watched)) = WATCH.with_borrow(Option::clone) {
        watched.tell(Happened { operation, weight, phase: Phase::Forward });
    }
}

/// Tells the watch that a step ran backward, gave these gradients, and keeps nothing any more.
pub(crate) fn ran_backward(alive: Arc<Alive>, gradients: Vec<(NodeId, usize)>) {
    let watched = alive.watched.clone();
    let step = watched.steps().1.get(&alive.number).map(|step| (step.operation, step.weight));
    drop(alive);
    if let Some((operation, weight)) = step {
        watched.tell(Happened { operation, weight, phase: Phase::Backward(gradients) });
    }
}
