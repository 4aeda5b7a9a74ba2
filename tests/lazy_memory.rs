//! Memory of lazy weights and of preparing files, byte by byte, and what is left of a preparation that is killed.
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor, TensorData, Tolerance};
use burn_memsave::functional::LinearCrossEntropyOptions;
use burn_memsave::lazy::{
    LazyLoad, LazyOptions, PrepareOptions, PrepareSource, ReadMode, WeightFile, prepare,
};
use burn_memsave::measure::{Scope, TrackingAllocator};
use burn_memsave::nn::{EmbeddingConfig, Linear, LinearConfig};
use burn_store::{BurnToPyTorchAdapter, ModuleSnapshot, SafetensorsStore};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// The allocator counts for the whole process.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const WIDTH: usize = 512;
const LAYERS: usize = 12;
/// Bytes of a weight: a mebibyte.
const WEIGHT: u64 = (WIDTH * WIDTH * 4) as u64;
/// The headers, the paths and the table of what is loaded.
const SMALL: u64 = 256 << 10;

#[derive(Module, Debug)]
struct Tower {
    layers: Vec<Linear>,
}

impl Tower {
    fn new() -> Self {
        let layer = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
        Self { layers: (0..LAYERS).map(|_| layer.init(&Device::flex())).collect() }
    }

    fn forward(&self) -> TensorData {
        let x = Tensor::<2>::ones([1, WIDTH], &Device::flex());
        self.layers.iter().fold(x, |x, layer| layer.forward(x)).into_data()
    }
}

/// A file of weights, written from memory that is free again.
fn write(path: &Path) -> TensorData {
    let eager = Tower::new();
    let y = eager.forward();
    eager.save_file(path).expect("a burnpack");
    y
}

#[test]
fn a_lazy_model_takes_its_budget() {
    let _one = ONE_AT_A_TIME.lock();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.bpk");
    let expected = write(&path);
    for (mode, budget, prefetch) in
        [(ReadMode::Copy, 1, 0), (ReadMode::Copy, 2, 1), (ReadMode::Copy, 4, 2), (ReadMode::Map, 1, 0)]
    {
        let building = Scope::start();
        let file = match mode {
            ReadMode::Copy => WeightFile::open(&path),
            // SAFETY: nobody writes to a file in the directory of this test.
            ReadMode::Map => unsafe { WeightFile::open_mapped(&path) },
        };
        let file = file.unwrap();
        let options = LazyOptions::new().with_budget(budget * WEIGHT).with_prefetch(prefetch);
        let (lazy, report) = Tower::new().lazy_load(&file, &options).unwrap();
        assert!(building.peak() < SMALL, "{mode:?}, building: {} bytes", building.peak());
        let running = Scope::start();
        for _ in 0..3 {
            assert!(lazy.forward() == expected);
        }
        // Products of one row, and what Burn packs for them.
        let most = if mode == ReadMode::Map { 0 } else { budget * WEIGHT } + SMALL;
        assert!(
            running.peak() <= most,
            "{mode:?}, {budget} weights: {} bytes; {}",
            running.peak(),
            report.cache.statistics()
        );
    }
}

/// A head in PyTorch's layout beyond the budget takes a block of 16 MiB, and a tied head within it takes itself.
#[test]
fn large_heads_take_a_block_or_themselves() {
    const OUTPUTS: usize = 20_000;
    const HEAD: u64 = (OUTPUTS * WIDTH * 4) as u64; // 39 MiB
    let _one = ONE_AT_A_TIME.lock();
    let directory = tempfile::tempdir().unwrap();
    let paths = ["head.safetensors", "table.bpk"].map(|name| directory.path().join(name));
    let device = Device::flex();
    let (head, table) = (LinearConfig::new(WIDTH, OUTPUTS), EmbeddingConfig::new(OUTPUTS, WIDTH));
    let mut store = SafetensorsStore::from_file(&paths[0]).with_to_adapter(BurnToPyTorchAdapter);
    head.init(&device).save_into(&mut store).unwrap();
    table.init(&device).save_file(&paths[1]).unwrap();
    drop(store);
    let x = Tensor::<2>::ones([1, WIDTH], &device);
    let [of_head, of_table] = paths.map(|path| WeightFile::open(path).unwrap());
    let options = |budget| LazyOptions::new().with_budget(budget).with_prefetch(0);
    let (head, _) = head.init(&device).lazy_load(&of_head.with_pytorch_adapter(), &options(WEIGHT)).unwrap();
    let (table, _) = table.init(&device).lazy_load(&of_table, &options(HEAD)).unwrap();
    let scope = Scope::start();
    drop(head.forward(x.clone()).into_data());
    assert!(scope.peak() <= (16 << 20) + 2 * SMALL, "a head: {} bytes", scope.peak());
    let scope = Scope::start();
    drop(table.logits(x).into_data());
    assert!(scope.peak() <= HEAD + 2 * SMALL, "a table: {} bytes", scope.peak());
    // A loss and its gradient: a block, and 1 MiB of logits with what is computed from them, up to six times.
    let x = Tensor::<2>::ones([1, WIDTH], &device.clone().autodiff()).require_grad();
    let options = LinearCrossEntropyOptions { chunk_bytes: Some(1 << 20), ..Default::default() };
    let targets = Tensor::<1, Int>::from_ints([5], &device);
    let scope = Scope::start();
    let loss = head.cross_entropy(x.clone(), targets, options);
    drop(x.grad(&loss.backward()));
    assert!(scope.peak() <= (16 << 20) + 4 * SMALL, "a loss: {} bytes", scope.peak());
}

#[test]
fn preparing_takes_one_tensor() {
    let _one = ONE_AT_A_TIME.lock();
    let directory = tempfile::tempdir().unwrap();
    let [source, destination] = ["source.bpk", "destination.bpk"].map(|name| directory.path().join(name));
    write(&source);
    let options = PrepareOptions::new();
    for (name, options, bytes) in [
        ("as it is", options.clone(), WEIGHT),
        ("bf16", options.clone().with_dtype(DType::BF16), WEIGHT / 2),
        ("int8", options.with_approximate_int8(), WEIGHT / 4 + WEIGHT / 32 + (4 << 20)),
    ] {
        let file = WeightFile::open(&source).unwrap();
        let scope = Scope::start();
        prepare(&file, &destination, &options).unwrap();
        assert!(scope.peak() <= bytes + SMALL, "{name}: {} bytes", scope.peak());
    }
}

#[test]
fn saving_a_lazy_model_takes_its_budget_and_one_tensor() {
    let _one = ONE_AT_A_TIME.lock();
    let directory = tempfile::tempdir().unwrap();
    let [source, saved] = ["source.bpk", "saved.bpk"].map(|name| directory.path().join(name));
    let expected = write(&source);
    let options = PrepareOptions::new();
    for (name, budget, options, bytes) in [
        ("as it is", 0, options.clone(), WEIGHT),
        ("beside a cache", 2, options.clone(), 2 * WEIGHT),
        ("bf16", 0, options.with_dtype(DType::BF16), WEIGHT + WEIGHT / 2),
    ] {
        let lazy = LazyOptions::new().with_budget(budget * WEIGHT).with_prefetch(0);
        let (lazy, _) = Tower::new().lazy_load(&WeightFile::open(&source).unwrap(), &lazy).unwrap();
        let scope = Scope::start();
        prepare(PrepareSource::of_module(&lazy), &saved, &options).unwrap();
        assert!(scope.peak() <= bytes + SMALL, "{name}: {} bytes", scope.peak());
        if name != "bf16" {
            assert!(Tower::new().load_file(&saved).forward() == expected, "{name}");
        }
    }
}

/// Weights in PyTorch's layout are used as they are read: nothing is transposed beside the cache.
#[test]
fn weights_of_pytorch_take_their_budget() {
    let _one = ONE_AT_A_TIME.lock();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let eager = Tower::new();
    let expected = eager.forward();
    let mut store = SafetensorsStore::from_file(&path).with_to_adapter(BurnToPyTorchAdapter);
    eager.save_into(&mut store).unwrap();
    drop((eager, store));
    for (mode, budget) in [(ReadMode::Copy, 1), (ReadMode::Copy, 4), (ReadMode::Copy, 12), (ReadMode::Map, 1)]
    {
        let file = match mode {
            ReadMode::Copy => WeightFile::open(&path),
            // SAFETY: nobody writes to a file in the directory of this test.
            ReadMode::Map => unsafe { WeightFile::open_mapped(&path) },
        };
        let options = LazyOptions::new().with_budget(budget * WEIGHT).with_prefetch(1);
        let (lazy, _) = Tower::new().lazy_load(&file.unwrap().with_pytorch_adapter(), &options).unwrap();
        let running = Scope::start();
        for _ in 0..3 {
            lazy.forward().assert_approx_eq::<f32>(&expected, Tolerance::default());
        }
        let most = if mode == ReadMode::Map { 0 } else { budget * WEIGHT } + SMALL;
        assert!(running.peak() <= most, "{mode:?}, {budget} weights: {} bytes", running.peak());

        // In the order of Burn, for a file: beside the cache, one weight.
        let scope = Scope::start();
        prepare(PrepareSource::of_module(&lazy), directory.path().join("saved.bpk"), &PrepareOptions::new())
            .unwrap();
        assert!(scope.peak() <= WEIGHT + 2 * SMALL, "{mode:?}, preparing: {} bytes", scope.peak());
    }
}

/// An adapter changes a linear weight, which is read as a whole then, and leaves a table alone, of which rows are read.
#[test]
fn what_an_adapter_leaves_alone_is_read_by_rows() {
    let _one = ONE_AT_A_TIME.lock();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.bpk");
    let config = EmbeddingConfig::new(WIDTH, WIDTH);
    config.init(&Device::flex()).save_file(&path).unwrap();
    let file = WeightFile::open(&path).unwrap().with_pytorch_adapter();
    let options = LazyOptions::new().with_budget(0);
    let (lazy, _) = config.init(&Device::flex()).lazy_load(&file, &options).unwrap();
    let scope = Scope::start();
    let rows = lazy.forward(Tensor::from_ints([[1, 2, 511]], &Device::flex()));
    assert_eq!(rows.dims(), [1, 3, WIDTH]);
    assert!(scope.peak() < SMALL, "{} bytes", scope.peak());
}

/// In the environment of the process that is killed: where it prepares.
const DIRECTORY: &str = "BURN_MEMSAVE_PREPARE";

fn prepare_until_killed(directory: &Path) -> ! {
    loop {
        let file = WeightFile::open(directory.join("source.bpk")).unwrap();
        prepare(&file, directory.join("destination.bpk"), &PrepareOptions::new()).unwrap();
    }
}

#[test]
fn a_killed_preparation_leaves_nothing_or_a_whole_file() {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        prepare_until_killed(directory.as_ref());
    }
    let _one = ONE_AT_A_TIME.lock();
    let directory = tempfile::tempdir().unwrap();
    let [source, destination] = ["source.bpk", "destination.bpk"].map(|name| directory.path().join(name));
    let expected = write(&source);
    let mut whole = 0;
    for attempt in 0..20u64 {
        let _ = std::fs::remove_file(&destination);
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_killed_preparation_leaves_nothing_or_a_whole_file"])
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(5 + attempt * 13 % 90));
        child.kill().unwrap(); // SIGKILL
        child.wait().unwrap();
        if destination.exists() {
            whole += 1;
            let file = WeightFile::open(&destination).unwrap();
            let (lazy, _) = Tower::new().lazy_load(&file, &LazyOptions::new()).unwrap();
            assert!(lazy.forward() == expected, "attempt {attempt}");
        }
    }
    println!("{whole} of 20 were whole");
}
