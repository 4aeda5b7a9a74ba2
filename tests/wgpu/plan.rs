//! Plans within a budget of a device's memory.
use crate::{alone, gpu, tensor, values};
use burn::tensor::Tensor;
use burn_memsave::measure::{StepInput, measure_step};
use burn_memsave::nn::{Linear, LinearConfig, activation::Gelu};
use burn_memsave::plan::{ProfileOptions, block, profile};

const WIDTH: usize = 128;

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
