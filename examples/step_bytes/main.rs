//! Measures the bytes of a step with Criterion: what an encoder keeps, and its peak, for several batch sizes, with Burn's layers and with
//! ours. A second run compares with the first.
//!
//! ```sh
//! cargo run --release --example step_bytes
//! ```
//!
//! In your crate this would be a file in `benches/`, with the feature `criterion` of `burn-memsave`.
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::measure::TrackingAllocator;
use burn_memsave::measure::criterion::{BenchBytes, KeptBytes, PeakBytes};
use criterion::measurement::Measurement;
use criterion::{Bencher, BenchmarkId, Criterion, criterion_group, criterion_main};

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

const LENGTH: usize = 32;
const WIDTH: usize = 32;

/// The same model with the layers of either crate.
macro_rules! encoder {
    ($($nn:ident)::+) => {{
        use $($nn)::+::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
        let model = TransformerEncoderConfig::new(WIDTH, 4 * WIDTH, 4, 2).init(&Device::flex().autodiff());
        let loss = |model: &TransformerEncoder, x| model.forward(TransformerEncoderInput::new(x)).mean();
        (model, loss)
    }};
}

/// `of` is the name of the measurement, under which Criterion stores its results.
fn steps<M: Measurement + 'static>(criterion: &mut Criterion<M>, of: &str)
where
    for<'a> Bencher<'a, M>: BenchBytes,
{
    let (burn, burn_loss) = encoder!(burn::nn);
    let (ours, our_loss) = encoder!(burn_memsave::nn);
    let mut group = criterion.benchmark_group(of);
    for batch in [1, 2, 4] {
        let shape = [batch, LENGTH, WIDTH];
        let x = Tensor::<3>::random(shape, Distribution::Default, &Device::flex().autodiff());
        group.bench_function(BenchmarkId::new("burn", batch), |bencher| {
            bencher.iter_step(&burn, x.clone(), burn_loss);
        });
        group.bench_function(BenchmarkId::new("memsave", batch), |bencher| {
            bencher.iter_step(&ours, x.clone(), our_loss);
        });
    }
    group.finish();
}

fn kept(criterion: &mut Criterion<KeptBytes>) {
    steps(criterion, "kept");
}

fn peak(criterion: &mut Criterion<PeakBytes>) {
    steps(criterion, "peak");
}

/// A step needs the same bytes every time, so a few samples are enough.
fn few<M: Measurement>(measurement: M) -> Criterion<M> {
    Criterion::default().with_measurement(measurement).sample_size(10)
}

criterion_group!(name = of_kept; config = few(KeptBytes); targets = kept);
criterion_group!(name = of_peak; config = few(PeakBytes); targets = peak);
criterion_main!(of_kept, of_peak);
