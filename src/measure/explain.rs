//! What a step keeps, why, and what would remove it.
use super::burns_own::{FoundPattern, ModuleTypes, Surveyed};
use super::bytes::{csv_of, human_bytes, tensor_bytes};
use super::device::bytes_in_use;
use super::ledger::{Ledger, LedgerRow, ModulePaths, Path, ledger, shown};
use super::step::StepInput;
use crate::functional::{LinearCrossEntropyOptions, linear_cross_entropy};
use crate::plan::{BlockProfile, ProfileOptions, profile};
use burn::backend::autodiff::NodeId;
use burn::module::{Flag, Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{Shape, Tensor};
use burn_memsave_layers::{
    burn_internals::Graph,
    graph::watch::{InputOfStep, LiveStep, Watch},
    ledger::{Entry, record},
    node::node_id,
};
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::{Serialize, Serializer};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::time::Duration;
use std::{fmt, io};

/// What would remove bytes that are kept.
///
/// ```
/// use burn_memsave::measure::Remedy;
///
/// assert_eq!(Remedy::Freeze.to_string(), "freeze");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Remedy {
    /// [`Module::freeze`] of the module: it is not trained. A batch norm then normalizes with its running statistics.
    Freeze,
    /// The [block](crate::plan::block) is computed again in the backward pass, as [`checkpoint`](crate::checkpoint::checkpoint)
    /// does.
    Checkpoint,
    /// [`linear_cross_entropy`](crate::functional::linear_cross_entropy), or `FusedLinearCrossEntropy`, in place of the dense
    /// layer that makes logits and of their cross entropy: the logits never exist. It is found where nothing but at most one
    /// operation, such as a reshape, is between both: it is for you to see that this changes no value.
    LinearCrossEntropy,
    /// [`SwiGlu`](crate::nn::activation::SwiGlu) in place of two dense layers, the SiLU of the first one's output, and its product with
    /// that of the second: what is made of the product keeps nothing then. It is found where one operation of Burn makes one tensor
    /// of those two: it is for you to see that this is a product, and no sum. (With Burn's gradient checkpointing it gives nothing: products
    /// are computed again.)
    SwiGlu,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Freeze => "freeze",
            Self::Checkpoint => "checkpoint",
            Self::LinearCrossEntropy => "linear_cross_entropy for",
            Self::SwiGlu => "SwiGlu for",
        })
    }
}

/// A remedy for a module, and what it gives. Shown as `freeze conv1: -12.25 MiB`, or `checkpoint layer3: -88.00 MiB, +4.000 ms`.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::explain, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
/// assert_eq!(explanation.suggestions[0].to_string(), "freeze 0: -64 B");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suggestion {
    /// What to do.
    pub remedy: Remedy,
    /// Path of the module.
    pub module: String,
    /// So many bytes fewer are kept after the forward pass. For `Freeze`: [measured](Self::measured) where bytes are counted,
    /// otherwise by the ledgers of both forward passes, which know nothing of operations of Burn; gradients not counted. For
    /// `Checkpoint`: measured. For `LinearCrossEntropy`: by the ledger of one of the same shapes; the
    /// peak falls by more, as the gradient of the logits is not made either. For `SwiGlu`: those of the product.
    pub bytes: u64,
    /// For `Freeze`: what a forward pass was measured to keep less, records of the graph included, where bytes are counted.
    pub measured: Option<i64>,
    /// So much more time does a step take, measured; `None` if it takes none, and for `LinearCrossEntropy` and `SwiGlu`, which are not timed.
    #[serde(rename = "extra_seconds", serialize_with = "maybe_seconds")]
    pub extra_time: Option<Duration>,
    /// The rows of the ledger that would go, by their number.
    #[serde(skip)]
    rows: Vec<usize>,
}

fn maybe_seconds<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serializer.serialize_some(&time.as_secs_f64()),
        None => serializer.serialize_none(),
    }
}

impl Suggestion {
    /// Bytes per millisecond of extra time; infinite if it takes none.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::explain, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
    /// assert_eq!(explanation.suggestions[0].bytes_per_ms(), f64::INFINITY); // freezing takes no time
    /// ```
    pub fn bytes_per_ms(&self) -> f64 {
        let time = self.extra_time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
        self.bytes as f64 / time
    }
}

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: -{}", self.remedy, self.module, human_bytes(self.bytes))?;
        match self.extra_time {
            Some(time) => write!(f, ", +{:.3} ms", time.as_secs_f64() * 1e3),
            None => Ok(()),
        }
    }
}

/// A tensor that an operation keeps, and what would remove it.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::explain, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
/// assert_eq!(explanation.rows[0].suggestion.as_deref(), Some("freeze 0: -64 B"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedRow {
    /// As in a [ledger](LedgerRow::module).
    pub module: String,
    /// The operation.
    pub operation: &'static str,
    /// What is kept.
    pub tensor: &'static str,
    /// Its bytes, as in a [ledger](LedgerRow::bytes).
    pub bytes: Option<u64>,
    /// Why it is kept.
    pub reason: &'static str,
    /// An earlier row of the forward pass keeps the same tensor.
    pub shared: bool,
    /// It is a parameter.
    pub parameter: bool,
    /// The first of the suggestions that would remove it. That does not make it free: a tensor that other rows keep, too, stays.
    pub suggestion: Option<String>,
}

impl ExplainedRow {
    fn new(row: LedgerRow, suggestion: Option<&Suggestion>) -> Self {
        let LedgerRow { module, operation, tensor, bytes, reason, shared, parameter } = row;
        let suggestion = suggestion.map(Suggestion::to_string);
        Self { module, operation, tensor, bytes, reason, shared, parameter, suggestion }
    }
}

/// What a step keeps, why, and what would remove it. Made by [`explain`], shown as tables.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::explain, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
/// assert_eq!((explanation.total, explanation.suggestions.len()), (64, 1));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Explanation {
    /// What is kept, most first; what takes no memory last.
    pub rows: Vec<ExplainedRow>,
    /// Bytes kept: the sum of the rows, which is what was measured, where bytes are counted, or what is listed, if that is more.
    pub total: u64,
    /// What would remove bytes: first what takes no time and changes nothing, most bytes first; then what to freeze, the ten that give
    /// most before all others, both grouped by the field of the model, most bytes first; then by [bytes per
    /// millisecond](Suggestion::bytes_per_ms). Each is meant alone: two together may give more than their sum, or less.
    pub suggestions: Vec<Suggestion>,
    /// Operations of Burn that compute together what one of this library computes.
    pub patterns: Vec<FoundPattern>,
    /// What was not looked at, and why.
    pub notes: Vec<String>,
}

/// Explains what a training step keeps: the [ledger](super::ledger()) of the forward pass, with suggestions that were tried.
///
/// - `freeze`: for every module with parameters that are trained, and for modules of them if that gives more than freezing those
///   one by one, the step runs again with that module frozen, and what it keeps less, as measured, is what it gives. Freezing one of
///   several modules that read one tensor gives nothing, so freezing all of them is suggested.
/// - `checkpoint`: if the forward pass runs [blocks](crate::plan::block), and bytes are counted, they are
///   [profiled](crate::plan::profile()), and what each gives and costs is measured. Times of a few steps are rough.
///
/// - `linear_cross_entropy for`: for a dense layer whose outputs a cross entropy keeps, it runs once on zeros of the same shapes.
/// - `SwiGlu for`: for two dense layers of one input, whose outputs are multiplied (as far as the graph shows) after a SiLU of one, if
///   the result is kept.
///
/// Suggestions are for a step as it is: freezing is suggested whether or not the module should be trained. A step runs about twice
/// for every module, and some ten times for blocks; the first time it also reads the values of inputs and outputs. What a step does besides (running
/// statistics, random numbers), it does each time. On this thread, as for a ledger.
///
/// What operations of Burn keep has one [row](Ledger::with_unlisted), where bytes are counted. Burn's graph does not show the bytes or
/// shapes of each, nor, but for some of a device with gradient checkpointing, their names; it shows which parameters they use, so that
/// the notes name the modules that are still Burn's, and how they are [put together](super::Pattern). What it brings to swap them is known
/// when they are swapped: at most that row, as types of modules cannot be exchanged at run time.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::explain, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(64, 128).init(&device), LinearConfig::new(128, 4).init(&device)];
/// let x = Tensor::<2>::ones([32, 64], &device);
/// let explanation = explain(&model, x, |model, x| model[1].forward(model[0].forward(x)).mean());
/// let suggestions: Vec<_> = explanation.suggestions.iter().map(|suggestion| suggestion.to_string()).collect();
/// assert_eq!(suggestions, ["freeze 1: -16.00 KiB", "freeze 0: -8.00 KiB"]);
/// println!("{explanation}");
/// ```
pub fn explain<M: Module, I: StepInput>(
    model: &M,
    input: I,
    loss: impl Fn(&M, I) -> Tensor<1>,
) -> Explanation {
    let step = Step { input: &input, loss: &loss };
    let watch = Watch::comparing();
    let (result, ledger) = watch.during(|| ledger(model, input.copy(), &loss));
    let steps = watch.alive();
    let mut suggestions = [of_heads(model, &steps, &ledger), of_gates(model, &steps, &ledger)].concat();
    let (graph, modules) = (Graph::of(result), ModulePaths::of(model).modules);
    let ours = watch.made();
    let surveyed = Surveyed::new(&graph, &steps, &ours, &modules);
    let patterns = surveyed.patterns();
    let kept = step.kept(model).map(|kept| u64::try_from(kept).unwrap_or(0));
    let unlisted = kept.map(|kept| kept.saturating_sub(ledger.total()));
    let mut notes = vec![];
    if kept.is_none() && ledger.fallbacks().next().is_some() {
        notes.push("Operations of Burn that ran in place of those of this library are not counted.".into());
    }
    notes.extend(advice(model, &surveyed, unlisted));
    let freezing = step.freezing(model, &ledger, kept);
    match profile(model, input.copy(), &ProfileOptions::new(), &loss) {
        Ok(profile) => {
            suggestions.extend(profile.blocks.iter().filter_map(|block| checkpointing(block, &ledger)))
        }
        Err(error) => notes.push(format!("No checkpoints are suggested: {error}.")),
    }
    // Infinite rates are equal.
    suggestions
        .sort_by(|a, b| b.bytes_per_ms().total_cmp(&a.bytes_per_ms()).then_with(|| b.bytes.cmp(&a.bytes)));
    let at = suggestions.partition_point(|one| one.extra_time.is_none());
    suggestions.splice(at..at, best_first(freezing));

    let ledger = match kept {
        Some(kept) => ledger.with_unlisted(kept),
        None => ledger,
    };
    let total = ledger.total();
    let mut order: Vec<usize> = (0..ledger.rows.len()).collect();
    order.sort_by_key(|&number| Reverse((ledger.rows[number].counts(), ledger.rows[number].bytes)));
    let explained = |number: usize| {
        let suggestion = suggestions.iter().find(|suggestion| suggestion.rows.contains(&number));
        ExplainedRow::new(ledger.rows[number].clone(), suggestion)
    };
    let rows = order.into_iter().map(explained).collect();
    Explanation { rows, total, suggestions, patterns, notes }
}

/// A step that is run with one model and another.
struct Step<'a, I, F> {
    input: &'a I,
    loss: F,
}

impl<I: StepInput, F> Step<'_, I, F> {
    fn ledger<M: Module>(&self, model: &M) -> Ledger
    where
        F: Fn(&M, I) -> Tensor<1>,
    {
        let (loss, ledger) = ledger(model, self.input.copy(), &self.loss);
        end(loss);
        ledger
    }

    /// What is alive after the forward pass that was not before.
    fn kept<M: Module>(&self, model: &M) -> Option<i64>
    where
        F: Fn(&M, I) -> Tensor<1>,
    {
        let device = self.input.device();
        let settled = || {
            let _ = device.sync(); // a failure of the device shows in the next operation
            bytes_in_use(&device)
        };
        let before = settled()?;
        let loss = (self.loss)(model, self.input.copy());
        let after = settled()?;
        let of_loss = tensor_bytes(&loss);
        end(loss);
        Some(after as i64 - before as i64 - of_loss as i64)
    }

    /// What it gives to freeze modules, of a step that keeps so many bytes.
    fn freezing<M: Module>(&self, model: &M, ledger: &Ledger, kept: Option<u64>) -> Vec<Suggestion>
    where
        F: Fn(&M, I) -> Tensor<1>,
    {
        let mut trained = Trained::default();
        model.visit(&mut trained);
        // Those inside of others first.
        trained.modules.sort_by_key(|path| Reverse(path.len()));
        let mut suggestions = vec![];
        // What is gained at most by freezing modules inside of one, one by one: by the ledgers, and as measured.
        let mut inside: HashMap<Vec<String>, [i64; 2]> = HashMap::new();
        for path in trained.modules {
            let frozen = model.clone().map(&mut Freeze { here: vec![], module: &path });
            let without = self.ledger(&frozen);
            let promised = ledger.total() as i64 - without.total() as i64;
            let measured = kept.zip(self.kept(&frozen)).map(|(kept, without)| kept as i64 - without);
            let gains = [promised, measured.unwrap_or(promised)];
            let of_parts = inside.remove(&path).unwrap_or_default();
            if let Some((_, around)) = path.split_last() {
                let all = inside.entry(around.to_vec()).or_default();
                (0..2).for_each(|by| all[by] += gains[by].max(of_parts[by]));
            }
            // What the ledgers promise, and the measurement bears out; or what operations of Burn keep less.
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
        suggestions
    }
}

/// So many bytes less, or fewer, may be records of the graph.
const RECORDS: i64 = 4096;

/// So many modules to freeze come before all others.
const BEST: usize = 10;

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

/// What is to be said of operations of Burn that could be swapped.
fn advice<M: Module>(model: &M, surveyed: &Surveyed, bytes: Option<u64>) -> Option<String> {
    let unswapped = surveyed.unswapped();
    let records = 2048 * surveyed.graph.parents.len() as u64; // of the graph
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

/// Frees the graph of a loss, by its backward pass: Burn does not free it at once if the loss is dropped.
fn end(loss: Tensor<1>) {
    if loss.is_tracked() {
        drop(loss.backward());
    }
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
    let mut removed = vec![];
    for (number, row) in ledger.rows.iter().enumerate() {
        match left.get_mut(&key(row)) {
            Some(count) if *count > 0 => *count -= 1,
            _ => removed.push(number),
        }
    }
    removed
}

/// What it gives to compute a block again.
fn checkpointing(block: &BlockProfile, ledger: &Ledger) -> Option<Suggestion> {
    let kept = block.costs.first()?;
    let again = block.costs.iter().find(|cost| cost.treatment.recompute)?;
    let bytes = u64::try_from(kept.kept - again.kept).ok().filter(|bytes| *bytes > 0)?;
    let [before, after] = [kept, again].map(|cost| cost.forward_time + cost.backward_time);
    // What runs twice takes longer, also where the clock does not show it.
    let extra_time = after.saturating_sub(before).max(kept.forward_time);
    let of_block = format!("{}.", block.module);
    let is_inside = |row: &LedgerRow| row.module == block.module || row.module.starts_with(&of_block);
    let rows = (0..ledger.rows.len())
        .filter(|&number| is_inside(&ledger.rows[number]) && ledger.rows[number].counts());
    Some(Suggestion {
        remedy: Remedy::Checkpoint,
        module: block.module.clone(),
        bytes,
        measured: None,
        extra_time: Some(extra_time),
        rows: rows.collect(),
    })
}

/// What it gives to make a head and its loss one.
fn of_heads<M: Module>(model: &M, steps: &[LiveStep], ledger: &Ledger) -> Vec<Suggestion> {
    let modules = ModulePaths::of(model).modules;
    let Some(device) = model.devices().first().map(|device| device.clone().autodiff()) else { return vec![] };
    let input = |step: &LiveStep, name: &str| step.inputs.iter().find(|input| input.name == name).cloned();
    let mut suggestions = vec![];
    for (at, loss) in steps.iter().enumerate().filter(|(_, step)| step.operation == "cross_entropy") {
        let Some(logits) = input(loss, "x") else { continue };
        let made = |node: NodeId| steps.iter().position(|step| step.output == Some(node));
        // By a step of this library; or by one operation of Burn from the output of such a step.
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
        let (one, entries) = record(|| linear_cross_entropy(of_x, of_weight, of_bias, targets, options));
        end(one);
        // What the backward pass reads of x is what the head reads of it; parameters are there anyway.
        let is_kept = |entry: &Entry| entry.node.is_none() || entry.node == node;
        let in_place = entries.into_iter().filter(is_kept).map(|entry| {
            let node = entry.node.map(|_| x.node);
            Entry { node, ..entry }
        });
        let in_place: Vec<Entry> = in_place.collect();
        let rest = steps.iter().enumerate().filter(|(number, _)| ![at, head].contains(number));
        let without = total(rest.flat_map(|(_, step)| &step.entries).chain(&in_place), &modules);
        let all = total(steps.iter().flat_map(|step| &step.entries), &modules);
        let path = steps[head].weight.and_then(|weight| modules.get(&weight)).cloned().unwrap_or_default();
        if all > without {
            let is_logits = |row: &LedgerRow| {
                row.operation == "cross_entropy" && row.tensor == "x" && row.bytes == Some(bytes(&logits))
            };
            suggestions.push(Suggestion {
                remedy: Remedy::LinearCrossEntropy,
                module: shown(&path, "linear"),
                bytes: all - without,
                measured: None,
                extra_time: None,
                rows: (0..ledger.rows.len()).filter(|&number| is_logits(&ledger.rows[number])).collect(),
            });
        }
    }
    suggestions
}

/// What it gives to make two dense layers and a gate between them one.
fn of_gates<M: Module>(model: &M, steps: &[LiveStep], ledger: &Ledger) -> Vec<Suggestion> {
    let modules = ModulePaths::of(model).modules;
    let made = |node: NodeId| steps.iter().find(|step| step.output == Some(node));
    // A dense layer, with adapters or without: its path, and what its twin must have in common with it.
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
            // Several may keep one tensor.
            let path = step.weight.and_then(|weight| modules.get(&weight)).cloned().unwrap_or_default();
            let of_step = |row: &LedgerRow| {
                row.bytes == Some(kept as u64)
                    && row.operation == step.operation
                    && row.module == shown(&path, step.operation)
            };
            let rows = (0..ledger.rows.len()).filter(|&number| of_step(&ledger.rows[number])).collect();
            let bytes = kept as u64;
            let (remedy, measured, extra_time) = (Remedy::SwiGlu, None, None);
            suggestions
                .push((product.node, Suggestion { remedy, module, bytes, measured, extra_time, rows }));
        }
    }
    suggestions.into_iter().map(|(_, suggestion)| suggestion).collect()
}

fn bytes(input: &InputOfStep) -> u64 {
    (input.shape.num_elements() * input.dtype.size()) as u64
}

/// Bytes of what is kept, each tensor once, parameters not at all.
fn total<'a>(entries: impl Iterator<Item = &'a Entry>, modules: &HashMap<NodeId, Path>) -> u64 {
    let (mut tensors, mut total) = (HashMap::<NodeId, u64>::new(), 0);
    for entry in entries {
        let bytes = entry.bytes.unwrap_or(0) as u64;
        match entry.node {
            None => total += bytes,
            Some(node) if modules.contains_key(&node) => {}
            Some(node) => {
                let most = tensors.entry(node).or_default();
                *most = bytes.max(*most);
            }
        }
    }
    total + tensors.values().sum::<u64>()
}

/// Finds modules with parameters that are trained, and those around them, but for the model itself.
#[derive(Default)]
struct Trained {
    here: Vec<String>,
    modules: Vec<Vec<String>>,
}

impl ModuleVisitor for Trained {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.here.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.here.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_initialized() || !param.is_require_grad() {
            return;
        }
        for depth in 1..self.here.len() {
            let module = &self.here[..depth];
            if !self.modules.iter().any(|known| known == module) {
                self.modules.push(module.to_vec());
            }
        }
    }
}

/// [`Module::freeze`] of a module in a model.
struct Freeze<'a> {
    here: Vec<String>,
    module: &'a [String],
}

impl Freeze<'_> {
    fn is_inside(&self) -> bool {
        self.here.starts_with(self.module)
    }
}

impl ModuleMapper for Freeze<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.here.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.here.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.is_inside() { param.set_require_grad(false) } else { param }
    }
    fn map_flag(&mut self, flag: Param<Flag>) -> Param<Flag> {
        if self.is_inside() { flag.with_value(false) } else { flag }
    }
}

impl Explanation {
    /// The rows as CSV with a header.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::explain, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(explanation.to_csv()?.contains("0,linear,x,64,weight is tracked,false,false,freeze 0: -64 B"));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// None are known: the rows are plain text and numbers in memory.
    pub fn to_csv(&self) -> io::Result<String> {
        csv_of(&self.rows)
    }

    /// The suggestions as CSV with a header.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::explain, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(explanation.suggestions_to_csv()?.contains("freeze,0,64,"));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// None are known: the rows are plain text and numbers in memory.
    pub fn suggestions_to_csv(&self) -> io::Result<String> {
        csv_of(&self.suggestions)
    }

    /// Everything as JSON: `{"rows": [...], "total": ..., "suggestions": [...], "notes": [...]}`.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::explain, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(explanation.to_json()?.contains(r#""total": 64"#));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// None are known: the rows are plain text and numbers in memory.
    pub fn to_json(&self) -> io::Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        let table = |header: &[&str]| {
            let mut table = Table::new();
            table.load_preset(presets::ASCII_MARKDOWN).set_header(header);
            table
        };
        let mut kept = table(&["module", "operation", "keeps", "bytes", "because", "", "would go with"]);
        for row in &self.rows {
            let bytes = row.bytes.map_or_else(|| "unknown".into(), human_bytes);
            let note = match row {
                ExplainedRow { bytes: None, .. } => "not counted",
                ExplainedRow { parameter: true, .. } => "parameter",
                ExplainedRow { shared: true, .. } => "shared",
                _ => "",
            };
            let [module, operation, tensor] = [&row.module, row.operation, row.tensor].map(Cell::new);
            let suggestion = row.suggestion.as_deref().unwrap_or("");
            let [reason, note, suggestion] = [row.reason, note, suggestion].map(Cell::new);
            kept.add_row([module, operation, tensor, number(bytes), reason, note, suggestion]);
        }
        let mut total: Vec<Cell> = ["total", "", "", "", "", "", ""].map(Cell::new).into();
        total[3] = number(human_bytes(self.total));
        kept.add_row(total);
        writeln!(f, "{kept}")?;
        let mut remedies = table(&["what would remove bytes", "bytes", "measured", "extra time"]);
        let mut to_freeze = 0;
        for suggestion in &self.suggestions {
            to_freeze += usize::from(suggestion.remedy == Remedy::Freeze);
            if suggestion.remedy == Remedy::Freeze && to_freeze > BEST {
                continue;
            }
            let what = format!("{} {}", suggestion.remedy, suggestion.module);
            let measured = suggestion.measured.map_or_else(String::new, |bytes| {
                let sign = if bytes > 0 { "-" } else { "+" };
                format!("{sign}{}", human_bytes(bytes.unsigned_abs()))
            });
            let time = suggestion
                .extra_time
                .map_or_else(String::new, |time| format!("+{:.3} ms", time.as_secs_f64() * 1e3));
            let [bytes, measured, time] =
                [format!("-{}", human_bytes(suggestion.bytes)), measured, time].map(number);
            remedies.add_row([Cell::new(what), bytes, measured, time]);
        }
        write!(f, "{remedies}")?;
        if to_freeze > BEST {
            write!(
                f,
                "\nModules that give less when they are frozen, in `suggestions`: {}.",
                to_freeze - BEST
            )?;
        }
        for found in self.patterns.iter().take(BEST) {
            write!(f, "\nBy hand in {found}.")?;
        }
        if self.patterns.len() > BEST {
            write!(f, "\nBy hand in more places, in `patterns`: {}.", self.patterns.len() - BEST)?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}"))
    }
}
