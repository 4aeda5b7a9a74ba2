use crate::nn::Identity;
use crate::nn::activation::{
    Celu, CeluConfig, Elu, EluConfig, Gelu, HardShrink, HardShrinkConfig, HardSigmoid, HardSigmoidConfig,
    HardSwish, LeakyRelu, LeakyReluConfig, PRelu, PReluConfig, Relu, Selu, Shrink, ShrinkConfig, Sigmoid,
    SoftShrink, SoftShrinkConfig, Softplus, SoftplusConfig, Softsign, SwiGlu, SwiGluConfig, Tanh,
    ThresholdedRelu, ThresholdedReluConfig,
};
use crate::nn::drop_in::wraps;
use burn::config::Config;
use burn::module::Module;
use burn::nn::activation as stock;
use burn::tensor::{Device, Tensor};

/// Configuration of any [`Activation`]; the same as [`burn::nn::activation::ActivationConfig`].
#[derive(Config, Debug)]
#[non_exhaustive]
pub enum ActivationConfig {
    /// [`Identity`].
    Identity,
    /// [`Gelu`].
    Gelu,
    /// [`Gelu`] approximated by tanh.
    GeluApproximate,
    /// [`PRelu`].
    PRelu(PReluConfig),
    /// [`Relu`].
    Relu,
    /// [`LeakyRelu`].
    LeakyRelu(LeakyReluConfig),
    /// [`SwiGlu`].
    SwiGlu(SwiGluConfig),
    /// [`Selu`].
    Selu,
    /// [`Sigmoid`].
    Sigmoid,
    /// [`Tanh`].
    Tanh,
    /// [`HardSigmoid`].
    HardSigmoid(HardSigmoidConfig),
    /// [`HardSwish`].
    HardSwish,
    /// [`Softplus`].
    Softplus(SoftplusConfig),
    /// [`Softsign`].
    Softsign,
    /// [`Elu`].
    Elu(EluConfig),
    /// [`Celu`].
    Celu(CeluConfig),
    /// [`ThresholdedRelu`].
    ThresholdedRelu(ThresholdedReluConfig),
    /// [`HardShrink`].
    HardShrink(HardShrinkConfig),
    /// [`SoftShrink`].
    SoftShrink(SoftShrinkConfig),
    /// [`Shrink`].
    Shrink(ShrinkConfig),
}

wraps!(ActivationConfig {
    PRelu(PReluConfig),
    LeakyRelu(LeakyReluConfig),
    SwiGlu(SwiGluConfig),
    HardSigmoid(HardSigmoidConfig),
    Softplus(SoftplusConfig),
    Elu(EluConfig),
    Celu(CeluConfig),
    ThresholdedRelu(ThresholdedReluConfig),
    HardShrink(HardShrinkConfig),
    SoftShrink(SoftShrinkConfig),
    Shrink(ShrinkConfig),
});

impl ActivationConfig {
    /// Initializes the activation.
    pub fn init(&self, device: &Device) -> Activation {
        match self {
            Self::Identity => Identity::new().into(),
            Self::Gelu => Gelu::new().into(),
            Self::GeluApproximate => Gelu::new_approximate().into(),
            Self::PRelu(config) => config.init(device).into(),
            Self::Relu => Relu::new().into(),
            Self::LeakyRelu(config) => config.init().into(),
            Self::SwiGlu(config) => config.init(device).into(),
            Self::Selu => Selu::new().into(),
            Self::Sigmoid => Sigmoid::new().into(),
            Self::Tanh => Tanh::new().into(),
            Self::HardSigmoid(config) => config.init().into(),
            Self::HardSwish => HardSwish::new().into(),
            Self::Softplus(config) => config.init().into(),
            Self::Softsign => Softsign::new().into(),
            Self::Elu(config) => config.init().into(),
            Self::Celu(config) => config.init().into(),
            Self::ThresholdedRelu(config) => config.init().into(),
            Self::HardShrink(config) => config.init().into(),
            Self::SoftShrink(config) => config.init().into(),
            Self::Shrink(config) => config.init().into(),
        }
    }
}

#[allow(clippy::useless_conversion)] // some variants hold modules of Burn
impl From<ActivationConfig> for stock::ActivationConfig {
    fn from(config: ActivationConfig) -> Self {
        match config {
            ActivationConfig::Identity => Self::Identity,
            ActivationConfig::Gelu => Self::Gelu,
            ActivationConfig::GeluApproximate => Self::GeluApproximate,
            ActivationConfig::PRelu(config) => Self::PRelu(config.into()),
            ActivationConfig::Relu => Self::Relu,
            ActivationConfig::LeakyRelu(config) => Self::LeakyRelu(config.into()),
            ActivationConfig::SwiGlu(config) => Self::SwiGlu(config.into()),
            ActivationConfig::Selu => Self::Selu,
            ActivationConfig::Sigmoid => Self::Sigmoid,
            ActivationConfig::Tanh => Self::Tanh,
            ActivationConfig::HardSigmoid(config) => Self::HardSigmoid(config.into()),
            ActivationConfig::HardSwish => Self::HardSwish,
            ActivationConfig::Softplus(config) => Self::Softplus(config.into()),
            ActivationConfig::Softsign => Self::Softsign,
            ActivationConfig::Elu(config) => Self::Elu(config.into()),
            ActivationConfig::Celu(config) => Self::Celu(config.into()),
            ActivationConfig::ThresholdedRelu(config) => Self::ThresholdedRelu(config.into()),
            ActivationConfig::HardShrink(config) => Self::HardShrink(config.into()),
            ActivationConfig::SoftShrink(config) => Self::SoftShrink(config.into()),
            ActivationConfig::Shrink(config) => Self::Shrink(config.into()),
        }
    }
}

/// Any activation, chosen at run time.
///
/// Keeps for the backward pass what the wrapped module keeps.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::nn::activation::ActivationConfig;
///
/// let device = Device::flex();
/// let activation = ActivationConfig::Relu.init(&device);
/// let y = activation.forward(Tensor::<1>::from_floats([-1.0, 2.0], &device));
/// y.to_data().assert_eq(&[0.0f32, 2.0].into(), true);
/// ```
#[derive(Module, Debug)]
#[non_exhaustive]
#[allow(clippy::large_enum_variant)] // as in Burn
pub enum Activation {
    /// [`Identity`].
    Identity(Identity),
    /// [`Gelu`].
    Gelu(Gelu),
    /// [`PRelu`].
    PRelu(PRelu),
    /// [`Relu`].
    Relu(Relu),
    /// [`LeakyRelu`].
    LeakyRelu(LeakyRelu),
    /// [`SwiGlu`].
    SwiGlu(SwiGlu),
    /// [`Selu`].
    Selu(Selu),
    /// [`Sigmoid`].
    Sigmoid(Sigmoid),
    /// [`Tanh`].
    Tanh(Tanh),
    /// [`HardSigmoid`].
    HardSigmoid(HardSigmoid),
    /// [`HardSwish`].
    HardSwish(HardSwish),
    /// [`Softplus`].
    Softplus(Softplus),
    /// [`Softsign`].
    Softsign(Softsign),
    /// [`Elu`].
    Elu(Elu),
    /// [`Celu`].
    Celu(Celu),
    /// [`ThresholdedRelu`].
    ThresholdedRelu(ThresholdedRelu),
    /// [`HardShrink`].
    HardShrink(HardShrink),
    /// [`SoftShrink`].
    SoftShrink(SoftShrink),
    /// [`Shrink`].
    Shrink(Shrink),
}

wraps!(Activation {
    Identity(Identity),
    Gelu(Gelu),
    PRelu(PRelu),
    Relu(Relu),
    LeakyRelu(LeakyRelu),
    SwiGlu(SwiGlu),
    Selu(Selu),
    Sigmoid(Sigmoid),
    Tanh(Tanh),
    HardSigmoid(HardSigmoid),
    HardSwish(HardSwish),
    Softplus(Softplus),
    Softsign(Softsign),
    Elu(Elu),
    Celu(Celu),
    ThresholdedRelu(ThresholdedRelu),
    HardShrink(HardShrink),
    SoftShrink(SoftShrink),
    Shrink(Shrink),
});

#[allow(clippy::useless_conversion)] // some variants hold modules of Burn
impl Activation {
    /// Converts the stock module; parameters keep their ids, values and settings.
    ///
    /// # Panics
    ///
    /// Panics for an activation that Burn 0.22.1 does not have.
    pub fn from_nn_activation(activation: stock::Activation) -> Self {
        match activation {
            stock::Activation::Identity(module) => Self::Identity(module.into()),
            stock::Activation::Gelu(module) => Self::Gelu(module.into()),
            stock::Activation::PRelu(module) => Self::PRelu(module.into()),
            stock::Activation::Relu(module) => Self::Relu(module.into()),
            stock::Activation::LeakyRelu(module) => Self::LeakyRelu(module.into()),
            stock::Activation::SwiGlu(module) => Self::SwiGlu(module.into()),
            stock::Activation::Selu(module) => Self::Selu(module.into()),
            stock::Activation::Sigmoid(module) => Self::Sigmoid(module.into()),
            stock::Activation::Tanh(module) => Self::Tanh(module.into()),
            stock::Activation::HardSigmoid(module) => Self::HardSigmoid(module.into()),
            stock::Activation::HardSwish(module) => Self::HardSwish(module.into()),
            stock::Activation::Softplus(module) => Self::Softplus(module.into()),
            stock::Activation::Softsign(module) => Self::Softsign(module.into()),
            stock::Activation::Elu(module) => Self::Elu(module.into()),
            stock::Activation::Celu(module) => Self::Celu(module.into()),
            stock::Activation::ThresholdedRelu(module) => Self::ThresholdedRelu(module.into()),
            stock::Activation::HardShrink(module) => Self::HardShrink(module.into()),
            stock::Activation::SoftShrink(module) => Self::SoftShrink(module.into()),
            stock::Activation::Shrink(module) => Self::Shrink(module.into()),
            other => panic!("from_nn_activation: {other:?} is newer than burn 0.22.1"),
        }
    }

    /// Converts back to the stock module.
    pub fn into_nn_activation(self) -> stock::Activation {
        match self {
            Self::Identity(module) => stock::Activation::Identity(module.into()),
            Self::Gelu(module) => stock::Activation::Gelu(module.into()),
            Self::PRelu(module) => stock::Activation::PRelu(module.into()),
            Self::Relu(module) => stock::Activation::Relu(module.into()),
            Self::LeakyRelu(module) => stock::Activation::LeakyRelu(module.into()),
            Self::SwiGlu(module) => stock::Activation::SwiGlu(module.into()),
            Self::Selu(module) => stock::Activation::Selu(module.into()),
            Self::Sigmoid(module) => stock::Activation::Sigmoid(module.into()),
            Self::Tanh(module) => stock::Activation::Tanh(module.into()),
            Self::HardSigmoid(module) => stock::Activation::HardSigmoid(module.into()),
            Self::HardSwish(module) => stock::Activation::HardSwish(module.into()),
            Self::Softplus(module) => stock::Activation::Softplus(module.into()),
            Self::Softsign(module) => stock::Activation::Softsign(module.into()),
            Self::Elu(module) => stock::Activation::Elu(module.into()),
            Self::Celu(module) => stock::Activation::Celu(module.into()),
            Self::ThresholdedRelu(module) => stock::Activation::ThresholdedRelu(module.into()),
            Self::HardShrink(module) => stock::Activation::HardShrink(module.into()),
            Self::SoftShrink(module) => stock::Activation::SoftShrink(module.into()),
            Self::Shrink(module) => stock::Activation::Shrink(module.into()),
        }
    }

    /// Applies the activation.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Identity(module) => module.forward(input),
            Self::Gelu(module) => module.forward(input),
            Self::PRelu(module) => module.forward(input),
            Self::Relu(module) => module.forward(input),
            Self::LeakyRelu(module) => module.forward(input),
            Self::SwiGlu(module) => module.forward(input),
            Self::Selu(module) => module.forward(input),
            Self::Sigmoid(module) => module.forward(input),
            Self::Tanh(module) => module.forward(input),
            Self::HardSigmoid(module) => module.forward(input),
            Self::HardSwish(module) => module.forward(input),
            Self::Softplus(module) => module.forward(input),
            Self::Softsign(module) => module.forward(input),
            Self::Elu(module) => module.forward(input),
            Self::Celu(module) => module.forward(input),
            Self::ThresholdedRelu(module) => module.forward(input),
            Self::HardShrink(module) => module.forward(input),
            Self::SoftShrink(module) => module.forward(input),
            Self::Shrink(module) => module.forward(input),
        }
    }
}

impl From<stock::Activation> for Activation {
    fn from(activation: stock::Activation) -> Self {
        Self::from_nn_activation(activation)
    }
}

impl From<Activation> for stock::Activation {
    fn from(activation: Activation) -> Self {
        activation.into_nn_activation()
    }
}
