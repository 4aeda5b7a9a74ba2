//! Times an optimizer's step on one matrix: Burn's AdamW and ours, one after the other.
//!
//! ```sh
//! cargo bench --bench optim
//! ```
#![recursion_limit = "256"]
use burn::module::Param;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::optim::AdamW8bitConfig;
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

fn steps(criterion: &mut Criterion) {
    let device = Device::flex().autodiff();
    let mut group = criterion.benchmark_group("optim");
    for width in [64, 256, 1024, 2048] {
        group.throughput(Throughput::Elements((width * width) as u64));
        let random = || Tensor::<2>::random([width, width], Distribution::Normal(0.0, 1.0), &device);
        let optimizers: [(&str, ModuleOptimizer); 3] = [
            ("burn", AdamWConfig::new().init()),
            ("f32", AdamW8bitConfig::new().with_min_8bit_size(usize::MAX).init()),
            ("8bit", AdamW8bitConfig::new().with_min_8bit_size(1).init()),
        ];
        for (name, mut optimizer) in optimizers {
            let mut parameter = Some(Param::from_tensor(random()));
            let gradient = random().inner();
            let id = parameter.as_ref().map(|parameter| parameter.id).expect("just made");
            let gradients = || {
                let mut gradients = GradientsParams::new();
                gradients.register(id, gradient.clone().mul_scalar(1.0)); // the only handle
                gradients
            };
            group.bench_function(BenchmarkId::new(name, width), |bencher| {
                let step = |gradients| {
                    let before = parameter.take().expect("put back");
                    parameter = Some(optimizer.step(1e-3, before, gradients));
                };
                bencher.iter_batched(gradients, step, BatchSize::LargeInput);
            });
        }
    }
    group.finish();
}

criterion_group!(benches, steps);
criterion_main!(benches);
