//! What is computed on Flex equals what is computed on wgpu: the form of an operation carries over to a device backend.
//!
//! Runs on any adapter, also on one in software (lavapipe): `cargo test -p burn-memsave --features wgpu --test wgpu`, and
//! with `--features wgpu,fusion`; with `cuda` in the place of `wgpu` on CUDA.
#![cfg(any(feature = "wgpu", feature = "cuda"))]
#![recursion_limit = "256"]
use burn::tensor::{DType, Device, Tensor, TensorData, activation};
use burn_memsave::functional as F;
use burn_memsave::measure::{LayerMeasurement, bytes_in_use, measure_layer, peak_bytes};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

mod checkpoint;
#[path = "../table/draws.rs"]
mod draws;
mod half;
mod layouts;
mod lazy;
mod limits;
mod measure;
mod mixed;
mod operations;
mod optim;
mod plan;
mod saved;
mod synchronized;
#[path = "../table/mod.rs"]
mod table;
mod table_walk;
mod training;

/// The memory of a device is counted for the whole program, and its generator is one: whoever measures or seeds is alone.
static DEVICE: RwLock<()> = RwLock::new(());

fn among_others() -> RwLockReadGuard<'static, ()> {
    DEVICE.read().unwrap_or_else(PoisonError::into_inner)
}

fn alone() -> RwLockWriteGuard<'static, ()> {
    DEVICE.write().unwrap_or_else(PoisonError::into_inner)
}

/// Of the backends that are compiled, the one that `BURN_DEVICE` names; otherwise wgpu.
fn gpu() -> Device {
    #[cfg(feature = "cuda")]
    if on_cuda() {
        return Device::cuda(0);
    }
    #[cfg(feature = "wgpu")]
    return Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    #[cfg(not(feature = "wgpu"))]
    unreachable!("one of them is compiled");
}

fn on_cuda() -> bool {
    cfg!(not(feature = "wgpu"))
        || cfg!(feature = "cuda") && std::env::var("BURN_DEVICE").is_ok_and(|name| name == "cuda")
}

/// Deterministic values in -1..1, no two alike.
fn values<const D: usize>(shape: [usize; D], seed: usize) -> TensorData {
    let len = shape.iter().product::<usize>();
    let value = |at: usize| ((at * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0;
    TensorData::new((0..len).map(value).collect::<Vec<_>>(), shape)
}

fn tensor<const D: usize>(data: TensorData, device: &Device) -> Tensor<D> {
    Tensor::from_data(data, (device, DType::F32))
}

/// How far results may differ, relative to the largest magnitude.
const EXACT: f32 = 1e-4;

/// The same of results of matrix products: on CUDA, Burn rounds their factors to TF32, with 10 bits behind the point.
fn of_products() -> f32 {
    if on_cuda() { 5e-3 } else { EXACT }
}

/// Relative to the largest magnitude.
fn assert_close(what: &str, wgpu: &TensorData, flex: &TensorData) {
    assert_within(EXACT, 1e-6, what, wgpu, flex);
}

/// The same of results of matrix products.
fn assert_products_close(what: &str, wgpu: &TensorData, flex: &TensorData) {
    assert_within(of_products(), 1e-6, what, wgpu, flex);
}

/// Within a tolerance relative to the largest magnitude, and at least to that of terms that may cancel.
fn assert_within(tolerance: f32, terms: f32, what: &str, wgpu: &TensorData, flex: &TensorData) {
    assert_eq!(wgpu.shape(), flex.shape(), "{what}");
    let scale = flex.iter::<f32>().fold(terms, |scale, v| scale.max(v.abs()));
    for (wgpu, flex) in wgpu.iter::<f32>().zip(flex.iter::<f32>()) {
        assert!((wgpu - flex).abs() <= tolerance * scale, "{what}: {wgpu}, Flex {flex}");
    }
}

/// Whether bytes in use are as many. On CUDA they may differ by the slots of a few numbers, of 64 bytes, from run to run.
fn same_bytes(a: u64, b: u64) -> bool {
    a == b || (on_cuda() && a.abs_diff(b) <= 4 * 64)
}

/// The generators of the two backends differ; the gradient must belong to the output all the same.
#[test]
fn dropout_replays_its_bits() {
    let _shared = among_others();
    let device = gpu().autodiff();
    let x = Tensor::<2>::ones([40, 33], (&device, DType::F32)).require_grad();
    let y = F::dropout(x.clone(), 0.3);
    let gradients = y.clone().sum().backward();
    x.grad(&gradients)
        .expect("tracked")
        .into_data()
        .assert_approx_eq::<f32>(&y.clone().into_data(), burn::tensor::Tolerance::default());
    let kept = y.greater_elem(0.0).int().sum().into_scalar::<i64>() as f64 / (40.0 * 33.0);
    assert!((kept - 0.7).abs() < 0.06, "{kept} kept at a rate of 0.3");
}

/// An input of 16 MiB, of which stock's ReLU keeps all and ours 512 KiB.
#[test]
fn memory_is_measured_on_the_device() {
    const ELEMENTS: u64 = 1 << 22;
    /// What the pool rounds up, and its small tensors.
    const NOISE: u64 = 1 << 17;
    let _alone = alone();
    let device = gpu().autodiff();
    let ones = || Tensor::<1>::ones([ELEMENTS as usize], (&device, DType::F32));

    let now = || {
        device.sync().expect("the device works");
        bytes_in_use(&device).zip(peak_bytes(&device)).expect("the pool counts")
    };
    let (before, _) = now();
    let x = ones();
    let (held, reserved) = now();
    assert!((held - before).abs_diff(4 * ELEMENTS) < NOISE, "{held} bytes, {before} before");
    assert!(reserved >= held, "{reserved} bytes reserved, {held} in use");
    drop(x);

    let measure = |relu: fn(Tensor<1>) -> Tensor<1>| {
        let run = || measure_layer(|| ones().require_grad(), relu);
        run(); // compiles the kernels
        run()
    };
    let of_ours @ LayerMeasurement { kept, forward_peak, peak, .. } = measure(F::relu);
    assert!(kept.is_some_and(|kept| kept.abs_diff(ELEMENTS / 8) < NOISE), "{of_ours:?}");
    assert!(kept <= forward_peak && forward_peak <= peak, "{of_ours:?}");
    let of_stock = measure(activation::relu);
    assert!(of_stock.kept.is_some_and(|kept| kept.abs_diff(4 * ELEMENTS) < NOISE), "{of_stock:?}");
}
