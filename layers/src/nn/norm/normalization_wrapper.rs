use crate::nn::Identity;
use crate::nn::drop_in::wraps;
use crate::nn::norm::{
    BatchNorm, BatchNormConfig, GroupNorm, GroupNormConfig, InstanceNorm, InstanceNormConfig, LayerNorm,
    LayerNormConfig, RmsNorm, RmsNormConfig,
};
use burn::config::Config;
use burn::module::Module;
use burn::nn::norm as stock;
use burn::tensor::{Device, Tensor};

/// Configuration of any [`Normalization`]; the same as [`burn::nn::norm::NormalizationConfig`].
#[derive(Config, Debug)]
#[non_exhaustive]
pub enum NormalizationConfig {
    /// [`Identity`].
    Identity,
    /// [`BatchNorm`].
    Batch(BatchNormConfig),
    /// [`GroupNorm`].
    Group(GroupNormConfig),
    /// [`InstanceNorm`].
    Instance(InstanceNormConfig),
    /// [`LayerNorm`].
    Layer(LayerNormConfig),
    /// [`RmsNorm`].
    Rms(RmsNormConfig),
}

wraps!(NormalizationConfig {
    Batch(BatchNormConfig),
    Group(GroupNormConfig),
    Instance(InstanceNormConfig),
    Layer(LayerNormConfig),
    Rms(RmsNormConfig),
});

impl NormalizationConfig {
    /// Initializes the normalization.
    pub fn init(&self, device: &Device) -> Normalization {
        match self {
            Self::Identity => Identity::new().into(),
            Self::Batch(config) => config.init(device).into(),
            Self::Group(config) => config.init(device).into(),
            Self::Instance(config) => config.init(device).into(),
            Self::Layer(config) => config.init(device).into(),
            Self::Rms(config) => config.init(device).into(),
        }
    }

    /// Sets the number of features.
    pub fn with_num_features(self, num_features: usize) -> Self {
        match self {
            Self::Identity => self,
            Self::Batch(config) => BatchNormConfig { num_features, ..config }.into(),
            Self::Group(config) => GroupNormConfig { num_channels: num_features, ..config }.into(),
            Self::Instance(config) => InstanceNormConfig { num_channels: num_features, ..config }.into(),
            Self::Layer(config) => LayerNormConfig { d_model: num_features, ..config }.into(),
            Self::Rms(config) => RmsNormConfig { d_model: num_features, ..config }.into(),
        }
    }

    /// The number of features.
    pub fn num_features(&self) -> usize {
        match self {
            Self::Identity => 0,
            Self::Batch(config) => config.num_features,
            Self::Group(config) => config.num_channels,
            Self::Instance(config) => config.num_channels,
            Self::Layer(config) => config.d_model,
            Self::Rms(config) => config.d_model,
        }
    }
}

/// Any normalization, chosen at run time.
///
/// Keeps for the backward pass what the wrapped module keeps.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::nn::norm::NormalizationConfig;
/// use burn_memsave_layers::nn::BatchNormConfig;
///
/// let device = Device::flex();
/// let norm = NormalizationConfig::from(BatchNormConfig::new(0)).with_num_features(3).init(&device);
/// assert_eq!(norm.forward(Tensor::<2>::ones([2, 3], &device)).dims(), [2, 3]);
/// ```
#[derive(Module, Debug)]
#[non_exhaustive]
pub enum Normalization {
    /// [`Identity`].
    Identity(Identity),
    /// [`BatchNorm`].
    Batch(BatchNorm),
    /// [`GroupNorm`].
    Group(GroupNorm),
    /// [`InstanceNorm`].
    Instance(InstanceNorm),
    /// [`LayerNorm`].
    Layer(LayerNorm),
    /// [`RmsNorm`].
    Rms(RmsNorm),
}

wraps!(Normalization {
    Identity(Identity),
    Batch(BatchNorm),
    Group(GroupNorm),
    Instance(InstanceNorm),
    Layer(LayerNorm),
    Rms(RmsNorm),
});

#[allow(clippy::useless_conversion)] // some variants hold modules of Burn
impl Normalization {
    /// Converts the stock module; parameters keep their ids, values and settings.
    ///
    /// # Panics
    ///
    /// Panics for a normalization that Burn 0.22.1 does not have.
    pub fn from_nn_normalization(norm: stock::Normalization) -> Self {
        match norm {
            stock::Normalization::Identity(module) => Self::Identity(module.into()),
            stock::Normalization::Batch(module) => Self::Batch(module.into()),
            stock::Normalization::Group(module) => Self::Group(module.into()),
            stock::Normalization::Instance(module) => Self::Instance(module.into()),
            stock::Normalization::Layer(module) => Self::Layer(module.into()),
            stock::Normalization::Rms(module) => Self::Rms(module.into()),
            other => panic!("from_nn_normalization: {other:?} is newer than burn 0.22.1"),
        }
    }

    /// Converts back to the stock module.
    pub fn into_nn_normalization(self) -> stock::Normalization {
        match self {
            Self::Identity(module) => stock::Normalization::Identity(module.into()),
            Self::Batch(module) => stock::Normalization::Batch(module.into()),
            Self::Group(module) => stock::Normalization::Group(module.into()),
            Self::Instance(module) => stock::Normalization::Instance(module.into()),
            Self::Layer(module) => stock::Normalization::Layer(module.into()),
            Self::Rms(module) => stock::Normalization::Rms(module.into()),
        }
    }

    /// Applies the normalization to an input of rank 2 or more.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        match self {
            Self::Identity(module) => module.forward(input),
            Self::Batch(module) => module.forward(input),
            Self::Group(module) => module.forward(input),
            Self::Instance(module) => module.forward(input),
            Self::Layer(module) => module.forward(input),
            Self::Rms(module) => module.forward(input),
        }
    }

    /// The number of features.
    pub fn num_features(&self) -> usize {
        match self {
            Self::Identity(_) => 0,
            Self::Batch(module) => module.gamma.shape()[0],
            Self::Group(module) => module.num_channels,
            Self::Instance(module) => module.num_channels,
            Self::Layer(module) => module.gamma.shape()[0],
            Self::Rms(module) => module.gamma.shape()[0],
        }
    }
}

impl From<stock::Normalization> for Normalization {
    fn from(norm: stock::Normalization) -> Self {
        Self::from_nn_normalization(norm)
    }
}

impl From<Normalization> for stock::Normalization {
    fn from(norm: Normalization) -> Self {
        norm.into_nn_normalization()
    }
}
