//! The graph of a part of a network that is computed again in the backward pass.
//!
//! A segment has any number of inputs, parameters and outputs, but a step of Burn has a fixed number of parents and one output.
//! So it is steps that compute nothing, along which an empty token is passed:
//!
//! | steps | in the backward pass, from the last |
//! | --- | --- |
//! | one per output | puts the gradient of the output where the replay finds it |
//! | one per kept input | puts the input there, which Burn may have to compute again |
//! | one | runs the replay, which leaves a gradient for every parent |
//! | one per parent: tracked inputs and parameters; and a tree of steps that joins these | gives the parent its gradient, once |
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

/// Computes a segment again, with its gradients; once.
#[derive(Clone)]
pub struct ReplayOnce(Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>);

impl ReplayOnce {
    /// Runs a function.
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
    /// The steps of a segment. Without autodiff, tokens and outputs pass unchanged.
    pub trait SegmentOps: Backend {
        /// Whether every backward pass on the device of `like` waits for those on other devices at its end: while Burn's distributed training
        /// runs.
        fn memsave_segment_waits(_like: FloatTensor<Self>) -> bool {
            false
        }

        /// The token of a chain that has one more parent, whose gradient is in the slot, or nowhere if it has none: when the backward
        /// pass comes by.
        fn memsave_segment_parent(
            token: FloatTensor<Self>,
            parent: FloatTensor<Self>,
            gradients: Slots,
            slot: usize,
        ) -> FloatTensor<Self>;

        /// The token of a chain whose parents are complete.
        fn memsave_segment_replay(token: FloatTensor<Self>, replay: ReplayOnce) -> FloatTensor<Self>;

        /// The token of a chain that keeps an input for the replay.
        fn memsave_segment_input(
            token: FloatTensor<Self>,
            input: FloatTensor<Self>,
            inputs: Slots,
            slot: usize,
        ) -> FloatTensor<Self>;

        /// An output, as one of the segment.
        fn memsave_segment_output(
            output: FloatTensor<Self>,
            token: FloatTensor<Self>,
            gradients: Slots,
            slot: usize,
        ) -> FloatTensor<Self>;

        /// Puts a tensor without autodiff into a slot; adds it to the one that is there, if there is one: whether there is.
        fn memsave_segment_put(tensor: FloatTensor<Self>, slots: Slots, slot: usize) -> bool;

        /// Takes it from there; `like` is any tensor of the backend.
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
                    drop((held, input)); // nobody else may hold it
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
