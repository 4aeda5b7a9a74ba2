//! Compares softmaxes with stock Burn.
use crate::common::*;
use burn::tensor::{DType, Tensor, activation};
use burn_memsave::functional as F;

/// A function of a tensor along an axis.
type Function = fn(Tensor<3>, isize) -> Tensor<3>;

fn check(shape: [usize; 3], setting: Setting) -> Check {
    Check::new([Input::between(shape, -4.0..4.0)], setting)
}

fn compare(check: Check, ours: Function, stock: Function, dim: isize) {
    check.compare_panics::<3>(&|t| ours(t.get(0), dim), &|t| stock(t.get(0), dim));
}

/// A module of tests per function.
macro_rules! softmaxes {
    ($($function:ident),+) => {$(
        mod $function {
            use super::*;

            const OURS: Function = |x, dim| F::$function(x, dim);
            const STOCK: Function = |x, dim| activation::$function(x, dim);

            #[test]
            fn equals_stock() {
                for_all(64, ([1..5usize, 1..7, 1..40], -3..3isize, settings()), |(shape, dim, setting)| {
                    compare(check(shape, setting), OURS, STOCK, dim);
                });
            }

            #[test]
            fn equals_stock_in_half_precision() {
                for (dtype, dim) in HALF.into_iter().flat_map(|dtype| (0..3).map(move |dim| (dtype, dim))) {
                    compare(check([2, 3, 17], Setting::of(dtype)), OURS, STOCK, dim);
                }
            }

            #[test]
            fn is_differentiated() {
                for dim in 0..3 {
                    check([2, 3, 7], Setting::default()).differentiate::<3>(&|t| OURS(t.get(0), dim));
                }
            }

            /// More than one thread takes, along every axis.
            #[test]
            fn equals_stock_for_many_elements() {
                let shapes = [[3, 70, 130], [700, 13, 7], [3, 7, 1300], [1, 9000, 5], [1, 40, 1300], [1, 300, 401]];
                for (shape, dim) in shapes.into_iter().flat_map(|shape| (0..3).map(move |dim| (shape, dim))) {
                    compare(check(shape, Setting::of(DType::F64)).on(Backend::Flex), OURS, STOCK, dim);
                }
            }

            /// Masked elements, a row without any other, numbers that the exponential has no value for.
            #[test]
            fn treats_extreme_inputs_as_stock() {
                let inf = f64::INFINITY;
                let rows = [[0.5, -inf, 1.0], [-inf, -inf, -inf], [1e4, 9.9e3, -1e4], [-200.0, -200.5, -300.0]];
                for dtype in [DType::F32, DType::F64] {
                    for backend in Backend::ALL {
                        let device = backend.device().autodiff();
                        let values = [rows.concat(), rows.concat()].concat();
                        let x = tensor::<3>(values, &[2, 4, 3], &device, dtype).require_grad();
                        let results = |f: Function, dim| {
                            let y = f(x.clone(), dim);
                            let weights = tensor(uniform(24, 1, -1.0..1.0), &[2, 4, 3], &device, dtype);
                            // Of an infinite loss the gradient is still defined.
                            let gradients = (y.clone() * weights).sum().backward();
                            [y.into_data(), x.grad(&gradients).expect("tracked").into_data()]
                        };
                        for dim in [1, 2] {
                            for (ours, stock) in results(OURS, dim).iter().zip(&results(STOCK, dim)) {
                                let pairs = numbers(ours).into_iter().zip(numbers(stock));
                                for (ours, stock) in pairs {
                                    let same = ours == stock || (ours - stock).abs() <= 1e-5 || ours.is_nan() && stock.is_nan();
                                    assert!(same, "{backend:?}, axis {dim}: {ours} instead of {stock}");
                                }
                            }
                        }
                    }
                }
            }

            #[test]
            fn treats_odd_arguments_as_stock() {
                for (shape, dim) in [([2, 0, 3], 1), ([2, 0, 3], 2), ([2, 3, 1], 2), ([2, 3, 4], 3), ([2, 3, 4], -4)] {
                    compare(check(shape, Setting::default()), OURS, STOCK, dim);
                }
            }
        }
    )+};
}
softmaxes!(softmax, log_softmax, softmin, quiet_softmax);
