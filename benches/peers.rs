//! Times steps of PyTorch, of stock Burn and of this crate in turns, and reports median milliseconds side by side.
//!
//! Run it with `cargo bench --bench peers [-- [--csv FILE] [--alone] [PART_OF_A_NAME]]`. PyTorch's column needs a `python3` that can import torch.
//! `RAYON_NUM_THREADS` sets the threads of all three.
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ParamGroup};
use burn::nn::PaddingConfig2d;
use burn::tensor::{Device, Distribution, Int, Tensor, activation, module, ops::ConvOptions};
use burn_memsave::{functional as F, nn};
use burn_memsave_paper::text::llama::{self, LanguageModel, Size};
use burn_memsave_paper::text::{self, Encoder, EncoderSize};
use burn_memsave_paper::vision::{self, Classifier, EfficientNet, ResNet};
use burn_memsave_paper::{Case, Tracked};
use clap::Parser;
use comfy_table::{Table, presets};
use serde::Serialize;
use std::error::Error;
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

mod recorded;

/// Steps of PyTorch, of stock Burn and of this crate side by side.
#[derive(Parser)]
struct Args {
    /// Also writes the table to this file.
    #[arg(long)]
    csv: Option<PathBuf>,
    /// Times the steps of this crate only, for a profiler.
    #[arg(long, conflicts_with = "csv")]
    alone: bool,
    /// Only steps whose name contains this.
    #[arg(default_value = "")]
    filter: String,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

/// Convolutions over images: `[batch, in, out, size, kernel, stride, padding, groups]`.
const CONVOLUTIONS: [(&str, [usize; 8]); 14] = [
    ("3x3 64-64, 56x56", [8, 64, 64, 56, 3, 1, 1, 1]),
    ("3x3 128-128, 28x28", [8, 128, 128, 28, 3, 1, 1, 1]),
    ("3x3 256-256, 14x14", [8, 256, 256, 14, 3, 1, 1, 1]),
    ("3x3 512-512, 7x7", [8, 512, 512, 7, 3, 1, 1, 1]),
    ("1x1 64-256, 56x56", [8, 64, 256, 56, 1, 1, 0, 1]),
    ("1x1 256-64, 56x56", [8, 256, 64, 56, 1, 1, 0, 1]),
    ("1x1 1024-256, 14x14", [8, 1024, 256, 14, 1, 1, 0, 1]),
    ("1x1 512-2048, 7x7", [8, 512, 2048, 7, 1, 1, 0, 1]),
    ("1x1 256-512 stride 2, 56x56", [8, 256, 512, 56, 1, 2, 0, 1]),
    ("7x7 3-64 stride 2, 224x224", [8, 3, 64, 224, 7, 2, 3, 1]),
    ("3x3 128-128 stride 2, 56x56", [8, 128, 128, 56, 3, 2, 1, 1]),
    ("3x3 depthwise 192, 28x28", [8, 192, 192, 28, 3, 1, 1, 192]),
    ("3x3 depthwise 192 stride 2, 56x56", [8, 192, 192, 56, 3, 2, 1, 192]),
    ("3x3 128-128 in 32 groups, 56x56", [8, 128, 128, 56, 3, 1, 1, 32]),
];

/// Batches that a convolution is also timed with, to see what a second thread brings.
const BATCHES: [usize; 2] = [1, 32];

/// What is computed of a convolution: the result, or also a gradient.
const WANTED: [&str; 3] = ["forward", "dx", "dweight"];

/// What requires a gradient in a step of a network of convolutions.
const CASES: [(&str, Case); 4] = [
    ("all", Case::batch(Tracked::All)),
    ("input", Case::batch(Tracked::Input)),
    ("running", Case::running(Tracked::Input)),
    ("norm", Case::batch(Tracked::Norm)),
];

/// Of the names of networks whose batch norms activate in the same passes, by `forward_activated`.
const ACTIVATED: &str = " (norms activate)";

/// PyTorch in another process.
struct Torch {
    _process: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Torch {
    fn start() -> Option<Self> {
        let python = |arguments: &[&str]| {
            let mut command = Command::new("python3");
            command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
            command
        };
        python(&["-c", "import torch"]).status().ok().filter(|status| status.success())?;
        let threads = rayon::current_num_threads().to_string();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/torch.py");
        let mut process = python(&[script, &threads]).spawn().ok()?;
        let (requests, answers) = (process.stdin.take()?, BufReader::new(process.stdout.take()?));
        Some(Self { _process: process, requests, answers })
    }

    /// Milliseconds of a step.
    fn time(&mut self, step: &str) -> f64 {
        writeln!(self.requests, "{step}").expect("PyTorch runs");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("PyTorch runs");
        answer.trim().parse().unwrap_or_else(|_| panic!("PyTorch cannot run {step:?}"))
    }
}

/// Milliseconds of a step of ours or of Burn's.
fn time(step: &dyn Fn()) -> f64 {
    let start = Instant::now();
    step();
    start.elapsed().as_secs_f64() * 1e3
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A step.
#[derive(Serialize)]
struct Row {
    what: String,
    step: String,
    /// `None` without PyTorch.
    pytorch_milliseconds: Option<f64>,
    burn_milliseconds: f64,
    ours_milliseconds: f64,
    ours_to_pytorch: Option<f64>,
    ours_to_burn: f64,
}

/// The rows, and the peers in them.
struct Peers {
    torch: Option<Torch>,
    /// Whether only steps of this crate run.
    alone: bool,
    filter: String,
    rows: Vec<Row>,
}

impl Peers {
    /// Whether a row is wanted.
    fn wants(&self, name: &str, step: &str) -> bool {
        format!("{name}, {step}").contains(&self.filter)
    }

    /// Adds a row. `request` is the step for PyTorch.
    fn row(
        &mut self,
        [name, step]: [&str; 2],
        request: &str,
        rounds: usize,
        burn: &dyn Fn(),
        ours: &dyn Fn(),
    ) {
        if !self.wants(name, step) {
            return;
        }
        let mut times: [Vec<f64>; 3] = Default::default();
        for round in 0..=rounds {
            let milliseconds = [
                self.torch.as_mut().map(|torch| torch.time(request)),
                (!self.alone).then(|| time(burn)),
                Some(time(ours)),
            ];
            if round > 0 {
                times.iter_mut().zip(milliseconds).for_each(|(times, of_round)| times.extend(of_round));
            }
        }
        let [torch, burn, ours] = times.map(median);
        let torch = self.torch.is_some().then_some(torch);
        self.rows.push(Row {
            what: name.into(),
            step: step.into(),
            pytorch_milliseconds: torch,
            burn_milliseconds: burn,
            ours_milliseconds: ours,
            ours_to_pytorch: torch.map(|torch| ours / torch),
            ours_to_burn: ours / burn,
        });
    }

    fn table(&self) -> Table {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN);
        table.set_header(["what", "step", "PyTorch", "Burn", "ours", "ours / PyTorch", "ours / Burn"]);
        for row in &self.rows {
            let numbers = [
                row.pytorch_milliseconds,
                Some(row.burn_milliseconds),
                Some(row.ours_milliseconds),
                row.ours_to_pytorch,
                Some(row.ours_to_burn),
            ];
            let cells =
                numbers.map(|number| number.map_or_else(|| "-".into(), |number| format!("{number:.2}")));
            table.add_row([row.what.clone(), row.step.clone()].into_iter().chain(cells));
        }
        table
    }

    fn convolution(&mut self, name: &str, sizes: [usize; 8]) {
        let [batch, channels, out, size, kernel, stride, padding, groups] = sizes;
        let options = ConvOptions::new([stride; 2], [padding; 2], [1; 2], groups);
        let device = Device::flex();
        let request = sizes.map(|size| size.to_string()).join(" ");
        for wanted in WANTED {
            let device = if wanted == "forward" { device.clone() } else { device.clone().autodiff() };
            let random = |shape: [usize; 4], gradient| {
                let tensor = Tensor::<4>::random(shape, Distribution::Default, &device);
                if wanted == gradient { tensor.require_grad() } else { tensor }
            };
            let x = random([batch, channels, size, size], "dx");
            let weight = random([out, channels / groups, kernel, kernel], "dweight");
            let step = |conv: &dyn Fn(Tensor<4>, Tensor<4>) -> Tensor<4>| {
                let y = conv(x.clone(), weight.clone());
                match wanted {
                    "forward" => drop(black_box(y)),
                    _ => drop(black_box(y.sum().backward())),
                }
            };
            self.row(
                [name, wanted],
                &format!("conv {request} {wanted}"),
                11,
                &|| step(&|x, weight| module::conv2d(x, weight, None, options.clone())),
                &|| step(&|x, weight| F::conv2d(x, weight, None, options.clone())),
            );
        }
    }

    /// A convolution, a batch norm with running statistics and a ReLU, all frozen.
    fn norm_relu(&mut self, name: &str, [batch, channels, out, size, kernel]: [usize; 5]) {
        let request = [batch, channels, out, size, kernel].map(|size| size.to_string()).join(" ");
        for wanted in ["forward", "dx"] {
            let device = Device::flex();
            let device = if wanted == "forward" { device } else { device.autodiff() };
            let pad = kernel / 2;
            let conv = nn::conv::Conv2dConfig::new([channels, out], [kernel; 2])
                .with_padding(PaddingConfig2d::Explicit(pad, pad, pad, pad))
                .with_bias(false)
                .init(&device)
                .freeze();
            let norm = nn::BatchNormConfig::new(out).init(&device).freeze();
            let (burn_conv, burn_norm) = (conv.clone().into_nn_conv2d(), norm.clone().into_nn_batch_norm());
            let x = Tensor::<4>::random([batch, channels, size, size], Distribution::Default, &device);
            let x = if wanted == "dx" { x.require_grad() } else { x };
            let step = |y: Tensor<4>| match wanted {
                "forward" => drop(black_box(y)),
                _ => drop(black_box(y.sum().backward())),
            };
            self.row(
                [&format!("{name}, norm, ReLU"), wanted],
                &format!("norm_relu {request} {wanted}"),
                11,
                &|| step(activation::relu(burn_norm.forward(burn_conv.forward(x.clone())))),
                &|| step(conv.forward_norm_relu(x.clone(), &norm)),
            );
        }
    }

    fn classifier<V: Copy, S: Classifier<Variant = V>, M: Classifier<Variant = V>>(
        &mut self,
        [name, request]: [&str; 2],
        variant: V,
    ) {
        let (batch, size) = (8, 224);
        for (case_name, case) in CASES {
            let name = format!("{name}, {batch} x {size}x{size}");
            if !self.wants(&name, case_name) {
                continue;
            }
            let device = Device::flex().autodiff();
            let images = Tensor::<4>::random([batch, 3, size, size], Distribution::Default, &device);
            let images = if case.tracks_input() { images.require_grad() } else { images };
            fn step<M: Classifier>(model: &M, images: &Tensor<4>) {
                drop(black_box(model.forward(images.clone()).sum().backward()));
            }
            let burn = case.prepare(S::new(variant, &device)).fork(&device);
            let ours = case.prepare(M::new(variant, &device)).fork(&device);
            self.row(
                [&name, case_name],
                &format!("{request} {batch} {size} {case_name}"),
                3,
                &|| step(&burn, &images),
                &|| step(&ours, &images),
            );
        }
    }

    fn encoder(&mut self) {
        let (batch, length) = (8, 128);
        for dropout in [0.0, 0.1] {
            let (name, step_name) =
                (format!("BERT-base, {batch} x {length}"), format!("all, dropout {dropout}"));
            if !self.wants(&name, &step_name) {
                continue;
            }
            let device = Device::flex().autodiff();
            let size = EncoderSize { dropout, ..EncoderSize::BERT_BASE };
            let EncoderSize { vocabulary, width, hidden, heads, layers, .. } = size;
            let tokens = tokens([batch, length], vocabulary, &device);
            fn step<M: Encoder>(model: &M, tokens: &Tensor<2, Int>) {
                drop(black_box(model.forward(tokens.clone()).sum().backward()));
            }
            let burn = text::stock::bert::Bert::new(&size, &device).fork(&device);
            let ours = text::memsave::bert::Bert::new(&size, &device).fork(&device);
            self.row(
                [&name, &step_name],
                &format!("encoder {vocabulary} {width} {hidden} {heads} {layers} {batch} {length} {dropout}"),
                3,
                &|| step(&burn, &tokens),
                &|| step(&ours, &tokens),
            );
        }
    }

    fn language_model(&mut self) {
        let (batch, length, rank) = (4, 512, 16);
        let (name, step_name) =
            (format!("language model, {batch} x {length}"), format!("LoRA of rank {rank}"));
        if !self.wants(&name, &step_name) {
            return;
        }
        let size = Size { vocabulary: 32_000, width: 1024, heads: 16, hidden: 2816, blocks: 8, length };
        let device = Device::flex().autodiff();
        fn adapted<M: LanguageModel>(size: &Size, rank: usize, device: &Device) -> M {
            let projections = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a valid pattern");
            let lora = Lora::new(rank, 2.0 * rank as f64).set_param_group(projections);
            M::new(size, device).apply_lora(lora).fork(device)
        }
        fn step<M: LanguageModel>(model: &M, tokens: &Tensor<2, Int>, next: &Tensor<2, Int>) {
            drop(black_box(model.loss(tokens.clone(), next.clone()).backward()));
        }
        let (burn, ours) = (
            adapted::<llama::stock::Llama>(&size, rank, &device),
            adapted::<llama::memsave::Llama>(&size, rank, &device),
        );
        let [tokens, next] = [(); 2].map(|()| tokens([batch, length], size.vocabulary, &device));
        let Size { vocabulary, width, heads, hidden, blocks, .. } = size;
        self.row(
            [&name, &step_name],
            &format!("llama {vocabulary} {width} {hidden} {heads} {blocks} {batch} {length} {rank}"),
            3,
            &|| step(&burn, &tokens, &next),
            &|| step(&ours, &tokens, &next),
        );
    }
}

fn tokens(shape: [usize; 2], vocabulary: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::random(shape, Distribution::Uniform(0.0, vocabulary as f64), device)
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let torch = if args.alone { None } else { Torch::start() };
    let mut peers = Peers { torch, alone: args.alone, filter: args.filter, rows: vec![] };
    for (name, sizes) in CONVOLUTIONS {
        peers.convolution(name, sizes);
    }
    for batch in BATCHES {
        let (name, mut sizes) = CONVOLUTIONS[0];
        sizes[0] = batch;
        peers.convolution(&format!("{name}, batch {batch}"), sizes);
    }
    for (name, sizes) in [
        ("3x3 64-64, 56x56", [8, 64, 64, 56, 3]),
        ("3x3 256-256, 14x14", [8, 256, 256, 14, 3]),
        ("1x1 256-64, 56x56", [8, 256, 64, 56, 1]),
    ] {
        peers.norm_relu(name, sizes);
    }
    for (number, depth) in [(18, ResNet::D18), (101, ResNet::D101)] {
        let (name, request) = (format!("ResNet-{number}"), format!("resnet {number}"));
        let names = [&name[..], &request];
        peers.classifier::<_, vision::stock::resnet::Net, vision::memsave::resnet::Net>(names, depth);
        let names = [&format!("{name}{ACTIVATED}")[..], &request];
        peers.classifier::<_, vision::stock::resnet::Net, vision::activated::resnet::Net>(names, depth);
    }
    let (name, request, net) = ("EfficientNetV2-S", "efficientnet", EfficientNet::V2S);
    peers.classifier::<_, vision::stock::efficientnet::Net, vision::memsave::efficientnet::Net>(
        [name, request],
        net,
    );
    peers.classifier::<_, vision::stock::efficientnet::Net, vision::activated::efficientnet::Net>(
        [&format!("{name}{ACTIVATED}"), request],
        net,
    );
    peers.encoder();
    peers.language_model();
    println!("{} threads, milliseconds\n{}", rayon::current_num_threads(), peers.table());
    let ratios: Vec<f64> = peers.rows.iter().filter_map(|row| row.ours_to_pytorch).map(f64::ln).collect();
    if !ratios.is_empty() {
        let mean = (ratios.iter().sum::<f64>() / ratios.len() as f64).exp();
        println!("geometric mean of ours / PyTorch: {mean:.2}");
    }
    if let Some(path) = args.csv {
        let command = format!("cargo bench --bench peers -- {}", peers.filter);
        recorded::write(&path, command.trim_end_matches([' ', '-']), "flex", &peers.rows)?;
    }
    Ok(())
}
