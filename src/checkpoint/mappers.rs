//! The visits that a segment makes to its tensors: what [`checkpoint`](super::checkpoint) does to the parameters, the inputs and the
//! outputs of a segment when it first runs ([`Fresh`], [`Finished`]), when it is searched for captured tensors ([`WithoutGraph`],
//! [`Refuse`]), when its steps are recorded ([`Skeleton`], [`Outputs`]), and when it is recomputed ([`Filled`], [`Seeds`], [`Collect`]).
use super::compared::{Sample, Samples, sample};
use super::parents::{Link, Parameters, from_probe, join, link, put, take};
use super::remembered::Seen;
use super::tensors::{TensorMapper, untouched};
use crate::strategy::with_strategy;
use crate::widened::widened;
use burn::backend::autodiff::NodeId;
use burn::module::{ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Bool, Device, Gradients, Int, Tensor};
use burn_memsave_layers::graph::Slots;
use burn_memsave_layers::node::node_id;
use std::vec::IntoIter;

/// Gives a forward pass leaves of its own.
pub(super) struct Fresh<'a> {
    pub(super) device: &'a Device,
    /// A tracked tensor, which inputs come from.
    pub(super) probe: Tensor<1>,
    /// Steps that have the leaves as parents.
    pub(super) leaves: Vec<Link>,
}

impl Fresh<'_> {
    /// Drops the graph. Burn frees graphs only in backward passes, so this runs one that reaches every leaf and nothing else.
    pub(super) fn forget(self) {
        let leaves = std::iter::once(link(self.probe)).chain(self.leaves);
        drop(join(self.device, leaves.collect(), &Slots::default()).backward());
    }
}

impl ModuleMapper for Fresh<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.base().is_tracked() {
            true => param.map(|value| {
                let leaf = with_strategy(value.inner(), self.device).require_grad();
                self.leaves.push(link(leaf.clone()));
                leaf
            }),
            false => param,
        }
    }
}

impl TensorMapper for Fresh<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        match tensor.is_tracked() {
            true => from_probe(tensor.detach().set_require_grad(false), &self.probe, Slots::default(), 0),
            false => tensor,
        }
    }
    untouched!();
}

/// Takes tracked tensors out of their graph.
pub(super) struct WithoutGraph;

impl TensorMapper for WithoutGraph {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if tensor.is_tracked() { tensor.detach().set_require_grad(false) } else { tensor }
    }
    untouched!();
}

/// Refuses outputs that are tracked though no parameter and no input is.
pub(super) struct Refuse {
    pub(super) number: usize,
    pub(super) name: &'static str,
}

impl TensorMapper for Refuse {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let Self { number, name } = self;
        assert!(
            !tensor.is_tracked(),
            "checkpoint: output {number} of {name} is computed from a captured tracked tensor: one in the closure, in a static, or in \
             a field of the module that is no parameter. It would get no gradient: make it an argument"
        );
        *number += 1;
        tensor
    }
    fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.number += 1;
        tensor
    }
    fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.number += 1;
        tensor
    }
}

/// The node of a tracked tensor. Nodes are numbered in the order in which they are made.
fn tracked_node<const D: usize>(tensor: &Tensor<D>) -> Option<NodeId> {
    if tensor.is_tracked() { node_id(tensor.clone()) } else { None }
}

/// Takes outputs out of their graph.
pub(super) struct Finished<'a> {
    pub(super) device: &'a Device,
    /// Whether values are compared.
    pub(super) is_checked: bool,
    /// Which float tensors are tracked.
    pub(super) tracked: Vec<bool>,
    pub(super) samples: Samples,
    /// The latest node of tracked outputs.
    pub(super) latest: Option<NodeId>,
    /// The node of an [`EarlyStop`](super::EarlyStop) output.
    pub(super) unread: Option<NodeId>,
}

impl TensorMapper for Finished<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.tracked.push(tensor.is_tracked());
        self.latest = self.latest.into_iter().chain(tracked_node(&tensor)).max_by_key(|node| node.value);
        self.samples.push(Sample::of(&tensor, self.is_checked.then(|| sample(&tensor))));
        if tensor.is_autodiff() { with_strategy(tensor.inner(), self.device) } else { tensor }
    }
    fn map_early_stop<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.unread = tracked_node(&tensor);
        self.map_float(tensor)
    }
    fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        self.samples.push(Sample::of(&tensor, None));
        tensor
    }
    fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        self.samples.push(Sample::of(&tensor, None));
        tensor
    }
}

/// Replaces tracked tensors by placeholders.
pub(super) struct Skeleton<'a> {
    pub(super) plain: &'a Device,
    pub(super) tracked: Vec<bool>,
}

impl TensorMapper for Skeleton<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.tracked.push(tensor.is_tracked());
        if tensor.is_tracked() { Tensor::zeros([1; D], self.plain) } else { tensor }
    }
    untouched!();
}

/// Makes tracked tensors outputs of a segment.
pub(super) struct Outputs {
    pub(super) token: Tensor<1>,
    pub(super) tracked: IntoIter<bool>,
    pub(super) of_outputs: Slots,
    pub(super) number: usize,
}

impl TensorMapper for Outputs {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let number = self.number;
        self.number += 1;
        match self.tracked.next() {
            Some(true) => from_probe(tensor, &self.token, self.of_outputs.clone(), number),
            _ => tensor,
        }
    }
    untouched!();
}

/// Replaces the placeholders by the inputs.
pub(super) struct Filled<'a> {
    pub(super) probe: Tensor<1>,
    pub(super) device: &'a Device,
    pub(super) tracked: IntoIter<bool>,
    pub(super) inputs: Slots,
    pub(super) number: usize,
    pub(super) gradients: Slots,
    pub(super) slot: usize,
}

impl TensorMapper for Filled<'_> {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        if self.tracked.next() != Some(true) {
            return tensor;
        }
        let (number, slot, gradients) = (self.number, self.slot, self.gradients.clone());
        self.number += 1;
        self.slot += 1;
        let input: Tensor<D> = take(&tensor, &self.inputs, number);
        from_probe(with_strategy(input, self.device), &self.probe, gradients, slot)
    }
    untouched!();
}

/// Compares outputs with those of the first run, and seeds their gradients.
pub(super) struct Seeds {
    pub(super) root: Tensor<1>,
    /// The output whose elements mean nothing.
    pub(super) left_out: Option<NodeId>,
    pub(super) of_outputs: Slots,
    /// The number of the next float tensor.
    pub(super) number: usize,
    /// The number of the next tensor.
    pub(super) output: usize,
    pub(super) samples: IntoIter<Sample>,
    pub(super) name: &'static str,
}

impl Seeds {
    /// The number of the next tensor, and what is remembered of it.
    fn next(&mut self) -> (usize, Sample) {
        let Some(before) = self.samples.next() else {
            panic!("checkpoint: computed again, {} has more outputs", self.name)
        };
        self.output += 1;
        (self.output - 1, before)
    }
}

impl TensorMapper for Seeds {
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let ((output, before), name) = (self.next(), self.name);
        let mut compares = before.has_values();
        if let Some(left_out) = self.left_out {
            let node = tracked_node(&tensor);
            assert!(
                node.is_none_or(|node| node.value <= left_out.value),
                "checkpoint: computed again, {name} goes on after its last operation"
            );
            compares &= node.is_some_and(|node| node.value < left_out.value);
        }
        let values = compares.then(|| sample(&tensor));
        before.check(Sample::of(&tensor, values), output, name);
        let number = self.number;
        self.number += 1;
        if self.of_outputs.has(number) {
            assert!(
                tensor.is_tracked(),
                "checkpoint: computed again, output {output} of {name} is not tracked"
            );
            self.root = link(tensor.clone())(self.root.clone(), self.of_outputs.clone(), number);
        }
        tensor
    }
    fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        let (output, before) = self.next();
        before.check(Sample::of(&tensor, None), output, self.name);
        tensor
    }
    fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
        let (output, before) = self.next();
        before.check(Sample::of(&tensor, None), output, self.name);
        tensor
    }
}

/// Collects the gradients of parameters.
pub(super) struct Collect<'a> {
    pub(super) found: Gradients,
    pub(super) seen: Seen,
    pub(super) parameters: &'a Parameters,
    /// Where they go.
    pub(super) gradients: &'a Slots,
    /// Whether they are parts of sums, which are computed in f32 at least.
    pub(super) is_part: bool,
}

impl ModuleVisitor for Collect<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(&slot) = self.parameters.get(&self.seen.see(param.id)) else { return };
        if let Some(gradient) = param.base().grad_remove(&mut self.found) {
            let gradient = if self.is_part { widened(gradient) } else { gradient };
            put(gradient, self.gradients, slot);
        }
    }
}
