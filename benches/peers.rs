//! Convolutions of PyTorch, stock Burn and this crate side by side, alternating in one run: milliseconds, medians.
//!
//! `cargo bench --bench peers`; PyTorch's column needs a `python3` that can import torch. `RAYON_NUM_THREADS` sets the threads of
//! all.
#![recursion_limit = "256"]
use burn::tensor::{Device, Distribution, Tensor, module, ops::ConvOptions};
use burn_memsave::functional as F;
use comfy_table::{Table, presets};
use std::hint::black_box;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

/// Rounds that a median is taken of.
const ROUNDS: usize = 11;

/// `[batch, in, out, size, kernel, stride, padding, groups]` of a convolution over images.
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
    ("3x3 128-128, 32 groups, 56x56", [8, 128, 128, 56, 3, 1, 1, 32]),
];

/// What is wanted of a step.
const WANTED: [&str; 3] = ["forward", "dx", "dweight"];

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

    fn time(&mut self, case: &str) -> f64 {
        writeln!(self.requests, "{case}").expect("PyTorch runs");
        let mut answer = String::new();
        self.answers.read_line(&mut answer).expect("PyTorch runs");
        answer.trim().parse().expect("milliseconds")
    }
}

type Conv = fn(Tensor<4>, Tensor<4>, ConvOptions<2>) -> Tensor<4>;

/// Milliseconds of one step.
fn time(conv: Conv, sizes: [usize; 8], wanted: &str, [x, weight]: [&Tensor<4>; 2]) -> f64 {
    let [.., stride, padding, groups] = sizes;
    let options = ConvOptions::new([stride; 2], [padding; 2], [1; 2], groups);
    let [x, weight] = [(x, "dx"), (weight, "dweight")].map(|(x, gradient)| match wanted {
        "forward" => x.clone().inner(),
        wanted => x.clone().set_require_grad(wanted == gradient),
    });
    let start = Instant::now();
    let y = conv(x, weight, options);
    match wanted {
        "forward" => drop(black_box(y)),
        _ => drop(black_box(y.backward())),
    }
    start.elapsed().as_secs_f64() * 1e3
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() {
    let filter = std::env::args().skip(1).find(|argument| !argument.starts_with('-'));
    let device = Device::flex().autodiff();
    let mut torch = Torch::start();
    let mut table = Table::new();
    table.load_preset(presets::ASCII_MARKDOWN).set_header([
        "convolution",
        "step",
        "PyTorch",
        "Burn",
        "ours",
        "ours / PyTorch",
        "ours / Burn",
    ]);
    let mut ratios = vec![];
    for (name, sizes) in CONVOLUTIONS {
        if filter.as_ref().is_some_and(|filter| !name.contains(filter)) {
            continue;
        }
        let [batch, channels, out, size, kernel, .., groups] = sizes;
        let random = |shape: [usize; 4]| Tensor::<4>::random(shape, Distribution::Default, &device);
        let [x, weight] =
            [[batch, channels, size, size], [out, channels / groups, kernel, kernel]].map(random);
        let case = sizes.map(|size| size.to_string()).join(" ");
        for wanted in WANTED {
            let mut times: [Vec<f64>; 3] = Default::default();
            for _ in 0..ROUNDS {
                let [of_torch, of_burn, ours] = &mut times;
                of_torch.extend(torch.as_mut().map(|torch| torch.time(&format!("{case} {wanted}"))));
                let burn: Conv = |x, weight, options| module::conv2d(x, weight, None, options);
                of_burn.push(time(burn, sizes, wanted, [&x, &weight]));
                ours.push(time(
                    |x, weight, options| F::conv2d(x, weight, None, options),
                    sizes,
                    wanted,
                    [&x, &weight],
                ));
            }
            let [of_torch, of_burn, ours] = times.map(|times| (!times.is_empty()).then(|| median(times)));
            let cell = |value: Option<f64>| value.map_or_else(|| "-".into(), |value| format!("{value:.2}"));
            let ratio = |other: Option<f64>| ours.zip(other).map(|(ours, other)| ours / other);
            ratios.extend(ratio(of_torch).map(f64::ln));
            table.add_row([
                name.into(),
                wanted.into(),
                cell(of_torch),
                cell(of_burn),
                cell(ours),
                cell(ratio(of_torch)),
                cell(ratio(of_burn)),
            ]);
        }
    }
    println!("{} threads, milliseconds\n{table}", rayon::current_num_threads());
    if !ratios.is_empty() {
        let mean = (ratios.iter().sum::<f64>() / ratios.len() as f64).exp();
        println!("geometric mean of ours / PyTorch: {mean:.2}");
    }
}
