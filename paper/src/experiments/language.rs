//! Fine-tuning a language model with LoRA: memory and time by rank, length, heads and vocabulary, and what fits into a budget.
use super::models::{tokens_of, with_next};
use super::step::{Step, Taken, in_turns, step};
use super::{Failure, Measured, Output, Part, Settings, Table, in_mib, mib, ratio};
use crate::figures::{Axis, Figure, Marker, Panel, Series, Style, Whose};
use burn::module::{Lora, Module, ParamGroup};
use burn::tensor::Device;
use burn_memsave::plan::largest_batch;
use burn_memsave_paper::text::llama::{LanguageModel, Size, checkpointed, memsave, swapped, written_out};
use serde::{Deserialize, Serialize};

pub struct Language;

/// One way to build the model, at one size.
#[derive(Serialize, Deserialize)]
pub struct Row {
    /// What is varied, such as the rank.
    question: String,
    /// Its value; for a limit, the largest value that fits.
    value: usize,
    variant: String,
    kept_bytes: Option<u64>,
    peak_bytes: Option<u64>,
    seconds: Option<f64>,
}

/// The settings of the fine-tuning.
#[derive(Clone, Copy)]
pub struct Tuning {
    pub size: Size,
    pub batch: usize,
    pub rank: usize,
}

impl Tuning {
    pub fn of(settings: &Settings) -> Self {
        let size = Size {
            vocabulary: settings.pick(500, 8000, 32_000),
            width: settings.pick(64, 512, 1024),
            heads: settings.pick(2, 8, 16),
            hidden: settings.pick(176, 1408, 2816),
            blocks: settings.pick(2, 4, 8),
            length: settings.pick(64, 256, 512),
        };
        Self { size, batch: settings.pick(2, 4, 4), rank: 16 }
    }

    pub fn step<M: LanguageModel + 'static>(&self, device: &Device) -> Box<dyn Step> {
        let Self { size, batch, rank } = *self;
        let model = with_lora(M::new(&size, device), rank);
        let tokens = with_next(tokens_of([batch, size.length], size.vocabulary, device), size.vocabulary);
        step(model, tokens, |model, (tokens, next)| model.loss(tokens, next))
    }
}

/// All projections of the blocks.
pub fn projections() -> ParamGroup {
    ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a valid pattern")
}

/// Adapters on these projections, the only parameters that are trained.
pub fn lora(rank: usize) -> Lora {
    Lora::new(rank, 2.0 * rank as f64).set_param_group(projections())
}

/// The model with these adapters.
pub fn with_lora<M: Module>(model: M, rank: usize) -> M {
    model.apply_lora(lora(rank))
}

type Make = fn(&Tuning, &Device) -> Box<dyn Step>;

/// The name of a variant, the function that makes its step, and its style in figures.
type Variant = (&'static str, Make, Style);

/// The ways to build the model.
const VARIANTS: [Variant; 5] = [
    (
        "Burn",
        |tuning, device| tuning.step::<written_out::Llama>(device),
        Style { whose: Whose::Burn, marker: Marker::Circle },
    ),
    (
        "Burn, its gradient checkpointing",
        |tuning, device| tuning.step::<written_out::Llama>(&device.clone().gradient_checkpointing()),
        Style { whose: Whose::Burn, marker: Marker::Square },
    ),
    (
        "ours, the swap alone",
        |tuning, device| tuning.step::<swapped::Llama>(device),
        Style { whose: Whose::Ours, marker: Marker::Circle },
    ),
    (
        "+ SwiGlu, FusedLinearCrossEntropy",
        |tuning, device| tuning.step::<memsave::Llama>(device),
        Style { whose: Whose::Ours, marker: Marker::Square },
    ),
    (
        "+ every block checkpointed",
        |tuning, device| tuning.step::<checkpointed::Llama>(device),
        Style { whose: Whose::Ours, marker: Marker::Triangle },
    ),
];

const LENGTH: &str = "length (tokens), batch 1";
const RANK: &str = "rank of the adapters";
const HEADS: &str = "heads";
const VOCABULARY: &str = "vocabulary (tokens)";

/// The longest sequence of Burn's variants. They keep queries times keys, here gigabytes: twice the length needs almost four times as much.
const LONGEST_OF_BURN: usize = 2048;

/// All variants at one size; for longer sequences all but Burn's, timed once.
fn compare(question: &str, value: usize, tuning: &Tuning, settings: &Settings) -> Result<Vec<Row>, Failure> {
    if tuning.size.length <= LONGEST_OF_BURN {
        return of(VARIANTS, settings.turns(), (question, value), tuning, settings);
    }
    let [_, _, ours @ ..] = VARIANTS;
    of(ours, 1, (question, value), tuning, settings)
}

fn of<const N: usize>(
    variants: [Variant; N],
    turns: usize,
    (question, value): (&str, usize),
    tuning: &Tuning,
    settings: &Settings,
) -> Result<Vec<Row>, Failure> {
    let device = settings.autodiff();
    let taken = in_turns(turns, variants.map(|(_, make, _)| make(tuning, &device)))?;
    let row = |((variant, _, _), taken): (Variant, Taken)| Row {
        question: question.into(),
        value,
        variant: variant.into(),
        kept_bytes: Some(taken.kept),
        peak_bytes: Some(taken.peak),
        seconds: Some(taken.seconds),
    };
    Ok(variants.into_iter().zip(taken).map(row).collect())
}

/// The longest sequence is searched in multiples of this many tokens.
const TILE: usize = 64;

/// The most that fits into a budget: sequences of a batch, or tokens of one sequence.
fn limit(budget: u64, is_length: bool, variant: usize, settings: &Settings) -> Result<Vec<Row>, Failure> {
    let device = settings.autodiff();
    let (name, make, _) = VARIANTS[variant];
    let peak = |items: usize| {
        let mut tuning = Tuning::of(settings);
        match is_length {
            true => (tuning.batch, tuning.size.length) = (1, TILE * items),
            false => tuning.batch = items,
        }
        // If bytes are not counted, nothing fits.
        make(&tuning, &device).memory().peak.unwrap_or(u64::MAX)
    };
    let found = largest_batch(budget, settings.pick(8, 256, 1024), peak).unwrap_or(0);
    let what = if is_length { "longest sequence (tokens)" } else { "largest batch (sequences)" };
    Ok(vec![Row {
        question: format!("{what} in {} MiB", budget >> 20),
        value: if is_length { TILE * found } else { found },
        variant: name.into(),
        kept_bytes: None,
        peak_bytes: None,
        seconds: None,
    }])
}

impl Measured for Language {
    type Row = Row;
    const NAME: &'static str = "language";
    const ABOUT: &'static str =
        "LoRA on a language model: rank, length, heads, vocabulary, and what fits into a budget";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        let mut parts = vec![];
        let mut add = |question: &'static str, values: Vec<usize>, set: fn(&mut Tuning, usize)| {
            for value in values {
                let settings = settings.clone();
                parts.push(Part::new(format!("{question}, {value}"), move || {
                    let mut tuning = Tuning::of(&settings);
                    set(&mut tuning, value);
                    compare(question, value, &tuning, &settings)
                }));
            }
        };
        add(RANK, settings.pick(vec![4, 16], vec![4, 16, 64], vec![4, 8, 16, 32, 64]), |tuning, rank| {
            tuning.rank = rank;
        });
        let usual = vec![512, 1024, 2048, 4096, 8192];
        add(LENGTH, settings.pick(vec![64, 128], usual.clone(), usual), |tuning, length| {
            (tuning.batch, tuning.size.length) = (1, length)
        });
        add(HEADS, settings.pick(vec![1, 2], vec![4, 8, 16], vec![8, 16, 32]), |tuning, heads| {
            tuning.size.heads = heads;
        });
        let vocabularies = settings.pick(vec![500, 1000], vec![4000, 16_000], vec![8000, 32_000, 128_000]);
        add(VOCABULARY, vocabularies, |tuning, vocabulary| tuning.size.vocabulary = vocabulary);
        let budget = settings.pick(2, 256, 2048) << 20;
        for is_length in [false, true] {
            for (variant, (name, _, _)) in VARIANTS.iter().enumerate() {
                let settings = settings.clone();
                let what = if is_length { "longest sequence" } else { "largest batch" };
                let run = move || limit(budget, is_length, variant, &settings);
                parts.push(Part::new(format!("{what}, {name}"), run));
            }
        }
        parts
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        vec![table(rows), limits(rows), Output::Figure(figure(rows))]
    }
}

fn table(rows: &[Row]) -> Output {
    let header =
        ["against", "", "variant", "kept (MiB)", "of Burn", "peak (MiB)", "of Burn", "step (s)", "of Burn"];
    let mut table = Table::new(&header, 3);
    let mut sizes: Vec<(&str, usize)> = vec![];
    for row in rows.iter().filter(|row| row.kept_bytes.is_some()) {
        if !sizes.contains(&(&row.question, row.value)) {
            sizes.push((&row.question, row.value));
        }
    }
    let none = || String::from("-");
    for (question, value) in sizes {
        let find = |variant: &str| {
            rows.iter().find(|row| {
                (row.question.as_str(), row.value, row.variant.as_str()) == (question, value, variant)
            })
        };
        let burn = find(VARIANTS[0].0);
        for (variant, _, _) in VARIANTS {
            let row = find(variant);
            let cells = |number: fn(&Row) -> Option<f64>, shown: fn(f64) -> String| {
                let (of, burn) = (row.and_then(number), burn.and_then(number));
                let of_burn = of.zip(burn).map_or_else(none, |(of, burn)| ratio(of, burn));
                [of.map_or_else(none, shown), of_burn]
            };
            let names = [question.to_string(), value.to_string(), variant.to_string()];
            let kept = cells(|row| Some(row.kept_bytes? as f64), |bytes| mib(bytes as u64));
            let peak = cells(|row| Some(row.peak_bytes? as f64), |bytes| mib(bytes as u64));
            let seconds = cells(|row| row.seconds, |seconds| format!("{seconds:.3}"));
            table.add(names.into_iter().chain(kept).chain(peak).chain(seconds));
        }
    }
    table.output("language-table")
}

fn limits(rows: &[Row]) -> Output {
    let mut table = Table::new(&["limit", "variant", "found"], 2);
    for row in rows.iter().filter(|row| row.kept_bytes.is_none()) {
        table.add([row.question.clone(), row.variant.clone(), row.value.to_string()]);
    }
    table.output("language-limits")
}

fn figure(rows: &[Row]) -> Figure {
    let panel = |title: &str, label: &str, value: fn(&Row) -> Option<f64>| {
        let of = |(name, _, style): &Variant| Series {
            name: (*name).into(),
            style: *style,
            points: rows
                .iter()
                .filter(|row| row.question == LENGTH && row.variant == *name)
                .filter_map(|row| Some((row.value as f64, value(row)?)))
                .collect(),
        };
        Panel {
            title: title.into(),
            x: Axis::log(LENGTH, 2),
            y: Axis::log(label, 10),
            series: VARIANTS.iter().map(of).collect(),
            bars: vec![],
        }
    };
    Figure {
        name: "language".into(),
        title: "Fine-tuning a language model with LoRA, by the length of the sequence".into(),
        columns: 3,
        panels: vec![
            panel("kept", "kept (MiB)", |row| row.kept_bytes.map(in_mib)),
            panel("peak", "peak (MiB)", |row| row.peak_bytes.map(in_mib)),
            panel("time", "step (s)", |row| row.seconds),
        ],
    }
}
