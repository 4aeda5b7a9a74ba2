//! Tests the cross entropy of heads that are read block by block.
use crate::{Saved, all, load, open};
use burn::module::{Module, ModuleMapper, Param};
use burn::nn::Initializer;
use burn::tensor::{DType, Device, Int, Tensor, TensorData, Tolerance};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::functional::LinearCrossEntropyOptions;
use burn_memsave::measure::ledger;
use burn_memsave::nn::loss::FusedLinearCrossEntropyConfig;
use burn_memsave::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use std::panic::{AssertUnwindSafe, catch_unwind};

const WIDTH: usize = 512;
/// 35 MiB: three blocks.
const CLASSES: usize = 18_000;
const BYTES: u64 = (WIDTH * CLASSES * 4) as u64;
const ROWS: usize = 6;

/// A head, and the table that is the head.
#[derive(Module, Debug)]
struct Heads {
    head: Linear,
    words: Embedding,
}

impl Heads {
    fn new(device: &Device) -> Self {
        let initializer = Initializer::Normal { mean: 0.0, std: 0.05 };
        Self {
            head: LinearConfig::new(WIDTH, CLASSES).init(device),
            words: EmbeddingConfig::new(CLASSES, WIDTH).with_initializer(initializer).init(device),
        }
    }

    fn loss(&self, tied: bool, x: Tensor<2>, options: LinearCrossEntropyOptions) -> Tensor<1> {
        // One target in every block, the first one and the last one.
        let targets = [0, 9000, CLASSES as i64 - 1, 5, -100, 17_000];
        let targets = Tensor::<1, Int>::from_ints(targets, &x.device());
        match tied {
            true => self.words.cross_entropy(x, targets, options),
            false => self.head.cross_entropy(x, targets, options),
        }
    }
}

/// With the factor 0 in the fifth row.
fn factors(device: &Device) -> Tensor<1> {
    Tensor::from_data(TensorData::from([0.3f32, 0.1, 0.2, 0.25, 0.0, 0.15]), device)
}

fn features(device: &Device) -> Tensor<2> {
    let values = (0..ROWS * WIDTH).map(|at| (at as f32 * 0.7 + (at * at % 17) as f32).sin() * 2.0);
    Tensor::from_data(TensorData::new(values.collect(), [ROWS, WIDTH]), device)
}

/// Rows of features, with ones in the fifth that are not numbers.
fn x(device: &Device, dtype: DType) -> Tensor<2> {
    let x = features(device);
    let nothing = Tensor::full([1, WIDTH], f32::NAN, device);
    x.slice_assign([4..5, 0..WIDTH], nothing).cast(dtype).require_grad()
}

#[test]
fn losses_by_blocks_are_those_of_the_whole_head() {
    let device = Device::flex().autodiff();
    let eager = Heads::new(&device).freeze();
    let saved = Saved::new(&eager);
    let path = saved.path("pytorch.safetensors");
    let mut store = SafetensorsStore::from_file(&path).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        let options = all().with_budget(BYTES / 4).with_prefetch(0).with_dtype(dtype);
        let file = open(&path).with_pytorch_adapter();
        let (lazy, report) = load(Heads::new(&device), &file, &options);
        let lazy = lazy.freeze();
        let bytes = BYTES * dtype.size() as u64 / 4;
        let x = x(&device, dtype);
        for (tied, softcap, chunk_bytes) in [
            (false, None, None),
            (true, None, Some(100_000)),
            (false, Some(2.0), Some(1)),
            (true, Some(0.5), None),
        ] {
            if chunk_bytes == Some(1) && dtype != DType::F32 {
                continue; // slow
            }
            let name = format!("{dtype:?}, tied {tied}, softcap {softcap:?}");
            let options = |chunk_bytes| LinearCrossEntropyOptions {
                factors: Some(factors(&device)),
                softcap,
                chunk_bytes,
                ..Default::default()
            };
            let whole = eager.clone().map(&mut Cast(dtype)).loss(tied, x.clone(), options(None));
            let before = report.cache.statistics();
            let (loss, kept) = ledger(&lazy, x.clone(), |lazy, x| lazy.loss(tied, x, options(chunk_bytes)));
            let statistics = report.cache.statistics();
            assert_eq!(statistics.bytes_read - before.bytes_read, bytes, "{name}: {statistics}");
            let rows: Vec<_> = kept.rows.iter().map(|row| (row.tensor, row.bytes)).collect();
            assert_eq!(rows, [("dx", Some((ROWS * WIDTH * dtype.size()) as u64))], "{name}: {kept}");
            let [expected, found] = [whole, loss].map(|loss| {
                // A gradient of the loss that is not 1.
                let dx = x.grad(&(loss.clone() * 3.0).backward()).expect("x is tracked");
                let value = loss.into_data().convert::<f64>().iter::<f64>().next().unwrap();
                (value, dx.into_data().convert::<f64>().iter::<f64>().collect::<Vec<_>>())
            });
            let rounding = if dtype == DType::F32 { 1e-5 } else { 3e-2 };
            assert!((expected.0 - found.0).abs() <= rounding * expected.0.abs(), "{name}: {found:?}");
            let largest = expected.1.iter().fold(0.0f64, |largest, dx| largest.max(dx.abs()));
            for (at, (expected, found)) in expected.1.iter().zip(&found.1).enumerate() {
                assert!(
                    (expected - found).abs() <= rounding * largest,
                    "{name}: {expected}, {found} at {at}"
                );
                assert!(at / WIDTH != 4 || *found == 0.0, "{name}: {found} in a row that does not count");
            }
            // Without a gradient, the same loss.
            let untracked = lazy.loss(tied, x.clone().detach(), options(chunk_bytes)).into_data();
            let untracked = untracked.convert::<f64>().iter::<f64>().next().unwrap();
            assert!((untracked - found.0).abs() <= rounding * found.0.abs(), "{name}: {untracked}");
        }
    }
}

/// The fused layer reads blocks, too, and counts padding.
#[test]
fn fused_heads_read_blocks() {
    let device = Device::flex().autodiff();
    let eager = LinearConfig::new(WIDTH, CLASSES).init(&device).freeze();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let mut store = SafetensorsStore::from_file(&path).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store).unwrap();
    let file = open(&path).with_pytorch_adapter();
    let options = all().with_budget(BYTES / 4).with_prefetch(0);
    let (lazy, report) = load(LinearConfig::new(WIDTH, CLASSES).init(&device), &file, &options);
    let x = features(&device).reshape([2, 3, WIDTH]).require_grad();
    for pads in [None, Some(vec![7]), Some(vec![7, 11])] {
        let loss = FusedLinearCrossEntropyConfig::new().with_pad_tokens(pads).init(&device);
        let targets = Tensor::<2, Int>::from_ints([[7, 7, 11], [11, 7, 7]], &device);
        let before = report.cache.statistics().bytes_read;
        let [expected, found] = [&eager, &lazy].map(|head| {
            let loss = loss.forward(head, x.clone(), targets.clone());
            let dx = x.grad(&loss.backward()).expect("x is tracked").into_data();
            (loss.into_data(), dx)
        });
        assert_eq!(report.cache.statistics().bytes_read - before, BYTES);
        for (expected, found) in [(expected.0, found.0), (expected.1, found.1)] {
            let numbers = |data: TensorData| data.iter::<f32>().collect::<Vec<_>>();
            let (expected, found) = (numbers(expected), numbers(found));
            let largest = expected.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
            let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-5 * largest || a.is_nan() && b.is_nan();
            assert!(expected.iter().zip(&found).all(close), "{expected:?}, {found:?}");
        }
    }
}

/// A lazy table of these rows.
fn lazy_words<const N: usize>(rows: [[f32; N]; 2], device: &Device) -> (Saved, Embedding) {
    let mut words = EmbeddingConfig::new(2, N).init(device);
    words.weight = words.weight.map(|_| Tensor::from_data(TensorData::from(rows), device));
    let saved = Saved::new(&words);
    let (lazy, _) = load(EmbeddingConfig::new(2, N).init(device), &saved.safetensors(), &all());
    (saved, lazy)
}

/// Equal logits, however large, and logits of minus infinity in columns of their own.
#[test]
fn large_and_infinite_logits() {
    let device = Device::flex();
    let loss = |rows, target: i32| {
        let (_saved, words) = lazy_words(rows, &device);
        let options = LinearCrossEntropyOptions { chunk_bytes: Some(1), ..Default::default() };
        let targets = Tensor::<1, Int>::from_ints([target], &device);
        words.cross_entropy(Tensor::ones([1, 2], &device), targets, options).into_scalar::<f32>()
    };
    for target in [0, 1] {
        assert!((loss([[1e8, 0.0], [1e8, 0.0]], target) - 2f32.ln()).abs() < 1e-6);
    }
    assert_eq!(loss([[f32::NEG_INFINITY, 0.0], [3.0, 0.0]], 1), 0.0);
    assert_eq!(loss([[f32::NEG_INFINITY, 0.0], [3.0, 0.0]], 0), f32::INFINITY);
    assert_eq!(loss([[3.0, 0.0], [f32::NEG_INFINITY, 0.0]], 0), 0.0);
}

/// In a segment, and with Burn's own recomputation, the loss is computed again from what is recomputed.
#[test]
fn losses_by_blocks_are_recomputed() {
    for device in [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()] {
        let rows = [[0.3, -0.2, 0.5], [-0.4, 0.1, 0.2]];
        let (_saved, words) = lazy_words(rows, &device);
        let x = || {
            let x = [[0.5, 1.0, -1.0], [0.2, 0.1, 2.0], [-0.3, 0.4, 0.0]];
            Tensor::<2>::from_data(TensorData::from(x), &device).require_grad()
        };
        let loss = |words: &Embedding, x: Tensor<2>| {
            let targets = Tensor::<1, Int>::from_ints([1, 0, 1], &x.device());
            words.cross_entropy(x.exp(), targets, LinearCrossEntropyOptions::default())
        };
        let [kept, recomputed] = [x(), x()];
        let dx = |x: &Tensor<2>, loss: Tensor<1>| {
            let value = loss.to_data();
            (value, x.grad(&(loss * 2.0).backward()).expect("x is tracked").into_data())
        };
        let expected = dx(&kept, loss(&words, kept.clone()));
        let found = dx(&recomputed, checkpoint(&words, recomputed.clone(), loss));
        assert_eq!(found, expected);
        // The definition.
        let plain = Tensor::<2>::from_data(TensorData::from(rows), &device);
        let x = x();
        let logits = x.clone().exp().matmul(plain.transpose());
        let targets = Tensor::<2, Int>::from_ints([[1], [0], [1]], &device);
        let loss = -burn::tensor::activation::log_softmax(logits, 1).gather(1, targets).mean();
        let (value, gradient) = dx(&x, loss);
        found.0.assert_approx_eq::<f32>(&value, Tolerance::default());
        found.1.assert_approx_eq::<f32>(&gradient, Tolerance::default());
    }
}

#[test]
fn a_target_must_be_a_class() {
    let device = Device::flex();
    let words = EmbeddingConfig::new(10, 4).init(&device);
    let saved = Saved::new(&words);
    let (lazy, _) = load(EmbeddingConfig::new(10, 4).init(&device), &saved.safetensors(), &all());
    for target in [-1, 10] {
        let loss = AssertUnwindSafe(|| {
            let targets = Tensor::<1, Int>::from_ints([3, target], &device);
            lazy.cross_entropy(Tensor::ones([2, 4], &device), targets, Default::default())
        });
        let message = *catch_unwind(loss).unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains(&format!("the target {target} is none of the 10 classes")), "{message}");
    }
}

/// Casts all parameters.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.cast(self.0).set_require_grad(false))
    }
}
