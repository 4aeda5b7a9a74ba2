//! Trains a model within a memory budget: profiles its blocks, plans which of them are kept and which are recomputed in the backward pass,
//! and draws the memory over a step, with the plan and without.
//!
//! ```sh
//! cargo run --release --example budget -- --model resnet101 --budget 300MiB
//! cargo run --release --example budget -- --model encoder --budget 100MiB --half --plot budget.svg
//! ```
//!
//! The budget covers the forward and backward pass, including gradients. Parameters, the optimizer's state and the batch come on top.
//! If no plan fits, the batch is halved until one does. Images, tokens and labels are drawn at random.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_memsave::measure::{StepInput, TrackingAllocator, human_bytes, measure_step, mib};
use burn_memsave::nn::loss::CrossEntropyLossConfig;
use burn_memsave::nn::transformer::{TransformerEncoderConfig, TransformerEncoderLayer};
use burn_memsave::plan::{Plan, PlanError, ProfileOptions, auto_checkpoint, block};
use burn_memsave::saved::SavedPolicy;
use burn_memsave_paper::text::llama::{LanguageModel, Size, planned};
use burn_memsave_paper::vision::memsave::resnet;
use burn_memsave_paper::vision::{Classifier, ResNet};
use bytesize::ByteSize;
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use picture::sample;
use std::error::Error;
use std::path::PathBuf;
use std::time::Instant;

#[path = "../picture/mod.rs"]
mod picture;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Trains a model within a memory budget.
#[derive(Parser)]
struct Args {
    /// The model to train.
    #[arg(long, value_enum, default_value_t = Model::Resnet101)]
    model: Model,
    /// The most bytes of a forward and backward pass beyond parameters and batch, such as 300MiB.
    #[arg(long, default_value = "300MiB")]
    budget: ByteSize,
    /// Images or sequences per step, if this many fit.
    #[arg(long, default_value_t = 8)]
    batch_size: usize,
    /// Width and height of images (default 224), or tokens of a sequence (default 256).
    #[arg(long)]
    length: Option<usize>,
    /// Training steps.
    #[arg(long, default_value_t = 10)]
    steps: usize,
    /// Blocks may also keep tensors in half as many bits, which rounds gradients.
    #[arg(long)]
    half: bool,
    /// The file for the picture of the memory over a step (SVG).
    #[arg(long, default_value = "budget.svg")]
    plot: PathBuf,
}

#[derive(Clone, Copy, ValueEnum)]
enum Model {
    Resnet18,
    Resnet101,
    /// An encoder of text, with 24 blocks 512 wide.
    Encoder,
    /// A language model in the style of Llama, with 8 blocks 512 wide.
    Language,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let device = Device::flex().autodiff();
    device.seed(0);
    match args.model {
        Model::Resnet18 => run(&args, resnet::Net::new(ResNet::D18, &device), images, class_loss),
        Model::Resnet101 => run(&args, resnet::Net::new(ResNet::D101, &device), images, class_loss),
        Model::Encoder => {
            let config = TransformerEncoderConfig::new(512, 2048, 8, 24).with_dropout(0.1);
            run(&args, Encoder { layers: config.init(&device).layers }, features, encoder_loss)
        }
        Model::Language => {
            let length = args.length.unwrap_or(256);
            let size = Size { vocabulary: 8192, width: 512, heads: 8, hidden: 1408, blocks: 8, length };
            run(&args, planned::Llama::new(&size, &device), tokens, |model, (tokens, next)| {
                model.loss(tokens, next)
            })
        }
    }
}

type Images = (Tensor<4>, Tensor<1, Int>);

fn images(args: &Args, batch: usize, device: &Device) -> Images {
    let size = args.length.unwrap_or(224);
    let images = Tensor::random([batch, 3, size, size], Distribution::Normal(0.0, 1.0), device);
    (images, labels([batch], 1000, device))
}

fn class_loss(model: &resnet::Net, (images, labels): Images) -> Tensor<1> {
    CrossEntropyLossConfig::new().init(&images.device()).forward(model.forward(images), labels)
}

fn features(args: &Args, batch: usize, device: &Device) -> Tensor<3> {
    Tensor::random([batch, args.length.unwrap_or(256), 512], Distribution::Normal(0.0, 1.0), device)
}

#[derive(Module, Debug)]
struct Encoder {
    layers: Vec<TransformerEncoderLayer>,
}

fn encoder_loss(model: &Encoder, x: Tensor<3>) -> Tensor<1> {
    let run = |x, layer| block(layer, x, |layer: &TransformerEncoderLayer, x| layer.forward(x, None, None));
    model.layers.iter().fold(x, run).powf_scalar(2.0).mean()
}

fn tokens(args: &Args, batch: usize, device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let draw = || labels([batch, args.length.unwrap_or(256)], 8192, device);
    (draw(), draw())
}

fn labels<const D: usize>(shape: [usize; D], classes: usize, device: &Device) -> Tensor<D, Int> {
    Tensor::random(shape, Distribution::Uniform(0.0, classes as f64), device)
}

fn run<M: Module, I: StepInput>(
    args: &Args,
    model: M,
    input: impl Fn(&Args, usize, &Device) -> I,
    loss: fn(&M, I) -> Tensor<1>,
) -> Result<(), Box<dyn Error>> {
    let device = Device::flex().autodiff();
    let options = match args.half {
        true => ProfileOptions::new().with_policy(SavedPolicy::Half),
        false => ProfileOptions::new(),
    };
    let mut batch = args.batch_size.max(1);
    let (plan, input) = loop {
        let input = input(args, batch, &device);
        match auto_checkpoint(&model, input.copy(), args.budget.as_u64(), &options, loss) {
            Ok(plan) => break (plan, input),
            Err(error @ PlanError::Budget { .. }) if batch > 1 => {
                eprintln!("{error}, with {batch} items");
                batch /= 2;
            }
            Err(error) => return Err(error.into()),
        }
    };
    println!("{batch} items per step\n{plan}");
    let planned = |model: &M, input: I| plan.scope(|| loss(model, input));
    let without = measure_step(&model, input.copy(), loss);
    let [with, without_plan] = [sample(&model, &input, planned), sample(&model, &input, loss)];
    let steps = [("without a plan", &without_plan[..]), ("with the plan", &with)];
    let title = "Memory over a forward and backward pass";
    picture::draw(&args.plot, title, Some(args.budget.as_u64()), steps)?;
    println!(
        "without a plan: {} at most; the picture is {}",
        without.peak.map_or("unknown".into(), human_bytes),
        args.plot.display()
    );
    train(args, model, &input, &plan, loss)
}

/// Trains with the plan, and prints how much memory was needed.
fn train<M: Module, I: StepInput>(
    args: &Args,
    mut model: M,
    input: &I,
    plan: &Plan,
    loss: fn(&M, I) -> Tensor<1>,
) -> Result<(), Box<dyn Error>> {
    let mut optimizer = SgdConfig::new().init();
    let bar = ProgressBar::new(args.steps as u64);
    bar.set_style(ProgressStyle::with_template("{bar:30} step {pos}/{len}, {msg}")?);
    let (mut most, start) = (0, Instant::now());
    for _ in 0..args.steps {
        let scope = burn_memsave::measure::Scope::start();
        let loss = plan.scope(|| loss(&model, input.copy()));
        let gradients = loss.backward();
        most = most.max(scope.peak().saturating_sub(input.bytes()));
        drop(scope);
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(1e-3, model, gradients);
        bar.inc(1);
        bar.set_message(format!("loss {:.4}, at most {}", loss.into_scalar::<f32>(), human_bytes(most)));
    }
    bar.finish();
    let seconds = start.elapsed().as_secs_f64() / args.steps.max(1) as f64;
    println!("{} at most of {} MiB, {seconds:.3} s per step", human_bytes(most), mib(args.budget.as_u64()));
    Ok(())
}
