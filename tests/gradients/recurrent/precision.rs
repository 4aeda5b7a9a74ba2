//! Compares recurrent layers in half precision with f64.
use super::layers::*;
use super::*;
use burn::tensor::{DType, TensorData};

/// Inputs in half precision, as tensors of any type can hold them.
fn inputs_of_half(options: Options, gates: usize, seed: u64, dtype: DType) -> Vec<Input> {
    let Options { batch, steps, d_input, hidden, .. } = options;
    let rounded = |shape: [usize; 3], index, range| {
        let values = uniform(shape.iter().product(), 5 * seed + index, range);
        Input::given(shape, numbers(&TensorData::new(values, shape).convert_dtype(dtype)))
    };
    vec![
        rounded([batch, steps, d_input], 1, 0.5..1.0),
        rounded([2, batch, hidden], 2, -1.0..1.0),
        rounded([gates, d_input, hidden], 3, -0.5..0.5),
        rounded([gates, hidden, hidden], 4, -0.5..0.5),
        rounded([2 * gates, 1, hidden], 5, -0.5..0.5),
    ]
}

/// The sum of the squares of what is off.
fn squares(gradient: &[f64], truth: &[f64]) -> f64 {
    gradient.iter().zip(truth).map(|(gradient, truth)| (gradient - truth).powi(2)).sum()
}

/// Errors against f64 are not above those of the steps, recorded by autodiff in the same precision: over many draws, since the
/// elements of one have most of their errors in common.
#[test]
fn half_precision_equals_the_steps() {
    let sizes = Options { batch: 4, steps: 5, d_input: 16, hidden: 24, ..USUAL };
    for dtype in HALF {
        let check = |name: &str, options: Options, gates: usize, ours: Op<1>, steps: Op<1>| {
            let mut errors = [[0.0; 2]; 5];
            for seed in 0..12 {
                let inputs = inputs_of_half(options, gates, seed, dtype);
                let gradients = |dtype, op| {
                    Check::new(inputs.clone(), Setting { seed, ..Setting::of(dtype) }).gradients(op)
                };
                let truth = gradients(DType::F64, steps);
                for (side, op) in [ours, steps].into_iter().enumerate() {
                    for (input, gradient) in gradients(dtype, op).iter().enumerate() {
                        errors[input][side] += squares(gradient, &truth[input]);
                    }
                }
            }
            for (input, [ours, stock]) in errors.into_iter().enumerate() {
                assert!(
                    ours <= stock,
                    "{name}, {dtype:?}: gradient of input {input}: squared error {ours:e}, by steps {stock:e}"
                );
            }
        };
        let options = Options { variant: false, ..sizes };
        check("lstm", options, 4, &lstm(options), &lstm_by_steps(options));
        check("rnn", sizes, 1, &rnn(sizes), &rnn_by_steps(sizes));
        for variant in [false, true] {
            let options = Options { variant, ..sizes };
            check("gru", options, 3, &gru(options), &gru_by_steps(options));
        }
    }
}

/// Sums over many steps and many segments are narrowed once: their errors against f64 are far below those of autodiff's, which
/// adds up step by step in half precision.
#[test]
fn sums_over_many_steps_are_made_in_f32() {
    for dtype in HALF {
        let check = |name: &str, options: Options, gates: usize, ours: Op<1>, steps: Op<1>| {
            let inputs = inputs_of_half(options, gates, 0, dtype);
            let gradients = |dtype, op| {
                let setting = Setting { reading: Reading::Sum, ..Setting::of(dtype) };
                Check::new(inputs.clone(), setting).gradients(op)
            };
            let truth = gradients(DType::F64, steps);
            let [ours, stock] = [ours, steps].map(|op| gradients(dtype, op));
            for input in [INPUT, HIDDEN, BIAS] {
                let [ours, stock] = [&ours, &stock].map(|all| squares(&all[input], &truth[input]));
                assert!(
                    9.0 * ours < stock,
                    "{name}, {dtype:?}, {options:?}: gradient of input {input}: squared error {ours:e}, by steps {stock:e}"
                );
            }
        };
        for checkpoint in [None, Some(1), Some(20)] {
            let options = Options { steps: 400, variant: false, checkpoint, ..USUAL };
            check("lstm", options, 4, &lstm(options), &lstm_by_steps(options));
            check("rnn", options, 1, &rnn(options), &rnn_by_steps(options));
            for variant in [false, true] {
                let options = Options { variant, ..options };
                check("gru", options, 3, &gru(options), &gru_by_steps(options));
            }
        }
    }
}
