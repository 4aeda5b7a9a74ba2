//! Compares embeddings with stock Burn.
use crate::common::*;
use burn::tensor::{DType, Int, Tensor, TensorData, module};
use burn_memsave::functional as F;

/// Rows to look up, as often as may be.
fn indices(t: &Operands, shape: [usize; 2], rows: usize, seed: u64) -> Tensor<2, Int> {
    let numbers = uniform(shape[0] * shape[1], seed, 0.0..rows as f64);
    let indices: Vec<i64> = numbers.into_iter().map(|row| (row as i64).min(rows as i64 - 1)).collect();
    Tensor::from_data(TensorData::new(indices, shape), t.device())
}

#[test]
fn equals_stock() {
    let sizes = [1..9usize, 1..6, 1..4, 1..9];
    for_all(96, (sizes, settings()), |([rows, width, batch, length], setting)| {
        let indices = |t: &Operands| indices(t, [batch, length], rows, setting.seed);
        let check = Check::new([Input::random([rows, width])], setting).same_output();
        check.compare::<3>(&|t| F::embedding(t.get(0), indices(t)), &|t| {
            module::embedding(t.get(0), indices(t))
        });
    });
}

#[test]
fn takes_indices_that_are_not_contiguous() {
    for form in [Form::Leaf, Form::Transposed, Form::Computed] {
        let setting = Setting { form, ..Setting::default() };
        let indices = |t: &Operands| indices(t, [5, 3], 6, 2).swap_dims(0, 1);
        Check::new([Input::random([6, 4])], setting)
            .compare::<3>(&|t| F::embedding(t.get(0), indices(t)), &|t| {
                module::embedding(t.get(0), indices(t))
            });
    }
}

#[test]
fn takes_a_table_twice() {
    let (first, second) = (|t: &Operands| indices(t, [2, 3], 6, 2), |t: &Operands| indices(t, [2, 3], 6, 3));
    Check::new([Input::random([6, 4])], Setting::default())
        .compare::<3>(&|t| F::embedding(t.get(0), first(t)) * F::embedding(t.get(0), second(t)), &|t| {
            module::embedding(t.get(0), first(t)) * module::embedding(t.get(0), second(t))
        });
}

#[test]
fn equals_stock_in_half_precision() {
    for dtype in HALF {
        let indices = |t: &Operands| indices(t, [2, 5], 6, 2);
        Check::new([Input::random([6, 4])], Setting::of(dtype))
            .compare::<3>(&|t| F::embedding(t.get(0), indices(t)), &|t| {
                module::embedding(t.get(0), indices(t))
            });
    }
}

#[test]
fn is_differentiated() {
    let indices = |t: &Operands| indices(t, [2, 5], 6, 2);
    Check::new([Input::random([6, 4])], Setting::of(DType::F64))
        .differentiate::<3>(&|t| F::embedding(t.get(0), indices(t)));
}

#[test]
fn treats_odd_indices_as_stock() {
    let none = |t: &Operands| Tensor::<2, Int>::zeros([2, 0], t.device());
    let beyond = |t: &Operands| Tensor::<2, Int>::full([1, 2], 6, t.device());
    let check = Check::new([Input::random([6, 4])], Setting::default());
    for indices in [&none as &dyn Fn(&Operands) -> Tensor<2, Int>, &beyond] {
        check.compare_panics::<3>(&|t| F::embedding(t.get(0), indices(t)), &|t| {
            module::embedding(t.get(0), indices(t))
        });
    }
    let check = Check::new([Input::random([6, 0])], Setting::default());
    let indices = |t: &Operands| indices(t, [2, 3], 6, 3);
    check.compare_panics::<3>(&|t| F::embedding(t.get(0), indices(t)), &|t| {
        module::embedding(t.get(0), indices(t))
    });
}
