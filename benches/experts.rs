//! Times a mixture of experts whose weights are lazy, token by token: 48 layers of 128 experts, of which each token uses 8 per layer, chosen
//! at random, so that the order of their weights never repeats.
//!
//! ```sh
//! cargo bench --bench experts
//! ```
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn::{Linear, LinearConfig};
use clap::Parser;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::{error::Error, time::Instant};

/// Milliseconds per token of a mixture of experts: in memory, and lazy with several budgets.
#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 1000)]
    tokens: usize,
    /// The tokens that a line of the table averages.
    #[arg(long, default_value_t = 100)]
    window: usize,
    #[arg(long, default_value_t = 48)]
    layers: usize,
    #[arg(long, default_value_t = 128)]
    experts: usize,
    /// The experts of each layer that a token uses.
    #[arg(long, default_value_t = 8)]
    chosen: usize,
    /// The width of an expert, which is one dense layer.
    #[arg(long, default_value_t = 32)]
    width: usize,
    /// The budget in MiB.
    #[arg(long, default_value_t = 4)]
    budget: u64,
    /// Given by cargo.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Module, Debug)]
struct Mixture {
    layers: Vec<Experts>,
}

#[derive(Module, Debug)]
struct Experts {
    experts: Vec<Linear>,
}

impl Mixture {
    fn new(args: &Args, device: &Device) -> Self {
        let expert = LinearConfig::new(args.width, args.width).with_bias(false);
        let layer = || Experts { experts: (0..args.experts).map(|_| expert.init(device)).collect() };
        Self { layers: (0..args.layers).map(|_| layer()).collect() }
    }

    /// One token. `expect` is told which experts of which layer were chosen, before they are used.
    fn forward(
        &self,
        x: Tensor<2>,
        chosen: usize,
        random: &mut StdRng,
        expect: impl Fn(usize, &[usize]),
    ) -> Tensor<2> {
        self.layers.iter().enumerate().fold(x, |x, (index, layer)| {
            let mut experts = vec![];
            while experts.len() < chosen {
                let expert = random.random_range(0..layer.experts.len());
                if !experts.contains(&expert) {
                    experts.push(expert);
                }
            }
            expect(index, &experts);
            let outputs = experts.iter().map(|&expert| layer.experts[expert].forward(x.clone()));
            let sum = outputs.reduce(|sum, y| sum + y).expect("at least one is chosen");
            sum.div_scalar(chosen as f32)
        })
    }
}

/// Milliseconds per token in every window, and what the last token gave.
fn time(model: &Mixture, args: &Args, expect: impl Fn(usize, &[usize])) -> (Vec<f64>, f32) {
    let device = Device::flex();
    let mut random = StdRng::seed_from_u64(0);
    let mut last = 0.0;
    let windows = (0..args.tokens / args.window).map(|_| {
        let begin = Instant::now();
        for _ in 0..args.window {
            let x = Tensor::<2>::ones([1, args.width], &device);
            last = model.forward(x, args.chosen, &mut random, &expect).sum().into_scalar::<f32>();
        }
        begin.elapsed().as_secs_f64() * 1e3 / args.window as f64
    });
    (windows.collect(), last)
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::parse();
    let device = Device::flex();
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("experts.bpk");
    let eager = Mixture::new(&args, &device);
    eager.clone().save_file(&path)?;
    let file = WeightFile::open(&path)?;
    let lazy = |budget: u64, prefetch: usize| {
        let options = LazyOptions::new().with_min_bytes(0).with_budget(budget).with_prefetch(prefetch);
        Mixture::new(&args, &device).lazy_load(&file, &options)
    };

    let (in_memory, expected) = time(&eager, &args, |_, _| ());
    let mut columns = vec![("eager", in_memory)];
    let budget = args.budget << 20;
    for (name, budget, prefetch, tell) in [
        ("all fit", u64::MAX, 1, false),
        ("no thread", budget, 0, false),
        ("read ahead", budget, 1, false),
        ("expected", budget, 1, true),
    ] {
        let (model, report) = lazy(budget, prefetch)?;
        let (times, last) = time(&model, &args, |layer, experts| {
            if tell {
                report.cache.expect(experts.iter().map(|expert| format!("layers.{layer}.experts.{expert}")));
            }
        });
        assert!(last == expected, "{name}: {last} instead of {expected}");
        println!("{name}: {}", report.cache.statistics());
        columns.push((name, times));
    }

    print!("{:>12}", "tokens");
    columns.iter().for_each(|(name, _)| print!("{name:>12}"));
    println!();
    for window in 0..args.tokens / args.window {
        print!("{:>12}", (window + 1) * args.window);
        columns.iter().for_each(|(_, times)| print!("{:>12.2}", times[window]));
        println!();
    }
    Ok(())
}
