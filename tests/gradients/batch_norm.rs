//! Compares batch norm with stock Burn, with the statistics of the batch and with given ones.
use crate::common::*;
use burn::tensor::{DType, Device, Tensor, module};
use burn_memsave::functional as F;
use proptest::prelude::*;

const EPSILON: f64 = 1e-5;

fn parameters(channels: usize) -> [Input; 2] {
    [Input::between([channels], 0.5..1.5), Input::random([channels])]
}

/// Shapes with enough elements per channel for a variance that rounding does not decide.
fn shapes() -> impl Strategy<Value = [usize; 4]> {
    [2..5usize, 1..5, 2..6, 2..6]
}

/// A sum has the gradient 0, of which no relative precision can be asked.
pub fn with_gradient(setting: Setting) -> Setting {
    match setting.reading {
        Reading::Sum => Setting { reading: Reading::Weighted, ..setting },
        _ => setting,
    }
}

/// With an activation in the same passes.
mod activated {
    use super::*;
    use burn::tensor::activation;
    use burn_memsave::functional::{ElementActivation, PiecewiseLinear, Smooth};
    use burn_memsave::saved::SavedPolicy;

    type Function = fn(Tensor<4>) -> Tensor<4>;

    /// Activations, and the same functions of Burn and of this library.
    fn activations() -> [(ElementActivation, Function, Function); 6] {
        [
            (PiecewiseLinear::Relu.into(), activation::relu, F::relu),
            (
                PiecewiseLinear::LeakyRelu { negative_slope: 0.1 }.into(),
                |z| activation::leaky_relu(z, 0.1),
                |z| F::leaky_relu(z, 0.1),
            ),
            (PiecewiseLinear::Clamp { min: 0.0, max: 6.0 }.into(), activation::relu6, F::relu6),
            (Smooth::Silu.into(), activation::silu, F::silu),
            (Smooth::HardSwish.into(), activation::hard_swish, F::hard_swish),
            (Smooth::Tanh.into(), activation::tanh, F::tanh),
        ]
    }

    fn ours(f: ElementActivation) -> impl Fn(&Operands) -> Tensor<4> {
        move |t| F::batch_norm_train_activated(t.get(0), t.get(1), t.get(2), EPSILON, f).output
    }

    fn stock(f: Function) -> impl Fn(&Operands) -> Tensor<4> {
        move |t| f(module::batch_norm_train(t.get(0), t.get(1), t.get(2), EPSILON).output)
    }

    /// NdArray computes some activations of f64 in f32.
    fn check(shape: [usize; 4], setting: Setting) -> Check {
        let check = Check::new(inputs(shape), setting);
        if setting.dtype == DType::F64 { check.within(1e-6) } else { check }
    }

    fn inputs(shape: [usize; 4]) -> Vec<Input> {
        [&[Input::random(shape)][..], &parameters(shape[1])].concat()
    }

    #[test]
    fn equals_stock() {
        for_all(64, (shapes(), settings(), 0..6usize), |(shape, setting, which)| {
            let (f, stock_f, _) = activations()[which];
            check(shape, with_gradient(setting)).compare::<4>(&ours(f), &stock(stock_f));
        });
    }

    /// Planes of a chunk and more, and of less; a single row of each channel.
    #[test]
    fn equals_stock_for_many_elements() {
        for shape in [[2, 3, 70, 70], [1, 2, 128, 130], [64, 40, 2, 3], [40, 300, 1, 1]] {
            for (f, stock_f, _) in activations() {
                check(shape, Setting::of(DType::F64)).compare::<4>(&ours(f), &stock(stock_f));
            }
        }
    }

    #[test]
    fn equals_stock_in_half_precision() {
        for dtype in HALF {
            for (f, stock_f, _) in activations() {
                let check = Check::new(inputs([4, 3, 5, 3]), Setting::of(dtype));
                check.compare::<4>(&ours(f), &stock(stock_f));
            }
        }
    }

    #[test]
    fn is_differentiated() {
        Check::new(inputs([3, 2, 3, 2]), Setting::default()).differentiate::<4>(&ours(Smooth::Silu.into()));
    }

    #[test]
    fn takes_a_result_twice() {
        let (ours, stock) = (ours(Smooth::Silu.into()), stock(activation::silu));
        Check::new(inputs([3, 2, 3, 4]), Setting::default())
            .compare::<4>(&|t| ours(t) + ours(t) * 0.5, &|t| stock(t) + stock(t) * 0.5);
    }

    #[test]
    fn treats_odd_shapes_as_stock() {
        for shape in [[0, 2, 3, 1], [2, 0, 3, 1], [2, 2, 0, 1], [2, 1, 2, 1]] {
            let check = Check::new(inputs(shape), Setting::default());
            check.compare_panics::<4>(&ours(PiecewiseLinear::Relu.into()), &stock(activation::relu));
        }
    }

    /// Output and gradients, also of inputs that are kept rounded: what is normalized again lies in the pieces of the forward pass.
    #[test]
    fn equals_the_two_operations() {
        let device = Device::flex().autodiff();
        for (shape, dtype, tolerance) in [
            ([3, 5, 33, 31], DType::F32, 1e-5),
            ([8, 64, 7, 7], DType::F32, 1e-5),
            ([3, 5, 33, 31], DType::BF16, 1.0 / 64.0),
        ] {
            let numbers = |shape: [usize; 4], seed: u64| {
                let values = (0..shape.iter().product::<usize>() as u64)
                    .map(|at| ((at * 7919 + seed * 104_729) % 2003) as f64 / 1001.0 - 1.0);
                tensor::<4>(values.collect(), &shape, &device, dtype)
            };
            for policy in [SavedPolicy::Keep, SavedPolicy::Half, SavedPolicy::HalfF16] {
                for (f, _, apart) in activations() {
                    let run = |forward: &dyn Fn(Tensor<4>, Tensor<1>, Tensor<1>) -> Tensor<4>| {
                        let x = (numbers(shape, 1) * 0.5 + 3.0).detach().require_grad();
                        let [gamma, beta] = [2, 3]
                            .map(|seed| numbers([1, 1, 1, shape[1]], seed).flatten::<1>(0, 3).require_grad());
                        // Nobody else holds it, so that it is kept as the policy says.
                        let y = policy.scope(|| forward(x.clone() * 1.0, gamma.clone(), beta.clone()));
                        let mut grads = (y.clone() * numbers(shape, 4)).sum().backward();
                        let dx = x.grad_remove(&mut grads).expect("tracked").into_data();
                        let of = |parameter: Tensor<1>| parameter.grad(&grads).expect("tracked").into_data();
                        [y.into_data(), dx, of(gamma), of(beta)]
                    };
                    let found = run(&|x, gamma, beta| {
                        F::batch_norm_train_activated(x, gamma, beta, EPSILON, f).output
                    });
                    let expected =
                        run(&|x, gamma, beta| apart(F::batch_norm_train(x, gamma, beta, EPSILON).output));
                    found[0].assert_eq(&expected[0], true);
                    for (what, (found, expected)) in
                        ["x", "gamma", "beta"].into_iter().zip(found[1..].iter().zip(&expected[1..]))
                    {
                        let scale = expected.iter::<f64>().fold(0.0, |scale: f64, x| scale.max(x.abs()));
                        let near = found
                            .iter::<f64>()
                            .zip(expected.iter::<f64>())
                            .all(|(found, expected)| (found - expected).abs() <= tolerance * scale);
                        assert!(near, "{f:?} of {shape:?} in {dtype:?}, {policy:?}: {what}");
                    }
                }
            }
        }
    }
}

mod batch_statistics {
    use super::*;

    fn ours<const D: usize>(t: &Operands) -> Tensor<D> {
        F::batch_norm_train(t.get(0), t.get(1), t.get(2), EPSILON).output
    }

    fn stock<const D: usize>(t: &Operands) -> Tensor<D> {
        module::batch_norm_train(t.get(0), t.get(1), t.get(2), EPSILON).output
    }

    fn inputs<const D: usize>(shape: [usize; D]) -> Vec<Input> {
        [&[Input::random(shape)][..], &parameters(shape[1])].concat()
    }

    #[test]
    fn equals_stock() {
        for_all(96, (shapes(), settings()), |(shape, setting)| {
            let setting = with_gradient(setting);
            Check::new(inputs(shape), setting).compare::<4>(&ours, &stock);
            let [batch, channels, height, width] = shape;
            Check::new(inputs([batch, channels, height * width]), setting).compare::<3>(&ours, &stock);
        });
    }

    #[test]
    fn equals_stock_for_rows() {
        for_all(64, (4..12usize, 1..6usize, settings()), |(batch, channels, setting)| {
            let setting = match with_gradient(setting) {
                Setting { form: Form::Expanded, .. } => return, // no variance
                setting => setting,
            };
            Check::new(inputs([batch, channels]), setting).compare::<2>(&ours, &stock);
        });
    }

    #[test]
    fn statistics_equal_stock_and_are_detached() {
        for_all(48, (shapes(), settings()), |(shape, setting)| {
            let check = Check::new(inputs(shape), setting);
            let ours = |t: &Operands| F::batch_norm_train::<4>(t.get(0), t.get(1), t.get(2), EPSILON);
            let stock = |t: &Operands| module::batch_norm_train::<4>(t.get(0), t.get(1), t.get(2), EPSILON);
            check.compare(&|t| ours(t).mean, &|t| stock(t).mean);
            check.compare(&|t| ours(t).variance, &|t| stock(t).variance);
        });
    }

    #[test]
    fn equals_stock_for_many_elements() {
        for shape in [[2, 3, 70, 70], [64, 40, 2, 3]] {
            Check::new(inputs(shape), Setting::of(DType::F64)).compare::<4>(&ours, &stock);
        }
    }

    #[test]
    fn equals_stock_in_half_precision() {
        for dtype in HALF {
            let check = Check::new(inputs([4, 3, 3, 3]), Setting::of(dtype));
            check.compare::<4>(&ours, &stock);
        }
    }

    #[test]
    fn is_differentiated() {
        Check::new(inputs([3, 2, 3, 2]), Setting::default()).differentiate::<4>(&ours);
    }

    /// A large mean costs no digits of the variance: two passes.
    #[test]
    fn survives_a_large_mean() {
        let inputs = [&[Input::between([8, 2, 16], 999.0..1001.0)][..], &parameters(2)].concat();
        Check::new(inputs, Setting::of(DType::F64)).within(1e-8).compare::<3>(&ours, &stock);
    }

    /// Although sums in f32 are rounded.
    #[test]
    fn normalizes_what_is_the_same_everywhere() {
        let device = Device::flex().autodiff();
        let [gamma, beta] = [3.0, 0.5].map(|value| Tensor::<1>::full([2], value, &device).require_grad());
        let x = Tensor::<3>::full([1, 2, 25_088], 1000.1, &device);
        let y = F::batch_norm_train(x, gamma, beta, EPSILON).output;
        assert!(y.into_data().iter::<f32>().all(|y| y == 0.5));
    }

    /// Two neighbouring numbers of half precision, whose mean is none: normalized they are -1 and 1.
    #[test]
    fn normalizes_with_a_mean_that_half_precision_lacks() {
        for (dtype, low, high) in [(DType::F16, 1024.0, 1025.0), (DType::BF16, 100.0, 100.5)] {
            let device = Device::flex().autodiff();
            let values = |values: &[f64]| tensor::<1>(values.to_vec(), &[values.len()], &device, dtype);
            let x = values(&[low, high, low, high]).reshape([4, 1]).require_grad();
            let [gamma, beta] = [1.0, 0.0].map(|value| values(&[value]).require_grad());
            let y = F::batch_norm_train::<2>(x.clone(), gamma.clone(), beta.clone(), EPSILON).output;
            let grads = y.clone().slice([0..1, 0..1]).sum().backward();
            let near = |found: Tensor<1>, right: &[f64]| {
                for (found, right) in found.into_data().iter::<f64>().zip(right) {
                    assert!(
                        (found - right).abs() <= 2e-3 * right.abs().max(0.1),
                        "{dtype:?}: {found}, not {right}"
                    );
                }
            };
            near(y.inner().flatten(0, 1), &[-1.0, 1.0, -1.0, 1.0]);
            // gamma / std (dy - mean(dy) - x_hat mean(dy x_hat)) of dy = [1, 0, 0, 0]
            let std = (high - low) / 2.0;
            near(x.grad(&grads).expect("tracked").flatten(0, 1), &[0.5 / std, 0.0, -0.5 / std, 0.0]);
            near(gamma.grad(&grads).expect("tracked"), &[-1.0]);
            near(beta.grad(&grads).expect("tracked"), &[1.0]);
        }
    }

    #[test]
    fn takes_a_result_twice() {
        Check::new(inputs([3, 2, 3]), Setting::default())
            .compare::<3>(&|t| ours(t) + ours(t) * 0.5, &|t| stock(t) + stock(t) * 0.5);
    }

    #[test]
    fn treats_odd_shapes_as_stock() {
        for shape in [[0, 2, 3], [2, 0, 3], [2, 2, 0], [2, 1, 2]] {
            Check::new(inputs(shape), Setting::default()).compare_panics::<3>(&ours, &stock);
        }
        let mismatched = [&[Input::random([2, 3, 4])][..], &parameters(2)].concat();
        Check::new(mismatched, Setting::default()).compare_panics::<3>(&ours, &stock);
        let vector = [&[Input::random([4])][..], &parameters(4)].concat();
        Check::new(vector, Setting::default()).compare_panics::<1>(&ours, &stock);
    }
}

mod given_statistics {
    use super::*;

    /// The statistics come from their own numbers: tracked ones are stock's business.
    fn statistics<const D: usize>(t: &Operands, x: &Tensor<D>) -> [Tensor<1>; 2] {
        let channels = x.dims()[1];
        let of = |seed, range| tensor(uniform(channels, seed, range), &[channels], t.device(), x.dtype());
        [of(7, -0.5..0.5), of(8, 0.5..1.5)]
    }

    fn ours<const D: usize>(t: &Operands) -> Tensor<D> {
        let x = t.get::<D>(0);
        let [mean, variance] = statistics(t, &x);
        F::batch_norm(x, t.get(1), t.get(2), mean, variance, EPSILON)
    }

    fn stock<const D: usize>(t: &Operands) -> Tensor<D> {
        let x = t.get::<D>(0);
        let [mean, variance] = statistics(t, &x);
        module::batch_norm(x, t.get(1), t.get(2), mean, variance, EPSILON)
    }

    fn inputs<const D: usize>(shape: [usize; D]) -> Vec<Input> {
        [&[Input::random(shape)][..], &parameters(shape[1])].concat()
    }

    #[test]
    fn equals_stock() {
        for_all(96, (shapes(), settings()), |(shape, setting)| {
            Check::new(inputs(shape), setting).compare::<4>(&ours, &stock);
            let [batch, channels, height, _] = shape;
            Check::new(inputs([batch, channels, height]), setting).compare::<3>(&ours, &stock);
            Check::new(inputs([batch, channels]), setting).compare::<2>(&ours, &stock);
        });
    }

    #[test]
    fn equals_stock_for_many_elements() {
        for shape in [[2, 3, 70, 70], [64, 40, 2, 3]] {
            Check::new(inputs(shape), Setting::of(DType::F64)).compare::<4>(&ours, &stock);
        }
    }

    #[test]
    fn equals_stock_where_statistics_are_tracked() {
        let inputs =
            [&inputs([3, 2, 4])[..], &[Input::between([2], -0.5..0.5), Input::between([2], 0.5..1.5)]]
                .concat();
        Check::new(inputs, Setting::default()).compare::<3>(
            &|t| F::batch_norm(t.get(0), t.get(1), t.get(2), t.get(3), t.get(4), EPSILON),
            &|t| module::batch_norm(t.get(0), t.get(1), t.get(2), t.get(3), t.get(4), EPSILON),
        );
    }

    #[test]
    fn equals_stock_in_half_precision() {
        for dtype in HALF {
            let check = Check::new(inputs([4, 3, 3, 3]), Setting::of(dtype));
            check.compare::<4>(&ours, &stock);
        }
    }

    #[test]
    fn is_differentiated() {
        Check::new(inputs([3, 2, 3, 2]), Setting::default()).differentiate::<4>(&ours);
    }

    #[test]
    fn takes_a_result_twice() {
        Check::new(inputs([3, 2, 3]), Setting::default())
            .compare::<3>(&|t| ours(t) + ours(t) * 0.5, &|t| stock(t) + stock(t) * 0.5);
    }

    #[test]
    fn treats_odd_shapes_as_stock() {
        for shape in [[0, 2, 3], [2, 0, 3], [2, 2, 0], [1, 1, 1]] {
            Check::new(inputs(shape), Setting::default()).compare_panics::<3>(&ours, &stock);
        }
        let mismatched = [&[Input::random([2, 3, 4])][..], &parameters(2)].concat();
        Check::new(mismatched, Setting::default()).compare_panics::<3>(&ours, &stock);
    }
}
