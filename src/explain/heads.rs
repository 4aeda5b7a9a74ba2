//! Which dense layers to fuse with their loss: those whose output a cross entropy keeps.
use super::explanation::{Remedy, Suggestion};
use super::step::end;
use crate::functional::{LinearCrossEntropyOptions, linear_cross_entropy};
use crate::measure::{Ledger, LedgerRow, Path, bytes_once, shown};
use burn::backend::autodiff::NodeId;
use burn::module::Module;
use burn::tensor::{Shape, Tensor};
use burn_memsave_layers::{
    graph::watch::{InputOfStep, LiveStep},
    ledger::{Entry, record},
    node::node_id,
};
use std::collections::HashMap;

/// What fusing a head with its loss gives.
pub(super) fn suggestions<M: Module>(
    model: &M,
    steps: &[LiveStep],
    modules: &HashMap<NodeId, Path>,
    ledger: &Ledger,
) -> Vec<Suggestion> {
    let Some(device) = model.devices().first().map(|device| device.clone().autodiff()) else { return vec![] };
    let input = |step: &LiveStep, name: &str| step.inputs.iter().find(|input| input.name == name).cloned();
    let mut suggestions = vec![];
    for (at, loss) in steps.iter().enumerate().filter(|(_, step)| step.operation == "cross_entropy") {
        let Some(logits) = input(loss, "x") else { continue };
        let made = |node: NodeId| steps.iter().position(|step| step.output == Some(node));
        // The head made the logits; or one operation of Burn made them from the head's output.
        let before = |logits: &InputOfStep| match logits.parents[..] {
            [parent] => made(parent),
            _ => None,
        };
        let head = made(logits.node).or_else(|| before(&logits));
        let Some(head) = head.filter(|&head| steps[head].operation == "linear") else { continue };
        let [x, weight, bias] = ["x", "weight", "bias"].map(|name| input(&steps[head], name));
        let Some((x, weight)) = x.zip(weight) else { continue };
        let [d_input, classes] = weight.shape.dims();
        let rows = x.shape.num_elements() / d_input.max(1);
        if logits.shape != Shape::new([rows, classes]) || rows * classes == 0 || x.dtype != weight.dtype {
            continue;
        }
        let has_weights = loss.entries.iter().any(|entry| entry.tensor == "weights");
        let weights = has_weights.then(|| Tensor::<1>::ones([classes], (&device, x.dtype)));
        let zeros = |of: &InputOfStep, shape: [usize; 2]| {
            let zeros = Tensor::<2>::zeros(shape, (&device, of.dtype));
            if of.tracked { zeros.require_grad() } else { zeros }
        };
        let (of_x, of_weight) = (zeros(&x, [rows, d_input]), zeros(&weight, [d_input, classes]));
        let of_bias = bias.map(|bias| {
            let zeros = Tensor::<1>::zeros([classes], (&device, bias.dtype));
            if bias.tracked { zeros.require_grad() } else { zeros }
        });
        let targets = Tensor::zeros([rows], &device);
        let options = LinearCrossEntropyOptions { class_weights: weights, ..Default::default() };
        let node = node_id(of_x.clone());
        let (fused, entries) = record(|| linear_cross_entropy(of_x, of_weight, of_bias, targets, options));
        end(fused);
        // What the fused loss keeps of its `x` is what the head keeps of its own. Parameters are alive anyway.
        let is_kept = |entry: &Entry| entry.node.is_none() || entry.node == node;
        let in_place = entries.into_iter().filter(is_kept).map(|entry| {
            let node = entry.node.map(|_| x.node);
            Entry { node, ..entry }
        });
        let in_place: Vec<Entry> = in_place.collect();
        let rest = steps.iter().enumerate().filter(|(number, _)| ![at, head].contains(number));
        let without = total(rest.flat_map(|(_, step)| &step.entries).chain(&in_place), modules);
        let all = total(steps.iter().flat_map(|step| &step.entries), modules);
        let path = steps[head].weight.and_then(|weight| modules.get(&weight)).cloned().unwrap_or_default();
        if all > without {
            let bytes = (logits.shape.num_elements() * logits.dtype.size()) as u64;
            let is_logits = |row: &LedgerRow| {
                row.operation == "cross_entropy" && row.tensor == "x" && row.bytes == Some(bytes)
            };
            suggestions.push(Suggestion {
                remedy: Remedy::LinearCrossEntropy,
                module: shown(&path, "linear"),
                bytes: all - without,
                measured: None,
                extra_time: None,
                rows: ledger.numbers_of(is_logits),
            });
        }
    }
    suggestions
}

/// Bytes of everything that is kept: each tensor once, and no parameters.
fn total<'a>(entries: impl Iterator<Item = &'a Entry>, modules: &HashMap<NodeId, Path>) -> u64 {
    let (tensors, others) = bytes_once(entries, |node| modules.contains_key(node));
    others + tensors.values().sum::<u64>()
}
