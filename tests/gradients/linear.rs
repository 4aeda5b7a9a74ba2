//! Compares dense layers with stock Burn.
use crate::common::*;
use burn::tensor::{Tensor, module};
use burn_memsave::functional as F;
use proptest::prelude::*;

fn ours(t: &Operands) -> Tensor<3> {
    F::linear(t.get(0), t.get(1), t.maybe(2))
}

fn stock(t: &Operands) -> Tensor<3> {
    module::linear(t.get(0), t.get(1), t.maybe(2))
}

fn inputs([batch, rows, d_input, d_output]: [usize; 4], bias: bool) -> Vec<Input> {
    let mut inputs = vec![Input::random([batch, rows, d_input]), Input::random([d_input, d_output])];
    inputs.extend(bias.then(|| Input::random([d_output])));
    inputs
}

#[test]
fn equals_stock() {
    for_all(96, ([1..4usize, 1..5, 1..8, 1..8], any::<bool>(), settings()), |(sizes, bias, setting)| {
        Check::new(inputs(sizes, bias), setting).compare(&ours, &stock);
    });
}

#[test]
fn equals_stock_for_a_vector_and_a_matrix() {
    for_all(48, ([1..4usize, 1..8, 1..8], settings()), |([rows, d_input, d_output], setting)| {
        let parameters = [Input::random([d_input, d_output]), Input::random([d_output])];
        let with = |x: Input| [vec![x], parameters.to_vec()].concat();
        Check::new(with(Input::random([d_input])), setting)
            .compare::<1>(&|t| F::linear(t.get(0), t.get(1), t.maybe(2)), &|t| {
                module::linear(t.get(0), t.get(1), t.maybe(2))
            });
        Check::new(with(Input::random([rows, d_input])), setting)
            .compare::<2>(&|t| F::linear(t.get(0), t.get(1), t.maybe(2)), &|t| {
                module::linear(t.get(0), t.get(1), t.maybe(2))
            });
    });
}

#[test]
fn equals_stock_in_half_precision() {
    for dtype in HALF {
        Check::new(inputs([2, 3, 5, 4], true), Setting::of(dtype)).compare(&ours, &stock);
    }
}

#[test]
fn is_differentiated() {
    Check::new(inputs([2, 3, 5, 4], true), Setting::default()).differentiate(&ours);
}

#[test]
fn takes_an_input_twice() {
    for_all(32, (1..6usize, settings()), |(size, setting)| {
        Check::new([Input::random([size, size])], setting).compare::<2>(
            &|t| F::linear(t.get(0), t.get(0), None) + F::linear(t.get(0), t.get(0), None) * 0.5,
            &|t| module::linear(t.get(0), t.get(0), None) + module::linear(t.get(0), t.get(0), None) * 0.5,
        );
    });
}

#[test]
fn follows_itself() {
    let inputs = [Input::random([2, 3, 4]), Input::random([4, 4]), Input::random([4])];
    Check::new(inputs, Setting::default()).compare::<3>(
        &|t| F::linear(F::linear(t.get(0), t.get(1), t.maybe(2)), t.get(1), t.maybe(2)),
        &|t| module::linear(module::linear(t.get(0), t.get(1), t.maybe(2)), t.get(1), t.maybe(2)),
    );
}

#[test]
fn treats_odd_shapes_as_stock() {
    for sizes in [[2, 3, 0, 4], [2, 3, 5, 0], [1, 1, 1, 1]] {
        Check::new(inputs(sizes, true), Setting::default()).compare_panics(&ours, &stock);
    }
    let mismatched = [
        [Input::random([2, 3, 5]), Input::random([4, 4]), Input::random([4])],
        [Input::random([2, 3, 4]), Input::random([4, 4]), Input::random([3])],
        [Input::random([2, 3, 4]), Input::random([4, 4]), Input::random([1])],
    ];
    for inputs in mismatched {
        Check::new(inputs, Setting::default()).compare_panics(&ours, &stock);
    }
}

/// Stock ends the process on Flex (a batched product of 0.22.1 reads beyond an empty batch), and panics on NdArray.
#[test]
fn takes_an_empty_batch() {
    for [batch, rows] in [[0, 3], [2, 0], [0, 0]] {
        Check::new(inputs([batch, rows, 5, 4], true), Setting::default()).compare(&ours, &|t| {
            let sum = t.get::<3>(0).sum() + t.get::<2>(1).sum() + t.get::<1>(2).sum();
            Tensor::zeros([batch, rows, 4], t.device()) + sum.unsqueeze::<3>()
        });
    }
}
