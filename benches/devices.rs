//! Measures every layer and three models on a device, Burn's beside ours: bytes kept, the most bytes in use, bytes reserved, kernels
//! launched, and the time of a forward and backward step.
//!
//! ```sh
//! cargo bench --bench devices --no-default-features --features wgpu -- conv2d
//! cargo bench --bench devices --no-default-features --features wgpu,fusion -- --csv fused.csv --card lavapipe
//! ```
//!
//! With `cuda` instead of `wgpu` it runs on CUDA. `--large` measures whole models of the size of a GPU instead, `--short` many rows of a
//! few elements, `--planes` large planes and long rows. Bytes in use are read whenever a kernel is launched. "Kept" is what is alive after the forward pass beside parameters;
//! "peak" is the most in use beyond parameters, input and the gradient of the output. As in a network with products around the layer, that
//! gradient exists when the backward pass begins, and the output is written before: fusion cannot join it with the sum that a test would
//! end with. Ratios are ours to Burn's; a ratio above 1 is a bug.
#![recursion_limit = "256"]
use burn::backend::{
    Backend, Dispatch, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, Ops, OpsKind},
    },
    backend_extension,
    tensor::FloatTensor,
};
use burn::module::{Lora, Module, ParamGroup};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_memsave::measure::{LayerMeasurement, measure_layer, mib};
use burn_memsave_paper::text::llama::{self, LanguageModel, Size};
use burn_memsave_paper::vision::{Classifier, ResNet, memsave, stock};
use clap::Parser;
use comfy_table::{Table, presets};
use serde::Serialize;
use std::cell::RefCell;
use std::error::Error;
use std::fmt::Display;
use std::hint::black_box;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use table::{
    Check, Row as TableRow, Visitor,
    run::{initialize, variants},
};

#[path = "devices/large.rs"]
mod large;
#[path = "devices/planes.rs"]
mod planes;
mod recorded;
#[path = "devices/short.rs"]
mod short;
#[path = "../tests/table/mod.rs"]
mod table;

/// Memory, launches and times on a device of every layer beside its stock twin.
#[derive(Parser)]
struct Args {
    /// Also writes the table to this file.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// Also writes the table to this file, with the name of the device.
    #[arg(long)]
    json: Option<PathBuf>,
    /// The name of the device in these files.
    #[arg(long, default_value = "a device")]
    card: String,
    /// Measures whole models and layers of the size of a GPU, instead of the table.
    #[arg(long)]
    large: bool,
    /// Measures many rows and planes of a few elements, instead of the table.
    #[arg(long, conflicts_with = "large")]
    short: bool,
    /// Measures large planes in both orders, long rows and axes, adapters of several ranks, and odd sizes, instead of the table.
    #[arg(long, conflicts_with_all = ["large", "short"])]
    planes: bool,
    #[command(flatten)]
    sizes: large::Sizes,
    /// How often both sides are timed in turns, for the medians: fewer times where a turn takes seconds, more where it takes
    /// milliseconds; 0 measures no times.
    #[arg(long, default_value_t = 9)]
    turns: usize,
    /// Only layers whose name contains this.
    #[arg(default_value = "")]
    filter: String,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The rest of a network, which reads an output and has a gradient for it.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
trait Rest: Backend {
    /// A number whose gradient with respect to `y` is `dy`.
    fn rest(y: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self>;
}

macro_rules! rest_on {
    ($($(#[$condition:meta])* $backend:ident),*) => {$(
        $(#[$condition])*
        impl Rest for burn::backend::$backend {
            fn rest(y: FloatTensor<Self>, _: FloatTensor<Self>) -> FloatTensor<Self> {
                use burn::backend::ops::FloatTensorOps;
                Self::float_zeros([1].into(), &y.device(), y.dtype().into())
            }
        }
    )*};
}
rest_on! {
    #[cfg(feature = "flex")]
    Flex,
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    Cube,
    #[cfg(feature = "remote")]
    Remote
}

impl<B: Rest, C: CheckpointStrategy> Rest for Autodiff<B, C> {
    fn rest(y: FloatTensor<Self>, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        let dy = dy.into_primitive();
        let output = B::rest(y.primitive().clone(), dy.clone());
        match RestStep.prepare::<C>([y.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(dy, output),
            OpsKind::UnTracked(prep) => prep.finish(output),
        }
    }
}

impl short::Bench for Devices {
    fn device(&self) -> Device {
        self.device.clone()
    }

    fn measure<const D: usize, const O: usize>(
        &mut self,
        name: &str,
        parameters: &str,
        input: ([usize; D], bool),
        sides: [&dyn Fn(Tensor<D>) -> Tensor<O>; 2],
    ) {
        Devices::measure(self, name, parameters, input, sides);
    }
}

#[derive(Debug)]
struct RestStep;

impl<B: Backend> Backward<B, 1> for RestStep {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        gradients.consume::<B>(&ops.node);
        if let [Some(y)] = ops.parents {
            gradients.register::<B>(y.id, ops.state);
        }
    }
}

fn rest<const D: usize>(y: Tensor<D>, dy: Tensor<D>) -> Tensor<1> {
    Tensor::from_dispatch(Dispatch::rest(y.into_dispatch(), dy.into_dispatch()))
}

const ENOUGH_TURNS: usize = 3;
const SHORT: Duration = Duration::from_millis(500);
const LONG: Duration = Duration::from_secs(2);

/// The measurements of one side.
struct Side {
    memory: LayerMeasurement,
    milliseconds: Option<f64>,
}

#[derive(Serialize)]
struct Row {
    layer: String,
    parameters: String,
    burn_kept_bytes: u64,
    ours_kept_bytes: u64,
    burn_peak_bytes: u64,
    ours_peak_bytes: u64,
    burn_reserved_bytes: u64,
    ours_reserved_bytes: u64,
    burn_launches: u64,
    ours_launches: u64,
    burn_milliseconds: Option<f64>,
    ours_milliseconds: Option<f64>,
    peak_ratio: f64,
    step_ratio: Option<f64>,
}

struct Devices {
    device: Device,
    args: Args,
    rows: Vec<Row>,
}

impl Visitor for Devices {
    fn row<const D: usize, const O: usize, S, M>(&mut self, row: TableRow<'_, D, O, S, M>)
    where
        S: Module + Display + From<M>,
        M: Module + Display + From<S>,
    {
        let leaves_out = |check| row.notes.leaves_out(check, &row.name);
        if !self.wants(&row.name) || leaves_out(Check::Time) || leaves_out(Check::TimeOnDevices) {
            return;
        }
        let (forward_stock, forward_ours) = (&row.stock.forward, &row.ours.forward);
        let shape = row.shapes.of_devices();
        let stock = (row.stock.init)(&self.device, shape);
        initialize(shape, &self.device, |x| forward_stock(&stock, x));
        for (parameters, stock) in variants(stock) {
            let ours = M::from(stock.clone());
            let sides: [&dyn Fn(Tensor<D>) -> Tensor<O>; 2] =
                [&|x| forward_stock(&stock, x), &|x| forward_ours(&ours, x)];
            self.measure(&row.name, parameters, (shape, true), sides);
        }
    }
}

impl Devices {
    fn wants(&self, name: &str) -> bool {
        name.contains(&self.args.filter)
    }

    fn measure<const D: usize, const O: usize>(
        &mut self,
        name: &str,
        parameters: &str,
        (shape, tracks_input): ([usize; D], bool),
        sides: [&dyn Fn(Tensor<D>) -> Tensor<O>; 2],
    ) {
        if !self.wants(name) {
            return;
        }
        let normal = Distribution::Normal(0.0, 1.0);
        let input = || Tensor::<D>::random(shape, normal, &self.device).set_require_grad(tracks_input);
        let of_output = sides[0](input()).dims();
        let dy = || Tensor::<O>::random(of_output, normal, &self.device);
        let run = |forward: &dyn Fn(Tensor<D>) -> Tensor<O>| {
            let dy = RefCell::new(Some(dy()));
            let dy = || dy.take().expect("one pass");
            measure_layer(input, |x| {
                let y = forward(x);
                self.finish();
                rest(y, dy())
            })
        };
        // Both sides have their parameters and compiled kernels before either is measured.
        for forward in sides {
            run(forward);
        }
        let memory = sides.map(run);
        let mut times = [vec![], vec![]];
        let start = Instant::now();
        for turn in (0..).take_while(|&turn| self.takes(turn, start.elapsed())) {
            for side in [turn % 2, 1 - turn % 2] {
                times[side].push(self.time(input(), dy(), sides[side]));
            }
        }
        let [burn, ours] = [0, 1].map(|side| Side {
            memory: memory[side],
            milliseconds: median(&mut times[side]).map(|time| time.as_secs_f64() * 1e3),
        });
        let bytes = |bytes: Option<u64>| bytes.expect("a device with a memory pool");
        let peaks = [burn.memory.peak, ours.memory.peak].map(bytes);
        let row = Row {
            layer: name.into(),
            parameters: parameters.into(),
            burn_kept_bytes: bytes(burn.memory.kept),
            ours_kept_bytes: bytes(ours.memory.kept),
            burn_peak_bytes: peaks[0],
            ours_peak_bytes: peaks[1],
            burn_reserved_bytes: bytes(burn.memory.reserved),
            ours_reserved_bytes: bytes(ours.memory.reserved),
            burn_launches: bytes(burn.memory.launches),
            ours_launches: bytes(ours.memory.launches),
            burn_milliseconds: burn.milliseconds,
            ours_milliseconds: ours.milliseconds,
            peak_ratio: peaks[1] as f64 / peaks[0].max(1) as f64,
            step_ratio: ours.milliseconds.zip(burn.milliseconds).map(|(ours, burn)| ours / burn),
        };
        eprintln!("{}", row.cells().join(" | "));
        self.rows.push(row);
    }

    /// Whether there is another turn, after `turn` turns in the time `elapsed`.
    fn takes(&self, turn: usize, elapsed: Duration) -> bool {
        let turns = self.args.turns;
        let most = match elapsed {
            elapsed if elapsed < SHORT => usize::MAX,
            elapsed if elapsed < LONG => turns,
            _ => turns.min(ENOUGH_TURNS),
        };
        turns > 0 && turn < most
    }

    fn finish(&self) {
        self.device.sync().expect("the device works");
    }

    fn time<const D: usize, const O: usize>(
        &self,
        x: Tensor<D>,
        dy: Tensor<O>,
        forward: &dyn Fn(Tensor<D>) -> Tensor<O>,
    ) -> Duration {
        self.finish();
        let start = Instant::now();
        let y = forward(x);
        self.finish();
        let loss = rest(y, dy);
        // Held until they are computed, because fusion leaves out what nothing holds.
        let gradients = black_box(loss.is_tracked().then(|| loss.backward()));
        self.finish();
        let time = start.elapsed();
        drop(gradients);
        time
    }

    fn resnet(&mut self) {
        let name = "ResNet-18, 2 x 64";
        if !self.wants(name) {
            return;
        }
        let device = self.device.clone();
        let burn = stock::resnet::Net::new(ResNet::D18, &device).fork(&device);
        let shape = [2, 3, 64, 64];
        initialize(shape, &device, |x| burn.forward(x));
        for (parameters, burn) in variants(burn) {
            let ours = memsave::resnet::Net::new(ResNet::D18, &device).fork(&device);
            let ours = if parameters == "frozen" { ours.freeze() } else { ours };
            let sides: [&dyn Fn(Tensor<4>) -> Tensor<2>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
            self.measure(name, parameters, (shape, true), sides);
        }
    }

    fn language_model(&mut self) {
        let (name, batch, length, rank) = ("language model, 2 x 128", 2, 128, 8);
        if !self.wants(name) {
            return;
        }
        let size = Size { vocabulary: 4096, width: 256, heads: 8, hidden: 704, blocks: 4, length };
        fn of<M: LanguageModel>(size: &Size, rank: Option<usize>, device: &Device) -> M {
            let model = M::new(size, device);
            let Some(rank) = rank else { return model.fork(device) };
            let projections = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a valid pattern");
            model.apply_lora(Lora::new(rank, 16.0).set_param_group(projections)).fork(device)
        }
        let device = self.device.clone();
        for (parameters, rank) in [("trainable", None), ("LoRA", Some(rank))] {
            let burn = of::<llama::stock::Llama>(&size, rank, &device);
            let ours = of::<llama::memsave::Llama>(&size, rank, &device);
            let [tokens, next] = [(); 2].map(|()| {
                let uniform = Distribution::Uniform(0.0, size.vocabulary as f64);
                Tensor::<2, Int>::random([batch, length], uniform, &device)
            });
            // The input stands for the tokens, which require no gradient.
            let sides: [&dyn Fn(Tensor<1>) -> Tensor<1>; 2] =
                [&|_| burn.loss(tokens.clone(), next.clone()), &|_| ours.loss(tokens.clone(), next.clone())];
            self.measure(name, parameters, ([1], true), sides);
        }
    }
}

fn median(times: &mut [Duration]) -> Option<Duration> {
    times.sort();
    times.get(times.len() / 2).copied()
}

const HEADER: [&str; 8] = [
    "layer",
    "parameters",
    "kept, MiB: Burn, ours",
    "peak, MiB: Burn, ours",
    "reserved, MiB: Burn, ours",
    "launches: Burn, ours",
    "step, ms: Burn, ours",
    "ratios: peak, step",
];

impl Row {
    fn cells(&self) -> [String; HEADER.len()] {
        let pair = |burn: u64, ours: u64| format!("{}, {}", mib(burn), mib(ours));
        let (times, ratio) = match (self.burn_milliseconds, self.ours_milliseconds, self.step_ratio) {
            (Some(burn), Some(ours), Some(ratio)) => (format!("{burn:.2}, {ours:.2}"), format!("{ratio:.2}")),
            _ => ("-".into(), "-".into()),
        };
        [
            self.layer.clone(),
            self.parameters.clone(),
            pair(self.burn_kept_bytes, self.ours_kept_bytes),
            pair(self.burn_peak_bytes, self.ours_peak_bytes),
            pair(self.burn_reserved_bytes, self.ours_reserved_bytes),
            format!("{}, {}", self.burn_launches, self.ours_launches),
            times,
            format!("{:.2}, {ratio}", self.peak_ratio),
        ]
    }
}

fn geometric_mean(ratios: impl Iterator<Item = f64>) -> f64 {
    let logarithms: Vec<f64> = ratios.map(f64::ln).collect();
    (logarithms.iter().sum::<f64>() / logarithms.len().max(1) as f64).exp()
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let device = Device::default();
    if device.memory_pool_usage().is_none() {
        return Err("this bench is for devices: --no-default-features --features wgpu, or cuda".into());
    }
    let mut devices = Devices { device: device.autodiff(), args, rows: vec![] };
    if devices.args.short {
        short::rows(&mut devices);
    } else if devices.args.planes {
        devices.planes();
    } else if devices.args.large {
        devices.large(devices.args.sizes);
    } else {
        table::visit(&mut devices);
        devices.resnet();
        devices.language_model();
    }

    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header(HEADER);
    table.add_rows(devices.rows.iter().map(Row::cells));
    println!("{table}");
    let times = geometric_mean(devices.rows.iter().filter_map(|row| row.step_ratio));
    println!(
        "geometric means: peak {:.2}, step {times:.2}",
        geometric_mean(devices.rows.iter().map(|row| row.peak_ratio))
    );
    if let Some(path) = devices.args.json {
        let results = serde_json::json!({ "device": devices.args.card, "rows": devices.rows });
        std::fs::write(&path, serde_json::to_string_pretty(&results)?)
            .map_err(|error| format!("{}: {error}", path.display()))?;
    }
    if let Some(path) = devices.args.csv {
        let features = if cfg!(feature = "fusion") { "wgpu,fusion" } else { "wgpu" };
        let features =
            if cfg!(feature = "cuda") { features.replace("wgpu", "cuda") } else { features.into() };
        let filter = &devices.args.filter;
        let command =
            format!("cargo bench --bench devices --no-default-features --features {features} -- {filter}");
        recorded::write(&path, command.trim_end_matches([' ', '-']), &devices.args.card, &devices.rows)?;
    }
    Ok(())
}
