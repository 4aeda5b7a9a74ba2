//! Activations with approximate gradients: outputs, bytes, and gradients beside exact ones.
#![cfg(feature = "flex")]
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData};
use burn_memsave::functional as F;
use burn_memsave::measure::TrackingAllocator;
use meter::{alone, bytes, devices, measure};
use proptest::prelude::*;

#[path = "memory/meter.rs"]
#[allow(dead_code, reason = "every test uses its part")]
mod meter;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// The approximate function, the exact one, the outer corner and the slope left of 0.
type Row = (fn(Tensor<2>) -> Tensor<2>, fn(Tensor<2>) -> Tensor<2>, f64, f64);
const ROWS: [Row; 2] =
    [(F::approx_gelu, F::gelu, 3.1718, -0.049_551), (F::approx_silu, F::silu, 6.3206, -0.040_513)];

fn gradient(f: impl Fn(Tensor<2>) -> Tensor<2>, x: &Tensor<2>, dy: &Tensor<2>) -> (TensorData, TensorData) {
    let x = x.clone().detach().require_grad();
    let y = f(x.clone());
    let gradients = (y.clone() * dy.clone()).sum().backward();
    (y.into_data(), x.grad(&gradients).unwrap().into_data())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn slopes_are_one_of_four(rows in 1..40usize, columns in 1..40usize, dtype in 0..4usize, turned: bool, checkpointing: bool) {
        let _alone = alone();
        let dtype = FloatDType::from([DType::F32, DType::F64, DType::F16, DType::BF16][dtype]);
        let device = devices()[usize::from(checkpointing)].clone();
        let random = |deviation| Tensor::<2>::random([rows, columns], Distribution::Normal(0.0, deviation), &device).cast(dtype);
        /// Between numbers of f16 next to 0.
        const STEP: f64 = 5.960_464_5e-8;
        let (x, dy) = (random(4.0), random(1.0));
        let x = if turned { x.transpose().reshape([columns, rows]).transpose() } else { x };
        for (approx, exact, corner, slope) in ROWS {
            let (y, dx) = gradient(approx, &x, &dy);
            prop_assert_eq!(y, gradient(exact, &x, &dy).0);
            let [x, dy] = [&x, &dy].map(|tensor| tensor.to_data().iter::<f64>().collect::<Vec<_>>());
            for ((x, dy), dx) in x.into_iter().zip(dy).zip(dx.iter::<f64>()) {
                let inner = if x > 0.0 { 1.0 - slope } else { slope };
                let expected = dy * if x.abs() < corner { inner } else { f64::from(x > 0.0) };
                // The corner is a number of the dtype.
                let is_near = (x.abs() - corner).abs() < 0.02;
                prop_assert!(is_near || (dx - expected).abs() <= 0.005 * expected.abs() + STEP, "{}, {}, {}", x, dx, expected);
            }
        }
    }
}

/// In the mean over many inputs the gradient is not far from the exact one.
#[test]
fn gradients_are_close() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::random([256, 256], Distribution::Normal(0.0, 1.0), &device);
    let one = Tensor::ones([256, 256], &device);
    for (approx, exact, ..) in ROWS {
        let [approx, exact] = [approx, exact].map(|f| gradient(f, &x, &one).1);
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
        let pairs = approx.iter::<f64>().zip(exact.iter::<f64>());
        let error = squares(&mut pairs.map(|(a, b)| a - b)) / squares(&mut exact.iter::<f64>());
        assert!(error.sqrt() < 0.5, "{error}");
    }
}

#[test]
fn two_bits_are_kept() {
    let _alone = alone();
    for device in devices() {
        for (approx, ..) in ROWS {
            let kept = |rows: usize| {
                let x = || Tensor::<2>::random([rows, 64], Distribution::Default, &device).require_grad();
                bytes(measure(&device, x, approx).kept)
            };
            assert_eq!(kept(1024) - kept(512), 512 * 64 * 2 / 8);
        }
    }
}
