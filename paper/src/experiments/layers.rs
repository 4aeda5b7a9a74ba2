//! Chains of equal layers, as in the figure of layers of [arXiv 2404.12406](https://arxiv.org/abs/2404.12406): what a chain keeps, by its
//! length and by which of its layers are trained.
//!
//! The paper's inputs are `[64, 8, 256, 256]`, or 128 MiB. The longest chains of image layers are also measured on these. In the figure a
//! layer's input has 2 MiB, which changes only the unit, and the time of the measurement.
use super::step::NOT_COUNTED;
use super::{Failure, Measured, Output, Part, Settings, Table, in_mib, mib, ratio};
use crate::figures::{Axis, Figure, Marker, Panel, Series, Style, Whose};
use burn::module::Module;
use burn::nn::PaddingConfig1d;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::measure::{LayerMeasurement, measure_layer};
use serde::{Deserialize, Serialize};

pub struct Layers;

/// A chain of layers, with Burn's and with ours.
#[derive(Serialize, Deserialize)]
pub struct Row {
    layer: String,
    shape: String,
    trained: String,
    layers: usize,
    burn_kept_bytes: u64,
    ours_kept_bytes: u64,
    burn_peak_bytes: u64,
    ours_peak_bytes: u64,
}

/// Which layers of the chain are trained.
#[derive(Clone, Copy)]
enum Trained {
    /// None; the input requires a gradient. In the other cases it does not.
    None,
    All,
    Fourth,
    FromFourth,
}

impl Trained {
    const ALL: [Self; 4] = [Self::None, Self::All, Self::Fourth, Self::FromFourth];

    fn name(self) -> &'static str {
        match self {
            Self::None => "none, but the input",
            Self::All => "all",
            Self::Fourth => "the 4th",
            Self::FromFourth => "the 4th and after",
        }
    }

    /// Whether the layer of this number, from 1, is trained.
    fn includes(self, number: usize) -> bool {
        match self {
            Self::None => false,
            Self::All => true,
            Self::Fourth => number == 4,
            Self::FromFourth => number >= 4,
        }
    }
}

/// The input of the paper.
const PUBLISHED: [usize; 4] = [64, 8, 256, 256];

/// The shapes of inputs with the lengths of their chains. The longest chain is also measured on the shapes `larger`.
fn chains<const D: usize>(
    settings: &Settings,
    quick: [usize; D],
    usual: [usize; D],
    larger: &[[usize; D]],
) -> Vec<([usize; D], usize)> {
    let lengths = settings.pick(vec![1, 4, 6], (1..=10).collect(), (1..=10).collect());
    let (shape, larger) = settings.pick((quick, &[][..]), (usual, larger), (usual, larger));
    let longest = lengths.last().copied().unwrap_or(0);
    let chains = lengths.into_iter().map(|length| (shape, length));
    chains.chain(larger.iter().map(|&shape| (shape, longest))).collect()
}

/// Bytes kept and peak of a chain of `count` layers of `init`, on an input of `shape`.
fn chain<const D: usize, M: Module>(
    device: &Device,
    shape: [usize; D],
    count: usize,
    trained: Trained,
    init: impl Fn(&Device) -> M,
    forward: impl Fn(&M, Tensor<D>) -> Tensor<D>,
) -> Result<[u64; 2], Failure> {
    let layer = |number| {
        let layer = init(device);
        // Unlike `freeze`, `no_grad` does not change which statistics a batch norm uses.
        if trained.includes(number) { layer.set_require_grad(true) } else { layer.no_grad() }
    };
    let layers: Vec<M> = (1..=count).map(layer).collect();
    let is_tracked = matches!(trained, Trained::None);
    let normal = Distribution::Normal(0.0, 1.0);
    let input = || Tensor::<D>::random(shape, normal, device).set_require_grad(is_tracked);
    let measure = || measure_layer(input, |x| layers.iter().fold(x, |x, layer| forward(layer, x)));
    measure(); // initializes parameters
    let bytes = || match measure() {
        LayerMeasurement { kept: Some(kept), peak: Some(peak), .. } => Ok([kept, peak]),
        _ => Err(NOT_COUNTED),
    };
    let mut least = bytes()?;
    if shape.iter().product::<usize>() < PUBLISHED.iter().product() {
        // The working memory of threads varies with which thread takes which part, so the least of three peaks counts.
        for [_, peak] in [bytes()?, bytes()?] {
            least[1] = least[1].min(peak);
        }
    }
    Ok(least)
}

/// A part for a layer, which is written once for both namespaces.
macro_rules! layer {
    ($parts:ident, $settings:ident, $name:literal, $quick:expr, $usual:expr $(, and $larger:expr)?;
     |$nn:ident, $device:ident| $init:expr) => {{
        let settings = $settings.clone();
        let run = move || {
            let device = settings.autodiff();
            let mut rows = vec![];
            for trained in Trained::ALL {
                for (shape, count) in chains(&settings, $quick, $usual, &[$($larger)?]) {
                    let [burn_kept_bytes, burn_peak_bytes] = {
                        use burn::nn as $nn;
                        chain(&device, shape, count, trained, |$device| $init, |layer, x| layer.forward(x))?
                    };
                    let [ours_kept_bytes, ours_peak_bytes] = {
                        use burn_memsave::nn as $nn;
                        chain(&device, shape, count, trained, |$device| $init, |layer, x| layer.forward(x))?
                    };
                    rows.push(Row {
                        layer: $name.into(),
                        shape: format!("{shape:?}"),
                        trained: trained.name().into(),
                        layers: count,
                        burn_kept_bytes,
                        ours_kept_bytes,
                        burn_peak_bytes,
                        ours_peak_bytes,
                    });
                }
            }
            Ok(rows)
        };
        $parts.push(Part::new($name, run));
    }};
}

impl Measured for Layers {
    type Row = Row;
    const NAME: &'static str = "layers";
    const ABOUT: &'static str = "chains of 1 to 10 equal layers, by which of them are trained";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        let mut parts = vec![];
        layer!(parts, settings, "linear", [32, 256], [2048, 256]; |nn, device| {
            nn::LinearConfig::new(256, 256).init(device)
        });
        layer!(parts, settings, "conv1d", [1, 8, 1024], [16, 8, 4096]; |nn, device| {
            let padding = PaddingConfig1d::Explicit(1, 1);
            nn::conv::Conv1dConfig::new(8, 8, 3).with_padding(padding).init(device)
        });
        layer!(parts, settings, "conv2d", [1, 8, 32, 32], [4, 8, 128, 128], and PUBLISHED; |nn, device| {
            let padding = nn::PaddingConfig2d::Explicit(1, 1, 1, 1);
            nn::conv::Conv2dConfig::new([8, 8], [3, 3]).with_padding(padding).init(device)
        });
        layer!(parts, settings, "conv3d", [1, 8, 8, 16, 16], [1, 8, 32, 32, 64]; |nn, device| {
            let padding = nn::PaddingConfig3d::Explicit(1, 1, 1);
            nn::conv::Conv3dConfig::new([8, 8], [3, 3, 3]).with_padding(padding).init(device)
        });
        layer!(parts, settings, "conv_transpose1d", [1, 8, 1024], [16, 8, 4096]; |nn, device| {
            nn::conv::ConvTranspose1dConfig::new([8, 8], 3).with_padding(1).init(device)
        });
        layer!(parts, settings, "conv_transpose2d", [1, 8, 32, 32], [4, 8, 128, 128], and PUBLISHED; |nn, device| {
            nn::conv::ConvTranspose2dConfig::new([8, 8], [3, 3]).with_padding([1, 1]).init(device)
        });
        layer!(parts, settings, "conv_transpose3d", [1, 8, 8, 16, 16], [1, 8, 32, 32, 64]; |nn, device| {
            nn::conv::ConvTranspose3dConfig::new([8, 8], [3, 3, 3]).with_padding([1, 1, 1]).init(device)
        });
        layer!(
            parts,
            settings,
            "batch norm, batch statistics",
            [1, 8, 32, 32],
            [4, 8, 128, 128], and PUBLISHED;
            |nn, device| { nn::BatchNormConfig::new(8).init(device) }
        );
        layer!(
            parts,
            settings,
            "batch norm, running statistics",
            [1, 8, 32, 32],
            [4, 8, 128, 128], and PUBLISHED;
            |nn, device| { nn::BatchNormConfig::new(8).init(device).freeze() }
        );
        parts
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        vec![table(rows), Output::Figure(figure(rows))]
    }
}

/// The longest chain of each layer.
fn table(rows: &[Row]) -> Output {
    let mut table = Table::new(
        &[
            "layers, input",
            "trained",
            "Burn kept (MiB)",
            "ours kept (MiB)",
            "ratio",
            "Burn peak (MiB)",
            "ours peak (MiB)",
            "ratio",
        ],
        2,
    );
    let longest = rows.iter().map(|row| row.layers).max().unwrap_or(0);
    for row in rows.iter().filter(|row| row.layers == longest) {
        table.add([
            format!("{} x {}, {}", row.layers, row.layer, row.shape),
            row.trained.clone(),
            mib(row.burn_kept_bytes),
            mib(row.ours_kept_bytes),
            ratio(row.ours_kept_bytes as f64, row.burn_kept_bytes as f64),
            mib(row.burn_peak_bytes),
            mib(row.ours_peak_bytes),
            ratio(row.ours_peak_bytes as f64, row.burn_peak_bytes as f64),
        ]);
    }
    table.output("layers-table")
}

/// A panel for each layer, for the inputs that have chains of every length.
fn figure(rows: &[Row]) -> Figure {
    let mut inputs: Vec<(&str, &str)> = vec![];
    for row in rows.iter().filter(|row| row.layers == 1) {
        if !inputs.contains(&(&row.layer, &row.shape)) {
            inputs.push((&row.layer, &row.shape));
        }
    }
    let panel = |(name, shape): &(&str, &str)| {
        let mut series = vec![];
        for (whose, of) in [(Whose::Burn, "Burn"), (Whose::Ours, "ours")] {
            for (trained, marker) in Trained::ALL.into_iter().zip(Marker::ALL) {
                let is_of =
                    |row: &&Row| (row.layer == *name && row.shape == *shape) && row.trained == trained.name();
                let bytes = |row: &Row| match whose {
                    Whose::Burn => row.burn_kept_bytes,
                    _ => row.ours_kept_bytes,
                };
                let points = rows.iter().filter(is_of).map(|row| (row.layers as f64, in_mib(bytes(row))));
                series.push(Series {
                    name: format!("{of}, trained: {}", trained.name()),
                    style: Style { whose, marker },
                    points: points.collect(),
                });
            }
        }
        Panel {
            title: (*name).into(),
            x: Axis::linear("layers"),
            y: Axis::linear("kept (MiB)"),
            series,
            bars: vec![],
        }
    };
    Figure {
        name: "layers".into(),
        title: "What a chain of equal layers keeps for the backward pass".into(),
        columns: 3,
        panels: inputs.iter().map(panel).collect(),
    }
}
