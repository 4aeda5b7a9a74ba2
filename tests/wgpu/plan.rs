//! Plans within a budget of a device's memory.
use crate::{alone, gpu, tensor, values};
use burn::tensor::{Device, Tensor};
use burn_memsave::measure::{StepInput, measure_step};
use burn_memsave::nn::{Linear, LinearConfig, activation::Gelu};
use burn_memsave::plan::{PlanError, ProfileOptions, block, dry_run, profile, retry_halved};

const WIDTH: usize = 128;

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
    assert_eq!(dry_run(&device, step).unwrap(), expected);
    assert_eq!(step(), expected); // kernels are launched again
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
        measure_step(&model, x, |model, x| model.iter().fold(x, |x, linear| linear.forward(x)).mean())
    };
    let step = dry_run(&device, step).unwrap();
    let weights = (LAYERS * LARGE * LARGE * 4) as u64; // 128 GiB
    assert_eq!(step.gradients, weights);
    assert!(step.peak.unwrap() >= weights, "{step}");
}

#[test]
fn only_devices_run_dry() {
    assert!(matches!(dry_run(&Device::flex(), || ()), Err(PlanError::NoDryRun)));
}

/// A batch for which there is no memory is halved; the device and graphs go on.
#[test]
fn batches_are_halved_where_there_is_no_memory() {
    const WIDE: usize = 1 << 16;
    /// Rows of a tensor of 8 GiB: more than a buffer may have.
    const HUGE: usize = 1 << 15;
    let _alone = alone();
    let device = gpu().autodiff();
    let weight = Tensor::<2>::ones([1, WIDE], &device).require_grad();
    let mut tried = vec![];
    let step = |items: usize| {
        tried.push(items);
        let x = Tensor::<2>::ones([if items > 16 { HUGE } else { items }, 1], &device);
        let gradients = (x * weight.clone()).mean().backward();
        weight.grad(&gradients).expect("it is tracked").sum().into_scalar::<f32>()
    };
    let (items, sum) = retry_halved(&device, 64, step).unwrap();
    assert_eq!((items, &tried[..]), (16, &[64, 32, 16][..]));
    assert!((sum - 1.0).abs() < 1e-3, "{sum}");
    let read = |_| Tensor::<2>::ones([HUGE, WIDE], &device).sum().into_scalar::<f32>();
    assert!(matches!(retry_halved(&device, 1, read), Err(PlanError::OutOfMemory)));
    assert_eq!(Tensor::<1>::ones([3], &device).sum().into_scalar::<f32>(), 3.0);
}
