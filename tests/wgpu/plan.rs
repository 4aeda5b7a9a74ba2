//! Plans within a budget of a device's memory.
use crate::{alone, gpu, on_cuda, same_bytes, tensor, values};
use burn::backend::DispatchDevice;
use burn::cubecl::MemoryScope;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::measure::{StepInput, bytes_in_use, measure_step};
use burn_memsave::nn::{Linear, LinearConfig, activation::Gelu};
use burn_memsave::plan::{
    OptimizerState, PlanError, ProfileOptions, block, dry_run, estimate_step, profile,
    retry_with_smaller_batch,
};

const WIDTH: usize = 128;

/// The bytes of two runs of a step.
fn counted_alike((a, b): (Option<u64>, Option<u64>)) -> bool {
    a.zip(b).is_some_and(|(a, b)| same_bytes(a, b))
}

#[allow(clippy::ptr_arg, reason = "a vector is a module, a slice is none")]
fn loss(model: &Vec<Vec<Linear>>, x: Tensor<2>) -> Tensor<1> {
    let gelu = |x: Tensor<2>, linear: &Linear| Gelu::new().forward(linear.forward(x));
    let run = |x, linears| block(linears, x, move |linears: &Vec<Linear>, x| linears.iter().fold(x, gelu));
    model.iter().fold(x, run).mean()
}

#[test]
fn steps_need_no_more_than_planned() {
    let _alone = alone();
    let device = gpu().autodiff();
    let linears = || (0..3).map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device)).collect();
    let model: Vec<Vec<Linear>> = (0..8).map(|_| linears()).collect();
    let x: Tensor<2> = tensor(values([1024, WIDTH], 3), &device);
    let profile = profile(&model, x.copy(), &ProfileOptions::new(), loss).unwrap();
    let (least, most) = (profile.least(), profile.most());
    let whole = measure_step(&model, x.copy(), loss).peak.unwrap();
    assert!(least < most * 3 / 4, "{least} to {most}");
    // A block that is measured alone has its input held, which fusion may overwrite in a step.
    assert!(most >= whole - whole / 20 && most <= whole + whole / 10, "{least} to {most}, {whole}");
    for budget in [least + least / 20, least.midpoint(most), most + most / 20] {
        let plan = profile.measured_plan(&model, x.copy(), budget, loss).unwrap();
        let measured = plan.measured.unwrap();
        assert!(measured <= budget, "{measured} of {budget}: {plan}");
        assert!(plan.predicted.abs_diff(measured) <= measured / 10, "{plan}");
    }
}

/// A step that is not run needs what it would need.
#[test]
fn dry_runs_count_what_steps_take() {
    let _alone = alone();
    let device = gpu().autodiff();
    let step = || {
        let model: Vec<Vec<Linear>> =
            (0..3).map(|_| (0..3).map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device)).collect()).collect();
        let step = measure_step(&model, Tensor::<2>::ones([1024, WIDTH], &device), loss);
        (step.kept, step.peak, step.gradients, step.launches)
    };
    step(); // what is tuned is tuned
    let expected = step();
    // Kernels are launched again afterwards.
    for (kept, peak, gradients, launches) in [dry_run(&device, step).unwrap(), step()] {
        let bytes = [(kept, expected.0), (peak, expected.1)];
        assert!(bytes.into_iter().all(counted_alike), "{bytes:?}");
        assert_eq!((gradients, launches), (expected.2, expected.3));
    }
}

/// What is said before anything is there is what is measured afterwards.
#[test]
fn steps_are_estimated() {
    let _alone = alone();
    let device = gpu().autodiff();
    let model = || -> Vec<Vec<Linear>> {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(&device);
        let mut model: Vec<Vec<Linear>> = (0..3).map(|_| (0..3).map(|_| linear()).collect()).collect();
        model[0][0] = linear().freeze();
        model
    };
    let input = || Tensor::<2>::ones([1024, WIDTH], &device);
    let estimated = estimate_step(&device, model, input, loss, OptimizerState::Two).unwrap();

    let before = bytes_in_use(&device).expect("a device counts");
    let (model, x) = (model(), input());
    drop(loss(&model, x.copy()).backward()); // parameters begin to be
    device.sync().expect("the device works");
    let parameters = bytes_in_use(&device).expect("a device counts") - before - x.bytes();
    let step = measure_step(&model, x.copy(), loss);
    let bytes = [(Some(estimated.kept), step.kept), (Some(estimated.peak), step.peak)];
    assert!(bytes.into_iter().all(counted_alike), "{bytes:?}");
    assert_eq!(estimated.training.gradients, step.gradients);
    assert_eq!(estimated.training.optimizer, 2 * step.gradients);
    assert_eq!(estimated.training.parameters, step.gradients + (4 * WIDTH * (WIDTH + 1)) as u64);
    assert!(
        parameters.abs_diff(estimated.training.parameters) <= parameters / 20,
        "{parameters}: {estimated:?}"
    );
    assert_eq!(estimated.input, x.bytes());
    assert_eq!(
        estimated.total(),
        estimated.training.parameters + 2 * step.gradients + x.bytes() + estimated.peak
    );
}

/// Bytes that the pools of the device have taken.
fn mapped_bytes() -> u64 {
    #[allow(irrefutable_let_patterns, reason = "without any other backend")]
    let DispatchDevice::Cube(device) = gpu().as_dispatch().clone() else { panic!("a device of CubeCL") };
    let report = device.client().memory_report(MemoryScope::Device);
    let pools = report.streams.into_iter().flat_map(|stream| {
        stream.pools.dynamic.into_iter().chain([stream.pools.persistent, stream.pools.dedicated])
    });
    // Pages of a pool are about equal.
    pools.map(|pool| pool.usage.bytes_reserved / pool.pages.max(1) * (pool.pages - pool.pages_unmapped)).sum()
}

/// Of a model that is larger than the memory.
#[test]
fn dry_runs_take_no_memory() {
    const LARGE: usize = 4096;
    const LAYERS: usize = 2048;
    let _alone = alone();
    let device = gpu().autodiff();
    let step = || {
        let config = LinearConfig::new(LARGE, LARGE).with_bias(false);
        let model: Vec<Linear> = (0..LAYERS).map(|_| config.init(&device)).collect();
        let x = Tensor::<2>::ones([1, LARGE], &device).require_grad();
        let step =
            measure_step(&model, x, |model, x| model.iter().fold(x, |x, linear| linear.forward(x)).mean());
        (step, mapped_bytes())
    };
    let before = mapped_bytes();
    let (step, mapped) = dry_run(&device, step).unwrap();
    let weights = (LAYERS * LARGE * LARGE * 4) as u64; // 128 GiB
    assert_eq!(step.gradients, weights);
    assert!(step.peak.unwrap() >= weights, "{step}");
    assert!(mapped <= before + (1 << 30), "{mapped}, {before} before");
}

/// What is computed again is not compared: there is nothing to compare.
#[test]
fn segments_run_dry() {
    let _alone = alone();
    let device = gpu().autodiff();
    let step = || {
        let model: Vec<Linear> = (0..4).map(|_| LinearConfig::new(WIDTH, WIDTH).init(&device)).collect();
        // What dry tensors may lie on.
        drop(Tensor::<2>::random([1024, WIDTH], Distribution::Default, &device));
        measure_step(&model, Tensor::<2>::ones([1024, WIDTH], &device), |model, x| {
            let run = |x, linear| {
                checkpoint(linear, x, |linear: &Linear, x| Gelu::new().forward(linear.forward(x)))
            };
            model.iter().fold(x, run).mean()
        })
        .peak
    };
    for _ in 0..2 {
        step();
    }
    let expected = step();
    for _ in 0..3 {
        let peaks = (dry_run(&device, step).unwrap(), expected);
        assert!(counted_alike(peaks), "{peaks:?}");
    }
}

#[test]
fn only_devices_run_dry() {
    let flex = Device::flex();
    assert!(matches!(dry_run(&flex, || ()), Err(PlanError::NoDryRun)));
    let none = || -> Vec<Vec<Linear>> { panic!("nothing is made") };
    let input = || Tensor::ones([1, WIDTH], &flex);
    let refused = estimate_step(&flex, none, input, loss, OptimizerState::None);
    assert!(matches!(refused, Err(PlanError::NoDryRun)));
}

/// A batch for which there is no memory is halved, also where only the backward pass has none; the device and graphs go on.
#[test]
fn batches_are_halved_where_there_is_no_memory() {
    const WIDE: usize = 1 << 16;
    // Rows of a tensor that is larger than a buffer may be: 8 GiB, or 1 TiB.
    let rows = if on_cuda() { 1 << 22 } else { 1 << 15 };
    let _alone = alone();
    let device = gpu().autodiff();
    let model = vec![LinearConfig::new(8, 8).init(&device)];
    let huge = |device: &Device| Tensor::<2>::ones([rows, WIDE], device).sum();
    for fails_backward in [false, true] {
        let mut tried = vec![];
        let step = |items: usize| {
            tried.push(items);
            let loss = model[0].forward(Tensor::<2>::ones([items, 8], &device)).mean();
            let mut gradients = GradientsParams::from_grads(loss.clone().backward(), &model);
            if items <= 16 {
                return Ok((loss, gradients));
            }
            // What is computed of what is not there.
            let nothing = huge(&device.clone().without_autodiff());
            if !fails_backward {
                return Ok((loss.inner() + nothing, gradients));
            }
            let gradient = gradients.remove::<2>(model[0].weight.id).expect("it is tracked");
            gradients.register(model[0].weight.id, gradient + nothing.unsqueeze());
            Ok((loss, gradients))
        };
        let (items, loss, gradients) = retry_with_smaller_batch(&model, 64, step).unwrap();
        assert_eq!((items, &tried[..], gradients.len()), (16, &[64, 32, 16][..], 2));
        assert!(loss.into_scalar::<f32>().is_finite());
    }
    let nothing = retry_with_smaller_batch(&model, 1, |_| Ok((huge(&device), GradientsParams::new())));
    assert!(matches!(nothing, Err(PlanError::OutOfMemory)));
    assert_eq!(Tensor::<1>::ones([3], &device).sum().into_scalar::<f32>(), 3.0);
}
