//! Criterion measures the bytes that `measure` does.
use crate::{alone, cpu_devices, settled};
use burn::nn;
use burn::tensor::{Tensor, activation};
use burn_memsave::measure::criterion::{BenchBytes, KeptBytes, PeakBytes};
use burn_memsave::measure::{measure_layer, measure_step};
use criterion::measurement::Measurement;
use criterion::{Bencher, Criterion, Throughput};
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

/// Runs a bench, and reads the mean that it leaves.
fn mean<M: Measurement + 'static>(
    measurement: M,
    directory: &Path,
    bench: impl FnMut(&mut Bencher<'_, M>),
) -> f64 {
    let short = Duration::from_millis(20);
    let mut criterion = Criterion::default()
        .with_measurement(measurement)
        .output_directory(directory)
        .sample_size(10)
        .warm_up_time(short)
        .measurement_time(short);
    criterion.bench_function("a", bench);
    estimate(&directory.join("a/new/estimates.json"), "mean")
}

fn estimate(path: &Path, name: &str) -> f64 {
    let estimates: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    estimates[name]["point_estimate"].as_f64().expect("a number")
}

/// Also in the second of two runs, which Criterion compares: bytes that are equal to the last one are no change, and no NaN.
#[test]
fn criterion_measures_the_bytes_of_a_step() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = nn::LinearConfig::new(64, 32).init(&device);
        let x = Tensor::<2>::ones([128, 64], &device);
        let loss = |model: &nn::Linear, x| model.forward(x).powf_scalar(2.0).mean();
        let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [of_kept, of_peak] = directories.each_ref().map(|directory| directory.path());
        let equal = settled(|| {
            let step = measure_step(&model, x.clone(), loss);
            let measured = [step.kept, step.peak].map(|bytes| bytes.expect("the allocator is installed"));
            let in_criterion = [
                mean(KeptBytes, of_kept, |bencher| bencher.iter_step(&model, x.clone(), loss)),
                mean(PeakBytes, of_peak, |bencher| bencher.iter_step(&model, x.clone(), loss)),
            ];
            assert!(measured[0] >= 4 * 128 * 64, "the input: {measured:?}");
            [0, 1].map(|which| in_criterion[which].round() as u64 == measured[which])
        });
        assert_eq!(equal, [true; 2], "{device:?}");
        for directory in [of_kept, of_peak] {
            let change = estimate(&directory.join("a/change/estimates.json"), "mean");
            assert!(change.abs() < 0.01, "{change}");
        }
    }
}

#[test]
fn criterion_measures_the_bytes_of_a_layer() {
    let _alone = alone();
    let Some(device) = cpu_devices().pop() else { return };
    let directory = tempfile::tempdir().unwrap();
    let input = || Tensor::<1>::ones([10_000], &device).require_grad();
    let equal = settled(|| {
        let layer = measure_layer(input, activation::relu);
        let kept = mean(KeptBytes, directory.path(), |bencher| bencher.iter_layer(input, activation::relu));
        assert!(kept >= 40_000.0, "{kept}");
        Some(kept.round() as u64) == layer.kept
    });
    assert!(equal);
}

/// Criterion takes no samples of 0, and cannot compare those that are all equal.
#[test]
fn samples_differ_by_less_than_half_a_byte() {
    let _alone = alone();
    let Some(device) = cpu_devices().pop() else { return };
    let directory = tempfile::tempdir().unwrap();
    mean(PeakBytes, directory.path(), |bencher| {
        bencher.iter_layer(|| Tensor::<1>::ones([0], &device), |x| x);
    });
    let sample = fs::read(directory.path().join("a/new/sample.json")).unwrap();
    let sample: serde_json::Value = serde_json::from_slice(&sample).unwrap();
    let numbers = |name: &str| -> Vec<f64> { serde_json::from_value(sample[name].clone()).unwrap() };
    let mut parts: Vec<f64> =
        numbers("times").iter().zip(numbers("iters")).map(|(bytes, steps)| (bytes / steps).fract()).collect();
    assert!(parts.iter().all(|part| (0.01..0.49).contains(part)), "{parts:?}");
    parts.sort_by(f64::total_cmp);
    parts.dedup_by(|a, b| (*a - *b).abs() < 1e-6);
    assert_eq!(parts.len(), 10, "{parts:?}");
}

/// `Bencher::iter` does not say where a step begins.
#[test]
fn other_methods_of_a_bencher_are_refused() {
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let run = || mean(KeptBytes, directory.path(), |bencher| bencher.iter(|| ()));
    let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
    assert!(panic.downcast_ref::<&str>().is_some_and(|text| text.contains("iter_step")));
}

#[test]
fn bytes_are_formatted_in_the_unit_that_suits_them() {
    let _alone = alone();
    let formatter = KeptBytes.formatter();
    assert_eq!(formatter.format_value(80.4), "80 B");
    assert_eq!(formatter.format_value(12_845_056.3), "12.25 MiB");
    let mut values = [1024.0, 3.0 * 1024.0];
    assert_eq!((formatter.scale_values(2048.0, &mut values), values), ("KiB", [1.0, 3.0]));
    let mut values = [1024.0];
    assert_eq!((formatter.scale_for_machines(&mut values), values), ("B", [1024.0]));
    let per_item = formatter.format_throughput(&Throughput::Elements(16), 3.0 * 1024.0 * 16.0);
    assert_eq!(per_item, "3.0000 KiB/elem");
}
