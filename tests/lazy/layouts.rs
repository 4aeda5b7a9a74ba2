//! Tests weights in PyTorch's layout, which layers use as transposed views: in files of all kinds, dtypes and read modes, with adapters and
//! without, in both passes.
use crate::archives::{self, View};
use crate::{all, cast, devices, load, open, open_mapped};
use burn::module::{Lora, Module};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, Distribution, Tensor, TensorData, Tolerance};
use burn_memsave::frozen::LazyWeight;
use burn_memsave::lazy::{PrepareOptions, PrepareSource, WeightFile, prepare};
use burn_memsave::nn::{Linear, LinearConfig};
use burn_store::{
    BurnToPyTorchAdapter, FloatCastAdapter, ModuleAdapter, ModuleSnapshot, PyTorchToBurnAdapter,
    SafetensorsStore,
};
use proptest::prelude::*;
use std::path::{Path, PathBuf};

/// Writes a linear layer as PyTorch does: as safetensors, and as an archive.
fn write(linear: &Linear, directory: &Path) -> [PathBuf; 2] {
    let paths = ["linear.safetensors", "linear.pt"].map(|name| directory.join(name));
    let mut store = SafetensorsStore::from_file(&paths[0]).with_to_adapter(BurnToPyTorchAdapter);
    linear.save_into(&mut store).unwrap();
    let [inputs, outputs] = linear.weight.dims();
    let (weight, bias) = (linear.weight.val().transpose(), linear.bias.as_ref().unwrap().val());
    archives::write(
        &paths[1],
        &[View::whole("weight", 0, &[outputs, inputs]), View::whole("bias", 1, &[outputs])],
        &[archives::storage(weight), archives::storage(bias)],
    );
    paths
}

/// The output of a layer, the gradient of its input, and that of its adapter's second factor.
fn run(linear: &Linear, x: &Tensor<3>) -> (TensorData, TensorData, Option<TensorData>) {
    let x = x.clone().require_grad();
    let y = linear.forward(x.clone());
    let output = y.clone().into_data();
    let gradients = y.powi_scalar(2).sum().backward();
    let adapter = match linear.weight.reparameterization::<LazyWeight>() {
        Some(lazy) => lazy.adapter(),
        None => linear.weight.adapter(),
    };
    let b = adapter.map(|adapter| adapter.b.grad(&gradients).expect("trained").into_data());
    (output, x.grad(&gradients).expect("tracked").into_data(), b)
}

/// The adapter of one layer on another.
fn with_adapter(linear: Linear, of: &Linear) -> Linear {
    let record = of.clone().into_record_group(burn::module::ParamGroup::from_regex("lora").unwrap());
    let record = ModuleRecord::from_bytes(record.into_bytes().unwrap()).unwrap();
    linear.load_record(record.allow_partial(true))
}

fn close(found: &TensorData, expected: &TensorData, dtype: DType) {
    assert_eq!(found.dtype(), expected.dtype());
    let tolerance = match dtype {
        DType::BF16 => Tolerance::rel_abs(5e-2, 5e-2),
        DType::F16 => Tolerance::rel_abs(1e-2, 1e-2),
        _ => Tolerance::rel_abs(1e-4, 1e-5),
    };
    let [found, expected] = [found, expected].map(|data| data.clone().convert_dtype(DType::F32));
    found.assert_approx_eq::<f32>(&expected, tolerance);
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn transposed_weights_are_those_of_the_file(
        (inputs, outputs, rows) in (1usize..70, 1usize..70, 1usize..40),
        stored in prop::sample::select(vec![DType::F32, DType::F64, DType::F16, DType::BF16]),
        wanted in prop::sample::select(vec![None, Some(DType::F32), Some(DType::F64)]),
        (archive, mapped, adapted, fits) in any::<(bool, bool, bool, bool)>(),
    ) {
        let dtype = wanted.unwrap_or(stored);
        for device in devices() {
            if device != Device::flex() && !matches!((stored, dtype), (DType::F32 | DType::F64, DType::F32 | DType::F64)) {
                continue; // NdArray has no half precision
            }
            let device = device.autodiff();
            let layer = LinearConfig::new(inputs, outputs);
            let eager = cast(layer.init(&device), stored).freeze();
            let directory = tempfile::tempdir().unwrap();
            let path = &write(&eager, directory.path())[usize::from(archive)];
            let file = if mapped { open_mapped(path) } else { open(path) };
            let options = all().with_budget(if fits { 1 << 30 } else { 0 });
            let options = wanted.into_iter().fold(options, |options, dtype| options.with_dtype(dtype));
            let (lazy, report) = load(layer.init(&device), &file.with_pytorch_adapter(), &options);
            if inputs * outputs == 1 {
                continue; // not lazy
            }
            prop_assert_eq!(report.lazy[0].mapped, mapped && dtype == stored);
            let (mut eager, mut lazy) = (cast(eager, dtype).freeze(), lazy.freeze());
            // The same elements.
            prop_assert_eq!(lazy.weight.val().into_data(), eager.weight.val().into_data());
            if adapted {
                eager = eager.apply_lora(Lora::new(2, 4.0));
                lazy = with_adapter(lazy.apply_lora(Lora::new(2, 4.0)), &eager);
            }
            let x = Tensor::random([2, rows, inputs], Distribution::Default, (&device, dtype));
            for _ in 0..2 {
                let ((y, dx, db), (lazy_y, lazy_dx, lazy_db)) = (run(&eager, &x), run(&lazy, &x));
                close(&lazy_y, &y, dtype);
                close(&lazy_dx, &dx, dtype);
                if let (Some(db), Some(lazy_db)) = (db, lazy_db) {
                    close(&lazy_db, &db, dtype);
                }
            }
            prop_assert!(report.cache.held().is_empty());
        }
    }
}

/// In Burn's layout: a record, a prepared file, a materialized module, and parameters that are not lazy.
#[test]
fn what_is_written_has_the_layout_of_burn() {
    let device = Device::flex();
    // More rows than are transposed at a time.
    let layer = LinearConfig::new(130, 600);
    for dtype in [DType::F32, DType::F16, DType::F64] {
        let eager = cast(layer.init(&device), dtype);
        let directory = tempfile::tempdir().unwrap();
        let expected = eager.weight.val().into_data();
        for path in write(&eager, directory.path()) {
            let file = open(&path).with_pytorch_adapter();
            let (lazy, report) = load(layer.init(&device), &file, &all().with_budget(0));
            assert_eq!((report.lazy[0].shape[..].to_vec(), report.lazy[0].stored), (vec![130, 600], dtype));
            let weight = lazy.weight.reparameterization::<LazyWeight>().unwrap().weight().clone();
            assert_eq!(weight.read(), expected);
            let transposed = weight.read_transposed().unwrap();
            assert_eq!(transposed, eager.weight.val().transpose().into_data());
            let rows = weight.read_rows(&[129, 0, 0]);
            assert_eq!(rows.shape()[..], [3, 600]);
            assert_eq!(
                rows,
                eager.weight.val().select(0, Tensor::from_ints([129, 0, 0], &device)).into_data()
            );

            let record = ModuleRecord::from_bytes(lazy.clone().into_record().into_bytes().unwrap()).unwrap();
            assert_eq!(layer.init(&device).load_record(record).weight.val().into_data(), expected);
            assert_eq!(lazy.clone().materialize().weight.val().into_data(), expected);
            let (resident, _) = load(layer.init(&device), &file, &all().exclude("*"));
            assert_eq!(resident.weight.val().into_data(), expected);

            let prepared = directory.path().join("prepared.bpk");
            for source in [
                PrepareSource::of_module(&lazy),
                PrepareSource::for_module(&file, &layer.init(&device)).unwrap(),
            ] {
                prepare(source, &prepared, &PrepareOptions::new()).unwrap();
                let (lazy, _) = load(layer.init(&device), &open(&prepared), &all());
                let weight = lazy.weight.reparameterization::<LazyWeight>().unwrap().weight().clone();
                assert!(weight.read_transposed().is_none());
                assert_eq!(weight.read(), expected);
            }
        }
    }
}

/// The blocks of eight bits are those of the rows that Burn's layout has. A file that has them in PyTorch's layout is transposed when it
/// is read.
#[test]
fn eight_bits_in_either_layout() {
    let device = Device::flex();
    let layer = LinearConfig::new(64, 96);
    let eager = layer.init(&device);
    let directory = tempfile::tempdir().unwrap();
    let [path, _] = write(&eager, directory.path());
    let prepared = directory.path().join("prepared.bpk");
    let int8 = PrepareOptions::new().with_approximate_int8();
    let file = open(&path).with_pytorch_adapter();
    let module = layer.init(&device);
    prepare(PrepareSource::for_module(&file, &module).unwrap(), &prepared, &int8).unwrap();
    let in_burns = open(&prepared);
    prepare(open(&path), directory.path().join("again.bpk"), &int8).unwrap();
    let in_pytorchs = open(&directory.path().join("again.bpk")).with_pytorch_adapter();
    for file in [in_burns, in_pytorchs] {
        let (lazy, report) = load(layer.init(&device), &file, &all());
        assert_eq!(report.lazy[0].dtype, DType::F32);
        let (found, expected) = (lazy.weight.val().into_data(), eager.weight.val().into_data());
        found.assert_approx_eq::<f32>(&expected, Tolerance::absolute(2e-3));
    }
}

/// The same adapter by another way of attaching it, and one that only looks the same.
#[test]
fn only_burns_adapter_makes_views() {
    let device = Device::flex();
    let layer = LinearConfig::new(5, 5);
    let eager = layer.init(&device);
    let directory = tempfile::tempdir().unwrap();
    let [path, _] = write(&eager, directory.path());
    let is_view = |file: WeightFile| {
        let (lazy, _) = load(layer.init(&device), &file, &all());
        assert_eq!(lazy.weight.val().into_data(), eager.weight.val().into_data());
        lazy.weight.reparameterization::<LazyWeight>().unwrap().weight().read_transposed().is_some()
    };
    assert!(is_view(open(&path).with_adapter(PyTorchToBurnAdapter)));

    let chained = PyTorchToBurnAdapter.chain(FloatCastAdapter::to(DType::F32));
    assert!(!is_view(open(&path).with_adapter(chained)));
}
