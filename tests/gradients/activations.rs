//! Compares piecewise linear activations and PReLU with stock Burn, also at kinks and special values.
use crate::common::*;
use burn::tensor::{DType, Tensor, activation};
use burn_memsave::functional as F;
use proptest::prelude::*;

/// The arguments of a function, as many as it takes.
type Options = [f64; 2];

/// A function of a tensor and its options: ours and stock.
type Pair = (fn(Tensor<3>, Options) -> Tensor<3>, fn(Tensor<3>, Options) -> Tensor<3>);

/// Multiples of 1/8, which every dtype has: often zero, often the same.
pub fn options() -> impl Strategy<Value = Options> {
    let option =
        || prop_oneof![1 => Just(0.0), 3 => (-16..=16i8).prop_map(|eighths| f64::from(eighths) / 8.0)];
    prop_oneof![4 => [option(), option()], 1 => option().prop_map(|option| [option; 2])]
}

/// A module of tests per function: the same call in two modules, and its kinks, in terms of the options.
macro_rules! activations {
    ($($function:ident: |$($option:ident),*| ($($argument:expr),*), kinks [$($kink:expr),*];)+) => {$(
        mod $function {
            use super::*;

            const NAME: &str = stringify!($function);

            const PAIR: Pair = (
                |x, [$($option,)* ..]: Options| F::$function(x, $($argument),*),
                |x, [$($option,)* ..]: Options| activation::$function(x, $($argument),*),
            );

            #[allow(unused_variables)] // some kinks are where they are whatever the options
            fn kinks([$($option,)* ..]: Options) -> Vec<f64> {
                [$($kink),*].into_iter().filter(|kink: &f64| kink.is_finite()).collect()
            }

            #[test]
            fn equals_stock() {
                super::equals_stock(NAME, PAIR);
            }

            #[test]
            fn equals_stock_in_half_precision() {
                super::equals_stock_in_half_precision(PAIR);
            }

            #[test]
            fn is_differentiated() {
                super::is_differentiated(PAIR.0, kinks);
            }

            #[test]
            fn equals_stock_at_kinks_and_special_values() {
                super::equals_stock_at_kinks_and_special_values(NAME, PAIR, kinks);
            }

            #[test]
            fn treats_empty_inputs_as_stock() {
                Check::new([Input::random([2, 0, 3])], Setting::default())
                    .compare_panics(&|t| PAIR.0(t.get(0), [0.5; 2]), &|t| PAIR.1(t.get(0), [0.5; 2]));
            }
        }
    )+};
}
activations! {
    relu: | | (), kinks [0.0];
    leaky_relu: |negative_slope| (negative_slope), kinks [0.0];
    relu6: | | (), kinks [0.0, 6.0];
    hardtanh: |a, b| (a.min(b), a.max(b)), kinks [a, b];
    hard_sigmoid: |alpha, beta| (alpha, beta), kinks [-beta / alpha, (1.0 - beta) / alpha];
    hard_shrink: |lambda| (lambda), kinks [-lambda, lambda];
    soft_shrink: |lambda| (lambda), kinks [-lambda, lambda, 0.0];
    shrink: |lambda, bias| (lambda, bias), kinks [-lambda, lambda, 0.0];
    threshold: |threshold, value| (threshold, value), kinks [threshold];
    thresholded_relu: |alpha| (alpha), kinks [alpha];
}

#[test]
fn treats_bounds_the_wrong_way_round_as_stock() {
    Check::new([Input::random([2, 3, 5])], Setting::default())
        .compare_panics::<3>(&|t| F::hardtanh(t.get(0), 0.5, -0.25), &|t| {
            activation::hardtanh(t.get(0), 0.5, -0.25)
        });
}

/// Slope and offset that no half precision has: rounded once, at the end, as in stock.
#[test]
fn hard_sigmoid_rounds_once_in_half_precision() {
    for dtype in HALF {
        let check = Check::new([Input::between([3, 5, 700], -3.0..3.0)], Setting::of(dtype)).same();
        check.compare::<3>(&|t| F::hard_sigmoid(t.get(0), 0.2, 0.3), &|t| {
            activation::hard_sigmoid(t.get(0), 0.2, 0.3)
        });
    }
}

/// Stock's hard sigmoid computes in f32 under autodiff (0.22.1), whatever the dtype.
pub fn loses_precision_in_stock(name: &str, dtype: DType) -> bool {
    name == "hard_sigmoid" && dtype == DType::F64
}

fn equals_stock(name: &str, (ours, stock): Pair) {
    // More than 64 elements: more than one word of bits.
    for_all(64, ([1..5usize, 1..6, 1..20], options(), settings()), |(sizes, options, setting)| {
        let (ours, stock) = (|x| ours(x, options), |x| stock(x, options));
        let check = Check::new([Input::between(sizes, -8.0..8.0)], setting);
        let check = match loses_precision_in_stock(name, setting.dtype) {
            false => check,
            true => check.within(4e-6), // some roundings of f32
        };
        check.compare(&|t| ours(t.get(0)), &|t| stock(t.get(0)));
        check.compare(&|t| ours(t.get(0)) + ours(t.get(0)) * 0.5, &|t| {
            stock(t.get(0)) + stock(t.get(0)) * 0.5
        });
        check.compare(&|t| ours(ours(t.get(0) * 2.0)), &|t| stock(stock(t.get(0) * 2.0)));
    });
}

fn equals_stock_in_half_precision((ours, stock): Pair) {
    for dtype in HALF {
        for_all(12, options(), |options| {
            let check = Check::new([Input::between([3, 5, 7], -8.0..8.0)], Setting::of(dtype));
            check.compare(&|t| ours(t.get(0), options), &|t| stock(t.get(0), options));
        });
    }
}

fn is_differentiated(ours: fn(Tensor<3>, Options) -> Tensor<3>, kinks: fn(Options) -> Vec<f64>) {
    for_all(12, options(), |options| {
        let mut values = uniform(3 * 5 * 7, 3, -8.0..8.0);
        values.retain(|value| kinks(options).iter().all(|kink| (value - kink).abs() > 1e-3));
        let check = Check::new([Input::given([values.len(), 1, 1], values)], Setting::default());
        check.differentiate(&|t| ours(t.get(0), options));
    });
}

fn equals_stock_at_kinks_and_special_values(name: &str, (ours, stock): Pair, kinks: fn(Options) -> Vec<f64>) {
    let special = [0.0, -0.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e30, -1e30, 1e-30, -1e-30];
    let dtypes = [DType::F32, DType::F64].into_iter().filter(|&dtype| !loses_precision_in_stock(name, dtype));
    for dtype in dtypes {
        let around = |kink: f64| match dtype {
            DType::F32 => [(kink as f32).next_up().into(), (kink as f32).next_down().into()],
            _ => [kink.next_up(), kink.next_down()],
        };
        for_all(16, options(), |options| {
            let kinks = kinks(options).into_iter();
            let kinks = kinks.flat_map(|kink| [&[kink, -kink][..], &around(kink)].concat());
            let values: Vec<f64> = special.into_iter().chain(kinks).collect();
            // Equal, for 0 and -0 are: NdArray's ReLU of -0 is -0 and Flex's is 0.
            let check = Check::new([Input::given([1, 1, values.len()], values)], Setting::of(dtype)).same();
            check.compare(&|t| ours(t.get(0), options), &|t| stock(t.get(0), options));
        });
    }
}

/// The gradient that comes in stays finite where the input is infinite.
#[test]
fn relu_passes_the_gradient_of_infinity() {
    for device in Backend::ALL.into_iter().flat_map(Backend::autodiff_devices) {
        let x = tensor::<1>(vec![f64::INFINITY, f64::NEG_INFINITY, 1.0], &[3], &device, DType::F32);
        let x = x.require_grad();
        let gradients = (F::relu(x.clone()) * 3.0).sum().backward();
        assert_eq!(numbers(&x.grad(&gradients).unwrap().into_data()), [3.0, 0.0, 3.0]);
    }
}

#[test]
fn one_element_and_many() {
    for len in [1, 63, 64, 65, 16384, 40001] {
        let check = Check::new([Input::random([len])], Setting::default()).same();
        check.compare::<1>(&|t| F::relu(t.get(0)), &|t| activation::relu(t.get(0)));
        check.compare::<1>(&|t| F::relu(t.get(0) * 2.0), &|t| activation::relu(t.get(0) * 2.0));
        check.compare::<1>(&|t| F::hardtanh(t.get(0), -0.5, 0.5), &|t| {
            activation::hardtanh(t.get(0), -0.5, 0.5)
        });
    }
}

mod prelu {
    use super::*;

    fn ours<const D: usize>(t: &Operands) -> Tensor<D> {
        F::prelu(t.get(0), t.get(1))
    }

    fn stock<const D: usize>(t: &Operands) -> Tensor<D> {
        activation::prelu(t.get(0), t.get(1))
    }

    #[test]
    fn equals_stock() {
        for_all(
            32,
            ([1..4usize, 1..6, 1..20], [any::<bool>(), any::<bool>()], settings()),
            |(sizes, [per_channel, whole], setting)| {
                let slopes = if per_channel { sizes[1] } else { 1 };
                // From -1 to 1, or one of 0, 1 and 2.
                let alpha = if whole { Input::steps([slopes], 3) } else { Input::random([slopes]) };
                Check::new([Input::random(sizes), alpha.clone()], setting).compare::<3>(&ours, &stock);
                let [rows, columns, _] = sizes;
                Check::new([Input::random([rows, columns]), alpha], setting).compare::<2>(&ours, &stock);
            },
        );
    }

    #[test]
    fn equals_stock_for_a_vector() {
        for_all(32, (1..200usize, settings()), |(len, setting)| {
            let inputs = [Input::random([len]), Input::random([1])];
            Check::new(inputs, setting).compare::<1>(&ours, &stock);
        });
    }

    #[test]
    fn equals_stock_for_many_elements() {
        for slopes in [1, 3] {
            let inputs = [Input::random([2, 3, 5000]), Input::random([slopes])];
            Check::new(inputs, Setting::of(DType::F64)).compare::<3>(&ours, &stock);
        }
    }

    #[test]
    fn equals_stock_in_half_precision() {
        for dtype in HALF {
            let inputs = [Input::random([2, 3, 4]), Input::random([3])];
            Check::new(inputs, Setting::of(dtype)).compare::<3>(&ours, &stock);
        }
    }

    #[test]
    fn is_differentiated() {
        for slopes in [1, 3] {
            let inputs = [Input::random([2, 3, 4]), Input::random([slopes])];
            Check::new(inputs, Setting::default()).differentiate::<3>(&ours);
        }
    }

    #[test]
    fn equals_stock_at_special_values() {
        let values = [0.0, -0.0, f64::NEG_INFINITY, 1e30, -1e30, 1e-30, -1e-30];
        for alpha in [0.25, 0.0, -1.0] {
            let inputs = [Input::given([1, 1, values.len()], values), Input::given([1], [alpha])];
            Check::new(inputs, Setting::default()).same().compare::<3>(&ours, &stock);
        }
        let values = [f64::INFINITY, f64::NAN, 1.0];
        let alpha = |t: &Operands| tensor::<1>(vec![0.25], &[1], t.device(), DType::F32);
        Check::new([Input::given([1, 1, 3], values)], Setting::default())
            .same()
            .compare::<3>(&|t| F::prelu(t.get(0), alpha(t)), &|t| activation::prelu(t.get(0), alpha(t)));
    }

    /// As in PyTorch: infinity, on the piece that `alpha` does not scale, adds nothing to its gradient; NaN makes it NaN.
    /// Stock's becomes NaN in both cases.
    #[test]
    fn alpha_hears_of_nan_but_not_of_infinity() {
        for device in Backend::ALL.into_iter().flat_map(Backend::autodiff_devices) {
            let alpha_gradient = |x: f64| {
                let x = tensor::<1>(vec![x, -2.0], &[2], &device, DType::F32);
                let alpha = tensor::<1>(vec![0.25], &[1], &device, DType::F32).require_grad();
                let gradients = F::prelu(x, alpha.clone()).sum().backward();
                numbers(&alpha.grad(&gradients).unwrap().into_data())[0]
            };
            assert_eq!(alpha_gradient(f64::INFINITY), -2.0);
            assert!(alpha_gradient(f64::NAN).is_nan());
        }
    }

    #[test]
    fn treats_odd_shapes_as_stock() {
        for (x, slopes) in
            [([2, 3, 4], 2), ([2, 3, 4], 4), ([2, 0, 4], 1), ([2, 0, 4], 0), ([0, 3, 4], 3), ([1, 1, 1], 1)]
        {
            let inputs = [Input::random(x), Input::random([slopes])];
            Check::new(inputs, Setting::default()).compare_panics::<3>(&ours, &stock);
        }
        let inputs = [Input::random([4]), Input::random([4])];
        Check::new(inputs, Setting::default()).compare_panics::<1>(&ours, &stock);
    }
}
