//! Tests which weights are in memory, and when.
use crate::{Saved, all, load, open, open_mapped};
use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData, Tolerance};
use burn_memsave::lazy::{LazyOptions, ReadMode};
use burn_memsave::measure::ledger;
use burn_memsave::nn::{Linear, LinearConfig};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const WIDTH: usize = 64;
/// Bytes of a weight.
const WEIGHT: u64 = (WIDTH * WIDTH * 4) as u64;

#[derive(Module, Debug)]
struct Tower {
    layers: Vec<Linear>,
}

impl Tower {
    fn new(layers: usize, device: &Device) -> Self {
        let layer = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
        Self { layers: (0..layers).map(|_| layer.init(device)).collect() }
    }

    fn forward(&self, device: &Device) -> TensorData {
        let x = Tensor::<2>::ones([2, WIDTH], device);
        self.layers.iter().fold(x, |x, layer| layer.forward(x)).into_data()
    }
}

fn soon(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn the_budget_bounds_what_is_in_memory() {
    let device = Device::flex();
    let eager = Tower::new(8, &device);
    let saved = Saved::new(&eager);
    let expected = eager.forward(&device);
    for file in [saved.safetensors(), open_mapped(&saved.path("model.safetensors"))] {
        let mode = file.read_mode();
        for (budget, prefetch) in [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (8, 2), (100, 4)] {
            let options = all().with_budget(budget * WEIGHT).with_prefetch(prefetch);
            let (lazy, report) = load(Tower::new(8, &device), &file, &options);
            assert!(report.lazy.iter().all(|parameter| parameter.mapped == (mode == ReadMode::Map)));
            assert_eq!(report.cache.cached_bytes(), 0);
            for _ in 0..3 {
                let x = Tensor::<2>::ones([2, WIDTH], &device);
                let y = lazy.layers.iter().fold(x, |x, layer| {
                    let y = layer.forward(x);
                    assert!(report.cache.cached_bytes() <= budget * WEIGHT, "{mode:?}, {budget} weights");
                    y
                });
                assert!(y.into_data() == expected, "{mode:?}, {budget} weights");
            }
            assert!(report.cache.held().is_empty());
            let statistics = report.cache.statistics();
            assert_eq!(statistics.hits + statistics.stalls, 24, "{statistics}");
            if budget >= 8 {
                assert_eq!(statistics.reads, 8, "{budget} weights: {statistics}");
            }
            if prefetch == 0 {
                // The first weights stay and the later ones come and go: what is evicted is used last.
                let again = 8 - (budget.max(1) - 1).min(8);
                let reads = if budget >= 8 { 8 } else { 8 + 2 * again };
                assert!(statistics.reads <= reads, "{budget} weights: {statistics}");
            }
        }
    }
}

#[test]
fn the_next_weights_are_read_ahead() {
    let device = Device::flex();
    let saved = Saved::new(&Tower::new(6, &device));
    let options = all().with_budget(2 * WEIGHT).with_prefetch(1);
    let (lazy, report) = load(Tower::new(6, &device), &saved.safetensors(), &options);
    let mut x = Tensor::<2>::ones([2, WIDTH], &device);
    for _ in 0..3 {
        for (index, layer) in lazy.layers.iter().enumerate() {
            x = layer.forward(x);
            let next = format!("layers.{}.weight", (index + 1) % 6);
            soon("the next weight is not read ahead", || report.cache.cached().contains(&&next[..]));
        }
    }
    let statistics = report.cache.statistics();
    assert_eq!((statistics.hits, statistics.stalls), (17, 1), "{statistics}");
}

#[test]
fn rows_are_read_without_their_table() {
    let device = Device::flex();
    let config = burn_memsave::nn::EmbeddingConfig::new(1000, 64);
    let eager = config.init(&device);
    let saved = Saved::new(&eager);
    let (lazy, report) = load(config.init(&device), &saved.safetensors(), &LazyOptions::new());
    let indices = Tensor::from_ints([[5, 6, 7, 999, 0, 5]], &device);
    assert_eq!(lazy.forward(indices.clone()).into_data(), eager.forward(indices).into_data());
    assert_eq!(report.cache.statistics().bytes_read, 6 * 64 * 4);
    assert_eq!(report.cache.cached_bytes(), 0);
    let beyond = catch_unwind(AssertUnwindSafe(|| lazy.forward(Tensor::from_ints([[1000]], &device))));
    assert!(beyond.is_err());
}

#[test]
fn a_tied_head_reads_blocks() {
    let device = Device::flex();
    let config = burn_memsave::nn::EmbeddingConfig::new(9000, 1024); // 35 MiB: three blocks
    let eager = config.init(&device);
    let saved = Saved::new(&eager);
    let (lazy, report) = load(config.init(&device), &saved.safetensors(), &LazyOptions::new());
    let x = Tensor::<3>::full([1, 2, 1024], 0.1, &device);
    let expected = eager.logits(x.clone()).into_data();
    let stock = x.clone().matmul(eager.weight.val().transpose().unsqueeze()).into_data();
    expected.assert_approx_eq::<f32>(&stock, Tolerance::default());
    lazy.logits(x).into_data().assert_approx_eq::<f32>(&expected, Tolerance::default());
    let statistics = report.cache.statistics();
    assert_eq!((statistics.reads, statistics.bytes_read), (3, 9000 * 1024 * 4), "{statistics}");
    assert_eq!(report.cache.cached_bytes(), 0);

    // In training the blocks are read again.
    let device = device.autodiff();
    let (eager, lazy) = (eager.train().freeze(), lazy.train());
    let x = || Tensor::<3>::full([1, 2, 1024], 0.1, &device).require_grad();
    let (of_eager, of_lazy) = (x(), x());
    let (y, kept) = ledger(&lazy, of_lazy.clone(), |lazy, x| lazy.logits(x));
    let reasons: Vec<_> = kept.rows.iter().map(|row| (row.bytes, row.reason)).collect();
    assert_eq!(reasons, [(Some(0), "read again"); 3], "{kept}");
    let square = |y: Tensor<3>| y.powf_scalar(2.0).sum().backward();
    let (expected, gradients) = (square(eager.logits(of_eager.clone())), square(y));
    let [expected, dx] = [of_eager.grad(&expected), of_lazy.grad(&gradients)].map(Option::unwrap);
    dx.into_data().assert_approx_eq::<f32>(&expected.into_data(), Tolerance::default());
    assert_eq!(report.cache.statistics().reads, 9);
}

/// A head that is not tied, in PyTorch's layout and larger than the budget.
#[test]
fn a_head_beyond_the_budget_is_read_by_blocks() {
    let device = Device::flex().autodiff();
    let (config, bytes) = (LinearConfig::new(1024, 9000), 9000 * 1024 * 4); // 35 MiB: three blocks
    let eager = config.init(&device).freeze();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let mut store = SafetensorsStore::from_file(&path).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store).unwrap();
    let file = open(&path).with_pytorch_adapter();
    let (lazy, report) = load(config.init(&device), &file, &all().with_budget(bytes - 1));
    let lazy = lazy.freeze();
    let x = || Tensor::<3>::full([1, 2, 1024], 0.1, &device).require_grad();
    let (of_eager, of_lazy) = (x(), x());
    let (y, kept) = ledger(&lazy, of_lazy.clone(), Linear::forward);
    let reasons: Vec<_> = kept.rows.iter().map(|row| (row.bytes, row.reason)).collect();
    assert_eq!(reasons, [(Some(0), "read again"); 3], "{kept}");
    let square = |y: Tensor<3>| (y.clone().into_data(), y.powf_scalar(2.0).sum().backward());
    let ((expected, of_square), (found, gradients)) = (square(eager.forward(of_eager.clone())), square(y));
    found.assert_approx_eq::<f32>(&expected, Tolerance::default());
    let [expected, dx] = [of_eager.grad(&of_square), of_lazy.grad(&gradients)].map(Option::unwrap);
    dx.into_data().assert_approx_eq::<f32>(&expected.into_data(), Tolerance::default());
    let statistics = report.cache.statistics();
    assert_eq!((statistics.reads, statistics.bytes_read), (6, 2 * bytes), "{statistics}");
    assert_eq!(report.cache.cached_bytes(), 0);

    // Within the budget it is read once, whole.
    let (lazy, report) = load(config.init(&device), &file, &all().with_budget(bytes));
    for _ in 0..2 {
        lazy.forward(x());
    }
    let statistics = report.cache.statistics();
    assert_eq!((statistics.reads, statistics.bytes_read), (1, bytes), "{statistics}");
}

/// Blocks of a table that is in memory are parts of it, not copies.
#[test]
fn a_tied_head_that_fits_is_read_once() {
    let device = Device::flex();
    let config = burn_memsave::nn::EmbeddingConfig::new(9000, 1024);
    let eager = config.init(&device);
    let saved = Saved::new(&eager);
    let (lazy, report) = load(config.init(&device), &saved.safetensors(), &all().with_budget(1 << 30));
    let x = Tensor::<3>::full([1, 2, 1024], 0.1, &device);
    for _ in 0..2 {
        assert_eq!(lazy.logits(x.clone()).into_data(), eager.logits(x.clone()).into_data());
    }
    let statistics = report.cache.statistics();
    assert_eq!((statistics.reads, statistics.bytes_read), (1, 9000 * 1024 * 4), "{statistics}");
}

#[test]
fn progress_is_told_once_per_parameter() {
    let device = Device::flex();
    let saved = Saved::new(&Tower::new(3, &device));
    let told = Arc::new(Mutex::new(vec![]));
    let tell = told.clone();
    let options = all().with_prefetch(0).with_progress(move |progress| {
        tell.lock().unwrap().push((progress.parameter.to_owned(), progress.parameters, progress.of));
    });
    let (lazy, _) = load(Tower::new(3, &device), &saved.safetensors(), &options);
    lazy.forward(&device);
    lazy.forward(&device);
    let expected = (0..3).map(|index| (format!("layers.{index}.weight"), index + 1, 3)).collect::<Vec<_>>();
    assert_eq!(*told.lock().unwrap(), expected);
}

#[test]
fn a_file_that_shrinks_is_an_error_of_the_tensor() {
    let device = Device::flex();
    let saved = Saved::new(&Tower::new(3, &device));
    let options = all().with_prefetch(1);
    let (lazy, _) = load(Tower::new(3, &device), &saved.safetensors(), &options);
    let path = saved.path("model.safetensors");
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(1000 + WEIGHT).unwrap();
    let result = catch_unwind(AssertUnwindSafe(|| lazy.forward(&device)));
    let message = *result.unwrap_err().downcast::<String>().unwrap();
    assert!(message.contains("model.safetensors") && message.contains("tensor layers."), "{message}");
}

#[test]
fn clones_and_threads_share_the_cache() {
    let device = Device::flex();
    let eager = Tower::new(4, &device);
    let saved = Saved::new(&eager);
    let options = all().with_budget(2 * WEIGHT).with_prefetch(1);
    let (lazy, report) = load(Tower::new(4, &device), &saved.safetensors(), &options);
    let expected = eager.forward(&device);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let lazy = lazy.clone();
            let (expected, device) = (&expected, &device);
            scope.spawn(move || (0..20).for_each(|_| assert!(lazy.forward(device) == *expected)));
        }
    });
    assert!(report.cache.cached_bytes() <= 2 * WEIGHT, "{}", report.cache.statistics());
}

#[derive(Module, Debug)]
struct Rows {
    table: burn_memsave::nn::Embedding,
    layers: Vec<Linear>,
}

/// Sizes that are no whole words, a table before the layers, and more to read ahead than fits.
#[test]
fn the_reading_thread_rests_when_nothing_fits() {
    let device = Device::flex();
    let new = || Rows {
        table: burn_memsave::nn::EmbeddingConfig::new(65, 65).init(&device),
        layers: (0..3).map(|_| LinearConfig::new(65, 65).with_bias(false).init(&device)).collect(),
    };
    let saved = Saved::new(&new());
    let weight = 65 * 65 * 4;
    for budget in
        [0, weight, weight + 8, 2 * weight, 2 * weight + 16, 3 * weight, 4 * weight, 4 * weight + 32]
    {
        for prefetch in [1, 3, 9] {
            let options = all().with_budget(budget).with_prefetch(prefetch);
            let (lazy, report) = load(new(), &saved.safetensors(), &options);
            let forward = || {
                let rows = lazy.table.forward(Tensor::from_ints([[64, 1, 2]], &device));
                lazy.layers.iter().fold(rows, |x, layer| layer.forward(x)).into_data()
            };
            let y = forward();
            assert_eq!(forward(), y);
            std::thread::sleep(Duration::from_millis(20));
            soon("the thread rests", || {
                let reads = report.cache.statistics().reads;
                std::thread::sleep(Duration::from_millis(20));
                report.cache.statistics().reads == reads
            });
            let after = report.cache.statistics();
            assert!(after.reads <= 16, "budget {budget}, {prefetch} ahead: {after}");
            assert!(
                report.cache.cached_bytes() <= budget,
                "budget {budget}: {}",
                report.cache.cached_bytes()
            );
        }
    }
}

/// What the graph of a stock layer holds is in memory once, however often the layer is applied.
#[test]
fn what_somebody_holds_is_not_read_again() {
    let device = Device::flex().autodiff();
    let stock = burn::nn::LinearConfig::new(WIDTH, WIDTH).with_bias(false);
    let saved = Saved::new(&stock.init(&device));
    let (lazy, report) =
        load(stock.init(&device), &saved.safetensors(), &all().with_budget(0).with_prefetch(0));
    let x = Tensor::<2>::ones([1, WIDTH], &device).require_grad();
    let y = (0..5).fold(x, |x, _| lazy.forward(x));
    let statistics = report.cache.statistics();
    assert_eq!((statistics.reads, statistics.hits), (1, 4), "{statistics}");
    assert_eq!(report.cache.cached_bytes(), WEIGHT);
    y.sum().backward();
    assert_eq!(report.cache.cached_bytes(), 0);
}
