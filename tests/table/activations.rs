//! Rows of activations and dropout.
use super::{Case, Check, IMAGES, Input, Notes, ROWS, Visitor, functions::function, is_chosen, kept, row};
use burn::module::Module;
use burn::tensor::{Tensor, activation};
use burn_memsave::functional;

const VARIANT: &[Check] = &[Check::Time];
const OTHER_NUMBERS: &str = "the same kernel with other numbers";
const IN_F32: &str = "stock computes it, or a factor of its gradient, in f32";

/// A smooth activation as a function, for checks with other shapes, layouts and types than those of the rows: against finite differences
/// (`tests/gradients/smooth.rs`), on wgpu (`operations.rs`, `layouts.rs`, `half.rs` in `tests/wgpu`) and of bytes
/// (`tests/memory/targets.rs`).
pub struct Activation {
    pub name: &'static str,
    pub ours: fn(Tensor<3>) -> Tensor<3>,
    pub stock: fn(Tensor<3>) -> Tensor<3>,
    pub notes: Notes,
}

impl Activation {
    /// Ours of numbers in -1..1 that are mapped to the range of its inputs.
    pub fn of_unit(&self, x: Tensor<3>) -> Tensor<3> {
        let inputs = self.notes.inputs();
        let (middle, half) = ((inputs.start + inputs.end) / 2.0, (inputs.end - inputs.start) / 2.0);
        (self.ours)(x * half + middle)
    }
}

/// Smooth activations that keep their input (or, if `summed()`, their output): a name, the range of the inputs, and then
///
/// - `module() |nn| ..` or `config() |nn| ..`, as in [`row!`]; or
/// - `function() |x| ours => stock` where Burn has no such module. Stock may be composed of Burn's functions.
///
/// Each becomes a row of the table and an [`Activation`].
macro_rules! smooth_activations {
    ($(
        $name:literal, $inputs:expr, $make:ident() |$argument:ident| $ours:expr $(=> $stock:expr)?
            $(, $note:ident ($($option:expr),*))*;
    )+) => {
        pub fn smooth() -> Vec<Activation> {
            let all = [$(Activation {
                name: $name,
                ours: smooth_activations!(@$make burn_memsave |$argument| $ours),
                stock: smooth_activations!(@$make burn |$argument| $ours $(=> $stock)?),
                notes: Notes::default().on($inputs)$(.$note($($option),*))*,
            }),+];
            all.into_iter().filter(|activation| is_chosen(activation.name)).collect()
        }

        fn visit_smooth(visitor: &mut impl Visitor) {
            $(smooth_activations! {
                @row $make visitor, $name, |$argument| $ours $(=> $stock)?, on($inputs) $(, $note($($option),*))*
            })+
        }
    };
    (@module $burn:ident |$nn:ident| $new:expr) => {
        |x| {
            use $burn::nn as $nn;
            $new.forward(x)
        }
    };
    (@config $burn:ident |$nn:ident| $new:expr) => {
        smooth_activations!(@module $burn |$nn| $new.init())
    };
    (@function $burn:ident |$x:ident| $function:expr) => { |$x| $function };
    (@function $burn:ident |$x:ident| $ours:expr => $stock:expr) => { |$x| $stock };
    (@row function $visitor:ident, $name:literal, |$x:ident| $ours:expr => $stock:expr, $($notes:tt)*) => {
        function! { $visitor, $name, IMAGES, kept::input, |$x| $ours => $stock, $($notes)* }
    };
    (@row $make:ident $visitor:ident, $name:literal, |$nn:ident| $new:expr, $($notes:tt)*) => {
        row! { $visitor, $name, IMAGES, kept::input, $make() |$nn, _| $new, $($notes)* }
    };
}

smooth_activations! {
    "gelu", -4.0..4.0, module() |nn| nn::activation::Gelu::new(),
        not_on_ndarray("it approximates the error function (0.22.1)");
    "gelu, approximate", -4.0..4.0, module() |nn| nn::activation::Gelu::new_approximate();
    "silu", -4.0..4.0, module() |nn| nn::activation::SiLU::new();
    "mish", -4.0..4.0, module() |nn| nn::activation::Mish::new();
    "softplus", -4.0..4.0, config() |nn| nn::activation::SoftplusConfig::new(), within(1e-6, IN_F32);
    "softplus, steep", -4.0..4.0, config() |nn| nn::activation::SoftplusConfig::new().with_beta(2.5),
        within(1e-6, IN_F32), without(VARIANT, OTHER_NUMBERS);
    "softplus, early", -4.0..4.0,
        config() |nn| nn::activation::SoftplusConfig::new().with_beta(1.5).with_threshold(2.0),
        within(1e-6, IN_F32), without(VARIANT, OTHER_NUMBERS);
    "softplus, late", -4.0..4.0, config() |nn| nn::activation::SoftplusConfig::new().with_threshold(1e4),
        within(1e-6, IN_F32), without(VARIANT, OTHER_NUMBERS);
    "softplus, function", -4.0..4.0,
        function() |x| functional::softplus(x, 2.5) => activation::softplus(x, 2.5),
        within(1e-6, IN_F32), without(VARIANT, OTHER_NUMBERS);
    "softsign", -4.0..4.0, module() |nn| nn::activation::Softsign::new();
    "elu", -4.0..4.0, config() |nn| nn::activation::EluConfig::new();
    "elu, half", -4.0..4.0, config() |nn| nn::activation::EluConfig::new().with_alpha(0.5),
        without(VARIANT, OTHER_NUMBERS);
    "elu, deep", -4.0..4.0, config() |nn| nn::activation::EluConfig::new().with_alpha(2.0),
        without(VARIANT, OTHER_NUMBERS);
    "celu", -4.0..4.0, config() |nn| nn::activation::CeluConfig::new();
    "celu, half", -4.0..4.0, config() |nn| nn::activation::CeluConfig::new().with_alpha(0.5),
        without(VARIANT, OTHER_NUMBERS);
    "celu, wide", -4.0..4.0, config() |nn| nn::activation::CeluConfig::new().with_alpha(2.0),
        without(VARIANT, OTHER_NUMBERS);
    "selu", -4.0..4.0, module() |nn| nn::activation::Selu::new();
    "log_sigmoid", -4.0..4.0, module() |nn| nn::activation::LogSigmoid::new();
    "hard_swish", -4.0..4.0, module() |nn| nn::activation::HardSwish::new(), within(1e-6, IN_F32);
    "tanhshrink", -4.0..4.0, module() |nn| nn::activation::Tanhshrink::new();
    "sigmoid", -4.0..4.0, module() |nn| nn::activation::Sigmoid::new(), summed();
    "tanh", -4.0..4.0, module() |nn| nn::activation::Tanh::new(), summed();
}

pub fn visit(visitor: &mut impl Visitor) {
    use kept::{input, mask};
    row! {
        visitor, "relu", IMAGES, mask, module() |nn, _| nn::activation::Relu::new()
    }
    row! {
        visitor, "leaky_relu", IMAGES, mask, config() |nn, _| nn::activation::LeakyReluConfig::new()
    }
    row! {
        visitor, "leaky_relu, steep", IMAGES, mask,
        config() |nn, _| nn::activation::LeakyReluConfig::new().with_negative_slope(0.2),
        without(VARIANT, OTHER_NUMBERS)
    }
    row! {
        visitor, "prelu", IMAGES, |case: Case, x: Input<4>| match case {
            Case::Frozen => x.bits(),
            case => kept::bilinear(case, x),
        },
        config(device) |nn, [_, n, ..]| nn::activation::PReluConfig::new().with_num_parameters(n)
    }
    row! {
        visitor, "relu6", IMAGES, mask, module() |nn, _| nn::activation::Relu6::new()
    }
    row! {
        visitor, "hardtanh", IMAGES, mask, config() |nn, _| nn::activation::HardtanhConfig::new()
    }
    row! {
        visitor, "hard_sigmoid", IMAGES, mask,
        config() |nn, _| nn::activation::HardSigmoidConfig::new(), within(1e-6, IN_F32)
    }
    row! {
        visitor, "hard_shrink", IMAGES, mask, config() |nn, _| nn::activation::HardShrinkConfig::new()
    }
    row! {
        visitor, "soft_shrink", IMAGES, mask, config() |nn, _| nn::activation::SoftShrinkConfig::new()
    }
    row! {
        visitor, "shrink", IMAGES, mask, config() |nn, _| nn::activation::ShrinkConfig::new()
    }
    row! {
        visitor, "threshold", IMAGES, mask, config() |nn, _| nn::activation::ThresholdConfig::new(0.5, 0.1)
    }
    row! {
        visitor, "thresholded_relu", IMAGES, mask,
        config() |nn, _| nn::activation::ThresholdedReluConfig::new()
    }
    row! {
        visitor, "rrelu", IMAGES, input,
        config() |nn, _| nn::activation::RReluConfig::new(),
        draws()
    }
    row! {
        visitor, "rrelu, evaluation", IMAGES, mask,
        module() |nn, _| nn::activation::RReluConfig::new().init().freeze(),
        without(VARIANT, "as leaky_relu")
    }
    visit_smooth(visitor);
    row! {
        visitor, "glu", IMAGES, input, module() |nn, _| nn::activation::GLU::new(1)
    }
    row! {
        visitor, "glu, last axis but one", IMAGES, input, module() |nn, _| nn::activation::GLU::new(-2),
        without(VARIANT, OTHER_NUMBERS)
    }
    // Kept are the input and the two halves of the gate, which does not change the width.
    let gate = |case: Case, x: Input<3>| match case {
        Case::Trainable | Case::InputUntracked => 3 * x.floats(),
        Case::Frozen => 2 * x.floats(),
        Case::BiasOnly | Case::Untracked => 0,
    };
    row! {
        visitor, "swiglu", ROWS, gate, config(device) |nn, [.., n]| nn::activation::SwiGluConfig::new(n, n)
    }
    let biased =
        move |case: Case, x: Input<3>| if case == Case::BiasOnly { 2 * x.floats() } else { gate(case, x) };
    row! {
        visitor, "swiglu, bias", ROWS, biased,
        config(device) |nn, [.., n]| nn::activation::SwiGluConfig::new(n, n).with_bias(true),
        without(VARIANT, "as swiglu")
    }
    row! {
        visitor, "dropout", IMAGES, mask, config() |nn, _| nn::DropoutConfig::new(0.5), draws()
    }
    row! {
        visitor, "activation, prelu", IMAGES, |case: Case, x: Input<4>| match case {
            Case::Frozen => x.bits(),
            case => kept::bilinear(case, x),
        },
        module(device) |nn, [_, n, ..]| {
            let prelu = nn::activation::PReluConfig::new().with_num_parameters(n);
            nn::activation::ActivationConfig::PRelu(prelu).init(device)
        },
        without(VARIANT, "as the module inside"), unlike("what is inside is named")
    }
    row! {
        visitor, "activation, gelu", IMAGES, input,
        module(device) |nn, _| nn::activation::ActivationConfig::Gelu.init(device),
        without(VARIANT, "as the module inside"), unlike("what is inside is named"),
        not_on_ndarray("it approximates the error function (0.22.1)")
    }
}
