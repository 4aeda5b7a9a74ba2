//! Compares convolutions, transposed and deformable convolutions with stock Burn.
use crate::common::*;
use burn::module::{Lora, Module, Quantizer};
use burn::nn::PaddingConfig2d;
use burn::tensor::{
    DType, Device, Distribution, Tensor, TensorData, Tolerance, activation, module,
    ops::{ConvOptions, ConvTransposeOptions, DeformConvOptions},
    quantization::{Calibration, QuantValue},
};
use burn_memsave::functional::{self as F, GivenNorm};
use burn_memsave::lora::ConvLora;
use burn_memsave::nn::{BatchNorm, BatchNormConfig, conv::Conv2dConfig};
use proptest::prelude::*;

/// One axis of a convolution.
#[derive(Clone, Copy, Debug)]
struct Axis {
    size: usize,
    kernel: usize,
    stride: usize,
    padding: (usize, usize),
    dilation: usize,
}

#[derive(Clone, Debug)]
struct Convolution<const N: usize> {
    batch: usize,
    groups: usize,
    /// Channels of a group, in and out.
    channels: [usize; 2],
    bias: bool,
    axes: [Axis; N],
    /// Only of a transposed convolution.
    padding_out: [usize; N],
}

/// An axis whose windows fit. `same`: the padding of `nn`'s `Same`, else the same on both sides or not.
fn axes() -> impl Strategy<Value = Axis> {
    let padding = prop_oneof![
        2 => (0..4usize).prop_map(|padding| Some((padding, padding))),
        1 => (0..4usize, 0..4usize).prop_map(Some),
        1 => Just(None),
    ];
    (1..5usize, 1..4usize, 1..3usize, padding, 0..7usize).prop_map(
        |(kernel, stride, dilation, padding, room)| {
            let extent = dilation * (kernel - 1) + 1;
            let same = ((extent - 1) / 2, extent / 2);
            let padding = padding.unwrap_or(same);
            let size = extent.saturating_sub(padding.0 + padding.1).max(1) + room;
            Axis { size, kernel, stride, padding, dilation }
        },
    )
}

fn convolutions<const N: usize>() -> impl Strategy<Value = Convolution<N>> {
    let axes = prop::array::uniform::<_, N>(axes());
    let padding_out = prop::array::uniform::<_, N>(0..3usize);
    (1..4usize, 1..4usize, [1..4usize, 1..4usize], any::<bool>(), axes, padding_out).prop_map(
        |(batch, groups, channels, bias, axes, padding_out)| Convolution {
            batch,
            groups,
            channels,
            bias,
            axes,
            padding_out,
        },
    )
}

impl<const N: usize> Convolution<N> {
    fn options(&self) -> ConvOptions<N> {
        let Self { axes, groups, .. } = self;
        ConvOptions::new_with_padding(
            axes.map(|a| a.stride),
            axes.map(|a| a.padding),
            axes.map(|a| a.dilation),
            *groups,
        )
    }

    fn transposed_options(&self) -> ConvTransposeOptions<N> {
        let Self { axes, groups, padding_out, .. } = self;
        ConvTransposeOptions::new(
            axes.map(|a| a.stride),
            axes.map(|a| a.padding.0),
            *padding_out,
            axes.map(|a| a.dilation),
            *groups,
        )
    }

    /// `[batch, channels, ...]`, `[first, second, kernel...]` and `[bias]`.
    fn inputs<const D: usize>(&self, channels: usize, weight: [usize; 2], bias: usize) -> Vec<Input> {
        let Self { batch, axes, .. } = self;
        let shape = |head: [usize; 2], tail: [usize; N]| -> [usize; D] {
            std::array::from_fn(|axis| if axis < 2 { head[axis] } else { tail[axis - 2] })
        };
        let mut inputs = vec![
            Input::random(shape([*batch, channels], axes.map(|a| a.size))),
            Input::random(shape(weight, axes.map(|a| a.kernel))),
        ];
        inputs.extend(self.bias.then(|| Input::random([bias])));
        inputs
    }

    fn conv_inputs<const D: usize>(&self) -> Vec<Input> {
        let Self { groups, channels: [i, o], .. } = self;
        self.inputs::<D>(groups * i, [groups * o, *i], groups * o)
    }

    fn transposed_inputs<const D: usize>(&self) -> Vec<Input> {
        let Self { groups, channels: [i, o], .. } = self;
        self.inputs::<D>(groups * i, [groups * i, *o], groups * o)
    }

    /// Padding the same on both sides.
    fn symmetric(mut self) -> Self {
        self.axes.iter_mut().for_each(|axis| axis.padding.1 = axis.padding.0);
        self.fitted()
    }

    /// Inputs at least as large as the windows, and outputs of the transposed convolution not empty.
    fn fitted(mut self) -> Self {
        for axis in &mut self.axes {
            let extent = axis.dilation * (axis.kernel - 1) + 1;
            axis.size = axis.size.max(extent.saturating_sub(axis.padding.0 + axis.padding.1)).max(1);
        }
        self
    }

    /// As a transposed convolution whose output is not empty, and of modest size.
    fn transposed(self) -> Self {
        let mut this = self.symmetric();
        for axis in &mut this.axes {
            let extent = axis.dilation * (axis.kernel - 1) + 1;
            axis.padding = (axis.padding.0.min((extent - 1) / 2), 0);
            axis.size = axis.size.min(4);
        }
        this
    }
}

/// A convolution with some numbers, over every axis the same.
fn fixed<const N: usize>(
    size: usize,
    kernel: usize,
    stride: usize,
    padding: (usize, usize),
) -> Convolution<N> {
    let axis = Axis { size, kernel, stride, padding, dilation: 1 };
    Convolution {
        batch: 2,
        groups: 2,
        channels: [2, 1],
        bias: true,
        axes: [axis; N],
        padding_out: [stride - 1; N],
    }
}

macro_rules! conv {
    ($conv:ident, $transposed:ident, $rank:literal, $dims:literal, $cases:literal) => {
        mod $conv {
            use super::*;

            fn ours(options: ConvOptions<$rank>) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| F::$conv(t.get(0), t.get(1), t.maybe(2), options.clone())
            }

            fn stock(options: ConvOptions<$rank>) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| module::$conv(t.get(0), t.get(1), t.maybe(2), options.clone())
            }

            #[test]
            fn equals_stock() {
                for_all($cases, (convolutions::<$rank>(), settings()), |(conv, setting)| {
                    let conv = match $rank {
                        1 => Convolution { groups: 1, ..conv },
                        2 => conv,
                        _ => conv.symmetric(),
                    };
                    let check = Check::new(conv.conv_inputs::<$dims>(), setting);
                    check.compare(&ours(conv.options()), &stock(conv.options()));
                });
            }

            /// A weight that is larger than what it is multiplied with.
            #[test]
            fn of_few_points_equals_stock() {
                let few = Convolution { groups: 1, channels: [40, 30], ..fixed::<$rank>(2, 1, 1, (0, 0)) };
                for dtype in HALF.into_iter().chain([DType::F32, DType::F64]) {
                    let check = Check::new(few.conv_inputs::<$dims>(), Setting::of(dtype));
                    check.compare(&ours(few.options()), &stock(few.options()));
                }
            }

            #[test]
            fn equals_stock_in_half_precision() {
                for dtype in HALF {
                    let conv = Convolution { groups: 1, ..fixed::<$rank>(5, 3, 1, (1, 1)) };
                    let check = Check::new(conv.conv_inputs::<$dims>(), Setting::of(dtype));
                    check.compare(&ours(conv.options()), &stock(conv.options()));
                }
            }

            /// Sums of many parts: several tiles of channels and of points, and few channels per group.
            #[test]
            fn sums_many_parts_in_half_precision() {
                let size = [300, 18, 8][$rank - 1];
                let many =
                    Convolution { groups: 1, channels: [130, 40], ..fixed::<$rank>(size, 3, 1, (1, 1)) };
                let depthwise = Convolution { groups: 6, channels: [1, 1], ..many.clone() };
                for (dtype, conv) in HALF.into_iter().flat_map(|dtype| [(dtype, &many), (dtype, &depthwise)])
                {
                    let check = Check::new(conv.conv_inputs::<$dims>(), Setting::of(dtype));
                    check.compare(&ours(conv.options()), &stock(conv.options()));
                }
            }

            #[test]
            fn is_differentiated() {
                for padding in [(1, 1), (0, 2)] {
                    let conv = fixed::<$rank>(6, 3, 2, padding);
                    let conv = if $rank == 3 { conv.symmetric() } else { conv };
                    let check = Check::new(conv.conv_inputs::<$dims>(), Setting::default());
                    check.differentiate(&ours(conv.options()));
                }
            }

            #[test]
            fn takes_a_result_twice() {
                let conv = Convolution { groups: 1, channels: [2, 2], ..fixed::<$rank>(4, 3, 1, (1, 1)) };
                let (ours, stock) = (ours(conv.options()), stock(conv.options()));
                let check = Check::new(conv.conv_inputs::<$dims>(), Setting::default());
                check.compare(&|t| ours(t) + ours(t) * 0.5, &|t| stock(t) + stock(t) * 0.5);
            }

            #[test]
            fn treats_odd_shapes_as_stock() {
                let conv = Convolution { groups: 1, ..fixed::<$rank>(3, 2, 1, (0, 0)) };
                let compare = |conv: &Convolution<$rank>, inputs: Vec<Input>| {
                    Check::new(inputs, Setting::default())
                        .compare_panics(&ours(conv.options()), &stock(conv.options()));
                };
                let one = Convolution { groups: 1, ..fixed::<$rank>(1, 1, 1, (0, 0)) };
                compare(&one, one.conv_inputs::<$dims>());
                let too_large = Convolution { groups: 1, ..fixed::<$rank>(2, 3, 1, (0, 0)) };
                compare(&too_large, too_large.conv_inputs::<$dims>());
                let asymmetric = Convolution { groups: 1, ..fixed::<$rank>(3, 2, 1, (0, 1)) };
                compare(&asymmetric, asymmetric.conv_inputs::<$dims>());
                let empty = Convolution { batch: 0, ..conv.clone() };
                compare(&empty, empty.conv_inputs::<$dims>());
                compare(&conv, conv.inputs::<$dims>(3, [1, 2], 1)); // channels that do not match
                compare(&Convolution { groups: 2, ..conv.clone() }, conv.inputs::<$dims>(4, [3, 2], 3));
                compare(&conv, conv.inputs::<$dims>(2, [1, 2], 2)); // a bias that does not
            }
        }

        mod $transposed {
            use super::*;

            fn ours(options: ConvTransposeOptions<$rank>) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| F::$transposed(t.get(0), t.get(1), t.maybe(2), options.clone())
            }

            fn stock(options: ConvTransposeOptions<$rank>) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| module::$transposed(t.get(0), t.get(1), t.maybe(2), options.clone())
            }

            #[test]
            fn equals_stock() {
                for_all($cases, (convolutions::<$rank>(), settings()), |(conv, setting)| {
                    let conv = conv.transposed();
                    let check = Check::new(conv.transposed_inputs::<$dims>(), setting);
                    check.compare(&ours(conv.transposed_options()), &stock(conv.transposed_options()));
                });
            }

            #[test]
            fn equals_stock_in_half_precision() {
                for dtype in HALF {
                    let conv = fixed::<$rank>(3, 3, 2, (1, 1));
                    let check = Check::new(conv.transposed_inputs::<$dims>(), Setting::of(dtype));
                    check.compare(&ours(conv.transposed_options()), &stock(conv.transposed_options()));
                }
            }

            /// Sums of many parts: several tiles of channels and of points.
            #[test]
            fn sums_many_parts_in_half_precision() {
                let size = [300, 17, 7][$rank - 1];
                let conv =
                    Convolution { groups: 1, channels: [130, 20], ..fixed::<$rank>(size, 3, 2, (1, 1)) };
                for dtype in HALF {
                    let check = Check::new(conv.transposed_inputs::<$dims>(), Setting::of(dtype));
                    check.compare(&ours(conv.transposed_options()), &stock(conv.transposed_options()));
                }
            }

            #[test]
            fn is_differentiated() {
                let conv = fixed::<$rank>(3, 3, 2, (1, 1));
                let check = Check::new(conv.transposed_inputs::<$dims>(), Setting::default());
                check.differentiate(&ours(conv.transposed_options()));
            }

            #[test]
            fn treats_odd_shapes_as_stock() {
                let conv = Convolution { groups: 1, ..fixed::<$rank>(3, 2, 1, (0, 0)) };
                let compare = |conv: &Convolution<$rank>, inputs: Vec<Input>| {
                    let options = conv.transposed_options();
                    Check::new(inputs, Setting::default())
                        .compare_panics(&ours(options.clone()), &stock(options.clone()));
                };
                let one = fixed::<$rank>(1, 1, 1, (0, 0));
                compare(&one, one.transposed_inputs::<$dims>());
                let empty = Convolution { batch: 0, ..conv.clone() };
                compare(&empty, empty.transposed_inputs::<$dims>());
                compare(&conv, conv.inputs::<$dims>(3, [2, 1], 1)); // channels that do not match
                compare(&conv, conv.inputs::<$dims>(2, [2, 1], 2)); // a bias that does not
                let uneven = Convolution { groups: 2, ..conv.clone() }; // groups that channels do not divide into
                compare(&uneven, uneven.inputs::<$dims>(3, [3, 1], 2));
                let padded = fixed::<$rank>(1, 2, 1, (2, 2)); // more padding than there is output
                compare(&padded, padded.transposed_inputs::<$dims>());
            }
        }
    };
}
conv!(conv1d, conv_transpose1d, 1, 3, 128);
conv!(conv2d, conv_transpose2d, 2, 4, 96);
conv!(conv3d, conv_transpose3d, 3, 5, 48);

/// A line with its padding that is longer than what is summed at once.
#[test]
fn depthwise_convolutions_of_long_lines_equal_stock() {
    let conv = Convolution { channels: [1, 1], ..fixed::<1>(5000, 4, 1, (1, 1)) };
    for setting in [DType::F32, DType::F64].map(Setting::of) {
        Check::new(conv.conv_inputs::<3>(), setting)
            .compare::<3>(&|t| F::conv1d(t.get(0), t.get(1), t.maybe(2), conv.options()), &|t| {
                module::conv1d(t.get(0), t.get(1), t.maybe(2), conv.options())
            });
    }
}

/// Planes of which some rows are laid out after the others.
#[test]
fn depthwise_convolutions_of_large_planes_equal_stock() {
    for (stride, dilation) in [(1, 1), (2, 1), (1, 5), (3, 2)] {
        let mut conv = Convolution { channels: [1, 1], ..fixed::<2>(130, 3, stride, (1, 1)) };
        conv.axes[0].size = 70;
        conv.axes.iter_mut().for_each(|axis| axis.dilation = dilation);
        let axes = [
            Axis { size: 9, kernel: 3, stride, padding: (1, 1), dilation },
            Axis { size: 20, kernel: 2, stride: 1, padding: (0, 0), dilation: 1 },
            Axis { size: 31, kernel: 3, stride, padding: (1, 1), dilation: 1 },
        ];
        let volume = Convolution { channels: [1, 1], axes, ..fixed::<3>(1, 1, 1, (0, 0)) };
        for setting in [DType::F32, DType::F64].map(Setting::of) {
            Check::new(conv.conv_inputs::<4>(), setting)
                .compare::<4>(&|t| F::conv2d(t.get(0), t.get(1), t.maybe(2), conv.options()), &|t| {
                    module::conv2d(t.get(0), t.get(1), t.maybe(2), conv.options())
                });
            Check::new(conv.transposed_inputs::<4>(), setting).compare::<4>(
                &|t| F::conv_transpose2d(t.get(0), t.get(1), t.maybe(2), conv.transposed_options()),
                &|t| module::conv_transpose2d(t.get(0), t.get(1), t.maybe(2), conv.transposed_options()),
            );
            Check::new(volume.conv_inputs::<5>(), setting)
                .compare::<5>(&|t| F::conv3d(t.get(0), t.get(1), t.maybe(2), volume.options()), &|t| {
                    module::conv3d(t.get(0), t.get(1), t.maybe(2), volume.options())
                });
        }
    }
}

/// In f64: elsewhere a rounding could move a sum across the kink of the ReLU.
macro_rules! norm_relu {
    ($conv_norm_relu:ident = $conv:ident, $rank:literal, $dims:literal, $cases:literal) => {
        mod $conv_norm_relu {
            use super::*;

            const BETA: usize = 2;
            /// The bias, or a `gamma` that may be tracked.
            const LAST: usize = 3;

            /// `x`, `weight`, `beta`, and `gamma` or the bias.
            fn inputs(conv: &Convolution<$rank>, with_gamma: bool) -> Vec<Input> {
                let channels = conv.groups * conv.channels[1];
                let mut inputs = conv.conv_inputs::<$dims>();
                inputs.insert(BETA, Input::random([channels]));
                if with_gamma {
                    inputs.truncate(LAST);
                    inputs.push(Input::random([channels]));
                }
                inputs
            }

            /// Statistics, and a `gamma` that is no input, of numbers that half precision has.
            fn norm(t: &Operands, with_gamma: bool) -> (Option<Tensor<1>>, GivenNorm) {
                let weight = t.get::<$dims>(1);
                let channels = weight.dims()[0];
                let of = |seed, range| {
                    let eighths = |value: f64| (8.0 * value).round() / 8.0;
                    let values: Vec<f64> = uniform(channels, seed, range).into_iter().map(eighths).collect();
                    tensor(values, &[channels], t.device(), weight.dtype())
                };
                let last = t.maybe(LAST);
                let (bias, gamma) = if with_gamma { (None, last) } else { (last, None) };
                let gamma = gamma.unwrap_or_else(|| of(9, -1.0..2.0));
                let (mean, variance) = (of(7, -0.5..0.5), of(8, 0.5..1.5));
                (bias, GivenNorm { gamma, beta: t.get(BETA), mean, variance, epsilon: 1e-3 })
            }

            fn ours(options: ConvOptions<$rank>, with_gamma: bool) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| {
                    let (bias, norm) = norm(t, with_gamma);
                    F::$conv_norm_relu(t.get(0), t.get(1), bias, norm, options.clone())
                }
            }

            fn stock(options: ConvOptions<$rank>, with_gamma: bool) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| {
                    let (bias, GivenNorm { gamma, beta, mean, variance, epsilon }) = norm(t, with_gamma);
                    let z = module::$conv(t.get(0), t.get(1), bias, options.clone());
                    activation::relu(module::batch_norm(z, gamma, beta, mean, variance, epsilon))
                }
            }

            #[test]
            fn equals_stock() {
                let with_gamma = prop::bool::weighted(0.25);
                let cases = (convolutions::<$rank>(), settings(), with_gamma);
                for_all($cases, cases, |(conv, setting, with_gamma)| {
                    let conv = match $rank {
                        1 => Convolution { groups: 1, ..conv },
                        2 => conv,
                        _ => conv.symmetric(),
                    };
                    let setting = Setting { dtype: DType::F64, ..setting };
                    let options = conv.options();
                    Check::new(inputs(&conv, with_gamma), setting)
                        .compare(&ours(options.clone(), with_gamma), &stock(options, with_gamma));
                });
            }

            /// Convolutions that the kernels here compute, not Burn's: in tiles, and plane by plane.
            #[test]
            fn equals_stock_for_many_points() {
                let size = [300, 18, 8][$rank - 1];
                let many = Convolution { groups: 1, channels: [20, 7], ..fixed::<$rank>(size, 3, 1, (1, 1)) };
                let depthwise = Convolution { groups: 6, channels: [1, 1], ..many.clone() };
                for conv in [many, depthwise] {
                    let options = conv.options();
                    Check::new(inputs(&conv, false), Setting::of(DType::F64))
                        .compare(&ours(options.clone(), false), &stock(options, false));
                }
            }

            /// Errors against f64 not above stock's, which rounds after every step.
            #[test]
            fn equals_stock_in_half_precision() {
                let few = Convolution { groups: 1, ..fixed::<$rank>(9, 3, 1, (1, 1)) };
                let many = Convolution { channels: [130, 7], ..few.clone() };
                for (dtype, conv) in HALF.into_iter().flat_map(|dtype| [(dtype, &few), (dtype, &many)]) {
                    let options = conv.options();
                    let check = Check::new(inputs(conv, false), Setting::of(dtype));
                    check.compare(&ours(options.clone(), false), &stock(options, false));
                }
            }

            #[test]
            fn is_differentiated() {
                let conv = fixed::<$rank>(6, 3, 2, (1, 1));
                let check = Check::new(inputs(&conv, false), Setting::default());
                check.differentiate(&ours(conv.options(), false));
            }

            #[test]
            fn treats_odd_shapes_as_stock() {
                let conv = Convolution { groups: 1, ..fixed::<$rank>(3, 2, 1, (0, 0)) };
                let compare = |inputs: Vec<Input>| {
                    Check::new(inputs, Setting::default())
                        .compare_panics(&ours(conv.options(), false), &stock(conv.options(), false));
                };
                compare(inputs(&Convolution { batch: 0, ..conv.clone() }, false));
                for wrong in [BETA, LAST] {
                    let mut inputs = inputs(&conv, false);
                    inputs[wrong] = Input::random([2]);
                    compare(inputs);
                }
            }
        }
    };
}
norm_relu!(conv1d_norm_relu = conv1d, 1, 3, 64);
norm_relu!(conv2d_norm_relu = conv2d, 2, 4, 64);
norm_relu!(conv3d_norm_relu = conv3d, 3, 5, 32);

/// In whatever state the layers are, the method computes what they compute one after the other.
#[test]
fn forward_norm_relu_is_the_layers_one_after_the_other() {
    let _seeded = generator();
    let device = Device::flex().autodiff();
    device.seed(5);
    let config = Conv2dConfig::new([32, 32], [3, 3]).with_padding(PaddingConfig2d::Same);
    let convs = [config.init(&device), config.with_bias(false).init(&device)];
    let lora = convs[0].clone().apply_reparameterization(ConvLora::new(Lora::new(1, 4.0)));
    let norm = BatchNormConfig::new(32).init(&device);
    let x = || Tensor::<4>::random([2, 32, 12, 11], Distribution::Default, &device);
    norm.forward(convs[0].forward(x())); // running statistics that are not those of the beginning
    let frozen = norm.clone().freeze();
    let of_beta = BatchNorm { beta: frozen.beta.clone().set_require_grad(true), ..frozen.clone() };
    let of_gamma = BatchNorm { gamma: frozen.gamma.clone().set_require_grad(true), ..frozen.clone() };
    let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
    let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
    let [first, second] = convs;
    let quantized = first.clone().freeze().quantize_weights(&mut quantizer);
    let quantized_norm = frozen.clone().quantize_weights(&mut quantizer);
    assert_ne!(quantized.weight.val().dtype(), DType::F32);
    assert_ne!(quantized_norm.gamma.val().dtype(), DType::F32);
    for conv in [first.clone(), second, first.freeze(), lora, quantized] {
        for norm in [&norm, &frozen, &of_beta, &of_gamma, &quantized_norm] {
            let x = x().require_grad();
            let gradients = |y: Tensor<4>| {
                let gradients = (y.clone() * y).sum().backward();
                let of_weight = conv.weight.val().grad(&gradients);
                let of_norm = [&norm.gamma, &norm.beta].map(|parameter| parameter.val().grad(&gradients));
                (x.grad(&gradients), of_weight, of_norm)
            };
            let at_once = || conv.forward_norm_relu(x.clone(), norm);
            let step_by_step = || F::relu(norm.forward(conv.forward(x.clone())));
            let close = |a: TensorData, b: TensorData| a.assert_approx_eq::<f32>(&b, Tolerance::default());
            close(at_once().into_data(), step_by_step().into_data());
            let (a, b) = (gradients(at_once()), gradients(step_by_step()));
            fn data<const D: usize>(gradient: Option<Tensor<D>>) -> Option<TensorData> {
                gradient.map(Tensor::into_data)
            }
            let all = |(x, weight, [gamma, beta]): (_, _, [_; 2])| {
                [data::<4>(x), data::<4>(weight), data::<1>(gamma), data::<1>(beta)]
            };
            for (a, b) in all(a).into_iter().zip(all(b)) {
                assert_eq!(a.is_some(), b.is_some());
                a.zip(b).into_iter().for_each(|(a, b)| close(a, b));
            }
        }
    }
}

/// Stock's weight gradient of a grouped 1-D convolution is wrong where the stride leaves a rest (Flex 0.22.1), or panics
/// (NdArray 0.22.1): the truth is one convolution without groups per group.
mod grouped_conv1d {
    use super::*;

    fn one_conv_per_group(t: &Operands, options: &ConvOptions<1>) -> Tensor<3> {
        let (x, weight, bias) = (t.get::<3>(0), t.get::<3>(1), t.maybe::<1>(2));
        let conv = |((x, weight), bias)| {
            module::conv1d(x, weight, bias, ConvOptions { groups: 1, ..options.clone() })
        };
        let biases = match bias {
            None => vec![None; options.groups],
            Some(bias) => bias.chunk(options.groups, 0).into_iter().map(Some).collect(),
        };
        let groups = x.chunk(options.groups, 1).into_iter().zip(weight.chunk(options.groups, 0)).zip(biases);
        Tensor::cat(groups.map(conv).collect(), 1)
    }

    fn ours(options: ConvOptions<1>) -> impl Fn(&Operands) -> Tensor<3> {
        move |t| F::conv1d(t.get(0), t.get(1), t.maybe(2), options.clone())
    }

    #[test]
    fn equals_one_conv_per_group() {
        for_all(128, (convolutions::<1>(), settings()), |(conv, setting)| {
            let options = conv.options();
            let check = Check::new(conv.conv_inputs::<3>(), setting);
            check.compare(&ours(options.clone()), &|t| one_conv_per_group(t, &options));
        });
    }

    /// PyTorch agrees with the differences here.
    #[test]
    fn is_differentiated_where_the_stride_leaves_a_rest() {
        let axis = Axis { size: 17, kernel: 3, stride: 3, padding: (1, 1), dilation: 1 };
        for channels in [[2, 1], [2, 3]] {
            let conv =
                Convolution { batch: 2, groups: 4, channels, bias: true, axes: [axis], padding_out: [0] };
            let check = Check::new(conv.conv_inputs::<3>(), Setting::default());
            check.differentiate(&ours(conv.options()));
        }
    }
}

mod deform_conv2d {
    use super::*;

    #[derive(Clone, Debug)]
    struct Deformed {
        conv: Convolution<2>,
        offset_groups: usize,
        mask: bool,
    }

    impl Deformed {
        fn options(&self) -> DeformConvOptions<2> {
            let Convolution { axes, groups, .. } = &self.conv;
            DeformConvOptions::new(
                axes.map(|a| a.stride),
                axes.map(|a| a.padding.0),
                axes.map(|a| a.dilation),
                *groups,
                self.offset_groups,
            )
        }

        /// x, weight, bias (if any), offset, mask (if any).
        fn inputs(&self) -> Vec<Input> {
            let Convolution { batch, axes, .. } = &self.conv;
            let [height, width] =
                axes.map(|a| (a.size + 2 * a.padding.0 - (a.dilation * (a.kernel - 1) + 1)) / a.stride + 1);
            let taps = self.offset_groups * axes[0].kernel * axes[1].kernel;
            let mut inputs = self.conv.conv_inputs::<4>();
            inputs.push(Input::random([*batch, 2 * taps, height, width]));
            inputs.extend(self.mask.then(|| Input::between([*batch, taps, height, width], 0.1..1.0)));
            inputs
        }

        fn op(&self, deform_conv2d: DeformConv) -> impl Fn(&Operands) -> Tensor<4> {
            let (options, bias, mask) = (self.options(), self.conv.bias, self.mask);
            move |t| {
                let offset = 2 + usize::from(bias);
                deform_conv2d(
                    t.get(0),
                    t.get(offset),
                    t.get(1),
                    mask.then(|| t.get(offset + 1)),
                    bias.then(|| t.get(2)),
                    options.clone(),
                )
            }
        }
    }

    type DeformConv = fn(
        Tensor<4>,
        Tensor<4>,
        Tensor<4>,
        Option<Tensor<4>>,
        Option<Tensor<1>>,
        DeformConvOptions<2>,
    ) -> Tensor<4>;

    fn deformed() -> impl Strategy<Value = Deformed> {
        (convolutions::<2>(), 1..3usize, any::<bool>()).prop_map(|(conv, offset_groups, mask)| {
            let mut conv = conv.symmetric();
            conv.channels[0] *= offset_groups;
            Deformed { conv, offset_groups, mask }
        })
    }

    fn fixed_one() -> Deformed {
        let conv = Convolution { channels: [2, 2], ..fixed::<2>(4, 2, 1, (1, 1)) };
        Deformed { conv, offset_groups: 2, mask: true }
    }

    /// NdArray 0.22.1 panics for inputs that are not contiguous. Stock computes every gradient in f32; the one of a bias
    /// alone is better here.
    #[test]
    fn equals_stock() {
        for_all(48, (deformed(), settings()), |(deformed, setting)| {
            let contiguous = Setting { form: Form::Leaf, ..setting };
            for backend in Backend::ALL {
                let setting = if backend == Backend::Flex { setting } else { contiguous };
                let check = Check::new(deformed.inputs(), setting).on(backend).same_output();
                let check = check.gradients_within(1e-5);
                check.compare(&deformed.op(F::deform_conv2d), &deformed.op(module::deform_conv2d));
            }
        });
    }

    #[test]
    fn equals_stock_in_half_precision() {
        for dtype in HALF {
            let deformed = fixed_one();
            let check = Check::new(deformed.inputs(), Setting::of(dtype));
            check.compare(&deformed.op(F::deform_conv2d), &deformed.op(module::deform_conv2d));
        }
    }

    fn differentiate(offset_groups: usize, backend: Backend) {
        let deformed = Deformed { offset_groups, ..fixed_one() };
        let check = Check::new(deformed.inputs(), Setting::of(DType::F64)).on(backend);
        // Burn 0.22.1 computes this backward pass in f32, whatever the dtype.
        check.within(1e-4).differentiate(&deformed.op(F::deform_conv2d));
    }

    #[test]
    fn is_differentiated() {
        Backend::ALL.into_iter().for_each(|backend| differentiate(1, backend));
        differentiate(2, Backend::Flex);
    }

    #[test]
    fn treats_odd_shapes_as_stock() {
        let deformed = fixed_one();
        let compare = |inputs: Vec<Input>| {
            let check = Check::new(inputs, Setting::default());
            check.compare_panics(&deformed.op(F::deform_conv2d), &deformed.op(module::deform_conv2d));
        };
        let mut inputs = deformed.inputs();
        inputs[0] = Input::random([2, 3, 4, 4]); // channels that do not match
        compare(inputs);
        let empty = Deformed { conv: Convolution { batch: 0, ..deformed.conv.clone() }, ..deformed.clone() };
        compare(empty.inputs());
    }
}
