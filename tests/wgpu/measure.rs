//! What users measure in their own tests and benches, on a device.
use crate::{alone, gpu, same_bytes, tensor, values};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn_memsave::functional as F;
use burn_memsave::measure::criterion::{BenchBytes, KeptBytes, PeakBytes};
use burn_memsave::measure::{Gate, GateError, GateFault, measure_step};
use criterion::Criterion;
use std::path::Path;
use std::time::Duration;

const ROWS: usize = 1024;
const FEATURES: usize = 64;

/// A gate passes what it recorded, and names the layer that keeps more.
#[test]
fn a_gate_compares_the_bytes_of_a_device() {
    let _alone = alone();
    let device = gpu().autodiff();
    let model = LinearConfig::new(FEATURES, FEATURES).init(&device);
    let run = |path: &Path, bless: bool, loss: fn(&Linear, Tensor<2>) -> Tensor<1>| {
        let mut gate = Gate::open(path).expect("a good file").with_bless(bless);
        gate.step("a model", &model, tensor(values([ROWS, FEATURES], 1), &device), loss);
        gate.finish()
    };
    let relu = |model: &Linear, x| F::relu(F::linear(x, model.weight.val(), None)).sum();
    let silu = |model: &Linear, x| F::silu(F::linear(x, model.weight.val(), None)).sum();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("memory.csv");
    run(&path, true, relu).unwrap();
    let record = std::fs::read_to_string(&path).unwrap();
    assert!(record.contains(&format!(",relu,relu,{},", ROWS * FEATURES / 8)), "{record}");
    run(&path, false, relu).unwrap();
    let Err(GateError::Faults { faults, .. }) = run(&path, false, silu) else {
        panic!("silu keeps its input")
    };
    let [GateFault::Grown { measured, layers, .. }] = &faults[..] else { panic!("{faults:?}") };
    let kept = (ROWS * FEATURES * 4) as u64;
    assert_eq!(measured.listed, 2 * kept);
    assert!(layers.iter().any(|layer| layer.operation == "silu" && layer.measured == kept), "{layers:?}");
}

/// Criterion's mean is what is measured once.
#[test]
fn criterion_measures_the_bytes_of_a_device() {
    let _alone = alone();
    let device = gpu().autodiff();
    let model = LinearConfig::new(FEATURES, 32).init(&device);
    let x = tensor(values([ROWS, FEATURES], 1), &device);
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).powf_scalar(2.0).mean();
    let directory = tempfile::tempdir().unwrap();
    let short = Duration::from_millis(20);
    let criterion =
        || Criterion::default().sample_size(10).warm_up_time(short).measurement_time(short).without_plots();
    measure_step(&model, x.clone(), loss); // compiles the kernels
    let step = measure_step(&model, x.clone(), loss);
    let mean = |at: &str| {
        let estimates = std::fs::read(directory.path().join(at).join("new/estimates.json")).unwrap();
        let estimates: serde_json::Value = serde_json::from_slice(&estimates).unwrap();
        estimates["mean"]["point_estimate"].as_f64().expect("a number").round() as u64
    };
    criterion()
        .with_measurement(KeptBytes)
        .output_directory(directory.path())
        .bench_function("kept", |bencher| bencher.iter_step(&model, x.clone(), loss));
    criterion()
        .with_measurement(PeakBytes)
        .output_directory(directory.path())
        .bench_function("peak", |bencher| bencher.iter_step(&model, x.clone(), loss));
    for (at, measured) in [("kept", step.kept), ("peak", step.peak)] {
        let measured = measured.expect("the pool counts");
        assert!(same_bytes(mean(at), measured), "{at}: {} bytes, {measured} measured", mean(at));
    }
}
