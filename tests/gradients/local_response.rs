//! Compares local response norm with stock Burn.
use crate::common::*;
use burn::nn::LocalResponseNormConfig;
use burn::tensor::{DType, Tensor};
use burn_memsave::functional as F;
use burn_memsave::layers::MemSaveLocalResponseNorm;
use proptest::prelude::*;

/// Options under which sums of squares matter.
fn configs() -> impl Strategy<Value = LocalResponseNormConfig> {
    // Exact in f32: NdArray rounds an exponent to it.
    let beta = prop::sample::select(vec![0.75, 0.5, 1.0, 2.0, 0.625, -0.5, 0.0]);
    (1..8usize, 0.1..2.0, beta, 0.5..2.0).prop_map(|(size, alpha, beta, k)| {
        LocalResponseNormConfig::new(size).with_alpha(alpha).with_beta(beta).with_k(k)
    })
}

fn ours<const D: usize>(config: &LocalResponseNormConfig) -> impl Fn(&Operands) -> Tensor<D> {
    let config = config.clone();
    move |t| F::local_response_norm(t.get(0), config.size, config.alpha, config.beta, config.k)
}

fn stock<const D: usize>(config: &LocalResponseNormConfig) -> impl Fn(&Operands) -> Tensor<D> {
    let config = config.clone();
    move |t| config.init().forward(t.get(0))
}

#[test]
fn equals_stock() {
    let shape = ([1..4usize, 1..7], [1..5usize, 1..4]);
    for_all(
        128,
        (shape, configs(), settings()),
        |(([batch, channels], [height, width]), config, setting)| {
            let check = Check::new([Input::random([batch, channels, height, width])], setting);
            check.compare::<4>(&ours(&config), &stock(&config));
            let check = Check::new([Input::random([batch, channels, height])], setting);
            check.compare::<3>(&ours(&config), &stock(&config));
        },
    );
}

#[test]
fn the_module_equals_stock() {
    for_all(32, (configs(), settings()), |(config, setting)| {
        let module = MemSaveLocalResponseNorm::from_nn_local_response_norm(config.init());
        let check = Check::new([Input::random([2, 5, 3, 2, 2])], setting);
        check.compare::<5>(&|t| module.forward(t.get(0)), &stock(&config));
    });
}

/// More elements than a tile, and enough for several threads.
#[test]
fn equals_stock_for_many_elements() {
    for shape in [[3, 6, 23, 29], [2, 70, 30, 40], [64, 40, 3, 3]] {
        let config = LocalResponseNormConfig::new(5).with_alpha(1.0);
        let check = Check::new([Input::random(shape)], Setting::of(DType::F64));
        check.compare::<4>(&ours(&config), &stock(&config));
    }
}

#[test]
fn equals_stock_in_half_precision() {
    for dtype in HALF {
        let config = LocalResponseNormConfig::new(3).with_alpha(1.0);
        let check = Check::new([Input::random([2, 5, 4, 3])], Setting::of(dtype));
        check.compare::<4>(&ours(&config), &stock(&config));
    }
}

#[test]
fn is_differentiated() {
    for (size, beta) in [(3, 0.75), (4, 1.3), (2, 1.0)] {
        let config = LocalResponseNormConfig::new(size).with_alpha(1.0).with_beta(beta);
        Check::new([Input::random([2, 5, 3])], Setting::default()).differentiate::<3>(&ours(&config));
    }
}

#[test]
fn takes_an_input_twice() {
    let config = LocalResponseNormConfig::new(3);
    let (ours, stock) = (ours::<3>(&config), stock::<3>(&config));
    let check = Check::new([Input::random([2, 5, 3])], Setting::default());
    check.compare::<3>(&|t| ours(t) + ours(t) * t.get(0), &|t| stock(t) + stock(t) * t.get(0));
}

#[test]
fn an_infinite_element_stays_in_its_windows() {
    let config = LocalResponseNormConfig::new(3);
    let values = [1.0, f64::INFINITY, 2.0, 3.0, f64::NAN, 0.0, -4.0, 5.0];
    let check = Check::new([Input::given([1, 8, 1], values)], Setting::of(DType::F64));
    check.compare::<3>(&ours(&config), &stock(&config));
}

#[test]
fn empty_inputs_give_empty_outputs() {
    for shape in [[0, 3, 2], [2, 3, 0], [2, 0, 3]] {
        let x = Tensor::<3>::zeros(shape, &Backend::Flex.autodiff_devices()[0]).require_grad();
        let y = F::local_response_norm(x.clone(), 3, 1.0, 0.75, 1.0);
        assert_eq!(y.dims(), shape);
        assert_eq!(x.grad(&y.sum().backward()).expect("tracked").dims(), shape);
    }
}

#[test]
#[should_panic = "[_, _, _, ..]"]
fn an_input_without_positions_is_refused() {
    let norm = MemSaveLocalResponseNorm::from(LocalResponseNormConfig::new(3).init());
    norm.forward(Tensor::<2>::zeros([2, 4], &Backend::Flex.device()));
}
