//! Rows of convolutions.
use super::{Case, Check, IMAGES, Input, SIGNAL, Shapes, VOLUME, Visitor, kept, row};
use burn::module::{Lora, Module};
use burn::tensor::Tensor;
use burn_memsave::lora::ConvLora;

const VARIANT: &[Check] = &[Check::Time];
const OTHER_SIZES: &str = "the same kernels as the row before it";
const UNEVEN: (usize, usize, usize, usize) = (0, 1, 2, 1);

pub fn visit(visitor: &mut impl Visitor) {
    use kept::bilinear;
    row! {
        visitor, "conv1d", SIGNAL, bilinear, config(device) |nn, [_, n, _]|
        nn::conv::Conv1dConfig::new(n, n, 3).with_padding(nn::PaddingConfig1d::Same)
    }
    row! {
        visitor, "conv1d, valid", SIGNAL, bilinear,
        config(device) |nn, [_, n, _]| nn::conv::Conv1dConfig::new(n, n, 3),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv1d, same, even", SIGNAL, bilinear,
        config(device) |nn, [_, n, _]| nn::conv::Conv1dConfig::new(n, n, 4).with_padding(nn::PaddingConfig1d::Same),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv1d, asymmetric", SIGNAL, bilinear,
        config(device) |nn, [_, n, _]| {
            let padding = nn::PaddingConfig1d::Explicit(0, 3);
            nn::conv::Conv1dConfig::new(n, n, 3).with_padding(padding).with_dilation(2)
        },
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv1d, grouped", SIGNAL, bilinear,
        config(device) |nn, [_, n, _]| nn::conv::Conv1dConfig::new(n, n, 3).with_groups(2),
        without(VARIANT, OTHER_SIZES),
        without(&[Check::Gradients], "stock's gradient of the weight is wrong (0.22.1): tests/gradients")
    }

    let same = (1, 1, 1, 1);
    macro_rules! conv2d {
        ($nn:ident, $n:expr, $kernel:expr, $padding:expr) => {{
            let (top, left, bottom, right) = $padding;
            let padding = $nn::PaddingConfig2d::Explicit(top, left, bottom, right);
            $nn::conv::Conv2dConfig::new([$n, $n], $kernel).with_padding(padding)
        }};
    }
    row! {
        visitor, "conv2d", IMAGES, bilinear, config(device) |nn, [_, n, ..]| conv2d!(nn, n, [3, 3], same)
    }
    row! {
        visitor, "conv2d, stride 2", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| conv2d!(nn, n, [3, 3], same).with_stride([2, 2])
    }
    row! {
        visitor, "conv2d, 1x1", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| nn::conv::Conv2dConfig::new([n, n], [1, 1])
    }
    row! {
        visitor, "conv2d, depthwise", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| conv2d!(nn, n, [3, 3], same).with_groups(n)
    }
    row! {
        visitor, "conv2d, 4 groups", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| conv2d!(nn, n, [3, 3], same).with_groups(4)
    }
    row! {
        visitor, "conv2d, asymmetric", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| conv2d!(nn, n, [3, 3], UNEVEN)
    }
    row! {
        visitor, "conv2d, valid", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| nn::conv::Conv2dConfig::new([n, n], [3, 3]),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv2d, more channels, no bias", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| {
            let conv = nn::conv::Conv2dConfig::new([n, 2 * n], [3, 3]).with_groups(4);
            conv.with_stride([2, 1]).with_bias(false)
        },
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv2d, same, even", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]|
            nn::conv::Conv2dConfig::new([n, n], [2, 4]).with_padding(nn::PaddingConfig2d::Same),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv2d, asymmetric, dilated", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| conv2d!(nn, n, [3, 3], UNEVEN).with_dilation([2, 1]),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv2d, LoRA", IMAGES.test([2, 2, 5, 5]), kept::nothing,
        module(device) |nn, [_, n, ..]| {
            let conv = nn::conv::Conv2dConfig::new([n, n], [3, 2]).init(device);
            conv.apply_reparameterization(ConvLora::new(Lora::new(1, 4.0)))
        },
        without(VARIANT, "an adapter is a matter of memory"),
        without(&[Check::Bytes, Check::Gradients, Check::Wgpu],
            "an adapter has parameters of its own: tests/memory/lora.rs, tests/gradients/lora.rs")
    }

    row! {
        visitor, "conv3d", VOLUME, bilinear,
        config(device) |nn, [_, n, ..]| {
            let padding = nn::PaddingConfig3d::Explicit(1, 1, 1);
            nn::conv::Conv3dConfig::new([n, n], [3, 3, 3]).with_padding(padding)
        }
    }
    row! {
        visitor, "conv3d, valid", VOLUME, bilinear,
        config(device) |nn, [_, n, ..]| nn::conv::Conv3dConfig::new([n, n], [3, 3, 3]).with_bias(false),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv3d, dilated", VOLUME, bilinear,
        config(device) |nn, [_, n, ..]| {
            let conv = nn::conv::Conv3dConfig::new([n, n], [3, 1, 3]).with_padding(nn::PaddingConfig3d::Same);
            conv.with_dilation([2, 1, 1])
        },
        without(VARIANT, OTHER_SIZES)
    }

    row! {
        visitor, "conv_transpose1d", SIGNAL, bilinear,
        config(device) |nn, [_, n, _]|
            nn::conv::ConvTranspose1dConfig::new([n, n], 4).with_stride(2).with_padding(1)
    }
    row! {
        visitor, "conv_transpose1d, odd", SIGNAL, bilinear,
        config(device) |nn, [_, n, _]| nn::conv::ConvTranspose1dConfig::new([n, n], 3).with_stride(2),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv_transpose2d", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]|
            nn::conv::ConvTranspose2dConfig::new([n, n], [4, 4]).with_stride([2, 2]).with_padding([1, 1])
    }
    row! {
        visitor, "conv_transpose2d, odd", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]|
            nn::conv::ConvTranspose2dConfig::new([n, n], [3, 3]).with_stride([2, 2]),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv_transpose2d, dilated", IMAGES, bilinear,
        config(device) |nn, [_, n, ..]| {
            let conv = nn::conv::ConvTranspose2dConfig::new([n, n], [3, 3]).with_stride([2, 2]);
            conv.with_dilation([2, 1]).with_padding([1, 0]).with_padding_out([1, 0])
        },
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "conv_transpose3d", VOLUME, bilinear,
        config(device) |nn, [_, n, ..]|
            nn::conv::ConvTranspose3dConfig::new([n, n], [2, 2, 2]).with_stride([2, 2, 2])
    }
    row! {
        visitor, "conv_transpose3d, dense", VOLUME, bilinear,
        config(device) |nn, [_, n, ..]| nn::conv::ConvTranspose3dConfig::new([n, n], [3, 3, 3]),
        without(VARIANT, OTHER_SIZES)
    }
    visit_deformable(visitor);
}

/// `x` is kept for the gradients of the weight, the offset and the mask; the offset and the mask for every gradient but the bias's.
fn visit_deformable(visitor: &mut impl Visitor) {
    const IN_F32: &str = "stock computes every gradient in f32";
    const CONSTANT: &str =
        "offsets that are tracked: tests/gradients/conv.rs, and on wgpu Burn's gradients differ";
    const SHAPES: Shapes<4> = Shapes { test: [2, 4, 12, 12], usual: [2, 16, 28, 28], small: [2, 16, 28, 28] };
    /// One channel per tap of a 3 x 3 kernel and axis.
    const OFFSET: usize = 18;
    /// One channel per tap.
    const MASK: usize = 9;
    /// An input with these channels at every output position of `x`, with or without padding of the convolution.
    fn sampling(x: &Tensor<4>, channels: usize, padded: bool) -> Tensor<4> {
        let [batch, _, height, width] = x.dims();
        let border = if padded { 0 } else { 2 };
        Tensor::zeros([batch, channels, height - border, width - border], (&x.device(), x.dtype()))
    }
    let sampled = |x: Input<4>, channels, padded| {
        let [batch, _, height, width] = x.shape;
        let border = if padded { 0 } else { 2 };
        Input { shape: [batch, channels, height - border, width - border], ..x }.floats()
    };
    let constant = |channels, padded| {
        move |case: Case, x: Input<4>| {
            let any = case.input() || case.weight();
            kept::bilinear(case, x) + if any { sampled(x, channels, padded) } else { 0 }
        }
    };
    let tracked = |channels| move |_: Case, x: Input<4>| x.floats() + sampled(x, channels, false);
    row! {
        visitor, "deform_conv2d", SHAPES, constant(OFFSET, true),
        config(device) |nn, [_, n, ..]| {
            let padding = nn::PaddingConfig2d::Explicit(1, 1, 1, 1);
            nn::conv::DeformConv2dConfig::new([n, n], [3, 3]).with_padding(padding)
        },
        forward |nn, layer, x| { let offset = sampling(&x, OFFSET, true); layer.forward(x, offset, None) },
        within(1e-5, IN_F32)
    }
    row! {
        visitor, "deform_conv2d, valid", SHAPES, constant(OFFSET, false),
        config(device) |nn, [_, n, ..]| nn::conv::DeformConv2dConfig::new([n, n], [3, 3]),
        forward |nn, layer, x| { let offset = sampling(&x, OFFSET, false); layer.forward(x, offset, None) },
        within(1e-5, IN_F32), without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "deform_conv2d with a mask", SHAPES, constant(OFFSET + MASK, false),
        config(device) |nn, [_, n, ..]| nn::conv::DeformConv2dConfig::new([n, n], [3, 3]),
        forward |nn, layer, x| {
            let [offset, mask] = [OFFSET, MASK].map(|n| sampling(&x, n, false));
            layer.forward(x, offset, Some(mask + 0.5))
        },
        within(1e-5, IN_F32), without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "deform_conv2d, offset tracked", SHAPES, tracked(OFFSET),
        config(device) |nn, [_, n, ..]| nn::conv::DeformConv2dConfig::new([n, n], [3, 3]),
        forward |nn, layer, x| {
            let offset = sampling(&x, OFFSET, false);
            layer.forward(x, if offset.device().is_autodiff() { offset.require_grad() } else { offset }, None)
        },
        without(VARIANT, OTHER_SIZES), without(&[Check::Gradients, Check::Wgpu], CONSTANT)
    }
    row! {
        visitor, "deform_conv2d, mask tracked", SHAPES, tracked(OFFSET + MASK),
        config(device) |nn, [_, n, ..]| nn::conv::DeformConv2dConfig::new([n, n], [3, 3]),
        forward |nn, layer, x| {
            let [offset, mask] = [OFFSET, MASK].map(|n| sampling(&x, n, false));
            layer.forward(x, offset, Some(if mask.device().is_autodiff() { mask.require_grad() } else { mask }))
        },
        without(VARIANT, OTHER_SIZES), without(&[Check::Gradients, Check::Wgpu], CONSTANT)
    }
}
