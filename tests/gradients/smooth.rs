//! Compares smooth activations and gates with stock Burn.
use crate::common::*;
use crate::table::activations::{Activation, smooth};
use burn::tensor::{DType, Tensor, activation};
use burn_memsave::functional as F;
use std::ops::Range;

/// A function of a tensor.
type Function = fn(Tensor<3>) -> Tensor<3>;

/// Runs a check of every smooth activation of the table.
fn each(check: impl Fn(&Activation)) {
    for activation in smooth() {
        println!("{}", activation.name);
        check(&activation);
    }
}

fn check(shape: [usize; 3], range: Range<f64>, setting: Setting) -> Check {
    Check::new([Input::between(shape, range)], setting)
}

#[test]
fn activations_equal_stock() {
    each(|Activation { ours, stock, notes, .. }| {
        for_all(48, ([1..4usize, 1..6, 1..20], settings()), |(shape, setting)| {
            for backend in Backend::ALL {
                if backend == Backend::NdArray && notes.not_on_ndarray.is_some() {
                    continue;
                }
                let check = check(shape, notes.inputs(), setting).on(backend);
                // Stock computes some of them, or factors of their gradients, in f32 whatever the dtype. So does NdArray.
                let tolerance = notes.within.or((backend == Backend::NdArray).then_some(1e-6));
                let check = match tolerance {
                    Some(tolerance) if setting.dtype == DType::F64 => check.within(tolerance),
                    _ => check,
                };
                check.compare::<3>(&|t| ours(t.get(0)), &|t| stock(t.get(0)));
            }
        });
    });
}

#[test]
fn activations_equal_stock_in_half_precision() {
    each(|Activation { ours, stock, notes, .. }| {
        for dtype in HALF {
            let check = check([2, 3, 7], notes.inputs(), Setting::of(dtype));
            check.compare::<3>(&|t| ours(t.get(0)), &|t| stock(t.get(0)));
        }
    });
}

#[test]
fn activations_are_differentiated() {
    each(|Activation { ours, notes, .. }| {
        check([2, 3, 7], notes.inputs(), Setting::default()).differentiate::<3>(&|t| ours(t.get(0)));
    });
}

/// No overflow, no division of one by the other: outputs and gradients are numbers far from zero, too.
#[test]
fn activations_are_finite_for_large_inputs() {
    each(|Activation { ours, .. }| {
        for (backend, dtype) in Backend::ALL.into_iter().flat_map(|b| [(b, DType::F32), (b, DType::F64)]) {
            let device = backend.device().autodiff();
            let values = vec![-1e6, -1e3, -100.0, -30.0, 0.0, 30.0, 100.0, 1e3, 1e6];
            let x = tensor::<3>(values, &[3, 3, 1], &device, dtype).require_grad();
            let y = ours(x.clone());
            let gradient = x.grad(&y.clone().sum().backward()).expect("x is tracked");
            for data in [y.into_data(), gradient.into_data()] {
                assert!(numbers(&data).iter().all(|value| value.is_finite()), "{dtype:?}: {data}");
            }
        }
    });
}

#[test]
fn activations_treat_empty_inputs_as_stock() {
    each(|Activation { ours, stock, notes, .. }| {
        let check = check([2, 0, 3], notes.inputs(), Setting::default());
        check.compare_panics::<3>(&|t| ours(t.get(0)), &|t| stock(t.get(0)));
    });
}

/// More elements than one thread takes.
#[test]
fn equals_stock_for_many_elements() {
    let check =
        Check::new([Input::between([3, 70, 130], -4.0..4.0)], Setting::of(DType::F64)).on(Backend::Flex);
    check.compare::<3>(&|t| F::gelu(t.get(0)), &|t| activation::gelu(t.get(0)));
    check.compare::<3>(&|t| F::tanh(t.get(0)), &|t| activation::tanh(t.get(0)));
    let check =
        Check::new([Input::random([3, 70, 130]), Input::random([3, 70, 130])], Setting::of(DType::F64));
    let check = check.on(Backend::Flex);
    check
        .compare::<3>(&|t| F::silu_gate(t.get(0), t.get(1)), &|t| t.get::<3>(0) * activation::silu(t.get(1)));
}

/// On what another layer keeps, sigmoid and tanh keep nothing: their slope is read off the input.
#[test]
fn reads_the_input_where_it_is_kept() {
    let check =
        Check::new([Input::random([3, 4, 5]), Input::random([5, 6])], Setting::default()).on(Backend::Flex);
    let ours: [Function; 2] = [F::sigmoid, F::tanh];
    let stock: [Function; 2] = [activation::sigmoid, activation::tanh];
    for (ours, stock) in ours.into_iter().zip(stock) {
        let chain = |t: &Operands, f: Function| {
            let x = t.get::<3>(0) * 2.0;
            let beside = F::linear(x.clone(), t.get(1), None);
            f(x).sum_dim(2) * beside
        };
        check.compare::<3>(&|t| chain(t, ours), &|t| chain(t, stock));
    }
}

mod gates {
    use super::*;

    #[test]
    fn silu_gate_equals_stock() {
        for_all(64, ([1..4usize, 1..6, 1..20], settings()), |(shape, setting)| {
            for backend in Backend::ALL {
                let check =
                    Check::new([Input::random(shape), Input::between(shape, -4.0..4.0)], setting).on(backend);
                let rough = backend == Backend::NdArray && setting.dtype == DType::F64;
                let check = if rough { check.within(1e-6) } else { check };
                let stock = |t: &Operands| t.get::<3>(0) * activation::silu(t.get(1));
                check.compare::<3>(&|t| F::silu_gate(t.get(0), t.get(1)), &stock);
            }
        });
    }

    #[test]
    fn glu_equals_stock() {
        for_all(64, ([1..4usize, 1..6, 1..10], -3..3isize, settings()), |(mut shape, dim, setting)| {
            shape[dim.rem_euclid(3) as usize] *= 2;
            for backend in Backend::ALL {
                let check = check(shape, -4.0..4.0, setting).on(backend);
                let rough = backend == Backend::NdArray && setting.dtype == DType::F64;
                let check = if rough { check.within(1e-6) } else { check };
                check.compare::<3>(&|t| F::glu(t.get::<3>(0), dim), &|t| activation::glu(t.get::<3>(0), dim));
            }
        });
    }

    #[test]
    fn are_differentiated() {
        let inputs = [Input::random([2, 3, 4]), Input::random([2, 3, 4])];
        let check = Check::new(inputs, Setting::default());
        check.differentiate::<3>(&|t| F::silu_gate(t.get(0), t.get(1)));
        check.differentiate::<3>(&|t| F::glu(t.get::<3>(0), 2).repeat_dim(2, 2) * t.get(1));
    }

    #[test]
    fn one_tensor_may_be_both() {
        let check = check([2, 3, 5], -4.0..4.0, Setting::default()).on(Backend::Flex);
        let stock = |t: &Operands| t.get::<3>(0) * activation::silu(t.get(0));
        check.compare::<3>(&|t| F::silu_gate(t.get(0), t.get(0)), &stock);
    }

    #[test]
    fn odd_inputs_are_treated_as_stock_treats_them() {
        for (shape, dim) in [([2, 3, 5], 2), ([2, 3, 4], 3), ([2, 3, 4], -4), ([2, 0, 4], 2), ([2, 0, 4], 1)]
        {
            check(shape, -4.0..4.0, Setting::default())
                .compare_panics::<3>(&|t| F::glu(t.get::<3>(0), dim), &|t| {
                    activation::glu(t.get::<3>(0), dim)
                });
        }
        let broadcast = Check::new([Input::random([2, 3, 4]), Input::random([2, 1, 4])], Setting::default());
        let stock = |t: &Operands| t.get::<3>(0) * activation::silu(t.get(1));
        broadcast.compare_panics::<3>(&|t| F::silu_gate(t.get(0), t.get(1)), &stock);
    }
}
