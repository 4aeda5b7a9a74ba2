//! [`Normalization`] and its config: any normalization, chosen at run time.
use super::*;
use crate::nn::Identity;
use crate::nn::drop_in::any_of;
use burn::config::Config;
use burn::module::Module;

any_of! {
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
    pub enum Normalization as MemSaveNormalization =
        burn::nn::norm::Normalization, from_nn_normalization, into_nn_normalization;
    #[derive(Config, Debug)]
    pub enum NormalizationConfig = burn::nn::norm::NormalizationConfig;
    /// Applies the normalization to an input of rank 2 or more.
    pub fn forward;
    device:
    Identity(Identity) => Identity::new();
    Batch(BatchNorm) from config: BatchNormConfig => config.init(device);
    Group(GroupNorm) from config: GroupNormConfig => config.init(device);
    Instance(InstanceNorm) from config: InstanceNormConfig => config.init(device);
    Layer(LayerNorm) from config: LayerNormConfig => config.init(device);
    Rms(RmsNorm) from config: RmsNormConfig => config.init(device);
}

impl NormalizationConfig {
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

impl Normalization {
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
