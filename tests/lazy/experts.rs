//! Tests the weights of a mixture of experts, which are chosen at random: their order never repeats.
use crate::{Saved, all, load};
use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use burn_memsave::lazy::LazyCache;
use burn_memsave::nn::{Linear, LinearConfig};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::time::{Duration, Instant};

const WIDTH: usize = 16;
/// Bytes of an expert.
const EXPERT: u64 = (WIDTH * WIDTH * 4) as u64;
const LAYERS: usize = 4;
/// Experts of a layer.
const EXPERTS: usize = 16;
/// The experts of a layer that a token uses.
const CHOSEN: usize = 3;

#[derive(Module, Debug)]
struct Mixture {
    layers: Vec<Layer>,
}

#[derive(Module, Debug)]
struct Layer {
    experts: Vec<Linear>,
}

impl Mixture {
    fn new(device: &Device) -> Self {
        let expert = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
        let layer = || Layer { experts: (0..EXPERTS).map(|_| expert.init(device)).collect() };
        Self { layers: (0..LAYERS).map(|_| layer()).collect() }
    }

    /// One token, of which `expect` is told what was chosen.
    fn forward(&self, random: &mut StdRng, expect: impl Fn(&[String])) -> TensorData {
        let mut x = Tensor::<2>::ones([1, WIDTH], &Device::flex());
        for (index, layer) in self.layers.iter().enumerate() {
            let first = random.random_range(0..EXPERTS);
            let chosen = [first, (first + 5) % EXPERTS, (first + 7) % EXPERTS];
            expect(&chosen.map(|expert| format!("layers.{index}.experts.{expert}")));
            let outputs = chosen.iter().map(|&expert| layer.experts[expert].forward(x.clone()));
            x = outputs.reduce(|sum, y| sum + y).unwrap();
        }
        x.into_data()
    }
}

/// Waits for the thread that reads ahead.
fn wait_for(cache: &LazyCache, weights: &[String]) {
    let begin = Instant::now();
    while !weights.iter().all(|path| cache.cached().contains(&&format!("{path}.weight")[..])) {
        assert!(begin.elapsed() < Duration::from_secs(30), "{weights:?} are not read ahead: {cache}");
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn experts_are_those_in_memory_within_the_budget() {
    let eager = Mixture::new(&Device::flex());
    let saved = Saved::new(&eager);
    for (budget, prefetch) in [(0, 0), (1, 1), (8, 0), (8, 2), (LAYERS * EXPERTS, 1)] {
        let budget = budget as u64 * EXPERT;
        let options = all().with_budget(budget).with_prefetch(prefetch);
        let (lazy, report) = load(Mixture::new(&Device::flex()), &saved.safetensors(), &options);
        for tell in [false, true] {
            let (mut of_eager, mut of_lazy) = (StdRng::seed_from_u64(1), StdRng::seed_from_u64(1));
            for token in 0..20 {
                let expect = |chosen: &[String]| {
                    assert!(report.cache.cached_bytes() <= budget);
                    if tell {
                        assert_eq!(report.cache.expect(chosen), CHOSEN);
                    }
                };
                let expected = eager.forward(&mut of_eager, |_| ());
                assert!(lazy.forward(&mut of_lazy, expect) == expected, "token {token}, budget {budget}");
            }
        }
        let statistics = report.cache.statistics();
        assert_eq!(statistics.hits + statistics.stalls, (2 * 20 * LAYERS * CHOSEN) as u64, "{statistics}");
        if budget == LAYERS as u64 * EXPERTS as u64 * EXPERT {
            assert!(statistics.reads <= (LAYERS * EXPERTS) as u64, "{statistics}");
        }
    }
}

/// No expert that was announced has to be waited for, and none is evicted before it was used.
#[test]
fn announced_experts_are_read_before_they_are_used() {
    let eager = Mixture::new(&Device::flex());
    let saved = Saved::new(&eager);
    let options = all().with_budget(2 * CHOSEN as u64 * EXPERT).with_prefetch(1);
    let (lazy, report) = load(Mixture::new(&Device::flex()), &saved.safetensors(), &options);
    let mut random = StdRng::seed_from_u64(1);
    for _ in 0..50 {
        lazy.forward(&mut random, |chosen| {
            report.cache.expect(chosen);
            wait_for(&report.cache, chosen);
        });
    }
    let statistics = report.cache.statistics();
    assert_eq!((statistics.hits, statistics.stalls), ((50 * LAYERS * CHOSEN) as u64, 0), "{statistics}");
}

#[test]
fn a_path_is_that_of_a_parameter_or_of_a_module() {
    let saved = Saved::new(&Mixture::new(&Device::flex()));
    let (_lazy, report) = load(Mixture::new(&Device::flex()), &saved.safetensors(), &all().with_prefetch(0));
    for (path, weights) in [
        ("layers", LAYERS * EXPERTS),
        ("layers.1", EXPERTS),
        ("layers.1.experts.1", 1), // and not those of 10 to 15
        ("layers.1.experts.15.weight", 1),
        ("layers.1.experts.15.bias", 0),
        ("layers.9", 0),
        ("layer", 0),
        ("", 0),
    ] {
        assert_eq!(report.cache.expect([path]), weights, "{path}");
    }
    assert_eq!(report.cache.expect(["layers.0.experts.2", "layers.3.experts.0"]), 2);
    assert_eq!(report.cache.expect([""; 0]), 0);
    assert_eq!(report.cache.cached_bytes(), 0, "no thread reads");
}
