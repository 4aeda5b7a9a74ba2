//! The parents of a segment: the tracked parameters and inputs that it computes gradients for, as steps of the graph around it.
//!
//! Steps are linked by *tokens*, tensors without a value. In the backward pass, the outputs first put their gradients into slots; then the
//! segment is recomputed, and puts the gradients of its parents into further slots; then the parents take these.
use super::remembered::Seen;
use super::tensors::{TensorMapper, untouched};
use crate::strategy::token;
use burn::backend::Dispatch;
use burn::module::{ModuleVisitor, Param, ParamId};
use burn::tensor::{Bool, Device, FloatDType, Int, Tensor};
use burn_memsave_layers::graph::{ReplayOnce, SegmentOps, Slots, is_entered};
use burn_memsave_layers::node::node_id;
use std::collections::HashMap;

/// The slots of the gradients of parameters. A parameter in several places of a module may be one leaf of the graph, or several.
pub(super) type Parameters = HashMap<(ParamId, usize), usize>;

/// Records a step on a token.
pub(super) type Link = Box<dyn FnOnce(Tensor<1>, Slots, usize) -> Tensor<1>>;

/// Joins the tokens of all parents to one, by a tree of steps, since Burn walks through graphs recursively.
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

/// Completes a gradient: a sum in f32 is cast to the dtype of its parameter, and a missing gradient becomes zeros. The first argument is
/// any tensor of the backend.
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

/// Finds the tracked parameters and inputs of a segment.
#[derive(Default)]
pub(super) struct Parents {
    /// The device of the first one.
    pub(super) device: Option<Device>,
    seen: Seen,
    pub(super) parameters: Parameters,
    pub(super) first_input: usize,
    /// Steps that make them parents of the segment: parameters, then inputs.
    links: Vec<Link>,
    /// Steps that keep the inputs.
    keeps: Vec<Link>,
    /// For parameters in half precision.
    pub(super) narrow: Vec<Finish>,
    /// For parameters that are not leaves, and for inputs.
    pub(super) zeros: Vec<Finish>,
    nodes: HashMap<u64, usize>,
}

impl Parents {
    /// The token from which the outputs of a segment come.
    pub(super) fn chain(
        self,
        device: &Device,
        gradients: Slots,
        inputs: Slots,
        replay: ReplayOnce,
    ) -> Tensor<1> {
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
                // Not a leaf: the step that made it waits for a gradient.
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
