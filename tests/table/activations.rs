//! Rows of activations and dropout.
use super::{Case, Check, IMAGES, Input, ROWS, Visitor, kept, row};
use burn::module::Module;

const VARIANT: &[Check] = &[Check::Time];
const OTHER_NUMBERS: &str = "the same kernel with other numbers";
const IN_F32: &str = "stock computes it, or a factor of its gradient, in f32";

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
    row! {
        visitor, "gelu", IMAGES, input, module() |nn, _| nn::activation::Gelu::new(),
        not_on_ndarray("it approximates the error function (0.22.1)")
    }
    row! {
        visitor, "gelu, approximate", IMAGES, input, module() |nn, _| nn::activation::Gelu::new_approximate()
    }
    row! {
        visitor, "silu", IMAGES, input, module() |nn, _| nn::activation::SiLU::new()
    }
    row! {
        visitor, "mish", IMAGES, input, module() |nn, _| nn::activation::Mish::new()
    }
    row! {
        visitor, "softplus", IMAGES, input,
        config() |nn, _| nn::activation::SoftplusConfig::new(), within(1e-6, IN_F32)
    }
    row! {
        visitor, "softplus, steep", IMAGES, input,
        config() |nn, _| nn::activation::SoftplusConfig::new().with_beta(2.0), within(1e-6, IN_F32),
        without(VARIANT, OTHER_NUMBERS)
    }
    row! {
        visitor, "softsign", IMAGES, input, module() |nn, _| nn::activation::Softsign::new()
    }
    row! {
        visitor, "elu", IMAGES, input, config() |nn, _| nn::activation::EluConfig::new()
    }
    row! {
        visitor, "elu, half", IMAGES, input,
        config() |nn, _| nn::activation::EluConfig::new().with_alpha(0.5), without(VARIANT, OTHER_NUMBERS)
    }
    row! {
        visitor, "celu", IMAGES, input, config() |nn, _| nn::activation::CeluConfig::new()
    }
    row! {
        visitor, "celu, half", IMAGES, input,
        config() |nn, _| nn::activation::CeluConfig::new().with_alpha(0.5), without(VARIANT, OTHER_NUMBERS)
    }
    row! {
        visitor, "selu", IMAGES, input, module() |nn, _| nn::activation::Selu::new()
    }
    row! {
        visitor, "log_sigmoid", IMAGES, input, module() |nn, _| nn::activation::LogSigmoid::new()
    }
    row! {
        visitor, "hard_swish", IMAGES, input,
        module() |nn, _| nn::activation::HardSwish::new(), within(1e-6, IN_F32)
    }
    row! {
        visitor, "tanhshrink", IMAGES, input, module() |nn, _| nn::activation::Tanhshrink::new()
    }
    row! {
        visitor, "sigmoid", IMAGES, input, module() |nn, _| nn::activation::Sigmoid::new(), summed()
    }
    row! {
        visitor, "tanh", IMAGES, input, module() |nn, _| nn::activation::Tanh::new(), summed()
    }
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
