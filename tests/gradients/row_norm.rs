//! Compares layer, RMS, group and instance norm with stock Burn or with their formulas.
use crate::batch_norm::with_gradient;
use crate::common::*;
use burn::tensor::{DType, Device, Tensor, Tolerance, module};
use burn_memsave::functional as F;
use proptest::prelude::*;

const EPSILON: f64 = 1e-5;

/// An input, a scale and a shift. (Rows are of eight elements and more: in one of two the gradient cancels out, and no
/// relative precision can be asked of it.)
fn inputs<const D: usize>(x: [usize; D], parameters: usize) -> Vec<Input> {
    vec![Input::random(x), Input::between([parameters], 0.5..1.5), Input::random([parameters])]
}

/// Settings with a gradient, of any form.
fn gradients() -> impl Strategy<Value = Setting> {
    settings().prop_map(with_gradient)
}

mod layer_norm {
    use super::*;

    fn ours<const D: usize>(t: &Operands) -> Tensor<D> {
        F::layer_norm(t.get(0), t.get(1), t.maybe(2), EPSILON)
    }

    fn stock<const D: usize>(t: &Operands) -> Tensor<D> {
        module::layer_norm(t.get(0), t.get(1), t.maybe(2), EPSILON)
    }

    #[test]
    fn equals_stock() {
        for_all(96, ([1..4usize, 1..5, 8..40], any::<bool>(), gradients()), |(shape, bias, setting)| {
            let [batch, rows, features] = shape;
            let cut = |inputs: Vec<Input>| inputs[..2 + usize::from(bias)].to_vec();
            Check::new(cut(inputs(shape, features)), setting).compare::<3>(&ours, &stock);
            Check::new(cut(inputs([batch * rows, features], features)), setting).compare::<2>(&ours, &stock);
        });
    }

    #[test]
    fn equals_stock_for_a_vector() {
        for seed in 0..4 {
            let setting = Setting { seed, ..Setting::default() };
            Check::new(inputs([37], 37), setting).compare::<1>(&ours, &stock);
        }
    }

    /// More rows than are added up in one precision, and enough for several threads.
    #[test]
    fn equals_stock_for_many_rows() {
        for shape in [[70, 33], [3000, 50], [40, 5000]] {
            Check::new(inputs(shape, shape[1]), Setting::of(DType::F64)).compare::<2>(&ours, &stock);
        }
    }

    #[test]
    fn equals_stock_in_half_precision() {
        for dtype in HALF {
            let check = Check::new(inputs([4, 3, 16], 16), Setting::of(dtype));
            check.compare::<3>(&ours, &stock);
        }
    }

    #[test]
    fn is_differentiated() {
        Check::new(inputs([2, 3, 5], 5), Setting::default()).differentiate::<3>(&ours);
    }

    #[test]
    fn survives_a_large_mean() {
        let mut inputs = inputs([8, 32], 32);
        inputs[0] = Input::between([8, 32], 999.0..1001.0);
        Check::new(inputs, Setting::of(DType::F64)).within(1e-8).compare::<2>(&ours, &stock);
    }

    /// Although sums in f32 are rounded. Long rows, few of which are divided among threads, too.
    #[test]
    fn normalizes_what_is_the_same_everywhere() {
        let device = Device::flex().autodiff();
        for length in [25_088, 200_003] {
            let [gamma, beta] =
                [3.0, 0.5].map(|value| Tensor::<1>::full([length], value, &device).require_grad());
            let x = Tensor::<2>::full([2, length], 1000.1, &device);
            let y = F::layer_norm(x, gamma, Some(beta), EPSILON);
            assert!(y.into_data().iter::<f32>().all(|y| y == 0.5), "{length}");
        }
    }

    #[test]
    fn takes_an_input_twice() {
        let check = Check::new(inputs([3, 7], 7), Setting::default());
        check.compare::<2>(&|t| ours::<2>(t) + ours(t) * t.get(0), &|t| stock::<2>(t) + stock(t) * t.get(0));
    }

    #[test]
    fn treats_odd_shapes_as_stock() {
        for shape in [[0, 4], [4, 0], [2, 1]] {
            Check::new(inputs(shape, shape[1]), Setting::default()).compare_panics::<2>(&ours, &stock);
        }
        Check::new(inputs([2, 4], 3), Setting::default()).compare_panics::<2>(&ours, &stock);
    }
}

mod rms_norm {
    use super::*;

    fn ours<const D: usize>(t: &Operands) -> Tensor<D> {
        F::rms_norm(t.get(0), t.get(1), EPSILON)
    }

    /// As stock, but with the root in the type of the input: stock computes it in f32.
    fn exact<const D: usize>(t: &Operands) -> Tensor<D> {
        let x = t.get::<D>(0);
        let rms = (x.clone().square().mean_dim(D - 1) + EPSILON).sqrt();
        x / rms * t.get::<1>(1).unsqueeze()
    }

    fn inputs<const D: usize>(x: [usize; D]) -> Vec<Input> {
        super::inputs(x, x[D - 1])[..2].to_vec()
    }

    #[test]
    fn equals_the_formula() {
        for_all(96, ([1..4usize, 1..5, 1..40], settings()), |(shape, setting)| {
            Check::new(inputs(shape), setting).compare::<3>(&ours, &exact);
            Check::new(inputs([shape[0] * shape[1], shape[2]]), setting).compare::<2>(&ours, &exact);
        });
    }

    #[test]
    fn equals_the_formula_for_many_rows() {
        for shape in [[70, 33], [3000, 50], [40, 5000]] {
            Check::new(inputs(shape), Setting::of(DType::F64)).compare::<2>(&ours, &exact);
        }
    }

    #[test]
    fn equals_the_formula_in_half_precision() {
        for dtype in HALF {
            Check::new(inputs([4, 3, 16]), Setting::of(dtype)).compare::<3>(&ours, &exact);
        }
    }

    #[test]
    fn is_differentiated() {
        Check::new(inputs([2, 3, 5]), Setting::default()).differentiate::<3>(&ours);
    }

    #[test]
    fn treats_odd_shapes_as_the_formula() {
        for shape in [[0, 4], [4, 0]] {
            Check::new(inputs(shape), Setting::default()).compare_panics::<2>(&ours, &exact);
        }
        let mismatched = super::inputs([2, 4], 3)[..2].to_vec();
        Check::new(mismatched, Setting::default()).compare_panics::<2>(&ours, &exact);
    }
}

mod group_norm {
    use super::*;

    fn ours<const D: usize>(groups: usize) -> impl Fn(&Operands) -> Tensor<D> {
        move |t| F::group_norm(t.get(0), t.maybe(1), t.maybe(2), groups, EPSILON)
    }

    /// As stock.
    fn formula<const D: usize>(groups: usize) -> impl Fn(&Operands) -> Tensor<D> {
        move |t| {
            let x = t.get::<D>(0);
            let dims = x.dims();
            let rows = x.reshape([dims[0] as i32, groups as i32, -1]);
            let centered = rows.clone() - rows.mean_dim(2);
            let std = (centered.clone().square().mean_dim(2) + EPSILON).sqrt();
            let mut parameter = [1; D];
            parameter[1] = dims[1];
            let of = |index| t.maybe::<1>(index).map(|p| p.reshape(parameter));
            let y: Tensor<D> = (centered / std).reshape(dims);
            let y = of(1).into_iter().fold(y, |y, gamma| y * gamma);
            of(2).into_iter().fold(y, |y, beta| y + beta)
        }
    }

    #[test]
    fn equals_the_formula() {
        let cases = ([1..4usize, 1..4, 1..4], [8..12usize, 1..5], 0..3usize, gradients());
        for_all(96, cases, |([batch, groups, channels], [height, width], parameters, setting)| {
            let channels = groups * channels;
            let cut = |inputs: Vec<Input>| inputs[..1 + parameters].to_vec();
            let x = [batch, channels, height, width];
            let check = Check::new(cut(inputs(x, channels)), setting);
            check.compare::<4>(&ours(groups), &formula(groups));
            let check = Check::new(cut(inputs([batch, channels, height], channels)), setting);
            check.compare::<3>(&ours(groups), &formula(groups));
            check.compare::<3>(&ours(channels), &formula(channels)); // instance normalization
        });
    }

    /// What is missing changes nothing, with autodiff and without.
    #[test]
    fn shifts_without_a_scale() {
        let ours = |t: &Operands| F::group_norm(t.get::<3>(0), None, t.maybe(1), 2, EPSILON);
        let truth = |t: &Operands| {
            let rows = t.get::<3>(0).reshape([6, -1]);
            let centered = rows.clone() - rows.mean_dim(1);
            let std = (centered.clone().square().mean_dim(1) + EPSILON).sqrt();
            (centered / std).reshape([3, 4, 8]) + t.get::<1>(1).reshape([1, 4, 1])
        };
        for_all(48, gradients(), |setting| {
            let inputs = vec![Input::random([3, 4, 8]), Input::random([4])];
            Check::new(inputs, setting).compare::<3>(&ours, &truth);
        });
        for device in Backend::ALL.map(Backend::device) {
            let x = Tensor::<2>::from_floats([[1.0, 3.0]], &device);
            let beta = Tensor::<1>::from_floats([10.0, 20.0], &device);
            let y = F::group_norm(x, None, Some(beta), 1, 0.0);
            y.into_data().assert_approx_eq::<f32>(&[[9.0f32, 21.0]].into(), Tolerance::default());
        }
    }

    #[test]
    fn equals_the_formula_for_rows() {
        for_all(48, ([2..9usize, 1..4, 8..20], gradients()), |([batch, groups, channels], setting)| {
            let check = Check::new(inputs([batch, groups * channels], groups * channels), setting);
            check.compare::<2>(&ours(groups), &formula(groups));
        });
    }

    #[test]
    fn equals_the_formula_for_many_elements() {
        for shape in [[2, 4, 300, 100], [64, 32, 9, 9]] {
            let check = Check::new(inputs(shape, shape[1]), Setting::of(DType::F64));
            check.compare::<4>(&ours(2), &formula(2));
        }
    }

    #[test]
    fn equals_the_formula_in_half_precision() {
        for dtype in HALF {
            let check = Check::new(inputs([4, 4, 8], 4), Setting::of(dtype));
            check.compare::<3>(&ours(2), &formula(2));
        }
    }

    #[test]
    fn is_differentiated() {
        let check = Check::new(inputs([2, 4, 3], 4), Setting::default());
        check.differentiate::<3>(&ours(2));
    }

    #[test]
    fn refuses_what_does_not_fit() {
        let refused = |x: [usize; 3], parameters, groups: usize, message: &str| {
            let run = || {
                Check::new(inputs(x, parameters), Setting::default()).compare::<3>(&ours(groups), &formula(1))
            };
            let panic = std::panic::catch_unwind(run).expect_err(message);
            let said = panic.downcast_ref::<String>().map(String::as_str).unwrap_or_default();
            assert!(said.contains(message), "{said}");
        };
        refused([2, 4, 3], 4, 3, "axis 1 of [2, 4, 3] cannot be 3 groups");
        refused([2, 4, 3], 4, 0, "cannot be 0 groups");
        refused([2, 4, 3], 2, 2, "gamma and beta must be [4] of F32");
    }
}
