//! Heads and losses in one: exactly what the heads of `ops/head_loss` and `ops/linear_log_prob.rs` say is kept, and at the peak less
//! than all logits of one model; and a reference that shares the weights of its model.
use crate::meter::{RECORDS, alone, bytes, devices, measure};
use burn::module::{Lora, Module};
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use burn_memsave::functional::{self as F, DistillationOptions, KlDirection, LinearLogProbOptions, Teacher};
use burn_memsave::measure::TrackingAllocator;
use burn_memsave::{lora, nn};

const D_INPUT: usize = 64;
const D_TEACHER: usize = 96;
const CLASSES: usize = 8000;
const CHUNK: usize = 1 << 20;

#[derive(Clone, Copy, Debug)]
struct Case {
    rows: usize,
    dtype: DType,
    trainable: bool,
}

impl Case {
    fn random(self, shape: [usize; 2], device: &Device) -> Tensor<2> {
        Tensor::random(shape, Distribution::Normal(0.0, 0.1), (device, self.dtype))
    }

    fn weight(self, device: &Device) -> Tensor<2> {
        let weight = self.random([D_INPUT, CLASSES], device);
        if self.trainable { weight.require_grad() } else { weight }
    }

    fn measure<const O: usize>(self, device: &Device, f: impl Fn(Tensor<2>) -> Tensor<O>) -> [i64; 2] {
        let x = || self.random([self.rows, D_INPUT], device).require_grad();
        let measured = measure(device, x, f);
        [measured.kept, measured.peak].map(bytes)
    }
}

const ROWS: usize = 1024;

fn cases() -> impl Iterator<Item = Case> {
    let sizes = [DType::F32, DType::F16].into_iter().flat_map(|dtype| [(dtype, ROWS), (dtype, 48)]);
    sizes.flat_map(|(dtype, rows)| [true, false].map(|trainable| Case { rows, dtype, trainable }))
}

#[test]
fn divergences_keep_gradients_and_never_all_logits() {
    let _alone = alone();
    for (device, case) in devices().iter().flat_map(|device| cases().map(move |case| (device, case))) {
        let Case { rows, dtype, trainable } = case;
        let (weight, size) = (case.weight(device), dtype.size());
        let teacher = Teacher {
            x: case.random([rows, D_TEACHER], device),
            weight: case.random([D_TEACHER, CLASSES], device),
            bias: None,
        };
        let options = || DistillationOptions { chunk_bytes: CHUNK, ..Default::default() };
        let [x, logits, weight_bytes] =
            [rows * D_INPUT, rows * CLASSES, D_INPUT * CLASSES].map(|len| len * size);
        let expected = match (trainable, rows < D_INPUT, dtype) {
            (false, ..) => x,                                  // dx
            (true, true, _) => x + logits,                     // x, dlogits
            (true, false, DType::F16) => 2 * x + rows * 4 * 4, // x, dx; three sums and a factor per row; handles
            (true, false, _) => x + weight_bytes,              // dx, dweight
        };
        let what_it_needs = |peak: i64, name: &str| {
            // The gradients, once made and once as given to the caller; a few chunks; never the logits.
            let most = 2 * weight_bytes.max(if rows < D_INPUT { logits } else { 0 }) + 4 * x + 8 * CHUNK;
            assert!(peak <= most as i64, "{name}, {case:?}: {peak} bytes at the peak, more than {most}");
            if rows == ROWS {
                assert!(peak < logits as i64, "{name}, {case:?}: {peak} bytes at the peak, logits {logits}");
            }
        };
        let run = |name: &str, f: &dyn Fn(Tensor<2>) -> Tensor<1>| {
            let [kept, peak] = case.measure(device, f);
            let over = kept - expected as i64;
            assert!(
                (0..=RECORDS).contains(&over),
                "{name}, {case:?}: {kept} bytes kept instead of {expected}"
            );
            what_it_needs(peak, name);
        };
        run("kl", &|x| {
            let direction = KlDirection::Reverse;
            F::linear_kl_div(x, weight.clone(), None, teacher.clone(), direction, options())
        });
        run("jsd", &|x| F::linear_jsd(x, weight.clone(), None, teacher.clone(), 0.3, options()));
    }
}

#[test]
fn log_probabilities_keep_two_numbers_per_row() {
    let _alone = alone();
    for (device, case) in devices().iter().flat_map(|device| cases().map(move |case| (device, case))) {
        let Case { rows, dtype, .. } = case;
        let weight = case.weight(device);
        let targets = Tensor::<1, Int>::ones([rows], device);
        let options = || LinearLogProbOptions { chunk_bytes: CHUNK, ..Default::default() };
        // x, and `log(sum(exp(logits)))`; the targets are a handle of the caller's, as is the weight.
        let expected = rows * D_INPUT * dtype.size() + rows * 4;
        let [kept, peak] =
            case.measure(device, |x| F::linear_log_prob(x, weight.clone(), None, targets.clone(), options()));
        let over = kept - expected as i64;
        assert!((0..=RECORDS).contains(&over), "{case:?}: {kept} bytes kept instead of {expected}");
        let logits = (rows * CLASSES * dtype.size()) as i64;
        assert!(rows < ROWS || peak < logits, "{case:?}: {peak} bytes at the peak, logits {logits}");
    }
}

#[test]
fn a_reference_shares_the_weights() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = nn::LinearConfig::new(512, 1024).init(&device).apply_lora(Lora::new(8, 8.0));
    drop(model.forward(Tensor::<2>::ones([1, 512], &device)).into_data()); // nothing is initialized later
    let before = TrackingAllocator::live();
    let reference = lora::without_adapters(&model);
    let more = TrackingAllocator::live() - before;
    // Factors of rank 1, and some records.
    let factors = 4 * (512 + 1024) as u64;
    assert!((factors..factors + 8192).contains(&(more as u64)), "{more} bytes");
    drop(reference);
}
