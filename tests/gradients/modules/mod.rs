//! Compares every layer with the stock layer that it is converted from: outputs, and the gradients of the input and of every parameter,
//! whichever of them are tracked, as configured and after `freeze`.
use crate::activations::{loses_precision_in_stock, options};
use crate::common::*;
use burn::module::{Module, Param, ParamId, RunningState};
use burn::nn::{
    BatchNorm, BatchNormConfig, DropoutConfig, EmbeddingConfig, GroupNormConfig, Initializer,
    InstanceNormConfig, LayerNormConfig, LinearConfig, LinearLayout, PaddingConfig1d, PaddingConfig2d,
    PaddingConfig3d, RmsNormConfig, activation::*, conv::*, interpolate::*, pool::*,
};
use burn::tensor::{DType, Int, Tensor, TensorData};
use burn_memsave::layers::*;
use proptest::prelude::*;
use std::{array, cell::Cell, convert::identity};

/// Compares a stock layer and ours made from it, as they are and frozen.
macro_rules! same_layers {
    ($check:expr, $ours:ty, |$t:ident| $stock:expr, |$layer:ident| $forward:expr) => {
        same_layers!(@compare $check, $ours, |$t| $stock, |$layer| $forward)
    };
    (@$compare:ident $check:expr, $ours:ty, |$t:ident| $stock:expr, |$layer:ident| $forward:expr) => {
        for frozen in [false, true] {
            $check.$compare(
                &|$t| {
                    let $layer = <$ours>::from($stock);
                    let $layer = if frozen { $layer.freeze() } else { $layer };
                    $forward
                },
                &|$t| {
                    let $layer = $stock;
                    let $layer = if frozen { $layer.freeze() } else { $layer };
                    $forward
                },
            );
        }
    };
}

/// Both layers panic in `forward`, with the same message.
macro_rules! both_refuse {
    ($check:expr, $ours:ty, |$t:ident| $stock:expr, |$layer:ident| $forward:expr) => {
        let returned = Cell::new(false);
        same_layers!(@compare_panics $check, $ours, |$t| $stock, |$layer| {
            let y = $forward;
            returned.set(true);
            y
        });
        assert!(!returned.get(), "{} is not refused", stringify!($stock));
    };
}

/// Input `index` as a parameter, trainable if it is tracked. (One that a config initializes draws from the generator of
/// the device, but only when it is first read.)
fn param<const D: usize>(t: &Operands, index: usize) -> Param<Tensor<D>> {
    Param::initialized(ParamId::new(), t.get(index))
}

/// The layer of a config, with input 1 as its weight and input 2 as its bias, if it has one.
macro_rules! with_parameters {
    ($config:expr, $t:expr) => {{
        let mut layer = $config.init($t.device());
        (layer.weight, layer.bias) = (param($t, 1), layer.bias.map(|_| param($t, 2)));
        layer
    }};
}

/// Any setting in which inputs can be parameters.
fn leaves() -> impl Strategy<Value = Setting> {
    settings().prop_map(|setting| Setting { form: Form::Leaf, ..setting })
}

fn check(inputs: impl Into<Vec<Input>>, setting: Setting) -> Check {
    Check::new(inputs, setting).same_output()
}

/// `[head, head, tail...]`
fn shape<const N: usize, const D: usize>(head: [usize; 2], tail: [usize; N]) -> [usize; D] {
    array::from_fn(|axis| if axis < 2 { head[axis] } else { tail[axis - 2] })
}

/// What a layer over one axis has in place of an array.
fn only<T>([item]: [T; 1]) -> T {
    item
}

mod convolutions;
mod interpolations;
mod normalizations;
mod pools;
mod windows;

mod dense {
    use super::*;

    #[test]
    fn linear() {
        for_all(32, ([1..4usize, 1..4, 1..6, 1..6], any::<bool>(), leaves()), |(sizes, bias, setting)| {
            let [batch, rows, d_input, d_output] = sizes;
            let config = LinearConfig::new(d_input, d_output).with_bias(bias);
            let mut inputs = vec![Input::random([batch, rows, d_input]), Input::random([d_input, d_output])];
            inputs.extend(bias.then(|| Input::random([d_output])));
            let check = check(inputs, setting);
            same_layers!(check, MemSaveLinear, |t| with_parameters!(config, t), |layer| {
                layer.forward(t.get::<3>(0))
            });
        });
    }

    /// The weight is a transposed view, and no leaf: the input alone is tracked. Burn multiplies batch by batch, ours all rows.
    #[test]
    fn linear_by_columns() {
        let config = LinearConfig::new(3, 5)
            .with_layout(LinearLayout::Col)
            .with_initializer(Initializer::Constant { value: 0.5 });
        let check = Check::new([Input::random([2, 4, 3])], Setting::default());
        same_layers!(check, MemSaveLinear, |t| config.init(t.device()), |layer| layer.forward(t.get::<3>(0)));
    }

    #[test]
    fn embedding() {
        for_all(32, ([1..9usize, 1..6, 1..4, 1..9], leaves()), |([rows, width, batch, length], setting)| {
            let rows_of = |numbers: Vec<f64>| numbers.into_iter().map(|n| n as i64).collect::<Vec<_>>();
            let indices = rows_of(uniform(batch * length, setting.seed, 0.0..rows as f64 - 1e-9));
            let indices = TensorData::new(indices, [batch, length]);
            let stock = |t: &Operands| {
                let mut layer = EmbeddingConfig::new(rows, width).init(t.device());
                layer.weight = param(t, 0);
                layer
            };
            let check = check([Input::random([rows, width])], setting);
            same_layers!(check, MemSaveEmbedding, |t| stock(t), |layer| {
                layer.forward(Tensor::<2, Int>::from_data(indices.clone(), t.device()))
            });
        });
    }

    #[test]
    fn what_stock_refuses_is_refused() {
        let check = Check::new([Input::random([2, 3])], Setting::default());
        let zeros = Initializer::Zeros;
        let linear = LinearConfig::new(4, 2).with_initializer(zeros.clone());
        both_refuse!(check, MemSaveLinear, |t| linear.init(t.device()), |layer| {
            layer.forward(t.get::<2>(0))
        });
        let embedding = EmbeddingConfig::new(4, 2).with_initializer(zeros);
        both_refuse!(check, MemSaveEmbedding, |t| embedding.init(t.device()), |layer| {
            layer.forward(Tensor::<2, Int>::full([1, 2], 4, t.device()))
        });
    }
}

mod activations {
    use super::*;

    macro_rules! activations {
        ($($test:ident: $ours:ident = |$options:pat_param| $stock:expr;)+) => {$(
            #[test]
            fn $test() {
                for_all(32, ([1..4usize, 1..6, 1..20], options(), leaves()), |(shape, options, setting)| {
                    let stock = |$options: [f64; 2]| $stock;
                    let check = check([Input::between(shape, -4.0..4.0)], setting);
                    let check = match loses_precision_in_stock(stringify!($test), setting.dtype) {
                        false => check,
                        true => check.within(1e-6),
                    };
                    same_layers!(check, $ours, |t| stock(options), |layer| layer.forward(t.get::<3>(0)));
                });
            }
        )+};
    }
    activations! {
        relu: MemSaveRelu = |_| Relu::new();
        leaky_relu: MemSaveLeakyRelu = |[slope, _]| LeakyReluConfig::new().with_negative_slope(slope).init();
        relu6: MemSaveRelu6 = |_| Relu6::new();
        hardtanh: MemSaveHardtanh =
            |[a, b]| HardtanhConfig::new().with_min_val(a.min(b)).with_max_val(a.max(b)).init();
        hard_sigmoid: MemSaveHardSigmoid =
            |[alpha, beta]| HardSigmoidConfig::new().with_alpha(alpha).with_beta(beta).init();
        hard_shrink: MemSaveHardShrink = |[lambda, _]| HardShrinkConfig::new().with_lambda(lambda).init();
        soft_shrink: MemSaveSoftShrink = |[lambda, _]| SoftShrinkConfig::new().with_lambda(lambda).init();
        shrink: MemSaveShrink =
            |[lambda, bias]| ShrinkConfig::new().with_lambda(lambda).with_bias(bias).init();
        threshold: MemSaveThreshold = |[threshold, value]| ThresholdConfig::new(threshold, value).init();
        thresholded_relu: MemSaveThresholdedRelu =
            |[alpha, _]| ThresholdedReluConfig::new().with_alpha(alpha).init();
    }

    /// One slope, or one per channel.
    #[test]
    fn prelu() {
        let sizes = [1..4usize, 1..6, 1..20];
        for_all(32, (sizes, any::<bool>(), options(), leaves()), |(shape, per_channel, [a, b], setting)| {
            let slopes = if per_channel { shape[1] } else { 1 };
            let alpha: Vec<f64> = [a, b].into_iter().cycle().take(slopes).collect();
            let stock = |t: &Operands| {
                let mut layer = PReluConfig::new().with_num_parameters(slopes).init(t.device());
                layer.alpha = param(t, 1);
                layer
            };
            let check = check([Input::random(shape), Input::given([slopes], alpha)], setting);
            same_layers!(check, MemSavePRelu, |t| stock(t), |layer| layer.forward(t.get::<3>(0)));
        });
    }
}

/// Layers that draw.
mod random {
    use super::*;

    #[test]
    fn dropout() {
        let _alone = generator();
        let rates = prop::sample::select(vec![0.0, 0.1, 0.5, 0.9]);
        for_all(32, ([1..4usize, 1..9, 1..30], rates, leaves()), |(shape, prob, setting)| {
            let check = check([Input::random(shape)], setting);
            same_layers!(check, MemSaveDropout, |t| DropoutConfig::new(prob).init(), |layer| {
                t.device().seed(setting.seed);
                layer.forward(t.get::<3>(0))
            });
        });
    }

    /// Training and, frozen or without autodiff, evaluation.
    #[test]
    fn rrelu() {
        let _alone = generator();
        for_all(32, ([1..4usize, 1..9, 1..30], options(), leaves()), |(shape, [a, b], setting)| {
            let config = RReluConfig::new().with_lower(a.min(b)).with_upper(a.max(b) + 0.125);
            let check = check([Input::random(shape)], setting);
            same_layers!(check, MemSaveRRelu, |t| config.init(), |layer| {
                t.device().seed(setting.seed);
                layer.forward(t.get::<3>(0))
            });
        });
    }

    /// A single slope is allowed, but in training Burn 0.22.1 cannot draw from a range without width.
    #[test]
    fn rrelu_of_one_slope() {
        let _alone = generator();
        let config = RReluConfig::new().with_lower(0.25).with_upper(0.25);
        let check = check([Input::random([3, 5])], Setting::default());
        same_layers!(@compare_panics check, MemSaveRRelu, |t| config.init(), |layer| {
            layer.forward(t.get::<2>(0))
        });
    }

    /// Below zero the gradient is the slope, within the bounds in training and their mean otherwise.
    #[test]
    fn rrelu_has_slopes_between_its_bounds() {
        let _alone = generator();
        for device in Backend::ALL.into_iter().flat_map(Backend::autodiff_devices) {
            let layer = MemSaveRRelu::from(RReluConfig::new().with_lower(-0.5).with_upper(0.25).init());
            for dtype in [DType::F32, DType::F64] {
                let slopes = |layer: &MemSaveRRelu| {
                    let x = tensor::<1>(vec![-2.0; 500], &[500], &device, dtype).require_grad();
                    let y = layer.forward(x.clone());
                    let slopes = numbers(&x.grad(&y.clone().sum().backward()).unwrap().into_data());
                    let of_output = numbers(&(y / -2.0).into_data());
                    assert_eq!(slopes, of_output);
                    slopes
                };
                let drawn = slopes(&layer);
                assert!(drawn.iter().all(|slope| (-0.5..=0.25).contains(slope)), "{drawn:?}");
                let spread = |low, high| drawn.iter().filter(|s| (low..high).contains(*s)).count();
                assert!(spread(-0.5, -0.25) > 100 && spread(0.0, 0.25) > 100, "{drawn:?}");
                assert_eq!(slopes(&layer.clone().freeze()), [-0.125; 500]);
            }
        }
    }
}
