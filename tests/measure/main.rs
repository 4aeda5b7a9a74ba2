//! Memory measurements: exact bytes of known things.
#![allow(deprecated)] // burn-ndarray is deprecated as a whole
use burn::module::Module;
use burn::nn;
use burn::tensor::{Device, Int, Tensor, activation};
use burn_memsave::functional;
use burn_memsave::measure::{
    LayerMeasurement, Measurement, Scope, TrackingAllocator, bytes_in_use, human_bytes, measure_layer,
    measure_step, mib, peak_bytes,
};
use meter::alone;
use serde::Serialize;
use std::sync::OnceLock;
use std::time::Duration;

mod burns_own;
#[cfg(feature = "criterion")]
mod criterion;
mod explain;
#[cfg(feature = "system")]
mod gate;
mod graphs;
mod ledger;
#[path = "../memory/meter.rs"]
#[allow(dead_code, reason = "every test uses its part")]
mod meter;
mod run;
mod timeline;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// A generous limit for the graph's own records of a few operations: nodes, shapes, tables that grow.
const RECORDS: u64 = 6000;

/// What two runs in a row agree on. The first one may pay for what is initialized lazily, and the test harness's own thread
/// allocates now and then.
fn settled<T: PartialEq>(observe: impl Fn() -> T) -> T {
    let mut last = observe();
    for _ in 0..100 {
        let next = observe();
        if next == last {
            return next;
        }
        last = next;
    }
    last
}

fn cpu_devices() -> Vec<Device> {
    vec![
        #[cfg(feature = "flex")]
        Device::flex().autodiff(),
        #[cfg(feature = "ndarray")]
        Device::ndarray().autodiff(),
    ]
}

/// A layer on a tracked input of `elements` elements.
fn measure(device: &Device, elements: usize, forward: impl Fn(Tensor<1>) -> Tensor<1>) -> LayerMeasurement {
    settled(|| measure_layer(|| Tensor::<1>::ones([elements], device).require_grad(), &forward))
}

fn kept(device: &Device, elements: usize, forward: impl Fn(Tensor<1>) -> Tensor<1>) -> u64 {
    measure(device, elements, forward).kept.expect("the allocator is installed")
}

#[test]
fn allocations_are_counted_exactly() {
    let _alone = alone();
    assert!(TrackingAllocator::is_installed());
    let observed = settled(|| {
        let scope = Scope::start();
        let now = || (scope.live(), scope.peak());
        let mut bytes: Vec<u8> = Vec::with_capacity(1000);
        let allocated = now();
        bytes.reserve_exact(3000); // may move: only the difference counts
        let grown = now();
        bytes.shrink_to(500);
        let shrunk = now();
        let zeros = vec![0u64; 10];
        let zeroed = now();
        drop((bytes, zeros));
        [allocated, grown, shrunk, zeroed, now()]
    });
    assert_eq!(observed, [(1000, 1000), (3000, 3000), (500, 3000), (580, 3000), (0, 3000)]);
}

#[test]
fn nested_scopes_have_their_own_peaks() {
    let _alone = alone();
    let observed = settled(|| {
        let now = |scope: &Scope| (scope.live(), scope.peak());
        let outer = Scope::start();
        drop(vec![0u8; 5000]);
        let held = vec![0u8; 100];

        let inner = Scope::start();
        drop(vec![0u8; 2000]);
        let innermost = Scope::start();
        drop(vec![0u8; 3000]);
        let in_innermost = now(&innermost);
        drop(innermost);
        drop(held);
        let in_inner = now(&inner);
        drop(inner);

        let in_outer = now(&outer);
        drop(vec![0u8; 6000]);
        [in_innermost, in_inner, in_outer, now(&outer)]
    });
    // The inner scope's peak is that of the scope inside it; the outer one's is from before both, then its own again.
    assert_eq!(observed, [(0, 3000), (-100, 3000), (0, 5000), (0, 6000)]);
}

#[test]
fn a_scope_counts_other_threads() {
    let _alone = alone();
    let scope = Scope::start();
    let bytes = std::thread::spawn(|| vec![0u8; 1 << 28]).join().expect("the thread ends well");
    // Not exact: threads have records of their own, and that of an earlier test may only just free its buffers.
    assert!(scope.live().abs_diff(1 << 28) < 1 << 24);
    drop(bytes);
    assert!(scope.peak().abs_diff(1 << 28) < 1 << 24);
}

#[test]
fn bytes_of_cpu_devices_are_those_of_the_allocator() {
    let _alone = alone();
    for device in cpu_devices() {
        let (grown, peak_covers) = settled(|| {
            let before = bytes_in_use(&device).expect("the allocator is installed");
            let _x = Tensor::<1>::ones([10_000], &device);
            let after = bytes_in_use(&device).expect("the allocator is installed");
            (after.abs_diff(before), peak_bytes(&device) >= Some(after))
        });
        assert!((40_000..40_000 + RECORDS).contains(&grown) && peak_covers, "{grown}");
    }
}

/// Stock keeps 4 bytes per element, ours 1 bit in words of 64, and each some records that do not depend on the size.
#[test]
fn relu_keeps_one_bit_where_stock_keeps_the_input() {
    let _alone = alone();
    for device in cpu_devices() {
        let [small, large] = [64_001, 128_100];
        let stock = [small, large].map(|n| kept(&device, n, activation::relu));
        let ours = [small, large].map(|n| kept(&device, n, functional::relu));
        let words = |n: usize| n.div_ceil(64) as u64 * 8;
        assert_eq!(stock[1] - stock[0], 4 * (large - small) as u64);
        assert_eq!(ours[1] - ours[0], words(large) - words(small));
        let records = [stock[0] - 4 * small as u64, ours[0] - words(small)];
        assert!(records.iter().all(|&bytes| bytes < RECORDS), "{records:?} bytes of records");
    }
}

#[test]
fn an_untracked_layer_keeps_nothing() {
    let _alone = alone();
    for device in cpu_devices() {
        let layer = settled(|| measure_layer(|| Tensor::<1>::ones([10_000], &device), |x| x + 1.0));
        assert!(layer.kept < Some(RECORDS), "{layer:?}");
        assert_eq!(layer.forward_peak, layer.peak); // no backward pass
    }
}

#[test]
fn a_transient_buffer_shows_in_the_peak() {
    let _alone = alone();
    for device in cpu_devices() {
        let peaks = [0usize, 1 << 22].map(|bytes| {
            measure(&device, 1000, |x| {
                drop(std::hint::black_box(vec![1u8; bytes]));
                x * 2.0
            })
        });
        let forward = peaks.map(|layer| layer.forward_peak.expect("the allocator is installed"));
        assert!(forward[0] < 20_000 && peaks[0].peak < Some(30_000), "{peaks:?}");
        // At most the output of 4000 bytes comes later.
        assert!(((1 << 22)..(1 << 22) + 10_000).contains(&forward[1]), "{peaks:?}");
        assert_eq!(peaks[1].forward_peak, peaks[1].peak);
        assert!(close(peaks[1].kept, peaks[0].kept), "{peaks:?}");
    }
}

/// Equal but for the graph's records.
fn close(a: Option<u64>, b: Option<u64>) -> bool {
    a.zip(b).is_some_and(|(a, b)| a.abs_diff(b) < RECORDS)
}

/// The weights, 32 x 32 numbers of 4 bytes in each of 2 heads, are computed once they are read.
#[test]
fn a_clone_of_the_output_of_an_attention_computes_nothing() {
    let _turn = alone();
    let attention = burn_memsave::nn::attention::MultiHeadAttentionConfig::new(4, 2).init(&Device::flex());
    let x = Tensor::<3>::ones([1, 32, 4], &Device::flex());
    let output = attention.forward(burn_memsave::nn::attention::MhaInput::self_attn(x));
    let weights = 2 * 32 * 32 * 4;
    let peak_of = |f: &dyn Fn()| {
        settled(|| {
            let scope = Scope::start();
            f();
            scope.peak()
        })
    };
    assert!(peak_of(&|| drop(output.clone())) < 1024);
    let reads = || assert_eq!(output.clone().weights.dims(), [1, 2, 32, 32]);
    let first = Scope::start();
    reads();
    assert!(first.live() >= weights, "the weights are kept for all clones");
    assert!(peak_of(&reads) < 1024);
}

#[test]
fn a_step_of_a_linear_layer() {
    let _alone = alone();
    for device in cpu_devices() {
        let [batch, inputs, outputs] = [32, 512, 256];
        let model = nn::LinearConfig::new(inputs, outputs).init(&device);
        let parameters = 4 * model.num_params() as u64;
        let x = Tensor::<2>::ones([batch, inputs], &device);
        let (x_bytes, y_bytes) = (4 * (batch * inputs) as u64, 4 * (batch * outputs) as u64);
        let step = |model: &nn::Linear, x| {
            let step = measure_step(model, x, |model, x| model.forward(x).sum());
            (step.kept, step.peak, step.gradients)
        };

        let trained = settled(|| step(&model, x.clone()));
        assert_eq!(trained.2, parameters);
        assert!(trained.0 >= Some(x_bytes) && trained.0 < Some(x_bytes + RECORDS), "{trained:?}");
        assert!(trained.1 >= Some(parameters + y_bytes), "{trained:?}");
        assert!(trained.1 < Some(2 * parameters + x_bytes), "{trained:?}");

        // Whoever holds the input does not matter: this one is held by the step alone.
        let given_away = settled(|| step(&model, Tensor::ones([batch, inputs], &device)));
        assert!(close(given_away.0, trained.0), "{given_away:?} {trained:?}");

        // Nothing requires a gradient: nothing is kept.
        let frozen = model.freeze();
        let frozen = settled(|| step(&frozen, x.clone()));
        assert!(frozen.0 < Some(RECORDS) && frozen.2 == 0, "{frozen:?}");
    }
}

#[test]
fn a_step_on_tokens_and_targets() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = nn::EmbeddingConfig::new(10, 4).init(&device);
        let tokens = Tensor::<2, Int>::from_ints([[1, 2, 3]], &device);
        let targets = Tensor::<3>::zeros([1, 3, 4], &device);
        let step = measure_step(&model, (tokens, targets), |model, (tokens, targets)| {
            (model.forward(tokens) - targets).abs().sum()
        });
        assert_eq!(step.gradients, 4 * 10 * 4);
    }
}

/// What only the first step pays for is not measured.
#[test]
fn a_step_warms_up() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = nn::LinearConfig::new(8, 8).init(&device);
        let cache = OnceLock::new();
        let step = measure_step(&model, Tensor::<2>::ones([2, 8], &device), |model, x| {
            cache.get_or_init(|| vec![0u8; 1 << 20]);
            model.forward(x).sum()
        });
        assert!(step.kept < Some(1 << 20) && step.peak < Some(1 << 20), "{step}");
    }
}

/// A thread that has not multiplied before makes a buffer as large as a second-level cache. Which threads multiply in a step is chance.
#[test]
#[cfg(feature = "flex")]
fn the_buffers_of_threads_are_not_measured() {
    let _alone = alone();
    let device = Device::flex();
    let pool = rayon::ThreadPoolBuilder::new().num_threads(3).build().expect("three threads");
    let square = Tensor::<2>::ones([64, 64], &device);
    let multiply_everywhere = |x| {
        rayon::broadcast(|_| drop(square.clone().matmul(square.clone())));
        x
    };
    let measured = pool.install(|| measure_layer(|| Tensor::<1>::ones([1], &device), multiply_everywhere));
    assert!(measured.kept < Some(RECORDS), "{measured:?}");
    // Threads that end would free what they have while another test measures.
    std::mem::forget(pool);
}

#[test]
fn a_measurement_reads_as_a_table_and_as_json() {
    let _alone = alone();
    let Some(device) = cpu_devices().pop() else { return };
    let model = nn::LinearConfig::new(1024, 1024).with_bias(false).init(&device);
    let x = Tensor::<2>::ones([4, 1024], &device);
    let step = measure_step(&model, x, |model, x| model.forward(x).sum());
    let table = step.to_string();
    assert!(table.contains("| gradients of parameters") && table.contains("4.00 MiB |"), "{table}");
    let json = serde_json::to_value(&step).expect("plain numbers");
    assert_eq!(json["gradients"], 4 << 20);
    assert_eq!(json["forward_seconds"], step.forward_time.as_secs_f64());
}

/// One row under a header; what is unknown is empty, or null.
#[test]
fn measurements_are_written_as_csv_and_as_json() {
    let _alone = alone();
    fn written(measurement: impl Serialize) -> [String; 2] {
        let mut csv = csv::Writer::from_writer(vec![]);
        csv.serialize(&measurement).expect("a flat row");
        let csv = String::from_utf8(csv.into_inner().expect("flushed")).expect("plain text");
        [csv, serde_json::to_string(&measurement).expect("plain numbers")]
    }
    let layer = LayerMeasurement {
        kept: Some(80),
        forward_peak: Some(120),
        peak: None,
        reserved: None,
        launches: Some(3),
    };
    let [csv, json] = written(layer);
    assert_eq!(csv, "kept,forward_peak,peak,reserved,launches\n80,120,,,3\n");
    assert_eq!(json, r#"{"kept":80,"forward_peak":120,"peak":null,"reserved":null,"launches":3}"#);

    let (forward_time, backward_time) = (Duration::from_millis(250), Duration::ZERO);
    let step = Measurement {
        kept: None,
        peak: Some(1 << 40),
        reserved: Some(9),
        launches: None,
        gradients: 8,
        forward_time,
        backward_time,
    };
    let [csv, json] = written(step);
    let names = "kept,peak,reserved,launches,gradients,forward_seconds,backward_seconds";
    assert_eq!(csv, format!("{names}\n,1099511627776,9,,8,0.25,0.0\n"));
    let memory = r#""kept":null,"peak":1099511627776,"reserved":9,"launches":null"#;
    let rest = r#""gradients":8,"forward_seconds":0.25,"backward_seconds":0.0"#;
    assert_eq!(json, format!("{{{memory},{rest}}}"));
}

#[test]
fn bytes_read_well() {
    let _alone = alone();
    assert_eq!(mib(3 << 19), "1.50");
    assert_eq!(human_bytes(0), "0 B");
    assert_eq!(human_bytes(1023), "1023 B");
    assert_eq!(human_bytes(5 << 30), "5.00 GiB");
}
