//! Compares the estimate of training memory, which only depends on the parameters, with what is allocated.
use super::meter::alone;
use burn::module::{Module, ParamGroup};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, MuonConfig, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_memsave::measure::TrackingAllocator;
use burn_memsave::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_memsave::optim::{AdamW8bitConfig, Muon8bitConfig};
use burn_memsave::plan::{Estimate, OptimizerState, PlanError, estimate, estimate_step};

const WIDTH: usize = 300;
/// What is no tensor: nodes, maps, optimizers of each parameter.
const RECORDS: u64 = 16 << 10;

#[derive(Module, Debug)]
struct Net {
    first: Linear,
    norm: LayerNorm,
    second: Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        let linear = || LinearConfig::new(WIDTH, WIDTH).init(device);
        Self { first: linear(), norm: LayerNormConfig::new(WIDTH).init(device), second: linear() }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.second.forward(self.norm.forward(self.first.forward(x))).sum()
    }
}

/// Two matrices, which are all that Muon takes.
fn matrices(device: &Device) -> [Linear; 2] {
    [(); 2].map(|()| LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device))
}

#[track_caller]
fn assert_close(estimated: u64, before: u64, after: u64) {
    let measured = after as i64 - before as i64;
    assert!(measured.abs_diff(estimated as i64) < RECORDS, "estimated {estimated}, measured {measured}");
}

/// Burn frees the graph of a dropped tensor in the next backward pass.
fn settle(device: &Device) {
    drop(Tensor::<1>::ones([1], device).require_grad().backward());
}

/// Parameters, gradients and states, one after the other, beside the estimate that was made before any of them.
#[track_caller]
fn compare<M: Module>(
    model: M,
    trained: &ParamGroup,
    state: OptimizerState,
    mut optimizer: ModuleOptimizer,
    loss: impl Fn(&M, Tensor<2>) -> Tensor<1>,
) {
    let device = Device::flex().autodiff();
    let x = Tensor::<2>::ones([1, WIDTH], &device);
    settle(&device);
    let start = TrackingAllocator::live();
    let Estimate { parameters, gradients, optimizer: of_states } = estimate(&model, trained, state);
    assert_eq!(TrackingAllocator::live(), start, "nothing is allocated");
    drop(loss(&model, x.clone()).inner());
    settle(&device);
    let made = TrackingAllocator::live();
    assert_close(parameters, start, made);
    let found = GradientsParams::from_grads(loss(&model, x).backward(), &model);
    assert_close(gradients, made, TrackingAllocator::live());
    let model = optimizer.step(1e-3, model, found);
    assert_close(of_states, made, TrackingAllocator::live());
    drop(model);
}

/// What a process allocates once: buffers of threads, tables of the graph.
fn warm_up<M: Module>(model: M, mut optimizer: ModuleOptimizer, loss: impl Fn(&M, Tensor<2>) -> Tensor<1>) {
    let x = Tensor::<2>::ones([1, WIDTH], &Device::flex().autodiff());
    let gradients = GradientsParams::from_grads(loss(&model, x).backward(), &model);
    drop(optimizer.step(1e-3, model, gradients));
}

#[test]
fn what_is_estimated_is_what_is_allocated() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let all = ParamGroup::all();
    let optimizers: [(OptimizerState, fn() -> ModuleOptimizer); 3] = [
        (OptimizerState::None, || SgdConfig::new().init()),
        (OptimizerState::Two, || AdamWConfig::new().init()),
        (OptimizerState::AdamW8bit, || AdamW8bitConfig::new().init()),
    ];
    for (state, optimizer) in optimizers {
        warm_up(Net::new(&device), optimizer(), Net::loss);
        compare(Net::new(&device), &all, state, optimizer(), Net::loss);
    }
    let of_matrices: [(OptimizerState, fn() -> ModuleOptimizer); 2] = [
        (OptimizerState::One, || MuonConfig::new().init()),
        (OptimizerState::Muon8bit, || Muon8bitConfig::new().init()),
    ];
    let loss = |net: &[Linear; 2], x| net.iter().fold(x, |x, layer| layer.forward(x)).sum();
    for (state, optimizer) in of_matrices {
        warm_up(matrices(&device), optimizer(), loss);
        compare(matrices(&device), &all, state, optimizer(), loss);
    }
}

#[test]
fn frozen_parameters_have_neither_gradients_nor_states() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let weight = (4 * WIDTH * WIDTH) as u64;
    let second = ParamGroup::from_regex(r"^second\.weight$").expect("a pattern");
    let of_second = estimate(&Net::new(&device), &second, OptimizerState::Two);
    assert_eq!((of_second.gradients, of_second.optimizer), (weight, 2 * weight));
    // Those that exist say themselves whether they are trained.
    let frozen = Net::new(&device).freeze();
    drop(frozen.loss(Tensor::ones([1, WIDTH], &device)));
    let nothing = estimate(&frozen, &ParamGroup::all(), OptimizerState::Two);
    assert_eq!((nothing.gradients, nothing.optimizer), (0, 0));
    assert_eq!(nothing.parameters, of_second.parameters);
    assert_eq!(nothing.total(), nothing.parameters);
}

/// On a CPU kernels cannot be left out, so a step has to run.
#[test]
fn steps_are_not_estimated_on_a_cpu() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = || -> Net { panic!("nothing is made") };
    let input = || Tensor::ones([1, WIDTH], &device);
    let refused = estimate_step(&device, model, input, Net::loss, OptimizerState::Two);
    let error = refused.expect_err("a CPU device");
    assert!(matches!(error, PlanError::NoDryRun));
    assert!(error.to_string().contains("`measure::measure_step`"), "{error}");
}
