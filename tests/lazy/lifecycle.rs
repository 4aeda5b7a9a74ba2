//! Tests what happens to lazy weights when a module is cloned, moved, materialized, saved and loaded.
use crate::{Saved, all, cast, devices, load, open};
use burn::module::{Lora, Module, Quantizer};
use burn::nn::LinearLayout;
use burn::store::ModuleRecord;
use burn::tensor::quantization::{Calibration, QuantScheme};
use burn::tensor::{DType, Device, Tensor};
use burn_memsave::frozen::LazyWeight;
use burn_memsave::lazy::{PrepareOptions, PrepareSource, prepare};
use burn_memsave::measure::ledger;
use burn_memsave::nn::{Linear, LinearConfig};

/// Layers that record their weights as they are, and transposed.
fn configs() -> [LinearConfig; 3] {
    let transposed = |d_input, d_output| LinearConfig::new(d_input, d_output).with_layout(LinearLayout::Col);
    [LinearConfig::new(6, 4), transposed(6, 4), transposed(5, 5)]
}

fn saved_again(linear: Linear, config: &LinearConfig) -> Linear {
    let record = linear.into_record().into_bytes().unwrap();
    config.init(&Device::flex()).load_record(ModuleRecord::from_bytes(record).unwrap())
}

#[test]
fn a_weight_is_saved_as_its_layer_records_it() {
    for device in devices() {
        for config in configs() {
            let eager = config.init(&device);
            let saved = Saved::new(&eager);
            let weight = |linear: &Linear| linear.weight.val().into_data();
            let expected = weight(&eager);
            let (lazy, _) = load(config.init(&device), &saved.safetensors(), &all());
            assert_eq!(weight(&saved_again(lazy.clone(), &config)), expected, "lazy");
            prepare(PrepareSource::of_module(&lazy), saved.path("streamed.bpk"), &PrepareOptions::new())
                .unwrap();
            let streamed = config.init(&device).load_file(saved.path("streamed.bpk"));
            assert_eq!(weight(&streamed), expected, "streamed");
            assert_eq!(weight(&saved_again(lazy.clone().materialize(), &config)), expected, "materialized");
            let other = config.init(&device);
            // (Burn does not load a transposed weight into a layer that was used before.)
            let (lazy, _) = load(config.init(&device), &saved.safetensors(), &all());
            let replaced = lazy.load_record(other.clone().into_record());
            assert_eq!(weight(&saved_again(replaced, &config)), weight(&other), "replaced");
        }
    }
}

#[test]
fn what_was_materialized_is_no_longer_the_file() {
    let device = Device::flex();
    let config = LinearConfig::new(32, 32);
    let saved = Saved::new(&config.init(&device));
    let (lazy, _) = load(config.init(&device), &saved.safetensors(), &all());
    let mut diverged = lazy.clone().materialize();
    diverged.weight = diverged.weight.map(|weight| weight * f32::NAN);
    let weight = saved_again(diverged, &config).weight.val().into_data();
    assert!(weight.iter::<f32>().all(f32::is_nan));

    let calibration = Calibration::MinMax;
    let packed =
        lazy.materialize().quantize_weights(&mut Quantizer::new(calibration, QuantScheme::default()));
    assert!(!packed.weight.base().dtype().is_float());
    assert_eq!(packed.into_record().len(), 2);
}

/// A placeholder that was cast is not taken for a weight.
#[test]
fn what_was_cast_is_saved_from_the_file() {
    let all_floats = [DType::F16, DType::BF16, DType::F32, DType::F64];
    // NdArray, the second, has no half precision.
    for (device, dtypes) in devices().into_iter().zip([&all_floats[..], &all_floats[2..]]) {
        let config = LinearConfig::new(6, 4);
        let saved = Saved::new(&cast(config.init(&device), DType::F64));
        for &dtype in dtypes {
            for &other in dtypes {
                let (lazy, _) = load(config.init(&device), &saved.safetensors(), &all().with_dtype(dtype));
                let expected = lazy.weight.val().into_data();
                let source = PrepareSource::of_module(&cast(lazy, other));
                prepare(source, saved.path("cast.bpk"), &PrepareOptions::new()).unwrap();
                let (again, _) = load(config.init(&device), &open(&saved.path("cast.bpk")), &all());
                assert_eq!(again.weight.val().into_data(), expected, "{dtype:?} as {other:?}");
            }
        }
    }
}

#[test]
fn clones_of_a_module_stay_as_they_are() {
    let device = Device::flex().autodiff();
    let config = LinearConfig::new(4, 4);
    let saved = Saved::new(&config.init(&device));
    let student = config.init(&device);
    let (teacher, _) = load(student.clone(), &saved.safetensors(), &all());
    let x = Tensor::<2>::ones([1, 4], &device);
    let gradients = (student.forward(x.clone()) + teacher.forward(x)).sum().backward();
    assert!(student.weight.grad(&gradients).is_some());
    assert!(teacher.weight.grad(&gradients).is_none());
}

fn has_adapter(linear: &Linear) -> bool {
    linear.weight.reparameterization::<LazyWeight>().is_some_and(|lazy| lazy.adapter().is_some())
}

#[test]
fn adapters_are_attached_wherever_a_module_was_moved() {
    for device in devices() {
        let config = LinearConfig::new(4, 4);
        let saved = Saved::new(&config.init(&device));
        let lazy = |device: &Device| load(config.init(device), &saved.safetensors(), &all()).0;
        let autodiff = device.clone().autodiff();
        let moved = [
            lazy(&device),
            lazy(&autodiff).to_device(&device),
            lazy(&autodiff).fork(&device),
            lazy(&device).to_device(&autodiff),
            lazy(&device).train(),
            lazy(&autodiff).valid(),
        ];
        for (which, moved) in moved.into_iter().enumerate() {
            let of = moved.weight.lazy_device();
            let adapted = moved.apply_lora(Lora::new(2, 4.0));
            assert!(has_adapter(&adapted), "{which} on {device:?}");
            let y = adapted.forward(Tensor::<2>::ones([1, 4], &of));
            assert_eq!(y.dims(), [1, 4]);
        }
    }
}

#[test]
fn records_are_loaded_into_lazy_modules() {
    for device in devices().into_iter().flat_map(|device| [device.clone(), device.autodiff()]) {
        for config in configs() {
            let eager = config.init(&device);
            let saved = Saved::new(&eager);
            let (lazy, _) = load(config.init(&device), &saved.safetensors(), &all());
            let other = config.init(&device);
            let loaded = lazy.clone().try_load_record(other.clone().into_record()).unwrap();
            let x = Tensor::<2>::ones([1, config.d_input], &device);
            assert_eq!(loaded.forward(x.clone()).into_data(), other.forward(x.clone()).into_data());
            // An adapter goes to what is lazy still.
            assert!(has_adapter(&lazy.apply_lora(Lora::new(2, 4.0))));

            // Materialized, and lazy again.
            let again = || load(loaded.clone().materialize(), &saved.safetensors(), &all().with_budget(0));
            assert!(has_adapter(&again().0.apply_lora(Lora::new(2, 4.0))));
            // (Burn does not load a transposed weight into a layer that was used before, but a square one.)
            if config.d_input == config.d_output {
                let loaded = again().0.try_load_record(other.clone().into_record()).unwrap();
                assert_eq!(loaded.forward(x.clone()).into_data(), other.forward(x.clone()).into_data());
            }
            let (lazy, report) = again();
            assert_eq!(lazy.forward(x.clone()).into_data(), eager.forward(x.clone()).into_data());
            if device.is_autodiff() && matches!(config.layout, LinearLayout::Row) {
                let (_y, kept) = ledger(&lazy, x.require_grad(), |lazy, x| lazy.forward(x));
                assert!(kept.rows.iter().all(|row| row.bytes == Some(0)), "{kept}");
                assert!(report.cache.held().is_empty());
            }
        }
    }
}
