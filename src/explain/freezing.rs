//! Which modules to freeze.
use super::explanation::{BEST, Remedy, Suggestion};
use super::step::Step;
use crate::measure::{Ledger, LedgerRow, StepInput};
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::cmp::Reverse;
use std::collections::HashMap;

/// Up to so many bytes, a difference may come from the graph's own records.
const RECORDS: i64 = 4096;

/// What freezing modules gives. `ledger` and `kept` are those of the step as it is.
pub(super) fn suggestions<M: Module, I: StepInput, F: Fn(&M, I) -> Tensor<1>>(
    step: &Step<'_, I, F>,
    model: &M,
    ledger: &Ledger,
    kept: Option<u64>,
) -> Vec<Suggestion> {
    let mut trained = Trained::default();
    model.visit(&mut trained);
    // A module comes after those inside it.
    trained.modules.sort_by_key(|path| Reverse(path.len()));
    let mut suggestions = vec![];
    // What freezing the modules inside a module one by one gives at most: by the ledgers, and as measured.
    let mut inside: HashMap<Vec<String>, [i64; 2]> = HashMap::new();
    for path in trained.modules {
        let frozen = model.clone().map(&mut Freeze { path: VisitPath::default(), module: &path });
        let without = step.ledger(&frozen);
        let promised = ledger.total() as i64 - without.total() as i64;
        let measured = kept.zip(step.kept(&frozen)).map(|(kept, without)| kept as i64 - without);
        let gains = [promised, measured.unwrap_or(promised)];
        let of_parts = inside.remove(&path).unwrap_or_default();
        if let Some((_, around)) = path.split_last() {
            let all = inside.entry(around.to_vec()).or_default();
            (0..2).for_each(|by| all[by] += gains[by].max(of_parts[by]));
        }
        // Either the ledgers promise a gain and the measurement confirms it, or operations of Burn keep less.
        let [promised, gained] = [0, 1].map(|by| gains[by] - of_parts[by]);
        let least = if promised > 0 { (promised + 1) / 2 } else { RECORDS };
        if gained >= least {
            suggestions.push(Suggestion {
                remedy: Remedy::Freeze,
                module: path.join("."),
                bytes: gains[1] as u64,
                measured,
                extra_time: None,
                rows: removed(ledger, &without),
            });
        }
    }
    best_first(suggestions)
}

/// The [best](BEST) modules to freeze, then the others, both grouped by the field of the model.
fn best_first(mut freezing: Vec<Suggestion>) -> Vec<Suggestion> {
    freezing.sort_by_key(|one| Reverse(one.bytes));
    let others = freezing.split_off(freezing.len().min(BEST));
    let grouped = |all: Vec<Suggestion>| {
        let field = |one: &Suggestion| one.module.split('.').next().unwrap_or("").to_string();
        let mut groups: Vec<(String, Vec<Suggestion>)> = vec![];
        for one in all {
            let field = field(&one);
            match groups.iter_mut().find(|(of, _)| *of == field) {
                Some((_, group)) => group.push(one),
                None => groups.push((field, vec![one])),
            }
        }
        groups.into_iter().flat_map(|(_, group)| group)
    };
    grouped(freezing).chain(grouped(others)).collect()
}

/// The rows of a ledger that another one does not have.
fn removed(ledger: &Ledger, without: &Ledger) -> Vec<usize> {
    fn key(row: &LedgerRow) -> (&str, &str, &str, Option<u64>) {
        (&row.module, row.operation, row.tensor, row.bytes)
    }
    let mut left: HashMap<_, usize> = HashMap::new();
    for row in &without.rows {
        *left.entry(key(row)).or_default() += 1;
    }
    ledger.numbers_of(|row| match left.get_mut(&key(row)) {
        Some(count) if *count > 0 => {
            *count -= 1;
            false
        }
        _ => true,
    })
}

/// Finds the modules with trained parameters, and the modules that contain them, except the model itself.
#[derive(Default)]
struct Trained {
    path: VisitPath,
    modules: Vec<Vec<String>>,
}

impl ModuleVisitor for Trained {
    follow_path!();
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_initialized() || !param.is_require_grad() {
            return;
        }
        let names = self.path.names();
        for depth in 1..names.len() {
            let module = &names[..depth];
            if !self.modules.iter().any(|known| known == module) {
                self.modules.push(module.to_vec());
            }
        }
    }
}

/// [`Module::freeze`] of one module in a model.
struct Freeze<'a> {
    path: VisitPath,
    module: &'a [String],
}

impl Freeze<'_> {
    fn is_inside(&self) -> bool {
        self.path.names().starts_with(self.module)
    }
}

impl ModuleMapper for Freeze<'_> {
    follow_path!();
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.is_inside() { param.set_require_grad(false) } else { param }
    }
    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        if self.is_inside() { flag.with_value(false) } else { flag }
    }
}
