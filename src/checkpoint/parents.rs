//! What a segment has gradients of, as steps of the graph around it.
use super::remembered::Seen;
use super::tensors::{TensorMapper, untouched};
use crate::ops::{Replay, SegmentOps, Slots, is_entered, node_id};
use crate::strategy::with_strategy;
use burn::backend::Dispatch;
use burn::module::{ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Device, FloatDType, Int, Tensor};
use std::collections::HashMap;

/// The slots of the gradients of parameters. One that is in several places of a module may be one leaf of the graph, or several.
pub(super) type Parameters = HashMap<(ParamId, usize), usize>;

/// What carries no value along a chain of steps.
pub(crate) fn token(device: &Device) -> Tensor<1> {
    with_strategy(Tensor::zeros([1], &device.clone().without_autodiff()), device)
}

/// Records a step on a token.
pub(super) type Link = Box<dyn FnOnce(Tensor<1>, Slots, usize) -> Tensor<1>>;

/// One token of all parents, by a tree of steps: Burn walks through graphs recursively.
pub(super) fn join(device: &Device, links: Vec<Link>, gradients: &Slots) -> Tensor<1> {
    let link = |(slot, link): (usize, Link)| link(token(device), gradients.clone(), slot);
    let mut tokens: Vec<Tensor<1>> = links.into_iter().enumerate().map(link).collect();
    while tokens.len() > 1 {
        let pair = |pair: &[Tensor<1>]| match pair {
            [a, b] => self::link(b.clone())(a.clone(), Slots::default(), 0),
            rest => rest[0].clone(),
        };
        tokens = tokens.chunks(2).map(pair).collect();
    }
    tokens.swap_remove(0)
}

pub(super) fn link<const D: usize>(parent: Tensor<D>) -> Link {
    Box::new(|token, slots, slot| {
        let (token, parent) = (token.into_dispatch(), parent.into_dispatch());
        Tensor::from_dispatch(Dispatch::memsave_segment_parent(token, parent, slots, slot))
    })
}

/// Completes the gradients: what was summed in f32 gets the type of its parameter, what is missing zeros. With any tensor of the
/// backend.
pub(super) type Finish = Box<dyn FnOnce(&Tensor<1>, &Slots) + Send>;

/// Fills the slot of the gradient of a parent with zeros if there is none, on the parent's device.
fn fill<const D: usize>(parent: &Tensor<D>, slot: usize) -> Finish {
    let (shape, dtype, device) = (parent.shape(), parent.dtype(), parent.device().without_autodiff());
    Box::new(move |_, gradients| {
        if !gradients.has(slot) {
            put(Tensor::<D>::zeros(shape, (&device, dtype)), gradients, slot);
        }
    })
}

/// Finds what is tracked.
#[derive(Default)]
pub(super) struct Parents {
    /// Of the first one.
    pub(super) device: Option<Device>,
    seen: Seen,
    pub(super) parameters: Parameters,
    pub(super) first_input: usize,
    /// To make them parents of the segment: parameters, then inputs.
    links: Vec<Link>,
    /// To keep the inputs.
    keeps: Vec<Link>,
    /// Of parameters in half precision.
    pub(super) narrow: Vec<Finish>,
    /// Of parameters that are no leaves, and of inputs.
    pub(super) zeros: Vec<Finish>,
    nodes: HashMap<u64, usize>,
}

impl Parents {
    /// The token from which the outputs of a segment come.
    pub(super) fn chain(self, device: &Device, gradients: Slots, inputs: Slots, replay: Replay) -> Tensor<1> {
        let token = join(device, self.links, &gradients).into_dispatch();
        let mut token = Tensor::from_dispatch(Dispatch::memsave_segment_replay(token, replay));
        for (number, keep) in self.keeps.into_iter().enumerate() {
            token = keep(token, inputs.clone(), number);
        }
        token
    }
}

impl ModuleVisitor for Parents {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let place = self.seen.see(param.id);
        let leaf = param.base();
        if !leaf.is_tracked() {
            return;
        }
        self.device.get_or_insert_with(|| leaf.device());
        let node = node_id(leaf.clone()).expect("a tracked tensor is a node").value;
        let slot = *self.nodes.entry(node).or_insert(self.links.len());
        if slot == self.links.len() {
            if !leaf.is_require_grad() && !is_entered(node) {
                // No leaf: the step that made it waits for a gradient.
                self.zeros.push(fill(&leaf, slot));
            }
            let dtype = leaf.dtype();
            if dtype.size() < 4 {
                self.narrow.push(Box::new(move |like, gradients| {
                    if gradients.has(slot) {
                        let sum: Tensor<D> = take(like, gradients, slot);
                        put(sum.cast(FloatDType::from(dtype)), gradients, slot);
                    }
                }));
            }
            self.links.push(link(leaf));
        }
        self.parameters.insert(place, slot);
        self.first_input = self.links.len();
    }
}

impl TensorMapper for Parents {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if tensor.is_tracked() {
            self.device.get_or_insert_with(|| tensor.device());
            self.zeros.push(fill(&tensor, self.links.len()));
            self.links.push(link(tensor.clone()));
            let kept = tensor.clone();
            self.keeps.push(Box::new(|token, slots, slot| {
                let (token, kept) = (token.into_dispatch(), kept.into_dispatch());
                Tensor::from_dispatch(Dispatch::memsave_segment_input(token, kept, slots, slot))
            }));
        }
        tensor
    }
    untouched!();
}

/// A tensor whose gradient goes into a slot.
pub(super) fn from_probe<const D: usize>(
    tensor: Tensor<D>,
    probe: &Tensor<1>,
    gradients: Slots,
    slot: usize,
) -> Tensor<D> {
    let (tensor, probe) = (tensor.into_dispatch(), probe.clone().into_dispatch());
    Tensor::from_dispatch(Dispatch::memsave_segment_output(tensor, probe, gradients, slot))
}

pub(super) fn put<const D: usize>(gradient: Tensor<D>, slots: &Slots, slot: usize) {
    Dispatch::memsave_segment_put(gradient.into_dispatch(), slots.clone(), slot);
}

/// `like`: any tensor of the backend.
pub(super) fn take<const D: usize, const E: usize>(
    like: &Tensor<D>,
    slots: &Slots,
    slot: usize,
) -> Tensor<E> {
    let like = like.clone().into_dispatch();
    Tensor::from_dispatch(Dispatch::memsave_segment_take(like, slots.clone(), slot))
}
