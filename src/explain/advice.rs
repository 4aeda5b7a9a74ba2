//! [`advice`]: which modules of Burn could be swapped.
use super::burns_own::Surveyed;
use super::explanation::BEST;
use crate::measure::{Path, human_bytes, shown};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::collections::HashMap;

/// A note about operations of Burn that could be swapped.
pub(super) fn advice<M: Module>(model: &M, surveyed: &Surveyed, bytes: Option<u64>) -> Option<String> {
    let unswapped = surveyed.unswapped();
    let records = 2048 * surveyed.graph.parents.len() as u64; // the graph's own
    if unswapped.is_empty() && bytes.is_none_or(|bytes| bytes < records) {
        return None;
    }
    let bytes = bytes.map_or_else(|| "what is not counted".into(), human_bytes);
    let mut note = format!("Burn's own operations, {} in the graph, keep {bytes}", surveyed.count());
    let names: Vec<String> =
        surveyed.names().into_iter().map(|(name, count)| format!("{name} ({count})")).collect();
    if !names.is_empty() {
        note += &format!(", {} among them", names.join(", "));
    }
    note += ". To swap them for those of this library gives at most that: call `burn_memsave::tensor::{activation, module}`";
    if !unswapped.is_empty() {
        let types = ModuleTypes::of(model).types;
        let named = unswapped.iter().take(BEST).map(|path| {
            let of = types.get(*path).map_or("", |of| of);
            shown(path, of) + &if path.is_empty() { String::new() } else { format!(" ({of})") }
        });
        let named: Vec<String> = named.collect();
        let more = unswapped.len() - named.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        note += &format!(
            ", and take from `burn_memsave::nn`, or convert by `from_nn_*`, the modules whose parameters they use: {}{more}",
            named.join(", ")
        );
    }
    Some(note + ".")
}

/// The types of modules with parameters, by their paths, as Burn names them to visitors.
#[derive(Default)]
struct ModuleTypes {
    path: VisitPath,
    types: HashMap<Path, String>,
}

impl ModuleTypes {
    fn of<M: Module>(model: &M) -> Self {
        let mut types = Self::default();
        model.visit(&mut types);
        types
    }
}

impl ModuleVisitor for ModuleTypes {
    follow_path!();
    fn visit_float<const D: usize>(&mut self, _: &Param<Tensor<D>>) {
        if let Some(container) = self.path.containers().last() {
            self.types.insert(self.path.module().to_vec(), container.trim_start_matches("Struct:").into());
        }
    }
}
