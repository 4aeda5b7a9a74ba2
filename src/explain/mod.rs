//! [`explain`]: what a step keeps, why, and what would make it keep less.
//!
//! The step runs once while its ledger and its graph are watched. Then each remedy is tried or computed: [`freezing`] runs the step again
//! with parts of the model frozen, [`checkpoints`] reads a profile of its blocks, and [`heads`] and [`gates`] look for layers that a fused
//! one can replace. [`burns_own`] says what the graph shows of operations of Burn, and [`advice`](mod@advice) which of them to swap. The
//! types that users see are in [`explanation`]. All of it is public in [`measure`](crate::measure).
mod advice;
mod burns_own;
mod checkpoints;
mod explanation;
mod freezing;
mod gates;
mod heads;
mod step;

pub use burns_own::{FoundPattern, Pattern};
pub use explanation::{ExplainedRow, Explanation, Remedy, Suggestion};

use crate::measure::{StepInput, ledger, modules_of};
use crate::plan::{ProfileOptions, profile};
use advice::advice;
use burn::module::Module;
use burn::tensor::Tensor;
use burn_memsave_layers::{burn_internals::Graph, graph::watch::Watch};
use burns_own::Surveyed;
use std::cmp::Reverse;
use step::Step;

/// Explains what a training step keeps: the [ledger](crate::measure::ledger()) of the forward pass, with suggestions that were tried.
///
/// - `freeze`: the step runs again with a module frozen, and the suggestion says how much less it keeps, as measured. This is tried for
///   every module with trained parameters. A module that contains others is suggested only if freezing it gives more than freezing those
///   one by one. If several modules read the same tensor, freezing one of them gives nothing, so freezing all of them is suggested.
/// - `checkpoint`: if the forward pass runs [blocks](crate::plan::block) and bytes are counted, the blocks are
///   [profiled](crate::plan::profile()), and the suggestion says what recomputing each saves and costs, as measured. Times of a few steps
///   are rough.
/// - `linear_cross_entropy for`: for a dense layer whose output a cross entropy keeps, the fused loss runs once on zeros of the same
///   shapes.
/// - `SwiGlu for`: for two dense layers with one input, if the product of a SiLU of one output and the other output (as far as the graph
///   shows) is kept.
///
/// The suggestions take the step as it is: freezing is suggested whether or not the module should be trained. The step runs about twice
/// per module, and some ten times if there are blocks; the first time, the values of inputs and outputs are also read. Side effects of a
/// step (running statistics, random numbers) happen each time. Like a ledger, this sees operations on this thread only.
///
/// Where bytes are counted, everything that operations of Burn keep has one [row](crate::measure::Ledger::with_unlisted). Burn's graph does
/// not show the bytes or shapes of single operations, and shows names only of some, on a device with gradient checkpointing. It shows which
/// parameters they use, so the notes name the modules that are still Burn's, and how operations are [combined](crate::measure::Pattern).
/// Types of modules cannot be exchanged at run time, so how much a swap saves is known only once it is made: at most that row.
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
    let modules = modules_of(model);
    let mut suggestions =
        [heads::suggestions(model, &steps, &modules, &ledger), gates::suggestions(&steps, &modules, &ledger)]
            .concat();
    let (graph, ours) = (Graph::of(result), watch.made());
    let surveyed = Surveyed::new(&graph, &steps, &ours, &modules);
    let patterns = surveyed.patterns();
    let kept = step.kept(model).map(|kept| u64::try_from(kept).unwrap_or(0));
    let unlisted = kept.map(|kept| kept.saturating_sub(ledger.total()));
    let mut notes = vec![];
    if kept.is_none() && ledger.fallbacks().next().is_some() {
        notes.push("Operations of Burn that ran in place of those of this library are not counted.".into());
    }
    notes.extend(advice(model, &surveyed, unlisted));
    let freezing = freezing::suggestions(&step, model, &ledger, kept);
    match profile(model, input.copy(), &ProfileOptions::new(), &loss) {
        Ok(profile) => {
            let blocks = profile.blocks.iter();
            suggestions.extend(blocks.filter_map(|block| checkpoints::suggestion(block, &ledger)));
        }
        Err(error) => notes.push(format!("No checkpoints are suggested: {error}.")),
    }
    // Infinite rates are equal.
    suggestions
        .sort_by(|a, b| b.bytes_per_ms().total_cmp(&a.bytes_per_ms()).then_with(|| b.bytes.cmp(&a.bytes)));
    let at = suggestions.partition_point(|one| one.extra_time.is_none());
    suggestions.splice(at..at, freezing);

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
