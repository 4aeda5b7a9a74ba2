//! Compares modules of convolutions with those of stock Burn.
use super::{windows::*, *};

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
                let check = Check::new(inputs, setting);
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
                let check = Check::new(channels.inputs::<_, $dims>(sizes, weight, windows.kernel()), setting);
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
    for_all(16, (windows::<2>(), channels(), offsets, leaves()), |(windows, channels, offsets, setting)| {
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
    });
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
