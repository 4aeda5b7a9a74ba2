//! The forms in which a step keeps a tensor for its backward pass, and how it reports this to the ledger.
use super::held::{self, AnyWaiting, Held};
use super::policy;
use super::recompute::{RecomputeGuard, is_offered};
use super::{ledger, watch};
use crate::backend::Saved;
use crate::frozen::WeightSource;
use crate::saved::SavedPolicy;
use crate::saved::packing::PackingKernels;
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff, NodeId,
        checkpoint::base::Checkpointer,
        ops::{Backward, OpsPrep, Tracked},
    },
    tensor::FloatTensor,
};
use core::any::Any;
use core::cell::RefCell;
use std::sync::Arc;

/// An input that a step keeps.
#[derive(Clone, Debug)]
pub(crate) enum Kept {
    /// A tensor in Burn's checkpointer, which recomputes it if it was offered. For a held tensor this is the stand-in.
    Node {
        node: NodeId,
        /// Says that other steps can have the tensor without keeping another byte. (`None` if it is untracked, so not in the graph.)
        _guard: Option<Arc<RecomputeGuard>>,
    },
    /// The source of a frozen weight, which is read again.
    Frozen(Box<Frozen>),
    /// A handle, a `FloatTensor<B>`, of a frozen weight that stays on its device.
    Staying(Arc<dyn Any + Send + Sync>),
    /// A held tensor that waits outside of the graph.
    Waiting(Arc<dyn AnyWaiting>),
}

/// Where a frozen weight is read from, and to which device of the backend.
#[derive(Clone, Debug)]
pub(crate) struct Frozen {
    source: WeightSource,
    /// The `Device<B>`.
    device: Arc<dyn Any + Send + Sync>,
}

impl Kept {
    /// Keeps a frozen weight: its source, or a handle if it stays on its device. `None` for any other tensor.
    pub(crate) fn frozen<B: Backend>(tensor: &FloatTensor<Autodiff<B>>) -> Option<Self> {
        let source = source::<B>(tensor)?;
        Some(match source.stays() {
            true => Self::Staying(Arc::new(tensor.primitive().clone())),
            false => Self::Frozen(Box::new(Frozen { source, device: Arc::new(tensor.device()) })),
        })
    }

    /// Keeps a tensor in Burn's checkpointer.
    pub(crate) fn node<BO, B, S, C, const N: usize>(
        prep: &mut OpsPrep<BO, B, S, C, N, Tracked>,
        tensor: &FloatTensor<Autodiff<B>>,
    ) -> Self
    where
        B: Backend,
        S: Clone + Send + core::fmt::Debug + 'static,
        BO: Backward<B, N, State = S>,
    {
        let node = prep.checkpoint(tensor);
        Self::Node { node, _guard: tensor.is_tracked().then(|| Arc::new(RecomputeGuard::new(node))) }
    }

    /// Keeps a held tensor outside of the graph.
    pub(crate) fn waiting<B: PackingKernels>(held: &Held<B>) -> Self {
        Self::Waiting(held.outside())
    }

    /// The tensor. To be called once.
    pub(crate) fn get<B: Backend>(self, checkpointer: &mut Checkpointer) -> FloatTensor<B> {
        match self {
            Self::Node { node, .. } => checkpointer.retrieve_node_output(node),
            Self::Frozen(frozen) => {
                let device = frozen.device.downcast_ref().expect("of the backend that keeps it");
                frozen.source.read::<B>(device)
            }
            Self::Staying(tensor) => {
                tensor.downcast_ref::<FloatTensor<B>>().expect("of the backend that keeps it").clone()
            }
            Self::Waiting(waiting) => *waiting.tensor().downcast().expect("of the backend that keeps it"),
        }
    }
}

/// A tensor that a step made for itself, and keeps outside of the graph.
#[derive(Clone, Debug)]
pub(crate) enum KeptTensor<T> {
    Whole(T),
    /// A held tensor, which waits; a `T`.
    Waiting(Arc<dyn AnyWaiting>),
}

impl<T: 'static> KeptTensor<T> {
    pub(crate) fn get(self) -> T {
        match self {
            Self::Whole(tensor) => tensor,
            Self::Waiting(waiting) => *waiting.tensor().downcast().expect("of the backend that keeps it"),
        }
    }
}

/// The source that a tensor can be read from again, if it is a frozen weight.
fn source<B: Backend>(tensor: &FloatTensor<Autodiff<B>>) -> Option<WeightSource> {
    if tensor.is_tracked() { None } else { WeightSource::of(tensor.id()) }
}

/// Reports what a step keeps to the [ledger].
pub struct Report {
    operation: &'static str,
    module: Option<NodeId>,
    /// The entries, while steps are [watched](watch).
    watched: Option<RefCell<Vec<ledger::Entry>>>,
}

impl Report {
    /// The report of an operation. `module`: the node of a parameter, by which its module is found.
    pub(crate) fn new(operation: &'static str, module: Option<NodeId>) -> Self {
        Self { operation, module, watched: watch::is_watching().then(RefCell::default) }
    }

    /// Reports a kept input. `waiting`: if it is held.
    pub(crate) fn input<B: PackingKernels>(
        &self,
        name: &'static str,
        tensor: &FloatTensor<Autodiff<B>>,
        waiting: Option<&Held<B>>,
        reason: &'static str,
    ) {
        // This closure runs only while somebody listens.
        self.report(name, || {
            if let Some(policy) = waiting.map(Held::policy)
                && let Some(bytes) = policy.bytes::<B>(tensor.shape().num_elements(), tensor.dtype())
            {
                return (bytes, policy.reason(), Some(tensor.id()));
            }
            if let Some(source) = source::<B>(tensor) {
                (0, if source.stays() { "stays on the device" } else { "read again" }, None)
            } else if is_offered(tensor.id()) {
                (0, "computed again", Some(tensor.id()))
            } else {
                (bytes(tensor), reason, Some(tensor.id()))
            }
        });
    }

    /// Reports what a step saves in its own form, such as a mask. Returns it.
    pub(crate) fn state<T: Saved>(&self, name: &'static str, saved: T, reason: &'static str) -> T {
        self.report(name, || (saved.bytes(), reason, None));
        saved
    }

    /// Reports a tensor that is not an input, or an input that no gradient flows to. Returns it.
    pub(crate) fn tensor<T: TensorMetadata>(&self, name: &'static str, tensor: T, reason: &'static str) -> T {
        self.report(name, || (bytes(&tensor), reason, None));
        tensor
    }

    /// Reports a tensor that the step made for itself, not its output, and keeps it as the [policy](crate::saved) says.
    pub(crate) fn made<B: PackingKernels>(
        &self,
        name: &'static str,
        tensor: FloatTensor<B>,
        reason: &'static str,
    ) -> KeptTensor<FloatTensor<B>> {
        let (elements, dtype) = (tensor.shape().num_elements(), tensor.dtype());
        let bytes = |policy: &SavedPolicy| policy.bytes::<B>(elements, dtype);
        match policy::current().and_then(|policy| Some((bytes(&policy)?, policy))) {
            None => KeptTensor::Whole(self.tensor(name, tensor, reason)),
            Some((bytes, policy)) => {
                self.report(name, || (bytes, policy.reason(), None));
                KeptTensor::Waiting(held::hold_made::<B>(tensor, policy))
            }
        }
    }

    /// Reports a handle of a quantized parameter, which is no copy: 0 bytes. Returns it.
    pub(crate) fn handle<T>(&self, name: &'static str, tensor: T) -> T {
        self.report(name, || (0, "a handle of the quantized parameter", None));
        tensor
    }

    fn report(&self, tensor: &'static str, kept: impl FnOnce() -> (usize, &'static str, Option<NodeId>)) {
        let entry = || {
            let (bytes, reason, node) = kept();
            let Self { operation, module: weight, .. } = *self;
            ledger::Entry { operation, tensor, bytes: Some(bytes), reason, node, weight }
        };
        match &self.watched {
            None => ledger::report(entry),
            Some(entries) => {
                let entry = entry();
                ledger::report(|| entry.clone());
                entries.borrow_mut().push(entry);
            }
        }
    }

    /// Tells the watch that the step of this report is recorded now. `None` if nobody watches.
    pub(crate) fn recorded(self, inputs: Vec<watch::InputOfStep>) -> Option<Arc<watch::Alive>> {
        let Self { operation, module: weight, watched } = self;
        let entries = watched?.into_inner();
        let after = Default::default();
        watch::recorded(|| watch::LiveStep { operation, weight, inputs, output: None, entries, after })
    }
}

fn bytes(tensor: &impl TensorMetadata) -> usize {
    tensor.shape().num_elements() * tensor.dtype().size()
}
