//! How bytes and time grow with batch, depth, width and length: the exponents of growth, and the bytes that formulas predict.
use super::fit::exponent;
use super::step::{Step, in_turns, step};
use super::{Failure, Measured, Output, Part, Settings, Table, in_mib};
use crate::figures::{Axis, Figure, Marker, Panel, Series, Style, Whose};
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave_paper::vision::{Classifier, ResNet, memsave, stock};
use serde::{Deserialize, Serialize};

pub struct Scaling;

/// One size of a network, with Burn's layers and with ours.
#[derive(Clone, Serialize, Deserialize)]
pub struct Row {
    network: String,
    /// What grows.
    variable: String,
    value: usize,
    /// The bytes that ours should keep.
    formula_bytes: Option<u64>,
    burn_kept_bytes: u64,
    ours_kept_bytes: u64,
    burn_peak_bytes: u64,
    ours_peak_bytes: u64,
    burn_seconds: f64,
    ours_seconds: f64,
}

/// The bytes of an f32.
const F32: usize = 4;
/// The heads of attention.
const HEADS: usize = 4;
const WIDTH: usize = 128;

type Steps = [Box<dyn Step>; 2];
/// The steps of Burn's layers and ours at a size, and the bytes that ours should keep.
type Sized = Box<dyn Fn(&Device, usize) -> (Steps, Option<usize>)>;

/// A network that grows.
struct Growing {
    network: &'static str,
    variable: &'static str,
    values: Vec<usize>,
    at: Sized,
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// `softmax(q k^T) v`, with queries, keys and values that require gradients. These three are kept.
fn attention(device: &Device, length: usize) -> (Steps, Option<usize>) {
    const HEAD: usize = 64;
    let tensor = || random([1, HEADS, length, HEAD], device).require_grad();
    let of = |attention: fn(Tensor<4>, Tensor<4>, Tensor<4>) -> Tensor<4>| {
        // `Relu` stands for a module without parameters.
        step(burn::nn::Relu::new(), (tensor(), (tensor(), tensor())), move |_, (q, (k, v))| {
            attention(q, k, v).sum()
        })
    };
    let steps = [
        of(|q, k, v| burn::tensor::module::attention(q, k, v, None, None, Default::default())),
        of(|q, k, v| burn_memsave::functional::attention(q, k, v, None, None, Default::default())),
    ];
    (steps, Some(F32 * HEADS * length * 3 * HEAD))
}

/// A dense layer on an input that requires no gradient. The input is kept.
fn linear(device: &Device, rows: usize, width: usize) -> (Steps, Option<usize>) {
    let x = || random([rows, width], device);
    let steps = [
        step(burn::nn::LinearConfig::new(width, width).init(device), x(), |layer, x| layer.forward(x).sum()),
        step(burn_memsave::nn::LinearConfig::new(width, width).init(device), x(), |layer, x| {
            layer.forward(x).sum()
        }),
    ];
    (steps, Some(F32 * rows * width))
}

/// An encoder whose feed-forward blocks are four times as wide. A layer keeps ten tensors of the width of the input: the input, queries,
/// keys, values, their context, the first sum, and four of the feed-forward block.
fn encoder(device: &Device, layers: usize, batch: usize, length: usize) -> (Steps, Option<usize>) {
    macro_rules! of {
        ($nn:path) => {{
            use nn::transformer::{TransformerEncoderConfig, TransformerEncoderInput};
            use $nn as nn;
            let config = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, HEADS, layers)
                .with_dropout(0.0)
                .with_norm_first(true);
            step(config.init(device), random([batch, length, WIDTH], device), |encoder, x| {
                encoder.forward(TransformerEncoderInput::new(x)).sum()
            })
        }};
    }
    let steps = [of!(burn::nn), of!(burn_memsave::nn)];
    (steps, Some(F32 * layers * batch * length * 10 * WIDTH))
}

fn resnet(device: &Device, batch: usize) -> (Steps, Option<usize>) {
    fn of<M: Classifier<Variant = ResNet> + 'static>(device: &Device, batch: usize) -> Box<dyn Step> {
        step(M::new(ResNet::D18, device), random([batch, 3, 64, 64], device), |model, x| {
            model.forward(x).sum()
        })
    }
    let steps = [of::<stock::resnet::Net>(device, batch), of::<memsave::resnet::Net>(device, batch)];
    (steps, None)
}

/// Numbers from `from` to at most `to`, each twice the one before.
fn doubling(from: usize, to: usize) -> Vec<usize> {
    std::iter::successors(Some(from), |value| Some(2 * value)).take_while(|&value| value <= to).collect()
}

fn networks(settings: &Settings) -> Vec<Growing> {
    let to = |quick, usual, full| settings.pick(quick, usual, full);
    let growing = |network, variable, values, at: Sized| Growing { network, variable, values, at };
    vec![
        growing(
            "attention, 4 heads of 64",
            "length (tokens)",
            doubling(64, to(256, 2048, 8192)),
            Box::new(attention),
        ),
        growing(
            "encoder layer, width 128",
            "length (tokens)",
            doubling(64, to(128, 1024, 2048)),
            Box::new(|device, length| encoder(device, 1, 4, length)),
        ),
        growing(
            "encoder, width 128, 4 x 128 tokens",
            "depth (layers)",
            doubling(1, to(2, 16, 16)),
            Box::new(|device, layers| encoder(device, layers, 4, 128)),
        ),
        growing(
            "linear, width 512",
            "batch (rows)",
            doubling(256, to(512, 8192, 16_384)),
            Box::new(|device, rows| linear(device, rows, 512)),
        ),
        growing(
            "linear, 1024 rows",
            "width (features)",
            doubling(128, to(256, 2048, 4096)),
            Box::new(|device, width| linear(device, 1024, width)),
        ),
        growing("ResNet-18, 64 x 64", "batch (images)", doubling(1, to(2, 16, 32)), Box::new(resnet)),
    ]
}

impl Measured for Scaling {
    type Row = Row;
    const NAME: &'static str = "scaling";
    const ABOUT: &'static str = "bytes and time against batch, depth, width and length";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        let part = |growing: Growing| {
            let settings = settings.clone();
            let Growing { network, variable, values, at } = growing;
            Part::new(format!("{network}, {variable}"), move || {
                let measure = |&value: &usize| -> Result<Row, Failure> {
                    let (steps, formula) = at(&settings.autodiff(), value);
                    let [burn, ours] = in_turns(settings.turns(), steps)?;
                    Ok(Row {
                        network: network.into(),
                        variable: variable.into(),
                        value,
                        formula_bytes: formula.map(|bytes| bytes as u64),
                        burn_kept_bytes: burn.kept,
                        ours_kept_bytes: ours.kept,
                        burn_peak_bytes: burn.peak,
                        ours_peak_bytes: ours.peak,
                        burn_seconds: burn.seconds,
                        ours_seconds: ours.seconds,
                    })
                };
                values.iter().map(measure).collect()
            })
        };
        networks(settings).into_iter().map(part).collect()
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        vec![table(rows), Output::Figure(kept(rows)), Output::Figure(times(rows))]
    }
}

/// Rows of the same network and variable.
fn series(rows: &[Row]) -> Vec<Vec<&Row>> {
    let mut series: Vec<Vec<&Row>> = vec![];
    for row in rows {
        let is_of = |of: &&mut Vec<&Row>| of[0].network == row.network && of[0].variable == row.variable;
        match series.iter_mut().find(is_of) {
            Some(of) => of.push(row),
            None => series.push(vec![row]),
        }
    }
    series
}

fn points(rows: &[&Row], value: impl Fn(&Row) -> f64) -> Vec<(f64, f64)> {
    rows.iter().map(|row| (row.value as f64, value(row))).collect()
}

fn table(rows: &[Row]) -> Output {
    let mut table = Table::new(
        &[
            "network",
            "against",
            "from, to",
            "kept: Burn",
            "ours",
            "formula",
            "ours beyond the formula, at the end",
            "peak: Burn",
            "ours",
            "time: Burn",
            "ours",
        ],
        2,
    );
    for rows in series(rows) {
        let of = |value: fn(&Row) -> f64| {
            exponent(&points(&rows, value)).map_or_else(|| "-".into(), |found| format!("{found:.2}"))
        };
        let (first, last) = (rows[0], rows[rows.len() - 1]);
        let beyond = last.formula_bytes.map_or_else(
            || "-".into(),
            |bytes| format!("{:+.2} %", 100.0 * (last.ours_kept_bytes as f64 / bytes as f64 - 1.0)),
        );
        table.add([
            first.network.clone(),
            first.variable.clone(),
            format!("{}, {}", first.value, last.value),
            of(|row| row.burn_kept_bytes as f64),
            of(|row| row.ours_kept_bytes as f64),
            of(|row| row.formula_bytes.unwrap_or(0) as f64),
            beyond,
            of(|row| row.burn_peak_bytes as f64),
            of(|row| row.ours_peak_bytes as f64),
            of(|row| row.burn_seconds),
            of(|row| row.ours_seconds),
        ]);
    }
    table.output("scaling-table")
}

fn panels(rows: &[Row], label: &str, values: [fn(&Row) -> Option<f64>; 3]) -> Vec<Panel> {
    let whose = [("Burn", Whose::Burn), ("ours", Whose::Ours), ("ours, by the formula", Whose::Formula)];
    let panel = |rows: Vec<&Row>| Panel {
        title: rows[0].network.clone(),
        x: Axis::log(&rows[0].variable, 2),
        y: Axis::log(label, 10),
        series: whose
            .into_iter()
            .zip(values)
            .map(|((name, whose), value)| Series {
                name: name.into(),
                style: Style { whose, marker: Marker::Circle },
                points: rows.iter().filter_map(|row| Some((row.value as f64, value(row)?))).collect(),
            })
            .filter(|series| !series.points.is_empty())
            .collect(),
        bars: vec![],
    };
    series(rows).into_iter().map(panel).collect()
}

fn kept(rows: &[Row]) -> Figure {
    Figure {
        name: "scaling-kept".into(),
        title: "What a step keeps, by size".into(),
        columns: 3,
        panels: panels(
            rows,
            "kept (MiB)",
            [
                |row| Some(in_mib(row.burn_kept_bytes)),
                |row| Some(in_mib(row.ours_kept_bytes)),
                |row| Some(in_mib(row.formula_bytes?)),
            ],
        ),
    }
}

fn times(rows: &[Row]) -> Figure {
    Figure {
        name: "scaling-time".into(),
        title: "Time of a step, by size".into(),
        columns: 3,
        panels: panels(
            rows,
            "step (s)",
            [|row| Some(row.burn_seconds), |row| Some(row.ours_seconds), |_| None],
        ),
    }
}
