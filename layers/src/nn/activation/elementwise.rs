//! Element-wise activations without tensors of their own, all defined in one table.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Defines a module whose forward pass is a function of the input and the fields, in their order; written as for [`drop_in!`].
/// A module with fields has a config, too, and the defaults stand next to the fields. Without `as ..`, Burn lacks the module.
macro_rules! elementwise {
    (
        $(#[$meta:meta])*
        pub struct $module:ident as $long:ident, $from:ident, $into:ident
        => $function:path
    ) => {
        drop_in! {
            $(#[$meta])*
            #[derive(Module, Debug, Default)]
            pub struct $module as $long = burn::nn::activation::$module, $from, $into;
        }
        elementwise!(@forward $module, $function {});
    };
    (
        $(#[$meta:meta])*
        pub struct $module:ident as $long:ident, $from:ident, $into:ident {
            $(#[doc = $doc:tt] pub $field:ident: f64 $(= $default:tt)?,)*
        }
        $config:ident $(, or $panics:ident)? => $function:path
    ) => {
        config_twin! {
            #[derive(Config, Debug)]
            pub struct $config = burn::nn::activation::$config {
                $(
                    #[doc = concat!($doc $(, " Default is ", $default)?)]
                    $(#[config(default = $default)])?
                    pub $field: f64,
                )*
            }
            pub fn init(&self) -> $module $(, or $panics)?;
        }
        drop_in! {
            $(#[$meta])*
            #[derive(Module, Debug)]
            pub struct $module as $long = burn::nn::activation::$module, $from, $into {
                $(#[doc = $doc] pub $field: f64,)*
            }
        }
        elementwise!(@forward $module, $function { $($field)* });
    };
    ($(#[$meta:meta])* pub struct $module:ident => $function:path) => {
        $(#[$meta])*
        #[derive(Module, Debug, Default)]
        pub struct $module;

        impl $module {
            /// Creates the module.
            pub fn new() -> Self {
                Self
            }
        }
        elementwise!(@forward $module, $function {});
    };
    (
        $(#[$meta:meta])*
        pub struct $module:ident {
            $(#[doc = $doc:tt] pub $field:ident: f64 $(= $default:tt)?,)*
        }
        $config:ident => $function:path
    ) => {
        #[doc = concat!("Configuration of [`", stringify!($module), "`].")]
        #[derive(Config, Debug)]
        pub struct $config {
            $(
                #[doc = concat!($doc $(, " Default is ", $default)?)]
                $(#[config(default = $default)])?
                pub $field: f64,
            )*
        }

        impl $config {
            /// Initializes the module.
            pub fn init(&self) -> $module {
                $module { $($field: self.$field),* }
            }
        }

        $(#[$meta])*
        #[derive(Module, Debug)]
        pub struct $module {
            $(#[doc = $doc] pub $field: f64,)*
        }
        elementwise!(@forward $module, $function { $($field)* });
    };
    (@forward $module:ident, $function:path { $($field:ident)* }) => {
        impl $module {
            /// Applies the function element by element.
            ///
            /// # Shapes
            ///
            /// - input: any
            /// - output: the same
            pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
                $function(input $(, self.$field)*)
            }
        }
    };
}
pub(super) use elementwise;

elementwise! {
    /// Rectified linear unit, `max(x, 0)`.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::Relu`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::activation::Relu;
    ///
    /// let x = Tensor::<1>::from_floats([-1.0, 0.0, 2.0], &Device::flex());
    /// Relu::new().forward(x).to_data().assert_eq(&[0.0f32, 0.0, 2.0].into(), true);
    /// ```
    pub struct Relu as MemSaveRelu, from_nn_relu, into_nn_relu
    => functional::relu
}

elementwise! {
    /// `min(max(x, 0), 6)`.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::Relu6`] keeps tensors of its input's size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::activation::Relu6;
    ///
    /// let x = Tensor::<1>::from_floats([-1.0, 0.0, 2.0], &Device::flex());
    /// Relu6::new().forward(x).to_data().assert_eq(&[0.0f32, 0.0, 2.0].into(), true);
    /// ```
    pub struct Relu6 as MemSaveRelu6, from_nn_relu6, into_nn_relu6
    => functional::relu6
}

elementwise! {
    /// `x` if `x >= 0`, else `negative_slope * x`.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::LeakyRelu`] keeps tensors of the input's size.
    pub struct LeakyRelu as MemSaveLeakyRelu, from_nn_leaky_relu, into_nn_leaky_relu {
        /// The negative slope.
        pub negative_slope: f64 = "0.01",
    }
    LeakyReluConfig => functional::leaky_relu
}

elementwise! {
    /// `x` if `x > 0`, else `alpha * (exp(x) - 1)`.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::activation::Elu`] keeps several tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::EluConfig;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 2.0], &Device::flex());
    /// let y = EluConfig::new().init().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 2.0].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Elu as MemSaveElu, from_nn_elu, into_nn_elu {
        /// The alpha value.
        pub alpha: f64 = "1.0",
    }
    EluConfig => functional::elu
}

elementwise! {
    /// `x` if `x > 0`, else `alpha * (exp(x / alpha) - 1)`.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::activation::Celu`] keeps several tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::CeluConfig;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 2.0], &Device::flex());
    /// let y = CeluConfig::new().init().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 2.0].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Celu as MemSaveCelu, from_nn_celu, into_nn_celu {
        /// The alpha value for the Celu formulation.
        pub alpha: f64 = "1.0",
    }
    CeluConfig, or panics => functional::celu
}

elementwise! {
    /// `1.0507 * (x if x > 0, else 1.6733 * (exp(x) - 1))`, element by element.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::activation::Selu`] keeps more than that.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::Selu;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
    /// let y = Selu::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 1.050701].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Selu as MemSaveSelu, from_nn_selu, into_nn_selu
    => functional::selu
}

elementwise! {
    /// `x * sigmoid(x)`, element by element.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::activation::SiLU`] keeps two tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::SiLU;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 2.0], &Device::flex());
    /// let y = SiLU::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 1.761594].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct SiLU as MemSaveSiLU, from_nn_silu, into_nn_silu
    => functional::silu
}

elementwise! {
    /// `x * tanh(log(1 + exp(x)))`, element by element.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::activation::Mish`] keeps five tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::Mish;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
    /// let y = Mish::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 0.865098].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Mish as MemSaveMish, from_nn_mish, into_nn_mish
    => functional::mish
}

elementwise! {
    /// `log(1 + exp(beta * x)) / beta`, and `x` where `beta * x` is above the threshold.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::activation::Softplus`] keeps several tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::SoftplusConfig;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 30.0], &Device::flex());
    /// let y = SoftplusConfig::new().init().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.693147f32, 30.0].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Softplus as MemSaveSoftplus, from_nn_softplus, into_nn_softplus {
        /// The beta value.
        pub beta: f64 = "1.0",
        /// The threshold above which the function is the identity.
        pub threshold: f64 = "20.0",
    }
    SoftplusConfig => functional::softplus_with_threshold
}

elementwise! {
    /// `x / (1 + |x|)`, element by element.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::activation::Softsign`] keeps three tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::Softsign;
    ///
    /// let x = Tensor::<1>::from_floats([-1.0, 3.0], &Device::flex());
    /// let y = Softsign::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[-0.5f32, 0.75].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Softsign as MemSaveSoftsign, from_nn_softsign, into_nn_softsign
    => functional::softsign
}

elementwise! {
    /// `1 / (1 + exp(-x))`, element by element.
    ///
    /// Keeps its output for the backward pass, in a tensor that the next layer shares, or nothing if its input is kept anyway;
    /// [`burn::nn::activation::Sigmoid`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::Sigmoid;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
    /// let y = Sigmoid::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.5f32, 0.731059].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Sigmoid as MemSaveSigmoid, from_nn_sigmoid, into_nn_sigmoid
    => functional::sigmoid
}

elementwise! {
    /// `log(sigmoid(x))`, element by element.
    ///
    /// Keeps its input for the backward pass, as [`burn::nn::activation::LogSigmoid`] does.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::LogSigmoid;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
    /// let y = LogSigmoid::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[-0.693147f32, -0.313262].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct LogSigmoid as MemSaveLogSigmoid, from_nn_log_sigmoid, into_nn_log_sigmoid
    => functional::log_sigmoid
}

elementwise! {
    /// `min(max(alpha x + beta, 0), 1)`.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::HardSigmoid`] keeps tensors of the input's size.
    pub struct HardSigmoid as MemSaveHardSigmoid, from_nn_hard_sigmoid, into_nn_hard_sigmoid {
        /// The alpha value.
        pub alpha: f64 = "0.2",
        /// The beta value.
        pub beta: f64 = "0.5",
    }
    HardSigmoidConfig => functional::hard_sigmoid
}

elementwise! {
    /// `x * min(max(x / 6 + 1/2, 0), 1)`, element by element.
    ///
    /// Keeps its input for the backward pass; [`burn::nn::activation::HardSwish`] keeps more than two tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::HardSwish;
    ///
    /// let x = Tensor::<1>::from_floats([-4.0, 3.0], &Device::flex());
    /// let y = HardSwish::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 3.0].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct HardSwish as MemSaveHardSwish, from_nn_hard_swish, into_nn_hard_swish
    => functional::hard_swish
}

elementwise! {
    /// The hyperbolic tangent, element by element.
    ///
    /// Keeps its output for the backward pass, in a tensor that the next layer shares, or nothing if its input is kept anyway;
    /// [`burn::nn::activation::Tanh`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::Tanh;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
    /// let y = Tanh::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 0.761594].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Tanh as MemSaveTanh, from_nn_tanh, into_nn_tanh
    => functional::tanh
}

elementwise! {
    /// `x - tanh(x)`, element by element.
    ///
    /// Keeps its input for the backward pass, as [`burn::nn::activation::Tanhshrink`] does.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::activation::Tanhshrink;
    ///
    /// let x = Tensor::<1>::from_floats([0.0, 1.0], &Device::flex());
    /// let y = Tanhshrink::new().forward(x);
    /// y.to_data().assert_approx_eq::<f32>(&[0.0f32, 0.238406].into(), Tolerance::absolute(1e-5));
    /// ```
    pub struct Tanhshrink as MemSaveTanhshrink, from_nn_tanhshrink, into_nn_tanhshrink
    => functional::tanhshrink
}

elementwise! {
    /// `x - sign(x) bias` if `|x| > lambda`, else 0.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::Shrink`] keeps tensors of the input's size.
    pub struct Shrink as MemSaveShrink, from_nn_shrink, into_nn_shrink {
        /// The lambda value for the Shrink formulation.
        pub lambda: f64 = "0.5",
        /// The bias value for the Shrink formulation.
        pub bias: f64 = "0.5",
    }
    ShrinkConfig => functional::shrink
}

elementwise! {
    /// `x - sign(x) lambda` if `|x| > lambda`, else 0.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::SoftShrink`] keeps tensors of the input's size.
    pub struct SoftShrink as MemSaveSoftShrink, from_nn_soft_shrink, into_nn_soft_shrink {
        /// The lambda value for the Soft Shrink formulation.
        pub lambda: f64 = "0.5",
    }
    SoftShrinkConfig => functional::soft_shrink
}

elementwise! {
    /// `x` if `|x| > lambda`, else 0.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::HardShrink`] keeps tensors of the input's size.
    pub struct HardShrink as MemSaveHardShrink, from_nn_hard_shrink, into_nn_hard_shrink {
        /// The lambda value for the Hard Shrink formulation.
        pub lambda: f64 = "0.5",
    }
    HardShrinkConfig => functional::hard_shrink
}

elementwise! {
    /// `x` if `x > threshold`, else `value`.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::Threshold`] keeps tensors of the input's size.
    pub struct Threshold as MemSaveThreshold, from_nn_threshold, into_nn_threshold {
        /// The value to threshold at.
        pub threshold: f64,
        /// The value to replace with where the input is at or below the threshold.
        pub value: f64,
    }
    ThresholdConfig => functional::threshold
}

elementwise! {
    /// `x` if `x > alpha`, else 0.
    ///
    /// Keeps one bit per element for the backward pass; [`burn::nn::activation::ThresholdedRelu`] keeps tensors of the input's
    /// size.
    pub struct ThresholdedRelu as MemSaveThresholdedRelu, from_nn_thresholded_relu, into_nn_thresholded_relu {
        /// The alpha threshold.
        pub alpha: f64 = "1.0",
    }
    ThresholdedReluConfig => functional::thresholded_relu
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::tensor::Device;

    fn scaled<const D: usize>(x: Tensor<D>, factor: f64, offset: f64) -> Tensor<D> {
        x * factor + offset
    }

    elementwise! {
        /// What Burn lacks, with numbers.
        pub struct Scaled {
            /// The factor.
            pub factor: f64,
            /// The offset.
            pub offset: f64 = "0.5",
        }
        ScaledConfig => scaled
    }

    #[test]
    fn modules_that_burn_lacks_have_configs() {
        let module = ScaledConfig::new(2.0).init();
        let y = module.forward(Tensor::<1>::from_floats([1.0, -1.0], &Device::flex()));
        y.into_data().assert_eq(&[2.5f32, -1.5].into(), true);
        assert_eq!(ScaledConfig::new(2.0).with_offset(3.0).init().offset, 3.0);
    }
}
