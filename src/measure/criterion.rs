//! Bytes of a step in Criterion's benches, which are printed, compared with the last run and plotted like times.
//!
//! The measurements [`KeptBytes`] and [`PeakBytes`] replace wall time, and [`BenchBytes`] gives their benchers a method that runs a step.
//! Every step that Criterion asks for is measured as by [`measure_step`](super::measure_step).
//!
//! ```no_run
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave::measure::TrackingAllocator;
//! use burn_memsave::measure::criterion::{BenchBytes, KeptBytes};
//! use burn_memsave::nn::LinearConfig;
//! use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
//!
//! #[global_allocator]
//! static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
//!
//! fn kept(criterion: &mut Criterion<KeptBytes>) {
//!     let device = Device::flex().autodiff();
//!     let model = LinearConfig::new(64, 64).init(&device);
//!     let mut group = criterion.benchmark_group("kept by batch size");
//!     for batch in [8, 16, 32] {
//!         let x = Tensor::<2>::ones([batch, 64], &device);
//!         group.bench_function(BenchmarkId::from_parameter(batch), |bencher| {
//!             bencher.iter_step(&model, x.clone(), |model, x| model.forward(x).mean());
//!         });
//!     }
//! }
//!
//! criterion_group! {
//!     name = bytes;
//!     config = Criterion::default().with_measurement(KeptBytes).sample_size(10);
//!     targets = kept
//! }
//! criterion_main!(bytes);
//! ```
//!
//! - Criterion prints `time:` before any measurement, as in `kept by batch size/8 time: [..]`. The numbers are bytes.
//! - A step needs the same number of bytes each time, so ten samples, the fewest that Criterion accepts, are enough.
//! - Criterion does not report differences below the noise threshold, by default 1 %. To lower it: `.noise_threshold(0.001)`.
//! - Benches of the two measurements need different names, since Criterion stores results by name.
//! - Criterion can neither test nor plot samples that are all equal, and refuses a sample of 0. So a fraction of a byte is added to each
//!   sample, a different one each time and always less than a half. Rounded, the bytes are exact.
use super::bytes::human_bytes;
use super::device::Metering;
use super::step::{StepInput, measure_layer, step};
use ::criterion::measurement::{Measurement, ValueFormatter};
use ::criterion::{Bencher, Throughput};
use burn::module::Module;
use burn::tensor::Tensor;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Bytes that a step keeps for its backward pass, as a measurement of Criterion. See the [example](self).
#[derive(Clone, Copy, Debug, Default)]
pub struct KeptBytes;

/// The most bytes that a step needs at one time, beyond parameters and input, as a measurement of Criterion. See the [example](self).
#[derive(Clone, Copy, Debug, Default)]
pub struct PeakBytes;

/// The bytes of several steps together. Made by the methods of [`BenchBytes`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepBytes {
    bytes: u64,
    steps: u64,
}

/// The methods of a [`Bencher`] of [`KeptBytes`] or [`PeakBytes`]. See the [example](self).
pub trait BenchBytes {
    /// Measures steps: `loss` runs the forward pass, and the backward pass follows, as in [`measure_step`](super::measure_step). A first
    /// step is not measured.
    ///
    /// # Panics
    ///
    /// If bytes are not counted on the device of the input: see [`bytes_in_use`](super::bytes_in_use).
    fn iter_step<M: Module, I: StepInput>(&mut self, model: &M, input: I, loss: impl Fn(&M, I) -> Tensor<1>);

    /// Measures `forward(input())` and the backward pass of its sum, as [`measure_layer`] does: `input` returns the only handle of its
    /// tensor. A first pass is not measured.
    ///
    /// # Panics
    ///
    /// If bytes are not counted on the device of the input.
    fn iter_layer<const D: usize, const O: usize>(
        &mut self,
        input: impl Fn() -> Tensor<D>,
        forward: impl Fn(Tensor<D>) -> Tensor<O>,
    );
}

macro_rules! measurements {
    ($($measurement:ident: $field:ident),+) => {$(
        impl Measurement for $measurement {
            type Intermediate = Infallible;
            type Value = StepBytes;

            /// Bytes are measured per step, and `Bencher::iter` does not show where a step begins.
            fn start(&self) -> Infallible {
                panic!("bytes are measured by `iter_step` or `iter_layer` of `measure::criterion::BenchBytes`");
            }
            fn end(&self, never: Infallible) -> StepBytes {
                match never {}
            }
            fn add(&self, a: &StepBytes, b: &StepBytes) -> StepBytes {
                StepBytes { bytes: a.bytes + b.bytes, steps: a.steps + b.steps }
            }
            fn zero(&self) -> StepBytes {
                StepBytes::default()
            }
            fn to_f64(&self, value: &StepBytes) -> f64 {
                value.sample()
            }
            fn formatter(&self) -> &dyn ValueFormatter {
                &BytesFormatter
            }
        }

        impl BenchBytes for Bencher<'_, $measurement> {
            fn iter_step<M: Module, I: StepInput>(
                &mut self,
                model: &M,
                input: I,
                loss: impl Fn(&M, I) -> Tensor<1>,
            ) {
                self.iter_custom(|steps| {
                    drop(step(Metering::Nothing, model, &input, &loss));
                    sum(steps, || step(Metering::Launches, model, &input, &loss).memory.$field)
                });
            }

            fn iter_layer<const D: usize, const O: usize>(
                &mut self,
                input: impl Fn() -> Tensor<D>,
                forward: impl Fn(Tensor<D>) -> Tensor<O>,
            ) {
                self.iter_custom(|steps| {
                    let layer = || measure_layer(&input, &forward);
                    layer();
                    sum(steps, || layer().$field)
                });
            }
        }
    )+};
}
measurements!(KeptBytes: kept, PeakBytes: peak);

fn sum(steps: u64, step: impl Fn() -> Option<u64>) -> StepBytes {
    let bytes = || {
        step().expect(
            "bytes are counted: on a CPU device, make `measure::TrackingAllocator` the global allocator; \
             servers do not say what they have",
        )
    };
    StepBytes { bytes: (0..steps).map(|_| bytes()).sum(), steps }
}

impl StepBytes {
    /// Bytes with a different fraction of a byte in every sample. With equal samples, Criterion's t-test is 0 / 0, and its plot of that
    /// panics (Criterion 0.8.2). It refuses a sample of 0.
    fn sample(&self) -> f64 {
        /// The fractional parts of multiples of the golden ratio are spread evenly, however many there are, so every run has the same mean.
        const GOLDEN: f64 = 0.618_033_988_749_895;
        static SAMPLES: AtomicU64 = AtomicU64::new(0);
        let sample = SAMPLES.fetch_add(1, Relaxed) as f64;
        let part = 0.05 + 0.4 * (sample * GOLDEN).fract();
        self.bytes as f64 + part * self.steps as f64
    }
}

/// Bytes in the unit that suits them.
struct BytesFormatter;

/// The exponent of the power of 1024 that suits a number of bytes, up to GiB, and that power.
fn power(bytes: f64) -> (usize, f64) {
    let sizes = [1.0, 1024.0, 1024.0 * 1024.0, 1024.0 * 1024.0 * 1024.0];
    let power = sizes.iter().rposition(|size| bytes >= *size).unwrap_or(0);
    (power, sizes[power])
}

impl ValueFormatter for BytesFormatter {
    fn format_value(&self, value: f64) -> String {
        human_bytes(value as u64) // without the fraction of a byte
    }

    fn scale_values(&self, typical_value: f64, values: &mut [f64]) -> &'static str {
        let (power, size) = power(typical_value);
        values.iter_mut().for_each(|value| *value /= size);
        ["B", "KiB", "MiB", "GiB"][power]
    }

    /// Bytes per item of the throughput that the bench states.
    fn scale_throughputs(
        &self,
        typical_value: f64,
        throughput: &Throughput,
        values: &mut [f64],
    ) -> &'static str {
        let (items, units) = match *throughput {
            Throughput::Bits(bits) => (bits, ["B/b", "KiB/b", "MiB/b", "GiB/b"]),
            Throughput::Bytes(bytes) | Throughput::BytesDecimal(bytes) => {
                (bytes, ["B/B", "KiB/B", "MiB/B", "GiB/B"])
            }
            Throughput::Elements(elements) | Throughput::ElementsAndBytes { elements, .. } => {
                (elements, ["B/elem", "KiB/elem", "MiB/elem", "GiB/elem"])
            }
        };
        let items = items.max(1) as f64;
        let (power, size) = power(typical_value / items);
        values.iter_mut().for_each(|value| *value /= items * size);
        units[power]
    }

    fn scale_for_machines(&self, _: &mut [f64]) -> &'static str {
        "B"
    }
}
