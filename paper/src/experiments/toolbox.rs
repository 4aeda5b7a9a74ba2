//! The tools: checkpointing, policies for saved tensors, plans and optimizers, each on an encoder, a language model or a few matrices.
use super::language::{Tuning, with_lora};
use super::models::{tokens_of, with_next};
use super::step::{NOT_COUNTED, Taken, in_turns, in_use, median, step};
use super::{Failure, Measured, Output, Part, Settings, Table, in_mib, mib, ratio};
use crate::figures::{Axis, Figure, Marker, Panel, Series, Style, Whose};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, MuonConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::measure::measure_step;
use burn_memsave::nn::transformer::{
    PositionWiseFeedForward, PositionWiseFeedForwardConfig, TransformerEncoderConfig, TransformerEncoderLayer,
};
use burn_memsave::nn::{Linear, LinearConfig};
use burn_memsave::optim::{AdamW8bitConfig, Muon8bitConfig};
use burn_memsave::plan::{Plan, ProfileOptions, auto_checkpoint, block, profile};
use burn_memsave::saved::SavedPolicy;
use burn_memsave_paper::text::llama::{LanguageModel, planned};
use serde::{Deserialize, Serialize};
use std::time::Instant;

pub struct Toolbox;

/// A tool, and one way to use it.
#[derive(Serialize, Deserialize)]
pub struct Row {
    tool: String,
    way: String,
    /// The budget of a plan.
    budget_bytes: Option<u64>,
    /// The peak that a plan predicts.
    predicted_bytes: Option<u64>,
    kept_bytes: Option<u64>,
    peak_bytes: Option<u64>,
    /// What an optimizer keeps between steps, and the parameters that it updates.
    state_bytes: Option<u64>,
    parameter_bytes: Option<u64>,
    seconds: f64,
}

const CHECKPOINTS: &str = "checkpoints";
const POLICIES: &str = "saved tensors";
const HALVES: &str = "half the peak";
const PLANS: &str = "plans";
const PLANNER: &str = "the planner";
const OPTIMIZERS: &str = "optimizers";

type Layers = Vec<TransformerEncoderLayer>;

/// A way to run layers of an encoder.
type Way = fn(&Layers, Tensor<3>) -> Tensor<1>;

/// Layers of an encoder, and their input.
fn encoder(settings: &Settings, device: &Device) -> (Layers, Tensor<3>) {
    let width = settings.pick(32, 128, 256);
    let config =
        TransformerEncoderConfig::new(width, 4 * width, 4, 8).with_dropout(0.1).with_norm_first(true);
    // With this many tokens, the kept tensors are larger than the gradients of the weights.
    let shape = [settings.pick(4, 8, 16), settings.pick(64, 256, 256), width];
    (config.init(device).layers, Tensor::random(shape, Distribution::Normal(0.0, 1.0), device))
}

fn run(layers: &[TransformerEncoderLayer], x: Tensor<3>) -> Tensor<3> {
    layers.iter().fold(x, |x, layer| layer.forward(x, None, None))
}

/// Runs the layers in segments of `length` layers, which are recomputed in the backward pass.
fn in_segments(layers: &Layers, x: Tensor<3>, length: usize) -> Tensor<1> {
    let segment =
        |x, layers: &[TransformerEncoderLayer]| checkpoint(&layers.to_vec(), x, |layers, x| run(layers, x));
    layers.chunks(length).fold(x, segment).sum()
}

/// Measures the encoder as it is, and in four ways to run it.
fn ways(tool: &str, settings: &Settings, ways: [(&str, Way); 4]) -> Result<Vec<Row>, Failure> {
    let (layers, x) = encoder(settings, &settings.autodiff());
    let plain = |layers: &Layers, x| run(layers, x).sum();
    let all = |way: Way| step(layers.clone(), x.clone(), way);
    let [a, b, c, d] = ways.map(|(_, way)| all(way));
    let taken = in_turns(settings.turns(), [all(plain), a, b, c, d])?;
    let names = ["as it is"].into_iter().chain(ways.map(|(name, _)| name));
    let row = |(way, taken): (&str, Taken)| Row {
        tool: tool.into(),
        way: way.into(),
        budget_bytes: None,
        predicted_bytes: None,
        kept_bytes: Some(taken.kept),
        peak_bytes: Some(taken.peak),
        state_bytes: None,
        parameter_bytes: None,
        seconds: taken.seconds,
    };
    Ok(names.zip(taken).map(row).collect())
}

fn checkpoints(settings: &Settings) -> Result<Vec<Row>, Failure> {
    ways(
        CHECKPOINTS,
        settings,
        [
            ("segments of 8 layers", |layers, x| in_segments(layers, x, 8)),
            ("segments of 4 layers", |layers, x| in_segments(layers, x, 4)),
            ("segments of 2 layers", |layers, x| in_segments(layers, x, 2)),
            ("segments of 1 layer", |layers, x| in_segments(layers, x, 1)),
        ],
    )
}

fn policies(settings: &Settings) -> Result<Vec<Row>, Failure> {
    ways(
        POLICIES,
        settings,
        [
            ("Half", |layers, x| SavedPolicy::Half.scope(|| run(layers, x)).sum()),
            ("Int8", |layers, x| SavedPolicy::Int8.scope(|| run(layers, x)).sum()),
            ("Disk", |layers, x| {
                let policy = SavedPolicy::disk(std::env::temp_dir()).expect("a directory for files");
                policy.scope(|| run(layers, x)).sum()
            }),
            ("Half, segments of 1 layer", |layers, x| SavedPolicy::Half.scope(|| in_segments(layers, x, 1))),
        ],
    )
}

/// Plans that halve the peak of a step of a language model that is fine-tuned with LoRA. Exact plans recompute blocks; the others may
/// also keep inputs in fewer bits.
fn halves(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let mut tuning = Tuning::of(settings);
    // With few blocks, a single one may take half of the peak.
    tuning.size.blocks = 8;
    let (device, Tuning { size, batch, rank }) = (settings.autodiff(), tuning);
    let model = with_lora(planned::Llama::new(&size, &device), rank);
    let (tokens, next) =
        with_next(tokens_of([batch, size.length], size.vocabulary, &device), size.vocabulary);
    let loss = |model: &planned::Llama, (tokens, next)| model.loss(tokens, next);
    let input = || (tokens.clone(), next.clone());
    let whole = measure_step(&model, input(), loss).peak.ok_or(NOT_COUNTED)?;
    let budget = whole / 2;
    let exact = ProfileOptions::new();
    let plan = |options: ProfileOptions| auto_checkpoint(&model, input(), budget, &options, loss);
    let plans = [
        plan(exact.clone())?,
        plan(exact.clone().with_policy(SavedPolicy::Half))?,
        plan(exact.with_policy(SavedPolicy::Int8))?,
    ];
    let with = |plan: &Plan| {
        let plan = plan.clone();
        step(model.clone(), input(), move |model, input| plan.scope(|| loss(model, input)))
    };
    let [a, b, c] = &plans;
    let taken = in_turns(settings.turns(), [step(model.clone(), input(), loss), with(a), with(b), with(c)])?;
    let rows = [None].into_iter().chain(plans.iter().map(Some)).zip(taken);
    Ok(rows
        .map(|(plan, taken)| Row {
            tool: HALVES.into(),
            way: plan.map_or_else(|| "as it is".into(), treated),
            budget_bytes: plan.map(|_| budget),
            predicted_bytes: plan.map(|plan| plan.predicted),
            kept_bytes: Some(taken.kept),
            peak_bytes: Some(taken.peak),
            state_bytes: None,
            parameter_bytes: None,
            seconds: taken.seconds,
        })
        .collect())
}

/// How many blocks a plan recomputes or keeps in fewer bits.
fn treated(plan: &Plan) -> String {
    let count = plan.blocks().count();
    let recomputed = plan.blocks().filter(|(_, treatment)| treatment.recompute).count();
    let again = format!("{recomputed} of {count} blocks computed again");
    let mut rounded = plan.blocks().filter(|(_, treatment)| treatment.saved != SavedPolicy::Keep).peekable();
    match rounded.peek() {
        Some((_, treatment)) => {
            let reason = treatment.saved.reason();
            format!("{again}, {} kept {reason}", rounded.count())
        }
        None => again,
    }
}

/// Plans for budgets from the least possible to what the encoder needs without a plan.
fn plans(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let (layers, x) = encoder(settings, &settings.autodiff());
    let loss = |layers: &Layers, x: Tensor<3>| {
        let run =
            |x, layer| block(layer, x, |layer: &TransformerEncoderLayer, x| layer.forward(x, None, None));
        layers.iter().fold(x, run).sum()
    };
    let profile = profile(&layers, x.clone(), &ProfileOptions::new(), loss)?;
    let least = profile.least();
    let most = profile.most().max(least);
    let count = settings.pick(4, 20, 20);
    let mut rows = vec![];
    for number in 0..count {
        let budget = least + (most - least) * number / (count - 1);
        let mut plan = profile.plan(budget)?;
        let step = plan.measure(&layers, x.clone(), loss);
        rows.push(Row {
            tool: PLANS.into(),
            way: treated(&plan),
            budget_bytes: Some(budget),
            predicted_bytes: Some(plan.predicted),
            kept_bytes: step.kept,
            peak_bytes: step.peak,
            state_bytes: None,
            parameter_bytes: None,
            seconds: (step.forward_time + step.backward_time).as_secs_f64(),
        });
    }
    Ok(rows)
}

/// How long it takes to choose a plan for a chain of blocks.
fn planner(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let device = settings.autodiff();
    let mut rows = vec![];
    for count in settings.pick(vec![4], vec![12, 50, 100], vec![12, 50, 100, 200]) {
        let config = PositionWiseFeedForwardConfig::new(64, 256).with_dropout(0.0);
        let blocks: Vec<PositionWiseFeedForward> = (0..count).map(|_| config.init(&device)).collect();
        let x = Tensor::<3>::random([4, 64, 64], Distribution::Normal(0.0, 1.0), &device);
        let profile = profile(&blocks, x, &ProfileOptions::new(), |blocks, x| {
            let run = |x, layer| block(layer, x, |layer: &PositionWiseFeedForward, x| layer.forward(x));
            blocks.iter().fold(x, run).sum()
        })?;
        let budget = profile.least().midpoint(profile.most().max(profile.least()));
        let start = Instant::now();
        let plan = profile.plan(budget)?;
        let seconds = start.elapsed().as_secs_f64();
        rows.push(Row {
            tool: PLANNER.into(),
            way: format!("{count} blocks"),
            budget_bytes: Some(budget),
            predicted_bytes: Some(plan.predicted),
            kept_bytes: None,
            peak_bytes: None,
            state_bytes: None,
            parameter_bytes: None,
            seconds,
        });
    }
    Ok(rows)
}

/// Steps of optimizers on a few square matrices, in turns.
fn optimizers(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let (width, device) = (settings.pick(128, 1024, 2048), settings.autodiff());
    let init = || -> Vec<Linear> {
        (0..4).map(|_| LinearConfig::new(width, width).with_bias(false).init(&device)).collect()
    };
    let x = Tensor::<2>::random([8, width], Distribution::Normal(0.0, 1.0), &device);
    let made: [(&str, ModuleOptimizer); 4] = [
        ("AdamW of Burn", AdamWConfig::new().init()),
        ("AdamW8bit", AdamW8bitConfig::new().init()),
        ("Muon of Burn", MuonConfig::new().init()),
        ("Muon8bit", Muon8bitConfig::new().init()),
    ];
    let step = |layers: Vec<Linear>, optimizer: &mut ModuleOptimizer| {
        let loss = layers.iter().fold(x.clone(), |x, layer| layer.forward(x)).powf_scalar(2.0).mean();
        let gradients = GradientsParams::from_grads(loss.backward(), &layers);
        // If the device fails here, the step failed and reports it.
        let _ = device.sync();
        let start = Instant::now();
        let layers = optimizer.step(1e-3, layers, gradients);
        let _ = device.sync();
        (layers, start.elapsed().as_secs_f64())
    };
    let mut running = vec![];
    for (name, mut optimizer) in made {
        let layers = init();
        drop(layers.iter().fold(x.clone(), |x, layer| layer.forward(x)).sum().backward()); // makes the weights
        let before = in_use(&device)?;
        let (layers, _) = step(layers, &mut optimizer);
        let state = in_use(&device)?.saturating_sub(before);
        running.push((name, optimizer, Some(layers), state, vec![]));
    }
    for _ in 0..settings.turns() {
        for (_, optimizer, layers, _, times) in &mut running {
            let (stepped, time) = step(layers.take().expect("put back"), optimizer);
            *layers = Some(stepped);
            times.push(time);
        }
    }
    let mut rows = vec![];
    for (name, _, _, state, times) in running {
        rows.push(Row {
            tool: OPTIMIZERS.into(),
            way: name.into(),
            budget_bytes: None,
            predicted_bytes: None,
            kept_bytes: None,
            peak_bytes: None,
            state_bytes: Some(state),
            parameter_bytes: Some((4 * width * width * 4) as u64),
            seconds: median(times),
        });
    }
    Ok(rows)
}

impl Measured for Toolbox {
    type Row = Row;
    const NAME: &'static str = "toolbox";
    const ABOUT: &'static str =
        "checkpoints, policies of saved tensors, plans against what they predict, optimizers";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        let part = |name, run: fn(&Settings) -> Result<Vec<Row>, Failure>| {
            let settings = settings.clone();
            Part::new(name, move || run(&settings))
        };
        vec![
            part(CHECKPOINTS, checkpoints),
            part(POLICIES, policies),
            part(HALVES, halves),
            part(PLANS, plans),
            part(PLANNER, planner),
            part(OPTIMIZERS, optimizers),
        ]
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        vec![
            ways_table(rows),
            plans_table(rows),
            planner_table(rows),
            optimizers_table(rows),
            Output::Figure(figure(rows)),
        ]
    }
}

fn of<'a>(rows: &'a [Row], tool: &'a str) -> impl Iterator<Item = &'a Row> {
    rows.iter().filter(move |row| row.tool == tool)
}

fn ways_table(rows: &[Row]) -> Output {
    let header = ["tool", "way", "kept (MiB)", "ratio", "peak (MiB)", "ratio", "step (s)", "ratio"];
    let mut table = Table::new(&header, 2);
    for tool in [CHECKPOINTS, POLICIES, HALVES] {
        let first = of(rows, tool).next();
        for row in of(rows, tool) {
            let bytes = |of: fn(&Row) -> Option<u64>| {
                let value = of(row).unwrap_or(0);
                [mib(value), ratio(value as f64, first.and_then(of).unwrap_or(0) as f64)]
            };
            let (kept, peak) = (bytes(|row| row.kept_bytes), bytes(|row| row.peak_bytes));
            let time = ratio(row.seconds, first.map_or(f64::NAN, |row| row.seconds));
            let time = [format!("{:.3}", row.seconds), time];
            table.add([tool.into(), row.way.clone()].into_iter().chain(kept).chain(peak).chain(time));
        }
    }
    table.output("toolbox-ways")
}

fn plans_table(rows: &[Row]) -> Output {
    let header = ["budget (MiB)", "predicted (MiB)", "measured (MiB)", "measured beyond predicted", "plan"];
    let mut table = Table::new(&header, 0);
    for row in of(rows, PLANS) {
        let [budget, predicted, peak] =
            [row.budget_bytes, row.predicted_bytes, row.peak_bytes].map(|bytes| bytes.unwrap_or(0));
        let beyond = 100.0 * (peak as f64 / predicted as f64 - 1.0);
        table.add([mib(budget), mib(predicted), mib(peak), format!("{beyond:+.2} %"), row.way.clone()]);
    }
    table.output("toolbox-plans")
}

fn planner_table(rows: &[Row]) -> Output {
    let mut table = Table::new(&["chain", "choosing a plan (s)"], 1);
    for row in of(rows, PLANNER) {
        table.add([row.way.clone(), format!("{:.3}", row.seconds)]);
    }
    table.output("toolbox-planner")
}

fn optimizers_table(rows: &[Row]) -> Output {
    let header = ["optimizer", "state (MiB)", "of the parameters", "step (s)"];
    let mut table = Table::new(&header, 1);
    for row in of(rows, OPTIMIZERS) {
        let (state, parameters) = (row.state_bytes.unwrap_or(0), row.parameter_bytes.unwrap_or(0));
        let share = ratio(state as f64, parameters as f64);
        table.add([row.way.clone(), mib(state), share, format!("{:.4}", row.seconds)]);
    }
    table.output("toolbox-optimizers")
}

fn figure(rows: &[Row]) -> Figure {
    let points = |y: fn(&Row) -> Option<f64>| {
        of(rows, PLANS).filter_map(|row| Some((in_mib(row.budget_bytes?), y(row)?))).collect::<Vec<_>>()
    };
    let series = |name: &str, whose, points| Series {
        name: name.into(),
        style: Style { whose, marker: Marker::Cross },
        points,
    };
    let budget = "budget (MiB)";
    let peaks = Panel {
        title: "memory".into(),
        x: Axis::linear(budget),
        y: Axis::linear("peak of a step (MiB)"),
        series: vec![
            series("the budget", Whose::Limit, points(|row| row.budget_bytes.map(in_mib))),
            series("predicted", Whose::Formula, points(|row| row.predicted_bytes.map(in_mib))),
            series("measured", Whose::Ours, points(|row| row.peak_bytes.map(in_mib))),
        ],
        bars: vec![],
    };
    let times = Panel {
        title: "time".into(),
        x: Axis::linear(budget),
        y: Axis::linear("step (s)"),
        series: vec![series("measured", Whose::Ours, points(|row| Some(row.seconds)))],
        bars: vec![],
    };
    Figure {
        name: "toolbox-plans-figure".into(),
        title: "Plans for budgets: what they predict, and what a step needed".into(),
        columns: 2,
        panels: vec![peaks, times],
    }
}
