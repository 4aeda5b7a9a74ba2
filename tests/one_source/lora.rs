//! Low-rank adapters on a model of both namespaces.
use super::*;
use burn::module::{Lora, ModuleMapper, QLora, Quantizer};
use burn::optim::{GradientsAccumulator, SgdConfig};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn_memsave::lora::{ConvLora, a_factors};

/// Adapters of every kind of layer that can have one.
fn config() -> ConvLora {
    ConvLora::new(Lora::new(2, 3.0))
}

/// Adapters do something.
struct Disturb {
    path: Vec<String>,
}

impl ModuleMapper for Disturb {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.path.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.path.pop();
    }
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if !self.path.ends_with(&["lora".into(), "b".into()]) {
            return param;
        }
        let random = |b: Tensor<D>| b.detach().random_like(Distribution::Normal(0.0, 0.3));
        param.map(random).set_require_grad(true)
    }
}

/// The net has functions with jumps, such as a threshold, that a rounding error in training may take somewhere else.
const ROUGHLY: f32 = 1e-3;

fn assert_roughly(what: &str, ours: TensorData, stock: &TensorData) {
    let largest = stock.iter::<f32>().fold(0f32, |largest, v| largest.max(v.abs()));
    for (ours, stock) in ours.iter::<f32>().zip(stock.iter::<f32>()) {
        assert!(
            (ours - stock).abs() <= ROUGHLY * largest,
            "{what}: {ours}, stock {stock}, largest {largest}"
        );
    }
}

fn group(pattern: &str) -> ParamGroup {
    ParamGroup::from_regex(pattern).expect("a valid pattern")
}

/// Both nets with the same adapters, of which those before a softmax are frozen: what hardly matters for the loss has a
/// gradient that is mostly rounding, and Adam makes steps of it.
fn trained(device: &Device) -> (stock::Net, memsave::Net) {
    let (stock, ours) = adapted(device);
    let attended = || group(r"mha\.(key|query)");
    (stock.freeze_group(attended()), ours.freeze_group(attended()))
}

/// Both nets with the same adapters.
fn adapted(device: &Device) -> (stock::Net, memsave::Net) {
    let (stock, ours) = nets(device);
    let stock = stock.apply_reparameterization(config()).map(&mut Disturb { path: vec![] });
    let ours = ours.apply_reparameterization(config()).load_record(stock.clone().into_record());
    (stock, ours)
}

fn quantizer(device: &Device, pattern: &str) -> Quantizer {
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
    quantizer.set_param_group(group(pattern));
    quantizer
}

fn input(device: &Device) -> (Tensor<4>, Tensor<2>) {
    let normal = Distribution::Normal(0.0, 1.0);
    (Tensor::random([3, 2, 8, 8], normal, device), Tensor::random([3, 3], normal, device))
}

fn devices() -> [Device; 2] {
    [Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing()]
}

#[test]
fn gradients_are_equal_with_all_adapters_or_some() {
    let _seeded = seeded();
    for device in devices() {
        let (x, dy) = input(&device);
        let (stock, ours) = adapted(&device);
        let found = by_path(&ours, None)
            .into_iter()
            .filter(|(path, data)| path.ends_with("lora.b") && data.is_some());
        assert!(found.count() > 10, "there are adapters");
        gradients_agree(&stock, &ours, &x, &dy);
        for frozen in ["lora.a$", "lora.b$", "lora", "head.*lora"] {
            let (stock, ours) =
                (stock.clone().freeze_group(group(frozen)), ours.clone().freeze_group(group(frozen)));
            gradients_agree(&stock, &ours, &x, &dy);
        }
        let (stock, ours) = (stock.freeze_group(a_factors()), ours.freeze_group(a_factors()));
        gradients_agree(&stock, &ours, &x, &dy);
        // Full fine-tuning with adapters; a softmax does not depend on the bias of keys, whose gradient is rounding.
        let all = ParamGroup::all().exclude(group(r"mha\.key\.bias$"));
        gradients_agree(&stock.unfreeze_group(all.clone()), &ours.unfreeze_group(all), &x, &dy);
    }
}

#[test]
fn gradients_are_equal_on_a_quantized_base() {
    let _seeded = seeded();
    for device in devices() {
        let (x, dy) = input(&device);
        for group in [r"(position|head|encoder.*)\.weight$", r"(position|head|encoder.*)\.(weight|bias)$"] {
            let stock = stock::Net::new(&device)
                .apply_qlora(QLora::new(Lora::new(2, 3.0), quantizer(&device, group)))
                .map(&mut Disturb { path: vec![] });
            let ours = memsave::Net::new(&device)
                .apply_qlora(QLora::new(Lora::new(2, 3.0), quantizer(&device, group)))
                .load_record(stock.clone().into_record());
            gradients_agree(&stock, &ours, &x, &dy);
        }
    }
}

#[test]
fn training_goes_the_same_way() {
    let _seeded = seeded();
    let device = Device::flex().autodiff();
    let (mut stock, mut ours) = trained(&device);
    let (mut sgd_stock, mut sgd_ours) = (SgdConfig::new().init(), SgdConfig::new().init());
    let (x, _) = input(&device);
    for seed in 0..5 {
        let (loss_stock, loss_ours);
        (stock, loss_stock) = step((stock, stock::Net::forward), &mut sgd_stock, &x, seed);
        (ours, loss_ours) = step((ours, memsave::Net::forward), &mut sgd_ours, &x, seed);
        assert_roughly("loss", loss_ours, &loss_stock);
    }
    let x = x.inner();
    let y = stock.valid().forward(x.clone()).into_data();
    assert_roughly("inference", ours.valid().forward(x.clone()).into_data(), &y);
    assert_roughly("merged", ours.valid().materialize().forward(x.clone()).into_data(), &y);
    // There and back.
    let untrained = memsave::Net::new(&device).apply_reparameterization(config());
    let loaded = untrained.load_record(stock.clone().into_record());
    assert_roughly("stock's record", loaded.valid().forward(x.clone()).into_data(), &y);
    let loaded = stock::Net::new(&device).apply_reparameterization(config()).load_record(ours.into_record());
    assert_roughly("our record", loaded.valid().forward(x).into_data(), &y);
}

#[test]
fn the_optimizers_state_moves_to_ours_and_back() {
    let _seeded = seeded();
    let (stock, ours) = trained(&Device::flex().autodiff());
    let stock = (stock, stock::Net::forward as Forward<_>);
    let ours = (ours, memsave::Net::forward as Forward<_>);
    training_is_taken_over(stock.clone(), ours.clone());
    training_is_taken_over(ours, stock);
}

#[test]
fn gradients_accumulate() {
    let _seeded = seeded();
    let device = Device::flex().autodiff();
    fn two_batches<M: Module>(model: M, forward: Forward<M>, x: &Tensor<4>) -> M {
        let mut accumulator = GradientsAccumulator::new();
        for part in x.clone().split(2, 0) {
            x.device().seed(3);
            let loss = forward(&model, part).powf_scalar(2.0).mean();
            accumulator.accumulate(&model, GradientsParams::from_grads(loss.backward(), &model));
        }
        SgdConfig::new().init().step(LEARNING_RATE, model, accumulator.grads())
    }
    let (stock, ours) = trained(&device);
    let x = Tensor::<4>::random([4, 2, 8, 8], Distribution::Normal(0.0, 1.0), &device);
    let before = weights(&stock);
    let stock = weights(&two_batches(stock, stock::Net::forward, &x));
    let ours = weights(&two_batches(ours, memsave::Net::forward, &x));
    let distance = |other: &[f32]| stock.iter().zip(other).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let [step, apart] = [&before, &ours].map(|other| distance(other));
    assert!(step > 1e-4, "no step was made");
    assert!(apart < ROUGHLY * step, "{apart} apart after a step of {step}");
}
