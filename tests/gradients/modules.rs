//! Every layer against the stock layer that it is made from: outputs, gradients of the input and of every parameter,
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

    /// The weight is a transposed view, and no leaf: the input alone is tracked.
    #[test]
    fn linear_by_columns() {
        let config = LinearConfig::new(3, 5)
            .with_layout(LinearLayout::Col)
            .with_initializer(Initializer::Constant { value: 0.5 });
        let check = check([Input::random([2, 4, 3])], Setting::default());
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

/// One axis of a convolution or a pool.
#[derive(Clone, Copy, Debug)]
struct Axis {
    kernel: usize,
    stride: usize,
    dilation: usize,
    /// Of [`Padding::Explicit`]; at most half of the kernel, so that no window of a pool is padding alone.
    padding: (usize, usize),
    /// Only of a transposed convolution.
    padding_out: usize,
    /// By how much the input is larger than a window.
    room: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Padding {
    Valid,
    Same,
    Explicit,
}

#[derive(Clone, Debug)]
struct Windows<const N: usize> {
    axes: [Axis; N],
    padding: Padding,
}

fn windows<const N: usize>() -> impl Strategy<Value = Windows<N>> {
    let axis = (1..5usize, 1..4usize, 1..3usize, [0..3usize, 0..3], 0..3usize, 0..4usize).prop_map(
        |(kernel, stride, dilation, padding, padding_out, room)| {
            let padding = padding.map(|padding| padding.min(kernel / 2)).into();
            Axis { kernel, stride, dilation, padding, padding_out, room }
        },
    );
    let padding = prop::sample::select(vec![Padding::Valid, Padding::Same, Padding::Explicit]);
    (prop::array::uniform::<_, N>(axis), padding).prop_map(|(axes, padding)| Windows { axes, padding })
}

impl Axis {
    /// The size of a window.
    fn extent(&self) -> usize {
        self.dilation * (self.kernel - 1) + 1
    }
}

impl<const N: usize> Windows<N> {
    fn each(&self, of: impl Fn(&Axis) -> usize) -> [usize; N] {
        self.axes.each_ref().map(of)
    }

    fn kernel(&self) -> [usize; N] {
        self.each(|axis| axis.kernel)
    }

    fn stride(&self) -> [usize; N] {
        self.each(|axis| axis.stride)
    }

    fn dilation(&self) -> [usize; N] {
        self.each(|axis| axis.dilation)
    }

    fn sizes(&self) -> [usize; N] {
        self.each(|axis| axis.extent() + axis.room)
    }

    /// With padding the same on both sides, for layers that have no other.
    fn symmetric(mut self) -> Self {
        for axis in &mut self.axes {
            axis.padding.1 = axis.padding.0;
            if self.padding == Padding::Same {
                (axis.kernel, axis.stride) = (axis.kernel | 1, 1);
            }
        }
        self
    }

    /// The output of a convolution with symmetric padding.
    fn outputs(&self) -> [usize; N] {
        self.each(|axis| {
            let padding = match self.padding {
                Padding::Valid => 0,
                Padding::Same => axis.kernel / 2,
                Padding::Explicit => axis.padding.0,
            };
            (axis.room + 2 * padding) / axis.stride + 1
        })
    }
}

impl Windows<1> {
    fn padding(&self) -> PaddingConfig1d {
        let [(left, right)] = self.axes.map(|axis| axis.padding);
        match self.padding {
            Padding::Valid => PaddingConfig1d::Valid,
            Padding::Same => PaddingConfig1d::Same,
            Padding::Explicit => PaddingConfig1d::Explicit(left, right),
        }
    }
}

impl Windows<2> {
    fn padding(&self) -> PaddingConfig2d {
        let [(top, bottom), (left, right)] = self.axes.map(|axis| axis.padding);
        match self.padding {
            Padding::Valid => PaddingConfig2d::Valid,
            Padding::Same => PaddingConfig2d::Same,
            Padding::Explicit => PaddingConfig2d::Explicit(top, left, bottom, right),
        }
    }
}

impl Windows<3> {
    fn padding(&self) -> PaddingConfig3d {
        let [(depth, _), (height, _), (width, _)] = self.axes.map(|axis| axis.padding);
        match self.padding {
            Padding::Valid => PaddingConfig3d::Valid,
            Padding::Same => PaddingConfig3d::Same,
            Padding::Explicit => PaddingConfig3d::Explicit(depth, height, width),
        }
    }
}

mod convolutions {
    use super::*;

    #[derive(Clone, Debug)]
    struct Channels {
        batch: usize,
        groups: usize,
        /// In and out, of a group.
        each: [usize; 2],
        bias: bool,
    }

    fn channels() -> impl Strategy<Value = Channels> {
        (1..3usize, 1..4usize, [1..3usize, 1..3], any::<bool>())
            .prop_map(|(batch, groups, each, bias)| Channels { batch, groups, each, bias })
    }

    impl Channels {
        fn all(&self) -> [usize; 2] {
            self.each.map(|channels| channels * self.groups)
        }

        /// The input, the weight, and the bias if there is one.
        fn inputs<const N: usize, const D: usize>(
            &self,
            sizes: [usize; N],
            weight: [usize; 2],
            kernel: [usize; N],
        ) -> Vec<Input> {
            let [channels_in, channels_out] = self.all();
            let mut inputs = vec![
                Input::random::<D>(shape([self.batch, channels_in], sizes)),
                Input::random::<D>(shape(weight, kernel)),
            ];
            inputs.extend(self.bias.then(|| Input::random([channels_out])));
            inputs
        }
    }

    macro_rules! convolutions {
        ($(
            $test:ident: $ours:ident = $new:expr,
            $transposed_test:ident: $transposed:ident = $transposed_new:expr,
            $rank:literal, $dims:literal, $each:ident, $windows:expr;
        )+) => {$(
            #[test]
            fn $test() {
                for_all(32, (windows::<$rank>(), channels(), leaves()), |(windows, channels, setting)| {
                    let (windows, channels) = $windows(windows, channels);
                    let Channels { groups, each: [group_in, _], bias, .. } = channels;
                    let [channels_in, channels_out] = channels.all();
                    let config = $new([channels_in, channels_out], $each(windows.kernel()))
                        .with_stride($each(windows.stride()))
                        .with_dilation($each(windows.dilation()))
                        .with_groups(groups)
                        .with_padding(windows.padding())
                        .with_bias(bias);
                    let weight = [channels_out, group_in];
                    let inputs = channels.inputs::<_, $dims>(windows.sizes(), weight, windows.kernel());
                    let check = check(inputs, setting);
                    same_layers!(check, $ours, |t| with_parameters!(config, t), |layer| {
                        layer.forward(t.get(0))
                    });
                });
            }

            #[test]
            fn $transposed_test() {
                for_all(32, (windows::<$rank>(), channels(), leaves()), |(windows, channels, setting)| {
                    let Channels { groups, each: [_, group_out], bias, .. } = channels;
                    let [channels_in, channels_out] = channels.all();
                    let padding = windows.each(|axis| axis.padding.0.min((axis.extent() - 1) / 2));
                    let config = $transposed_new([channels_in, channels_out], $each(windows.kernel()))
                        .with_stride($each(windows.stride()))
                        .with_dilation($each(windows.dilation()))
                        .with_groups(groups)
                        .with_padding($each(padding))
                        .with_padding_out($each(windows.each(|axis| axis.padding_out)))
                        .with_bias(bias);
                    let (sizes, weight) = (windows.each(|axis| 1 + axis.room), [channels_in, group_out]);
                    let check = check(channels.inputs::<_, $dims>(sizes, weight, windows.kernel()), setting);
                    same_layers!(check, $transposed, |t| with_parameters!(config, t), |layer| {
                        layer.forward(t.get(0))
                    });
                });
            }
        )+};
    }
    convolutions! {
        // Stock's gradients of groups over one axis are wrong (0.22.1), see below.
        conv1d: MemSaveConv1d = |[i, o]: [usize; 2], kernel| Conv1dConfig::new(i, o, kernel),
            conv_transpose1d: MemSaveConvTranspose1d = ConvTranspose1dConfig::new,
            1, 3, only, |windows, channels| (windows, Channels { groups: 1, ..channels });
        conv2d: MemSaveConv2d = Conv2dConfig::new,
            conv_transpose2d: MemSaveConvTranspose2d = ConvTranspose2dConfig::new,
            2, 4, identity, |windows, channels| (windows, channels);
        conv3d: MemSaveConv3d = Conv3dConfig::new,
            conv_transpose3d: MemSaveConvTranspose3d = ConvTranspose3dConfig::new,
            3, 5, identity, |windows: Windows<3>, channels| (windows.symmetric(), channels);
    }

    /// Against stock's `Conv2d` over a first axis of one element.
    #[test]
    fn grouped_conv1d() {
        for_all(32, (windows::<1>(), channels(), leaves()), |(windows, channels, setting)| {
            let Channels { groups, each: [group_in, _], bias, .. } = channels;
            let [channels_in, channels_out] = channels.all();
            let ([kernel], [stride], [dilation]) = (windows.kernel(), windows.stride(), windows.dilation());
            let config = Conv1dConfig::new(channels_in, channels_out, kernel)
                .with_stride(stride)
                .with_dilation(dilation)
                .with_groups(groups)
                .with_padding(windows.padding())
                .with_bias(bias);
            let flat = Axis { kernel: 1, stride: 1, dilation: 1, padding: (0, 0), padding_out: 0, room: 0 };
            let lifted = Windows { axes: [flat, windows.axes[0]], padding: windows.padding };
            let lifted = Conv2dConfig::new(channels.all(), lifted.kernel())
                .with_stride(lifted.stride())
                .with_dilation(lifted.dilation())
                .with_groups(groups)
                .with_padding(lifted.padding())
                .with_bias(bias);
            let weight = [channels_out, group_in];
            let inputs = channels.inputs::<_, 3>(windows.sizes(), weight, windows.kernel());
            Check::new(inputs, setting).compare::<3>(
                &|t| MemSaveConv1d::from(with_parameters!(config, t)).forward(t.get(0)),
                &|t| {
                    let mut layer = lifted.init(t.device());
                    let weight = t.get::<3>(1).unsqueeze_dim(2);
                    layer.weight = Param::initialized(ParamId::new(), weight);
                    layer.bias = layer.bias.map(|_| param(t, 2));
                    layer.forward(t.get::<3>(0).unsqueeze_dim(2)).squeeze_dim(2)
                },
            );
        });
    }

    /// Stock computes every gradient in f32 (0.22.1).
    #[test]
    fn deform_conv2d() {
        let offsets = (1..3usize, any::<bool>());
        for_all(
            16,
            (windows::<2>(), channels(), offsets, leaves()),
            |(windows, channels, offsets, setting)| {
                let (windows, (offset_groups, masked)) = (windows.symmetric(), offsets);
                let [group_in, group_out] = channels.each;
                let channels = Channels { each: [group_in * offset_groups, group_out], ..channels };
                let config = DeformConv2dConfig::new(channels.all(), windows.kernel())
                    .with_stride(windows.stride())
                    .with_dilation(windows.dilation())
                    .with_weight_groups(channels.groups)
                    .with_offset_groups(offset_groups)
                    .with_padding(windows.padding())
                    .with_bias(channels.bias);
                let taps = offset_groups * windows.kernel().iter().product::<usize>();
                let per_output = |channels| shape::<2, 4>([channels, taps], windows.outputs());
                let [batch, _, height, width] = per_output(channels.batch);
                let weight = [channels.all()[1], channels.each[0]];
                let mut inputs = channels.inputs::<_, 4>(windows.sizes(), weight, windows.kernel());
                inputs.insert(2, Input::random([batch, 2 * taps, height, width]));
                if masked {
                    inputs.insert(3, Input::between([batch, taps, height, width], 0.1..1.0));
                }
                let stock = |t: &Operands| {
                    let mut layer = config.init(t.device());
                    let bias = 3 + usize::from(masked);
                    (layer.weight, layer.bias) = (param(t, 1), layer.bias.map(|_| param(t, bias)));
                    layer
                };
                let check = check(inputs, setting).gradients_within(1e-5);
                same_layers!(check, MemSaveDeformConv2d, |t| stock(t), |layer| {
                    layer.forward(t.get(0), t.get(2), masked.then(|| t.get(3)))
                });
            },
        );
    }

    #[test]
    fn what_stock_refuses_is_refused() {
        let zeros = Initializer::Zeros;
        let plane = Check::new([Input::random([1, 2, 4, 4])], Setting::default());
        let conv = Conv2dConfig::new([3, 2], [1, 1]).with_initializer(zeros.clone());
        both_refuse!(plane, MemSaveConv2d, |t| conv.init(t.device()), |layer| layer.forward(t.get(0)));
        let conv = ConvTranspose2dConfig::new([3, 2], [1, 1]).with_initializer(zeros.clone());
        both_refuse!(plane, MemSaveConvTranspose2d, |t| conv.init(t.device()), |layer| {
            layer.forward(t.get(0))
        });
        // A stride of 2 over an even size pads one side only.
        let asymmetric = DeformConv2dConfig::new([2, 2], [3, 3]).with_initializer(zeros.clone());
        for conv in [
            asymmetric.clone().with_padding(PaddingConfig2d::Same).with_stride([2, 2]),
            asymmetric.with_padding(PaddingConfig2d::Explicit(1, 1, 0, 1)),
        ] {
            both_refuse!(plane, MemSaveDeformConv2d, |t| conv.init(t.device()), |layer| {
                layer.forward(t.get(0), Tensor::zeros([1, 18, 2, 2], t.device()), None)
            });
        }
        let volume = Check::new([Input::random([1, 2, 4, 4, 4])], Setting::default());
        let conv = Conv3dConfig::new([2, 2], [3, 3, 3])
            .with_initializer(zeros)
            .with_padding(PaddingConfig3d::Same)
            .with_stride([1, 2, 1]);
        both_refuse!(volume, MemSaveConv3d, |t| conv.init(t.device()), |layer| layer.forward(t.get(0)));
    }
}

mod pools {
    use super::*;

    macro_rules! pools {
        ($(
            $max_test:ident: $max:ident = $max_config:ident,
            $avg_test:ident: $avg:ident = $avg_config:ident,
            $rank:literal, $dims:literal, $each:ident, $with_stride:ident;
        )+) => {$(
            /// With ties and without.
            #[test]
            fn $max_test() {
                let flags = [any::<bool>(), any::<bool>()];
                for_all(48, (windows::<$rank>(), flags, leaves()), |(windows, [ceil, ties], setting)| {
                    let config = $max_config::new($each(windows.kernel()))
                        .$with_stride($each(windows.stride()))
                        .with_dilation($each(windows.dilation()))
                        .with_padding(windows.padding())
                        .with_ceil_mode(ceil);
                    let shape = shape::<_, $dims>([2, 3], windows.sizes());
                    let input = if ties { Input::steps(shape, 3) } else { Input::random(shape) };
                    let check = check([input], setting);
                    same_layers!(check, $max, |t| config.init(), |layer| layer.forward(t.get(0)));
                });
            }

            #[test]
            fn $avg_test() {
                let flags = [any::<bool>(), any::<bool>()];
                for_all(48, (windows::<$rank>(), flags, leaves()), |(windows, [ceil, include], setting)| {
                    let config = $avg_config::new($each(windows.kernel()))
                        .$with_stride($each(windows.stride()))
                        .with_padding(windows.padding())
                        .with_count_include_pad(include)
                        .with_ceil_mode(ceil);
                    let input = Input::random(shape::<_, $dims>([2, 3], windows.sizes()));
                    let check = check([input], setting);
                    same_layers!(check, $avg, |t| config.init(), |layer| layer.forward(t.get(0)));
                });
            }
        )+};
    }
    pools! {
        max_pool1d: MemSaveMaxPool1d = MaxPool1dConfig,
            avg_pool1d: MemSaveAvgPool1d = AvgPool1dConfig, 1, 3, only, with_stride;
        max_pool2d: MemSaveMaxPool2d = MaxPool2dConfig,
            avg_pool2d: MemSaveAvgPool2d = AvgPool2dConfig, 2, 4, identity, with_strides;
    }

    macro_rules! adaptive_pools {
        ($($test:ident: $ours:ident = $config:ident, $rank:literal, $dims:literal, $each:ident;)+) => {$(
            #[test]
            fn $test() {
                let sizes = |range| prop::array::uniform::<_, $rank>(range);
                for_all(32, (sizes(1..8usize), sizes(1..7usize), leaves()), |(sizes, outputs, setting)| {
                    let config = $config::new($each(outputs));
                    let check = check([Input::random(shape::<_, $dims>([2, 3], sizes))], setting);
                    same_layers!(check, $ours, |t| config.init(), |layer| layer.forward(t.get(0)));
                });
            }
        )+};
    }
    adaptive_pools! {
        adaptive_avg_pool1d: MemSaveAdaptiveAvgPool1d = AdaptiveAvgPool1dConfig, 1, 3, only;
        adaptive_avg_pool2d: MemSaveAdaptiveAvgPool2d = AdaptiveAvgPool2dConfig, 2, 4, identity;
        adaptive_avg_pool3d: MemSaveAdaptiveAvgPool3d = AdaptiveAvgPool3dConfig, 3, 5, identity;
    }
}

mod interpolations {
    use super::*;
    use InterpolateMode::*;

    macro_rules! interpolations {
        ($($test:ident: $ours:ident = $config:ident, $rank:literal, $dims:literal, $each:ident;)+) => {$(
            /// Outputs of every mode on both backends; gradients where stock has them (0.22.1: but for Lanczos on Flex,
            /// nearest on NdArray), and everywhere against differences.
            #[test]
            fn $test() {
                let numbers = |range| prop::array::uniform::<_, $rank>(range);
                let size = (any::<bool>(), numbers(1..9usize));
                for (mode, corners) in [Nearest, Linear, Cubic, Lanczos].into_iter().flat_map(|mode| {
                    [(mode.clone(), false), (mode, true)]
                }) {
                    for_all(8, (numbers(2..8), size.clone(), leaves()), |(input, (scaled, size), setting)| {
                        let scale = scaled.then(|| $each(size.map(|size| size as f32 / 2.0)));
                        let config = $config::new()
                            .with_mode(mode.clone())
                            .with_align_corners(corners)
                            .with_output_size((!scaled).then(|| $each(size)))
                            .with_scale_factor(scale);
                        let check = check([Input::random(shape::<_, $dims>([2, 2], input))], setting);
                        same_layers!(check, $ours, |t| config.clone().init(), |layer| {
                            layer.forward(t.get(0)).detach()
                        });
                        let with_gradients: &[Backend] = match mode {
                            Nearest => &Backend::ALL,
                            Linear | Cubic => &[Backend::Flex],
                            _ => &[],
                        };
                        for &backend in with_gradients {
                            let check = check.clone().on(backend);
                            same_layers!(check, $ours, |t| config.clone().init(), |layer| {
                                layer.forward(t.get(0))
                            });
                        }
                        check.differentiate(&|t| $ours::from(config.clone().init()).forward(t.get(0)));
                    });
                }
            }
        )+};
    }
    interpolations! {
        interpolate1d: MemSaveInterpolate1d = Interpolate1dConfig, 1, 3, only;
        interpolate2d: MemSaveInterpolate2d = Interpolate2dConfig, 2, 4, identity;
    }

    /// No size, two sizes, and a mode that no CPU backend has.
    #[test]
    fn what_stock_refuses_is_refused() {
        let line = Check::new([Input::random([1, 2, 4])], Setting::default());
        let plane = Check::new([Input::random([1, 2, 4, 4])], Setting::default());
        for (size, scale, mode) in
            [(None, None, Nearest), (Some(2), Some(0.5), Linear), (Some(2), None, NearestExact)]
        {
            let resize = Interpolate1dConfig::new()
                .with_mode(mode.clone())
                .with_output_size(size)
                .with_scale_factor(scale);
            both_refuse!(line, MemSaveInterpolate1d, |t| resize.clone().init(), |layer| {
                layer.forward(t.get(0))
            });
            let resize = Interpolate2dConfig::new()
                .with_mode(mode)
                .with_output_size(size.map(|size| [size; 2]))
                .with_scale_factor(scale.map(|scale| [scale; 2]));
            both_refuse!(plane, MemSaveInterpolate2d, |t| resize.clone().init(), |layer| {
                layer.forward(t.get(0))
            });
        }
    }
}

mod batch_norm {
    use super::*;

    /// The layer with running statistics of its own.
    fn stock(t: &Operands, config: &BatchNormConfig, dtype: DType) -> BatchNorm {
        let channels = config.num_features;
        let state = |seed, range| {
            RunningState::new(tensor(uniform(channels, seed, range), &[channels], t.device(), dtype))
        };
        let mut layer = config.init(t.device());
        (layer.gamma, layer.beta) = (param(t, 1), param(t, 2));
        (layer.running_mean, layer.running_var) = (state(7, -0.5..0.5), state(8, 0.5..1.5));
        layer
    }

    /// Outputs, and the running statistics after two batches.
    #[test]
    fn batch_norm() {
        let shapes = [2..5usize, 1..4, 2..5, 2..5];
        let numbers =
            (prop::sample::select(vec![1e-5, 1e-3, 0.5]), prop::sample::select(vec![0.0, 0.1, 1.0]));
        for_all(32, (shapes, numbers, leaves()), |(shape, (epsilon, momentum), setting)| {
            let reading = match setting.reading {
                Reading::Sum => Reading::Weighted, // of a sum, the gradient is 0
                reading => reading,
            };
            let (channels, dtype) = (shape[1], setting.dtype);
            let config = BatchNormConfig::new(channels).with_epsilon(epsilon).with_momentum(momentum);
            let parameters = [Input::between([channels], 0.5..1.5), Input::random([channels])];
            let inputs = [&[Input::random(shape)][..], &parameters].concat();
            let check = Check::new(inputs, Setting { reading, ..setting });
            same_layers!(check, MemSaveBatchNorm, |t| stock(t, &config, dtype), |layer| {
                layer.forward(t.get::<4>(0))
            });
            same_layers!(check, MemSaveBatchNorm, |t| stock(t, &config, dtype), |layer| {
                let x = t.get::<4>(0);
                layer.forward(layer.forward(x) * 2.0 + 1.0);
                Tensor::cat(vec![layer.running_mean.value_sync(), layer.running_var.value_sync()], 0)
            });
        });
    }

    /// The layer of a config for a shape and an epsilon, with the parameters that `$set` gives it.
    macro_rules! rows {
        ($($test:ident: $ours:ident = |$shape:ident: [usize; $rank:literal], $epsilon:ident| $config:expr, $parameters:expr,
            |$layer:ident, $t:ident| $set:expr;)+) => {$(
            #[test]
            fn $test() {
                let shapes = prop::array::uniform::<_, $rank>(2..5usize);
                let epsilons = prop::sample::select(vec![1e-5, 1e-3, 0.5]);
                for_all(32, (shapes, epsilons, leaves()), |($shape, $epsilon, setting)| {
                    let parameters = $parameters;
                    let inputs = [
                        Input::random($shape),
                        Input::between([parameters], 0.5..1.5),
                        Input::random([parameters]),
                    ];
                    let check = Check::new(inputs, crate::batch_norm::with_gradient(setting)).within(1e-5);
                    let stock = |$t: &Operands| {
                        let mut $layer = $config.init($t.device());
                        $set;
                        $layer
                    };
                    same_layers!(check, $ours, |t| stock(t), |layer| layer.forward(t.get::<$rank>(0)));
                });
            }
        )+};
    }
    rows! {
        layer_norm: MemSaveLayerNorm = |shape: [usize; 3], epsilon|
            LayerNormConfig::new(shape[2]).with_epsilon(epsilon), shape[2],
            |layer, t| (layer.gamma, layer.beta) = (param(t, 1), Some(param(t, 2)));
        rms_norm: MemSaveRmsNorm = |shape: [usize; 3], epsilon|
            RmsNormConfig::new(shape[2]).with_epsilon(epsilon), shape[2],
            |layer, t| layer.gamma = param(t, 1);
        group_norm: MemSaveGroupNorm = |shape: [usize; 4], epsilon|
            GroupNormConfig::new(1, shape[1]).with_epsilon(epsilon), shape[1],
            |layer, t| (layer.gamma, layer.beta) = (Some(param(t, 1)), Some(param(t, 2)));
        instance_norm: MemSaveInstanceNorm = |shape: [usize; 4], epsilon|
            InstanceNormConfig::new(shape[1]).with_epsilon(epsilon), shape[1],
            |layer, t| (layer.gamma, layer.beta) = (Some(param(t, 1)), Some(param(t, 2)));
    }

    /// Half precision beside parameters in full precision, which stock widens.
    #[test]
    fn layer_norm_of_mixed_types() {
        let check = Check::new([Input::random([3, 4])], Setting::of(DType::F16));
        let config = LayerNormConfig::new(4);
        same_layers!(check, MemSaveLayerNorm, |t| config.init(t.device()), |layer| layer
            .forward(t.get::<2>(0)));
    }

    #[test]
    fn what_stock_refuses_is_refused() {
        let config = BatchNormConfig::new(3);
        let check = Check::new([Input::random([2, 2, 4])], Setting::default());
        both_refuse!(check, MemSaveBatchNorm, |t| config.init(t.device()), |layer| {
            layer.forward(t.get::<3>(0))
        });
        let layer_norm = LayerNormConfig::new(3);
        both_refuse!(check, MemSaveLayerNorm, |t| layer_norm.init(t.device()), |layer| layer
            .forward(t.get::<3>(0)));
        let rms_norm = RmsNormConfig::new(3);
        both_refuse!(check, MemSaveRmsNorm, |t| rms_norm.init(t.device()), |layer| layer
            .forward(t.get::<3>(0)));
        let group_norm = GroupNormConfig::new(1, 3);
        both_refuse!(check, MemSaveGroupNorm, |t| group_norm.init(t.device()), |layer| layer
            .forward(t.get::<3>(0)));
        let instance_norm = InstanceNormConfig::new(3);
        both_refuse!(check, MemSaveInstanceNorm, |t| instance_norm.init(t.device()), |layer| {
            layer.forward(t.get::<3>(0))
        });
        let too_small = Check::new([Input::random([1, 1, 2])], Setting::default());
        let group_norm = GroupNormConfig::new(1, 1);
        both_refuse!(too_small, MemSaveGroupNorm, |t| group_norm.init(t.device()), |layer| {
            layer.forward(t.get::<3>(0))
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
    use crate::dropout::generator;

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
