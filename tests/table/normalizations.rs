//! Rows of normalizations.
use super::{Case, Check, IMAGES, Input, Notes, ROWS, Row, Shapes, Twin, Visitor, kept, row};
use burn::module::Module;
use burn::tensor::{Tensor, activation};
use burn_memsave::functional::{ElementActivation, PiecewiseLinear, Smooth};

const VARIANT: &[Check] = &[Check::Time];
const OTHER_SIZES: &str = "the same kernels as the row before it";
/// In tests, what is kept per channel is 8 numbers wide.
const NARROW: Shapes<3> = ROWS.test([4, 32, 8]);

pub fn visit(visitor: &mut impl Visitor) {
    use kept::normalized;
    row! {
        visitor, "batch_norm", IMAGES, normalized, config(device) |nn, [_, n, ..]| nn::BatchNormConfig::new(n)
    }
    row! {
        visitor, "batch_norm, running statistics", IMAGES, kept::bilinear,
        module(device) |nn, [_, n, ..]|
            nn::BatchNormConfig::new(n).init(device).freeze().set_require_grad(true)
    }
    let silu = |case: Case, x: Input<4>| if case.any() { x.floats() } else { 0 };
    activated(visitor, "batch_norm, silu", Smooth::Silu.into(), silu, activation::silu);
    // A ReLU keeps a bit where the norm keeps nothing.
    let relu = |case: Case, x: Input<4>| match case {
        Case::BiasOnly => x.bits(),
        _ => normalized(case, x),
    };
    activated(visitor, "batch_norm, relu", PiecewiseLinear::Relu.into(), relu, activation::relu);
    row! {
        visitor, "layer_norm", NARROW, normalized, config(device) |nn, [.., n]| nn::LayerNormConfig::new(n)
    }
    row! {
        visitor, "layer_norm, no bias", NARROW, normalized,
        config(device) |nn, [.., n]| nn::LayerNormConfig::new(n).with_bias(false),
        without(VARIANT, OTHER_SIZES)
    }
    for epsilon in [1.0 / 3.0, 0.0, 1e-300] {
        row! {
            visitor, format!("layer_norm, epsilon {epsilon:e}"), NARROW, normalized,
            config(device) |nn, [.., n]| nn::LayerNormConfig::new(n).with_epsilon(epsilon),
            without(VARIANT, OTHER_SIZES),
            without(&[Check::Bytes, Check::Gradients, Check::Wgpu], "a number like another")
        }
    }
    row! {
        visitor, "rms_norm", NARROW, normalized,
        config(device) |nn, [.., n]| nn::RmsNormConfig::new(n),
        within(1e-5, "stock computes the root in f32")
    }
    // Both inputs and both outputs have a gradient. Cumulative sums and concatenation keep nothing.
    visitor.row(Row {
        name: String::from("add_rms_norm"),
        shapes: NARROW,
        kept: Box::new(normalized),
        stock: Twin {
            init: Box::new(|device, [.., n]| burn::nn::RmsNormConfig::new(n).init(device)),
            forward: Box::new(|norm, x| {
                let sum = x.clone() + x.cumsum(2);
                Tensor::cat(vec![norm.forward(sum.clone()), sum], 0)
            }),
        },
        ours: Twin {
            init: Box::new(|device, [.., n]| burn_memsave::nn::norm::AddRmsNormConfig::new(n).init(device)),
            forward: Box::new(|norm: &burn_memsave::nn::norm::AddRmsNorm, x| {
                let (sum, y) = norm.forward(x.clone(), x.cumsum(2));
                Tensor::cat(vec![y, sum], 0)
            }),
        },
        notes: Notes::default()
            .within(1e-5, "stock computes the root in f32")
            .without(&[Check::Conversion], "as rms_norm, whose twin it shares"),
    });
    row! {
        visitor, "group_norm", IMAGES, normalized,
        config(device) |nn, [_, n, ..]| nn::GroupNormConfig::new(n.div_ceil(8), n)
    }
    row! {
        visitor, "group_norm, 2 groups", IMAGES, normalized,
        config(device) |nn, [_, n, ..]| nn::GroupNormConfig::new(2, n),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "instance_norm", IMAGES, normalized,
        config(device) |nn, [_, n, ..]| nn::InstanceNormConfig::new(n)
    }
    row! {
        visitor, "instance_norm, not affine", IMAGES, kept::input,
        config(device) |nn, [_, n, ..]| nn::InstanceNormConfig::new(n).with_affine(false),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "local_response_norm", IMAGES, kept::input,
        config() |nn, _| nn::LocalResponseNormConfig::new(5)
    }
    for (size, alpha) in [(5, 0.0001), (2, 1.0 / 3.0)] {
        row! {
            visitor, format!("local_response_norm of {size}"), IMAGES, kept::input,
            config() |nn, _| nn::LocalResponseNormConfig::new(size).with_alpha(alpha).with_k(1e-300),
            without(VARIANT, OTHER_SIZES),
            without(&[Check::Bytes, Check::Gradients, Check::Wgpu], "a power of nearly nothing has no digits")
        }
    }
    macro_rules! wrapped {
        ($($name:literal: |$nn:ident, $n:ident| $norm:expr, $kept:expr;)+) => {$(
            row! {
                visitor, concat!("normalization, ", $name), IMAGES, $kept,
                module(device) |$nn, [_, $n, ..]| $nn::norm::NormalizationConfig::from($norm).init(device),
                without(VARIANT, "as the module inside"),
                unlike("what is inside is named")
            }
        )+};
    }
    wrapped! {
        "batch": |nn, n| nn::BatchNormConfig::new(n), normalized;
        "group": |nn, n| nn::GroupNormConfig::new(2, n), normalized;
        "instance": |nn, n| nn::InstanceNormConfig::new(n), normalized;
    }
    macro_rules! wrapped_rows {
        ($($name:literal: |$nn:ident, $n:ident| $norm:expr, $($note:ident($($argument:expr),*)),*;)+) => {$(
            row! {
                visitor, concat!("normalization, ", $name), NARROW, normalized,
                module(device) |$nn, [.., $n]| $nn::norm::NormalizationConfig::from($norm).init(device),
                without(VARIANT, "as the module inside"),
                unlike("what is inside is named") $(, $note($($argument),*))*
            }
        )+};
    }
    wrapped_rows! {
        "layer": |nn, n| nn::LayerNormConfig::new(n), ;
        "rms": |nn, n| nn::RmsNormConfig::new(n), within(1e-5, "stock computes the root in f32");
    }
}

/// A batch norm that also activates.
fn activated(
    visitor: &mut impl Visitor,
    name: &str,
    f: ElementActivation,
    kept: impl Fn(Case, Input<4>) -> usize + Sync,
    stock: fn(Tensor<4>) -> Tensor<4>,
) {
    visitor.row(Row {
        name: String::from(name),
        shapes: IMAGES,
        kept: Box::new(kept),
        stock: Twin {
            init: Box::new(|device, [_, n, ..]| burn::nn::BatchNormConfig::new(n).init(device)),
            forward: Box::new(move |norm: &burn::nn::BatchNorm, x| stock(norm.forward(x))),
        },
        ours: Twin {
            init: Box::new(|device, [_, n, ..]| burn_memsave::nn::BatchNormConfig::new(n).init(device)),
            forward: Box::new(move |norm: &burn_memsave::nn::BatchNorm, x| norm.forward_activated(x, f)),
        },
        notes: Notes::default()
            .within(1e-6, "NdArray computes some activations of f64 in f32")
            .without(&[Check::Conversion], "as batch_norm"),
    });
}
