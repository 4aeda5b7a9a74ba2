//! Tests fused heads and losses. They keep exactly what the heads of `ops/head_loss` and `ops/linear_log_prob.rs` say, and need less than
//! all logits of one model at the peak. Also tests a reference that shares the weights of its model.
use crate::meter::{RECORDS, alone, bytes, devices, measure};
use burn::module::{Lora, Module};
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use burn_memsave::functional::{self as F, DistillationOptions, KlDirection, LinearLogProbOptions, Teacher};
use burn_memsave::measure::TrackingAllocator;
use burn_memsave::{lora, nn};

const D_INPUT: usize = 64;
const D_TEACHER: usize = 96;
const CLASSES: usize = 2000;
const CHUNK: usize = 1 << 17;

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

    /// Kept bytes and the peak. `expected` says, for a number of rows, exactly what is kept besides the graph's own records, whose
    /// size does not depend on it.
    fn measure<const O: usize>(
        self,
        device: &Device,
        expected: impl Fn(usize) -> usize,
        f: impl Fn(Tensor<2>) -> Tensor<O>,
    ) -> i64 {
        let of = |rows: usize| {
            let x = || self.random([rows, D_INPUT], device).require_grad();
            let measured = measure(device, x, &f);
            [measured.kept, measured.peak].map(bytes)
        };
        let ([kept, peak], [kept_of_half, _]) = (of(self.rows), of(self.rows / 2));
        let [all, half] = [self.rows, self.rows / 2].map(|rows| expected(rows) as i64);
        assert_eq!(kept - kept_of_half, all - half, "{self:?}: kept for twice the rows, {all} in all");
        assert!((all..=all + 4 * RECORDS).contains(&kept), "{self:?}: {kept} bytes kept instead of {all}");
        peak
    }
}

const ROWS: usize = 512;

/// In f16, where products are slow without optimization, on one device.
fn cases_of(devices: &[Device]) -> impl Iterator<Item = (&Device, Case)> {
    let of = |(at, device)| cases().map(move |case| (at, device, case));
    let all = devices.iter().enumerate().flat_map(of);
    all.filter(|(at, _, case)| *at == 0 || case.dtype == DType::F32).map(|(_, device, case)| (device, case))
}

fn cases() -> impl Iterator<Item = Case> {
    let sizes = [DType::F32, DType::F16].into_iter().flat_map(|dtype| [(dtype, ROWS), (dtype, 24)]);
    sizes.flat_map(|(dtype, rows)| [true, false].map(|trainable| Case { rows, dtype, trainable }))
}

#[test]
fn divergences_keep_gradients_and_never_all_logits() {
    let _alone = alone();
    for (device, case) in cases_of(&devices()) {
        let Case { rows, dtype, trainable } = case;
        let (weight, size) = (case.weight(device), dtype.size());
        let weight_bytes = D_INPUT * CLASSES * size;
        let (x_of_teacher, head) =
            (case.random([rows, D_TEACHER], device), case.random([D_TEACHER, CLASSES], device));
        let teacher = |rows: usize| Teacher {
            x: x_of_teacher.clone().narrow(0, 0, rows),
            weight: head.clone(),
            bias: None,
        };
        let options = || DistillationOptions { chunk_bytes: Some(CHUNK), ..Default::default() };
        let expected = |rows: usize| {
            let (x, dlogits) = (rows * D_INPUT * size, rows * CLASSES * size);
            match (trainable, rows < D_INPUT, dtype) {
                (false, ..) => x,                                  // dx
                (true, true, _) => x + dlogits,                    // x, dlogits
                (true, false, DType::F16) => 2 * x + rows * 6 * 4, // x, dx, five numbers and a factor per row; handles
                (true, false, _) => x + weight_bytes,              // dx, dweight
            }
        };
        let logits = rows * CLASSES * size;
        let run = |name: &str, f: &dyn Fn(Tensor<2>) -> Tensor<1>| {
            let peak = case.measure(device, expected, f);
            assert!(
                rows < ROWS || peak < logits as i64,
                "{name}, {case:?}: {peak} at the peak, logits {logits}"
            );
        };
        run("kl", &|x| {
            let (direction, teacher) = (KlDirection::Reverse, teacher(x.dims()[0]));
            F::linear_kl_div(x, weight.clone(), None, teacher, direction, options())
        });
        if trainable {
            continue; // as the other
        }
        run("jsd", &|x| {
            let teacher = teacher(x.dims()[0]);
            F::linear_jsd(x, weight.clone(), None, teacher, 0.3, options())
        });
    }
}

#[test]
fn log_probabilities_keep_three_numbers_per_row() {
    let _alone = alone();
    for (device, case) in cases_of(&devices()) {
        let Case { rows, dtype, .. } = case;
        let weight = case.weight(device);
        let targets = Tensor::<1, Int>::ones([rows], device);
        let options = || LinearLogProbOptions { chunk_bytes: Some(CHUNK), ..Default::default() };
        // x, and both parts of `log(sum(exp(logits)))`; the targets are the caller's, as is the weight.
        let expected = |rows: usize| rows * D_INPUT * dtype.size() + rows * 8;
        let peak = case.measure(device, expected, |x| {
            let targets = targets.clone().narrow(0, 0, x.dims()[0]);
            F::linear_log_prob(x, weight.clone(), None, targets, options())
        });
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
    // Factors of rank 1, and records; of the weight, which is 2 MiB, nothing.
    assert!(more < 1 << 15, "{more} bytes");
    drop(reference);
}
