//! Kept tensors in fewer bits, on a device.
use crate::{alone, assert_close, gpu, on_cuda, tensor, values};
use burn::tensor::{Device, FloatDType, Tensor, TensorData, Tolerance};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::functional as F;
use burn_memsave::measure::measure_layer;
use burn_memsave::saved::SavedPolicy;

/// The gradient of a weight is that of rounded inputs; the formats are those of the CPU.
#[test]
fn kept_tensors_in_fewer_bits() {
    let _alone = alone();
    let gradient = |device: &Device, x: &TensorData, turned: bool, policy: &SavedPolicy| {
        let x = Tensor::<2>::from_data(x.clone(), device);
        let [rows, columns] = x.dims();
        let weight = Tensor::<2>::from_data(values([columns, 24], 5), device).require_grad();
        let one = || Tensor::<2>::eye(columns, device);
        let y = policy.scope(|| {
            // Nobody else holds what this gives.
            let x = match turned {
                true => F::linear(x.transpose().require_grad(), Tensor::eye(rows, device), None).transpose(),
                false => F::linear(x.require_grad(), one(), None),
            };
            F::linear(x, weight.clone(), None)
        });
        let dy = Tensor::<2>::from_data(values([rows, 24], 7), device);
        weight.grad(&(y * dy).sum().backward()).unwrap().into_data()
    };
    let [host, device] = [Device::flex().autodiff(), gpu().autodiff()];
    // Elements in vectors of four, two and one, and a rest.
    for (shape, turned) in [([64, 128], false), ([130, 62], false), ([67, 93], false), ([70, 120], true)] {
        let x = values(shape, 3);
        for (policy, half) in [(SavedPolicy::Half, FloatDType::BF16), (SavedPolicy::HalfF16, FloatDType::F16)]
        {
            let half = Tensor::<2>::from_data(x.clone(), &host).cast(half).cast(FloatDType::F32);
            let exact = gradient(&device, &half.into_data(), turned, &SavedPolicy::Keep);
            let found = gradient(&device, &x, turned, &policy);
            // On CUDA the product with ones has rounded the input before it is kept.
            let tolerance = if on_cuda() { 2e-2 } else { 1e-5 };
            found.assert_approx_eq::<f32>(&exact, Tolerance::rel_abs(tolerance, tolerance));
        }
        let disk = SavedPolicy::disk(std::env::temp_dir()).unwrap();
        let exact = gradient(&device, &x, turned, &SavedPolicy::Keep);
        for elsewhere in [SavedPolicy::Host, disk] {
            assert_eq!(gradient(&device, &x, turned, &elsewhere), exact, "{elsewhere:?}");
        }
        let exact = gradient(&host, &x, turned, &SavedPolicy::Keep);
        let found = gradient(&device, &x, turned, &SavedPolicy::Int8);
        let mut largest = 0f64;
        for (a, b) in exact.iter::<f64>().zip(found.iter::<f64>()) {
            largest = largest.max((a - b).abs());
        }
        // Errors of the elements are below 1/127, of either sign.
        let bound = 3.0 / 127.0 * (shape[0] as f64).sqrt();
        assert!(largest > 0.0 && largest < bound, "{shape:?}: {largest}, {bound}");
    }
}

/// What is no number, and what is infinite, come back as they were, and the rest of their group does too.
#[test]
fn values_beside_numbers_in_eight_bits() {
    let _alone = alone();
    const ROWS: usize = 70;
    let gradient = |device: &Device, policy: SavedPolicy| {
        let mut x = values([ROWS, 130], 3).try_to_vec::<f32>().unwrap();
        for (row, value) in [(3, f32::NAN), (20, f32::INFINITY), (40, f32::NEG_INFINITY)] {
            x[row * 130 + 2 * row] = value;
        }
        let x = Tensor::<2>::from_data(TensorData::new(x, [ROWS, 130]), device).require_grad();
        // Its slope is a number also where x is infinite.
        let y = policy.scope(|| F::softplus(x.clone().mul_scalar(1.0), 1.0));
        x.grad(&y.sum().backward()).unwrap().into_data()
    };
    let exact = gradient(&Device::flex().autodiff(), SavedPolicy::Keep);
    let found = gradient(&gpu().autodiff(), SavedPolicy::Int8);
    let mut beside = 0;
    for (a, b) in exact.iter::<f32>().zip(found.iter::<f32>()) {
        // A slope changes by a quarter of a step of 1/63 at most, and some.
        assert!((a - b).abs() < 0.01 || a.is_nan() && b.is_nan(), "{b}, exact {a}");
        beside += usize::from(a.is_nan() || a == 0.0 || a == 1.0);
    }
    assert_eq!(beside, 3);
}

/// What one thread has still to compute is packed by another, after it was computed: on the device, each has a stream of its own.
#[test]
fn what_a_thread_left_is_packed_by_another() {
    // Large enough for a device to be busy when the tensor is packed.
    let size = if on_cuda() { 2048 } else { 128 };
    let _alone = alone();
    let device = gpu().autodiff();
    let inner = device.clone().without_autodiff();
    // Products with a permutation are exact, also in TF32.
    let mut turned = vec![0f32; size * size];
    (0..size).for_each(|row| turned[row * size + (row + 1) % size] = 1.0);
    let turned = Tensor::<2>::from_data(TensorData::new(turned, [size, size]), &inner);
    let x = TensorData::new(
        (0..size * size).map(|at| (at % 251) as f32 / 256.0).collect::<Vec<_>>(),
        [size, size],
    );
    let x = Tensor::<2>::from_data(x, &inner);
    let weight = Tensor::<2>::from_inner(turned.clone()).require_grad();
    let forward = |policy: &SavedPolicy, seed: usize| {
        let x = (0..30).fold(x.clone() + seed as f32, |x, _| x.matmul(turned.clone()));
        policy.scope(|| {
            let x = F::linear(Tensor::from_inner(x).require_grad(), Tensor::from_inner(turned.clone()), None);
            F::linear(x, weight.clone(), None)
        })
    };
    let backward = |y: Tensor<2>| weight.grad(&y.sum().backward()).unwrap().into_data();
    let exact: Vec<_> = (0..4).map(|seed| backward(forward(&SavedPolicy::Keep, seed))).collect();
    for policy in [SavedPolicy::Host, SavedPolicy::Half] {
        for (seed, exact) in exact.iter().enumerate() {
            let y = std::thread::scope(|scope| scope.spawn(|| forward(&policy, seed)).join().unwrap());
            // This thread packs what that one left, whenever it records a step.
            let other = policy.scope(|| F::relu(Tensor::<1>::ones([8], &device).require_grad()));
            let found = backward(y);
            found.assert_approx_eq::<f32>(exact, Tolerance::rel_abs(1e-2, 1e-2));
            drop(other);
        }
    }
}

#[test]
fn kept_tensors_take_fewer_bytes() {
    let _alone = alone();
    let device = gpu().autodiff();
    let weight: Tensor<2> = tensor(values([128, 128], 5), &device).require_grad();
    let kept = |policy: &SavedPolicy| {
        let run = || {
            measure_layer(
                || tensor(values([4096, 128], 3), &device).require_grad(),
                |x: Tensor<2>| {
                    policy.scope(|| {
                        let x = F::linear(x, Tensor::eye(128, &device), None); // leaves stay as they are
                        (0..8).fold(x, |x, _| F::linear(x, weight.clone(), None))
                    })
                },
            )
        };
        run();
        run().kept.expect("wgpu counts") as f64
    };
    let exact = kept(&SavedPolicy::Keep);
    assert!(exact >= (8 * 4 * 4096 * 128) as f64, "{exact}");
    for (policy, share) in [(SavedPolicy::Half, 0.5), (SavedPolicy::HalfF16, 0.5), (SavedPolicy::Int8, 0.26)]
    {
        let found = kept(&policy) / exact;
        assert!((share - 0.01..share + 0.01).contains(&found), "{policy:?}: {found}");
    }
    let disk = SavedPolicy::disk(std::env::temp_dir()).unwrap();
    for elsewhere in [SavedPolicy::Host, disk] {
        let found = kept(&elsewhere) / exact;
        // The last copies may be on their way; a GPU is far ahead of a disk.
        let most = if on_cuda() { 0.51 } else { 0.26 };
        assert!(found <= most, "{elsewhere:?}: {found}");
    }
}

/// Tensors leave the device while others are computed, and come back ahead of their use: for the thread that computed them
/// and for another one, in order and out of it.
#[test]
fn tensors_on_the_host() {
    const LAYERS: usize = 10;
    let _alone = alone();
    let device = gpu().autodiff();
    // Small enough for values to stay about 1: what is fused with what, and so rounded, differs where tensors leave.
    let weight = |at| (tensor::<2>(values([64, 64], at), &device) * 0.2).require_grad();
    let weights: Vec<Tensor<2>> = (0..LAYERS).map(weight).collect();
    let linear: burn_memsave::nn::Linear = burn_memsave::nn::LinearConfig::new(64, 64).init(&device);
    linear.weight.val(); // initializes it
    let forward = |policy: &SavedPolicy, seed: usize| {
        policy.scope(|| {
            let x = tensor(values([512, 64], seed), &device).require_grad();
            let x = F::linear(x, Tensor::eye(64, &device), None);
            // Some in place, some taken twice, some in a segment.
            let y = weights.iter().fold(x, |x, weight| {
                let y = F::linear(x.clone(), weight.clone(), None).mul_scalar(0.5) + 0.25;
                F::silu(y) + F::linear(x, weights[0].clone(), None)
            });
            let y = checkpoint(&linear, y, |linear, y| linear.forward(F::gelu(y)));
            F::linear(y, weights[1].clone(), None)
        })
    };
    let backward = |y: Tensor<2>| {
        let gradients = y.sum().backward();
        let mut of: Vec<_> =
            weights.iter().map(|weight| weight.grad(&gradients).unwrap().into_data()).collect();
        of.push(linear.weight.grad(&gradients).unwrap().into_data());
        of
    };
    let close = |found: &[TensorData], exact: &[TensorData]| {
        for (at, (found, exact)) in found.iter().zip(exact).enumerate() {
            assert_close(&format!("gradient {at}"), found, exact);
        }
    };
    let exact = [0, 1].map(|seed| backward(forward(&SavedPolicy::Keep, seed)));
    let disk = SavedPolicy::disk(std::env::temp_dir()).unwrap();
    for policy in [SavedPolicy::Host, disk] {
        for _ in 0..3 {
            close(&backward(forward(&policy, 0)), &exact[0]);
        }
        // Two graphs, of which the first one is first.
        let [first, second] = [0, 1].map(|seed| forward(&policy, seed));
        close(&backward(first), &exact[0]);
        drop(forward(&policy, 0)); // nobody asks for it
        close(&backward(second), &exact[1]);
        std::thread::scope(|scope| {
            let y = forward(&policy, 1);
            scope.spawn(|| close(&backward(y), &exact[1]));
            for seed in [0, 1] {
                let (policy, exact) = (&policy, &exact);
                let run = move || close(&backward(forward(policy, seed)), &exact[seed]);
                scope.spawn(run);
            }
        });
    }
}
