//! What each operation of a forward pass keeps, and why.
use super::bytes::{bytes_or_unknown, csv_of, json_of};
use super::table::{number, table};
use burn::backend::autodiff::NodeId;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use burn_memsave_layers::{
    follow_path,
    ledger::{Entry, record},
    node::node_id,
    visit::VisitPath,
};
use comfy_table::Cell;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fmt;

/// One tensor that an operation keeps for the backward pass, or an operation of Burn that ran in place of one of this library.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{functional, measure::ledger};
///
/// let device = Device::flex().autodiff();
/// let model = burn::nn::LinearConfig::new(8, 4).init(&device);
/// let x = Tensor::<2>::ones([2, 8], &device).require_grad();
/// let (_y, ledger) = ledger(&model, x, |model, x| functional::linear(x, model.weight.val(), None));
/// let [x, weight] = &ledger.rows[..] else { panic!("two tensors") };
/// assert_eq!((x.tensor, x.bytes, x.counts()), ("x", Some(64), true));
/// assert_eq!((weight.tensor, weight.parameter, weight.counts()), ("weight", true, false));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LedgerRow {
    /// Path of the module whose weight the operation uses, such as `encoder.layers.0.linear`. For an operation without a weight (an
    /// activation, attention): the path of the module around it, which is the innermost one with the weights used before and after. If that
    /// is the model itself, or if no weight was used before or after: the name of the operation.
    pub module: String,
    /// The operation.
    pub operation: &'static str,
    /// What is kept (`x`, `weight`, `mask`, ...), or what replaces the operation: `Burn's operation`, or other operations of this library,
    /// which have rows of their own.
    pub tensor: &'static str,
    /// Its bytes. `None` if the arguments did not fit the operation, since it is unknown what Burn's operation keeps.
    pub bytes: Option<u64>,
    /// Why it is kept, or what did not fit.
    pub reason: &'static str,
    /// Whether an earlier row keeps the same tensor, so that this row takes no memory.
    pub shared: bool,
    /// Whether it is a parameter of the model, which is alive anyway, so that this row takes no memory.
    pub parameter: bool,
}

impl LedgerRow {
    /// Whether this row takes a known amount of memory: it is neither shared nor a parameter nor an operation of Burn.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{functional, measure::ledger};
    ///
    /// let x = Tensor::<1>::ones([640], &Device::flex().autodiff()).require_grad();
    /// let (_y, ledger) = ledger(&burn::nn::Relu::new(), x, |_, x| functional::relu(x));
    /// assert!(ledger.rows[0].counts());
    /// ```
    pub fn counts(&self) -> bool {
        self.bytes.is_some() && !self.shared && !self.parameter
    }
}

/// What the operations of a forward pass keep for the backward pass. Made by [`ledger`].
///
/// Displayed as a table, largest first. Rows that take no memory come last.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{functional, measure::ledger};
///
/// let x = Tensor::<1>::ones([64_000], &Device::flex().autodiff()).require_grad();
/// let (_y, ledger) = ledger(&burn::nn::Relu::new(), x, |_, x| functional::relu(x));
/// assert!(ledger.to_string().contains("7.81 KiB"));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ledger {
    /// One row for every tensor that an operation keeps, in the order of the forward pass.
    pub rows: Vec<LedgerRow>,
}

impl Ledger {
    /// Bytes kept for the backward pass. Each tensor counts once, and parameters do not count. What operations of Burn keep counts only
    /// after [`with_unlisted`](Self::with_unlisted).
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{functional, measure::ledger};
    ///
    /// let x = Tensor::<1>::ones([640], &Device::flex().autodiff()).require_grad();
    /// let (_y, ledger) = ledger(&burn::nn::Relu::new(), x, |_, x| functional::relu(functional::relu(x)));
    /// assert_eq!(ledger.total(), 2 * 640 / 8);
    /// ```
    pub fn total(&self) -> u64 {
        self.rows.iter().filter(|row| row.counts()).filter_map(|row| row.bytes).sum()
    }

    /// The numbers of the rows for which `is_so` holds.
    pub(crate) fn numbers_of<'a>(&'a self, mut is_so: impl FnMut(&'a LedgerRow) -> bool) -> Vec<usize> {
        self.rows.iter().enumerate().filter(|(_, row)| is_so(row)).map(|(number, _)| number).collect()
    }

    /// The rows of operations that Burn ran because the arguments did not fit those of this library.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{functional, measure::ledger};
    ///
    /// let device = Device::flex().autodiff();
    /// let norm = burn::nn::BatchNormConfig::new(8).init(&device);
    /// let x = Tensor::<2>::ones([2, 8], &device).require_grad();
    /// let (_y, ledger) = ledger(&norm, x, |norm, x| {
    ///     let mean = x.clone().mean_dim(0).squeeze_dim(0); // has a gradient
    ///     functional::batch_norm(x, norm.gamma.val(), norm.beta.val(), mean, Tensor::ones([8], &device), 1e-5)
    /// });
    /// assert_eq!(ledger.fallbacks().next().unwrap().reason, "the statistics are tracked");
    /// ```
    pub fn fallbacks(&self) -> impl Iterator<Item = &LedgerRow> {
        self.rows.iter().filter(|row| row.bytes.is_none())
    }

    /// Adds a row for what is kept and not listed: tensors of operations of Burn, and the graph's own records, a few hundred bytes per
    /// operation. `kept` is what was [measured](super::Measurement::kept) for the same step. The new [`total`](Self::total) is `kept`, or
    /// what is listed, if that is more: a tensor that lived before the step, such as one that `forward` captured, is listed but not
    /// measured.
    ///
    /// The row has no module, since Burn's graph does not show what its operations keep. [`explain`](super::explain()) names the modules
    /// that they belong to.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, activation};
    /// use burn_memsave::{functional, measure::{TrackingAllocator, ledger, measure_step}};
    ///
    /// #[global_allocator]
    /// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
    ///
    /// let x = Tensor::<1>::ones([64_000], &Device::flex().autodiff()).require_grad();
    /// let model = burn::nn::Relu::new();
    /// let loss = |_: &_, x| activation::gelu(functional::relu(x)).sum(); // that of Burn keeps its input
    /// let kept = measure_step(&model, x.clone(), loss).kept.unwrap();
    /// let (_, ledger) = ledger(&model, x, loss);
    /// let ledger = ledger.with_unlisted(kept);
    /// let row = ledger.rows.last().unwrap();
    /// assert_eq!((row.operation, row.bytes), ("operations of Burn", Some(kept - 64_000 / 8)));
    /// assert!(row.bytes >= Some(4 * 64_000));
    /// assert_eq!(ledger.total(), kept);
    /// ```
    #[must_use]
    pub fn with_unlisted(mut self, kept: u64) -> Self {
        self.rows.push(LedgerRow {
            module: String::new(),
            operation: "operations of Burn",
            tensor: "what is not listed",
            bytes: Some(kept.saturating_sub(self.total())),
            reason: "measured, less what is listed",
            shared: false,
            parameter: false,
        });
        self
    }

    /// The rows as CSV with a header, in the order of the forward pass.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{functional, measure::ledger};
    ///
    /// let x = Tensor::<1>::ones([640], &Device::flex().autodiff()).require_grad();
    /// let (_y, ledger) = ledger(&burn::nn::Relu::new(), x, |_, x| functional::relu(x));
    /// let csv = ledger.to_csv();
    /// assert_eq!(csv.lines().next(), Some("module,operation,tensor,bytes,reason,shared,parameter"));
    /// assert_eq!(csv.lines().nth(1), Some("relu,relu,mask,80,x is tracked,false,false"));
    /// ```
    pub fn to_csv(&self) -> String {
        csv_of(&self.rows)
    }

    /// The rows as JSON: `{"rows": [{"module": ..., "bytes": ..., ...}, ...]}`.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{functional, measure::ledger};
    ///
    /// let x = Tensor::<1>::ones([640], &Device::flex().autodiff()).require_grad();
    /// let (_y, ledger) = ledger(&burn::nn::Relu::new(), x, |_, x| functional::relu(x));
    /// assert!(ledger.to_json().contains(r#""bytes": 80"#));
    /// ```
    pub fn to_json(&self) -> String {
        json_of(self)
    }
}

impl fmt::Display for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rows: Vec<_> = self.rows.iter().collect();
        rows.sort_by_key(|row| Reverse((row.counts(), row.bytes)));
        let mut table = table(["module", "operation", "keeps", "bytes", "because", ""]);
        let bytes = |bytes: Option<u64>| number(bytes_or_unknown(bytes));
        for row in rows {
            let note = note(row.bytes, row.parameter, row.shared);
            let [module, operation, tensor, reason, note] =
                [&row.module, row.operation, row.tensor, row.reason, note].map(Cell::new);
            table.add_row([module, operation, tensor, bytes(row.bytes), reason, note]);
        }
        let [total, empty] = ["total", ""].map(Cell::new);
        let total_bytes = bytes(Some(self.total()));
        table.add_row([total, empty.clone(), empty.clone(), total_bytes, empty.clone(), empty]);
        write!(f, "{table}")
    }
}

/// Why a row takes no memory.
pub(crate) fn note(bytes: Option<u64>, parameter: bool, shared: bool) -> &'static str {
    match (bytes, parameter, shared) {
        (None, _, _) => "not counted",
        (_, true, _) => "parameter",
        (_, _, true) => "shared",
        _ => "",
    }
}

/// Runs `forward(model, input)`, and lists what the operations of this library that it calls keep for the backward pass.
///
/// If arguments do not fit an operation of this library (a parameter of another dtype, a quantized input, ...), Burn's own operation runs,
/// and has a [row](Ledger::fallbacks) that says why. Other operations of Burn are not listed: [`Ledger::with_unlisted`] adds what they
/// keep, as measured.
///
/// An operation belongs to the module of `model` that has its weight, and without a weight to the [module around](LedgerRow::module) it.
/// This assumes that a module is not called again before others have run. `forward` runs on this thread, and may return anything.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{functional, measure::ledger};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device), LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let (_y, ledger) = ledger(&model, x, |model, x| {
///     let y = functional::linear(x.clone(), model[0].weight.val(), None);
///     y + functional::linear(x, model[1].weight.val(), None)
/// });
/// let [first, second] = &ledger.rows[..] else { panic!("two tensors") };
/// assert_eq!((first.module.as_str(), first.shared), ("0", false));
/// assert_eq!((second.module.as_str(), second.shared), ("1", true)); // the same x
/// assert_eq!(ledger.total(), 2 * 8 * 4);
/// ```
pub fn ledger<M: Module, I, R>(model: &M, input: I, forward: impl FnOnce(&M, I) -> R) -> (R, Ledger) {
    let (result, entries) = record(|| forward(model, input));
    // After the forward pass, which initializes lazy parameters.
    let modules = modules_of(model);
    let mut seen = HashSet::new();
    let paths = paths(entries.iter().map(|entry| entry.weight), &modules);
    let rows = entries.into_iter().zip(paths).map(|(entry, path)| {
        let shared = entry.node.is_some_and(|node| !seen.insert(node));
        row(entry, path, shared, &modules)
    });
    let rows = rows.collect();
    (result, Ledger { rows })
}

/// The module of every operation by the node of its weight. Where it is unknown, the path is empty.
pub(super) fn paths(
    weights: impl Iterator<Item = Option<NodeId>>,
    modules: &HashMap<NodeId, Path>,
) -> Vec<Path> {
    let known: Vec<Option<&Path>> = weights.map(|weight| modules.get(&weight?)).collect();
    let mut before = None;
    let mut paths = Vec::with_capacity(known.len());
    for (index, of_weight) in known.iter().enumerate() {
        if let Some(path) = *of_weight {
            before = Some(path);
            paths.push(path.clone());
            continue;
        }
        let after = known[index..].iter().find_map(|path| *path);
        paths.push(before.zip(after).map_or_else(Path::new, |(before, after)| around(before, after)));
    }
    paths
}

/// The name of a module in a table; if the module is unknown, that of the operation.
pub(crate) fn shown(path: &Path, operation: &str) -> String {
    if path.is_empty() { operation.into() } else { path.join(".") }
}

/// The innermost module that contains two modules and is neither of them: a module with weights, such as a dense layer, calls no other
/// operation between them.
fn around(a: &Path, b: &Path) -> Path {
    let parent = |path: &Path| path.len().saturating_sub(1);
    let [a, b] = [&a[..parent(a)], &b[..parent(b)]];
    a.iter().zip(b).take_while(|(a, b)| a == b).map(|(name, _)| name.clone()).collect()
}

fn row(entry: Entry, path: Path, shared: bool, modules: &HashMap<NodeId, Path>) -> LedgerRow {
    let Entry { operation, tensor, bytes, reason, node, weight: _ } = entry;
    LedgerRow {
        module: shown(&path, operation),
        operation,
        tensor,
        bytes: bytes.map(|bytes| bytes as u64),
        reason,
        shared,
        parameter: node.is_some_and(|node| modules.contains_key(&node)),
    }
}

/// Bytes that are kept by the nodes of tensors, and bytes of everything else. Parameters do not count. A tensor that several operations
/// keep counts once: where one of them has it recomputed, another may keep it.
pub(crate) fn bytes_once<'a>(
    entries: impl Iterator<Item = &'a Entry>,
    is_parameter: impl Fn(&NodeId) -> bool,
) -> (HashMap<NodeId, u64>, u64) {
    let (mut tensors, mut others) = (HashMap::<NodeId, u64>::new(), 0);
    for entry in entries {
        let bytes = entry.bytes.unwrap_or(0) as u64;
        match entry.node {
            None => others += bytes,
            Some(node) if is_parameter(&node) => {}
            Some(node) => {
                let most = tensors.entry(node).or_default();
                *most = bytes.max(*most);
            }
        }
    }
    (tensors, others)
}

/// The names of nested modules, outermost first.
pub(crate) type Path = Vec<String>;

/// The module of each parameter by the parameter's node; the first one for a parameter that is tied.
pub(crate) fn modules_of<M: Module>(model: &M) -> HashMap<NodeId, Path> {
    let mut paths = ModulePaths::default();
    model.visit(&mut paths);
    paths.modules
}

/// Finds the module of every parameter.
#[derive(Default)]
struct ModulePaths {
    path: VisitPath,
    modules: HashMap<NodeId, Path>,
}

impl ModuleVisitor for ModulePaths {
    follow_path!();
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // A parameter that is still lazy took no part. (`val` instead of `base` would compute the effective weight of an adapter again.)
        if !param.is_initialized() {
            return;
        }
        if let Some(node) = node_id(param.base()) {
            self.modules.entry(node).or_insert_with(|| self.path.module().to_vec());
        }
    }
}
