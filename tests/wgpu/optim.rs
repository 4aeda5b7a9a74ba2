//! Steps of optimizers on the device, beside those on Flex.
use crate::{among_others, gpu, on_cuda, values};
use burn::module::Param;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_memsave::optim::{AdamW8bitConfig, Muon8bitConfig};

const LR: f64 = 0.01;
/// No element more than a block, parts of a block, vectors of one, two and four.
const SHAPES: [[usize; 2]; 4] = [[1, 5], [16, 16], [67, 131], [64, 258]];

/// Weights after steps with the same gradients, which lie in another order in memory.
fn trained(
    init: &dyn Fn() -> ModuleOptimizer,
    device: &Device,
    shape: [usize; 2],
    dtype: DType,
    steps: usize,
) -> TensorData {
    let device = device.clone().autodiff();
    let tensor = |data: TensorData| Tensor::<2>::from_data(data.convert_dtype(dtype), (&device, dtype));
    let mut parameter = Param::from_tensor(tensor(values(shape, 3)));
    let mut optimizer = init();
    for step in 0..steps {
        let gradient = tensor(values([shape[1], shape[0]], 11 + step)).transpose();
        let mut gradients = GradientsParams::new();
        gradients.register(parameter.id, gradient.inner());
        parameter = optimizer.step(LR, parameter, gradients);
    }
    parameter.val().into_data()
}

/// Where a moment is between two codes, devices may differ: one element in so many, by less than the steps of two codes.
fn assert_steps_are_close(one_in: usize, what: &str, found: &TensorData, expected: &TensorData) {
    let pairs = found.iter::<f32>().zip(expected.iter::<f32>());
    let far: Vec<f32> = pairs.map(|(a, b)| (a - b).abs()).filter(|error| *error > 1e-5).collect();
    assert!(far.len() * one_in <= found.num_elements(), "{what}: {} of {}", far.len(), found.num_elements());
    assert!(far.iter().all(|&error| f64::from(error) < LR), "{what}: {far:?}");
}

#[test]
fn adamw() {
    let _shared = among_others();
    for shape in SHAPES {
        for (min_8bit_size, cautious) in [(0, false), (0, true), (usize::MAX, false), (usize::MAX, true)] {
            let config = AdamW8bitConfig::new().with_weight_decay(0.1).with_min_8bit_size(min_8bit_size);
            let config = config.with_cautious_weight_decay(cautious);
            let trained = |device: &Device| trained(&|| config.init(), device, shape, DType::F32, 4);
            let what = format!("{shape:?}, {config:?}");
            assert_steps_are_close(100, &what, &trained(&gpu()), &trained(&Device::flex()));
        }
    }
}

#[test]
fn muon() {
    let _shared = among_others();
    for shape in [[64, 72], [67, 131]] {
        let init = || Muon8bitConfig::new().with_min_8bit_size(0).init();
        let trained = |device: &Device| trained(&init, device, shape, DType::F32, 3);
        // Products of products make a direction.
        let one_in = if on_cuda() { 10 } else { 100 };
        assert_steps_are_close(one_in, &format!("{shape:?}"), &trained(&gpu()), &trained(&Device::flex()));
    }
}

/// Weights in half precision go up and down where those on Flex do.
#[test]
fn stochastic_rounding() {
    let _shared = among_others();
    for dtype in [DType::F16, DType::BF16] {
        if !gpu().supports_dtype(dtype) {
            println!("skipped: the device has no {dtype:?}");
            continue;
        }
        for min_8bit_size in [0, usize::MAX] {
            let init = || AdamW8bitConfig::new().with_min_8bit_size(min_8bit_size).init();
            let trained = |device: &Device| trained(&init, device, [67, 131], dtype, 1);
            let (found, expected) = (trained(&gpu()), trained(&Device::flex()));
            let pairs = || found.iter::<f32>().zip(expected.iter::<f32>());
            let differing = pairs().filter(|(a, b)| a != b).count();
            assert!(differing * 100 <= found.num_elements(), "{dtype:?}: {differing}");
            // The next number of the type, at most.
            assert!(pairs().all(|(a, b)| (a - b).abs() <= b.abs() / 128.0 + 1e-6));
        }
    }
}

/// Changes that are smaller than half the distance of two numbers are not lost.
#[test]
fn small_changes_add_up() {
    let _shared = among_others();
    let (device, dtype) = (gpu(), DType::F16);
    if !device.supports_dtype(dtype) {
        println!("skipped: the device has no {dtype:?}");
        return;
    }
    let device = device.autodiff();
    let ones = || Tensor::<1>::ones([5000], (&device, dtype));
    let mut parameter = Param::from_tensor(ones());
    let mut optimizer = AdamW8bitConfig::new().with_weight_decay(0.0).init();
    for _ in 0..20 {
        let mut gradients = GradientsParams::new();
        gradients.register(parameter.id, ones().inner());
        parameter = optimizer.step(1e-4, parameter, gradients);
    }
    let data = parameter.val().into_data();
    let mean = data.iter::<f64>().sum::<f64>() / 5000.0;
    assert!((mean - (1.0 - 20.0 * 1e-4)).abs() < 5e-5, "{mean}");
}
