//! The steps of a segment, which is recomputed in the backward pass.
//!
//! A segment has any number of inputs, parameters and outputs, but a step of Burn has a fixed number of parents and one output.
//! So a segment is a chain of steps that compute nothing, and pass a token along:
//!
//! | steps | what they do in the backward pass, the last one first |
//! | --- | --- |
//! | one per output | puts the gradient of the output into a slot, where the replay finds it |
//! | one per kept input | puts the input into a slot; Burn may have to recompute it first |
//! | one | runs the replay, which puts the gradient of every parent into a slot |
//! | one per parent (tracked inputs and parameters), and a tree of steps that joins these | gives the parent its gradient, once |
//!
//! No gradient flows along the token.
use super::bare::recorded;
use super::held;
use super::kept::{Kept, Report};
use super::run::Run as _;
use super::slots::Slots;
use super::update;
use super::watch::{self, Alive};
use crate::backend::plain_backends;
use crate::burn_next::routed;
use crate::saved::packing::PackingKernels;
use burn::backend::{
    Backend,
    autodiff::{
        Autodiff,
        checkpoint::{
            base::Checkpointer,
            strategy::{BalancedCheckpointing, CheckpointStrategy},
        },
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    distributed::get_distributed_sync_client,
    tensor::FloatTensor,
};
use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// The replay of a segment: recomputes it, and computes its gradients. Runs once.
#[derive(Clone)]
pub struct ReplayOnce(Arc<Mutex<Option<Function>>>);

type Function = Box<dyn FnOnce() + Send>;

impl ReplayOnce {
    /// A replay that runs this function.
    pub fn new(replay: impl FnOnce() + Send + 'static) -> Self {
        Self(Arc::new(Mutex::new(Some(Box::new(replay)))))
    }

    fn run(self) {
        let replay = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        replay.expect("a step runs once")();
    }
}

impl fmt::Debug for ReplayOnce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReplayOnce")
    }
}

routed! {
    [Autodiff]
    /// The steps of a segment. Those of parents, the replay and inputs take the token of the chain, and return the next one. Without
    /// autodiff, tokens and outputs pass unchanged.
    pub trait SegmentOps: Backend {
        /// Whether every backward pass on the device of `like` ends only with those on other devices: while Burn's distributed training
        /// runs.
        fn memsave_segment_waits(_like: FloatTensor<Self>) -> bool {
            false
        }

        /// Adds a parent to a chain. When the backward pass reaches this step, the parent's gradient is in the slot, if it has one.
        fn memsave_segment_parent(
            token: FloatTensor<Self>,
            parent: FloatTensor<Self>,
            gradients: Slots,
            slot: usize,
        ) -> FloatTensor<Self>;

        /// Adds the replay to a chain that has all its parents.
        fn memsave_segment_replay(token: FloatTensor<Self>, replay: ReplayOnce) -> FloatTensor<Self>;

        /// Adds an input that the chain keeps for the replay.
        fn memsave_segment_input(
            token: FloatTensor<Self>,
            input: FloatTensor<Self>,
            inputs: Slots,
            slot: usize,
        ) -> FloatTensor<Self>;

        /// Makes a tensor an output of the segment.
        fn memsave_segment_output(
            output: FloatTensor<Self>,
            token: FloatTensor<Self>,
            gradients: Slots,
            slot: usize,
        ) -> FloatTensor<Self>;

        /// Puts a tensor without autodiff into a slot, or adds it to the one that is there. Returns whether there was one.
        fn memsave_segment_put(tensor: FloatTensor<Self>, slots: Slots, slot: usize) -> bool;

        /// Takes the tensor out of a slot. `like` is any tensor of the backend.
        fn memsave_segment_take(like: FloatTensor<Self>, slots: Slots, slot: usize) -> FloatTensor<Self>;
    }
}

plain_backends!(SegmentOps {
    fn memsave_segment_parent(
        token: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: Slots,
        _: usize,
    ) -> FloatTensor<Self> {
        token
    }
    fn memsave_segment_replay(token: FloatTensor<Self>, _: ReplayOnce) -> FloatTensor<Self> {
        token
    }
    fn memsave_segment_input(
        token: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: Slots,
        _: usize,
    ) -> FloatTensor<Self> {
        token
    }
    fn memsave_segment_output(
        output: FloatTensor<Self>,
        _: FloatTensor<Self>,
        _: Slots,
        _: usize,
    ) -> FloatTensor<Self> {
        output
    }
    fn memsave_segment_put(tensor: FloatTensor<Self>, slots: Slots, slot: usize) -> bool {
        slots.add::<Self>(slot, tensor)
    }
    fn memsave_segment_take(_: FloatTensor<Self>, slots: Slots, slot: usize) -> FloatTensor<Self> {
        slots.take::<Self>(slot).expect("a tensor was put there")
    }
});

impl<B: SegmentOps + PackingKernels, C: CheckpointStrategy> SegmentOps for Autodiff<B, C> {
    fn memsave_segment_waits(_: FloatTensor<Self>) -> bool {
        get_distributed_sync_client::<B>().is_some()
    }

    fn memsave_segment_parent(
        token: FloatTensor<Self>,
        parent: FloatTensor<Self>,
        gradients: Slots,
        slot: usize,
    ) -> FloatTensor<Self> {
        let nodes = [token.node(), parent.node()];
        recorded::<B, _, 2>(ParentStep, nodes, (gradients, slot), token.into_primitive())
    }

    fn memsave_segment_replay(token: FloatTensor<Self>, replay: ReplayOnce) -> FloatTensor<Self> {
        recorded::<B, _, 1>(ReplayStep, [token.node()], replay, token.into_primitive())
    }

    fn memsave_segment_input(
        token: FloatTensor<Self>,
        input: FloatTensor<Self>,
        inputs: Slots,
        slot: usize,
    ) -> FloatTensor<Self> {
        held::pack_idle();
        let held = held::hold(&input, Self::recomputes(), false);
        let report = Report::new("checkpoint", None);
        report.input::<B>("input", &input, held.as_ref(), "the segment is computed again from it");
        let token =
            match InputStep.prepare::<BalancedCheckpointing>([token.node()]).compute_bound().stateful() {
                OpsKind::Tracked(mut prep) => {
                    let kept = match &held {
                        Some(held) => Kept::waiting(held),
                        None => Kept::node(&mut prep, &input),
                    };
                    drop((held, input)); // so that the last handle is the one that waits
                    held::pack_idle();
                    prep.finish((kept, inputs, slot, report.recorded(vec![])), token.into_primitive())
                }
                OpsKind::UnTracked(prep) => prep.finish(token.into_primitive()),
            };
        watch::made(token.id());
        token
    }

    fn memsave_segment_output(
        output: FloatTensor<Self>,
        token: FloatTensor<Self>,
        gradients: Slots,
        slot: usize,
    ) -> FloatTensor<Self> {
        recorded::<B, _, 1>(OutputStep, [token.node()], (gradients, slot), output.into_primitive())
    }

    fn memsave_segment_put(tensor: FloatTensor<Self>, slots: Slots, slot: usize) -> bool {
        slots.add::<B>(slot, tensor.into_primitive())
    }

    fn memsave_segment_take(_: FloatTensor<Self>, slots: Slots, slot: usize) -> FloatTensor<Self> {
        FloatTensor::<Self>::new(slots.take::<B>(slot).expect("a tensor was put there"))
    }
}

#[derive(Debug)]
struct ParentStep;

impl<B: Backend> Backward<B, 2> for ParentStep {
    type State = (Slots, usize);

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let (slots, slot) = ops.state;
        let [_, parent] = ops.parents;
        if let Some((parent, gradient)) = parent.zip(slots.take::<B>(slot)) {
            gradients.register::<B>(parent.id, gradient);
        }
        update::look::<B>(gradients);
    }
}

#[derive(Debug)]
struct ReplayStep;

impl<B: Backend> Backward<B, 1> for ReplayStep {
    type State = ReplayOnce;

    fn backward(self, ops: Ops<Self::State, 1>, _: &mut Gradients, _: &mut Checkpointer) {
        ops.state.run();
    }
}

#[derive(Debug)]
struct InputStep;

impl<B: Backend> Backward<B, 1> for InputStep {
    type State = (Kept, Slots, usize, Option<Arc<Alive>>);

    fn backward(self, ops: Ops<Self::State, 1>, _: &mut Gradients, checkpointer: &mut Checkpointer) {
        let (kept, slots, slot, _alive) = ops.state;
        slots.add::<B>(slot, kept.get::<B>(checkpointer));
    }
}

#[derive(Debug)]
struct OutputStep;

impl<B: Backend> Backward<B, 1> for OutputStep {
    type State = (Slots, usize);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let (slots, slot) = ops.state;
        slots.add::<B>(slot, gradients.consume::<B>(&ops.node));
    }
}
