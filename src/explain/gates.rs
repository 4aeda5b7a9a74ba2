//! Which dense layers to replace by a `SwiGlu`: two with one input, whose outputs are multiplied after a SiLU of one.
use super::explanation::{Remedy, Suggestion};
use crate::measure::{Ledger, LedgerRow, Path, shown};
use burn::backend::autodiff::NodeId;
use burn_memsave_layers::graph::watch::LiveStep;
use std::collections::HashMap;

/// What a `SwiGlu` gives for two dense layers and the gate between them.
pub(super) fn suggestions(
    steps: &[LiveStep],
    modules: &HashMap<NodeId, Path>,
    ledger: &Ledger,
) -> Vec<Suggestion> {
    let made = |node: NodeId| steps.iter().find(|step| step.output == Some(node));
    // A dense layer, with adapters or without: its path, and what the other layer must have in common with it.
    let dense = |step: &LiveStep| {
        let is_dense = ["linear", "lora"].contains(&step.operation);
        let input = |name: &str| step.inputs.iter().find(|input| input.name == name).filter(|_| is_dense);
        let common = (input("x")?.node, input("weight")?.shape.clone(), input("bias").is_some());
        Some((modules.get(&step.weight?)?.clone(), common))
    };
    let mut suggestions: Vec<(NodeId, Suggestion)> = vec![];
    for step in steps {
        for product in &step.inputs {
            let kept = step.entries.iter().find(|entry| entry.node == Some(product.node));
            let kept = kept.and_then(|entry| entry.bytes).filter(|&bytes| bytes > 0);
            let (Some(kept), &[a, b]) = (kept, &product.parents[..]) else { continue };
            // Several steps may keep one tensor.
            if made(product.node).is_some() || suggestions.iter().any(|(node, _)| *node == product.node) {
                continue;
            }
            let found = [(a, b), (b, a)].into_iter().find_map(|(gate, value)| {
                let silu = made(gate).filter(|step| step.operation == "silu")?;
                let (of_gate, x) = dense(made(silu.inputs.first()?.node)?)?;
                let (of_value, same) = dense(made(value)?)?;
                (x == same).then(|| [of_gate, of_value].map(|path| shown(&path, "linear")).join(" and "))
            });
            let Some(module) = found else { continue };
            let path = step.weight.and_then(|weight| modules.get(&weight)).cloned().unwrap_or_default();
            let bytes = kept as u64;
            let of_step = |row: &LedgerRow| {
                row.bytes == Some(bytes)
                    && row.operation == step.operation
                    && row.module == shown(&path, step.operation)
            };
            let suggestion = Suggestion {
                remedy: Remedy::SwiGlu,
                module,
                bytes,
                measured: None,
                extra_time: None,
                rows: ledger.numbers_of(of_step),
            };
            suggestions.push((product.node, suggestion));
        }
    }
    suggestions.into_iter().map(|(_, suggestion)| suggestion).collect()
}
