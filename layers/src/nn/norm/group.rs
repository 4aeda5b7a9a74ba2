//! Group normalization, and the affine parameters that it shares with instance normalization.
use crate::functional::{
    self,
    guard::{Misfit, accepts, is_tracked, require},
};
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct GroupNormConfig = burn::nn::GroupNormConfig {
        /// The number of groups to separate the channels into
        pub num_groups: usize,
        /// The number of channels expected in the input
        pub num_channels: usize,
        /// A value required for numerical stability. Default: 1e-5
        #[config(default = 1e-5)]
        pub epsilon: f64,
        /// Whether the module has learnable per-channel affine parameters, initialized to ones (weights) and zeros (biases).
        /// Default: `true`
        #[config(default = true)]
        pub affine: bool,
    }
    pub fn init(&self, device: &Device) -> GroupNorm, or panics;
}

drop_in! {
    /// Group normalization of `[batch_size, num_channels, ...]`: `y = (x - mean) / sqrt(variance + epsilon) * gamma + beta`,
    /// with the mean and variance of each group of channels, after [arXiv 1803.08494](https://arxiv.org/abs/1803.08494).
    ///
    /// Keeps its input for the backward pass; [`burn::nn::GroupNorm`] keeps two tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::GroupNormConfig;
    ///
    /// let device = Device::flex();
    /// let norm = GroupNormConfig::new(1, 2).init(&device);
    /// let y = norm.forward(Tensor::<3>::from_floats([[[1.0, 3.0], [1.0, 3.0]]], &device));
    /// y.to_data().assert_approx_eq::<f32>(&[[[-1.0f32, 1.0], [-1.0, 1.0]]].into(), Tolerance::default());
    /// ```
    #[derive(Module, Debug)]
    pub struct GroupNorm as MemSaveGroupNorm = burn::nn::GroupNorm, from_nn_group_norm, into_nn_group_norm {
        /// The learnable weight
        pub gamma: Option<Param<Tensor<1>>>,
        /// The learnable bias
        pub beta: Option<Param<Tensor<1>>>,
        /// The number of groups to separate the channels into
        pub num_groups: usize,
        /// The number of channels expected in the input
        pub num_channels: usize,
        /// A value required for numerical stability
        pub epsilon: f64,
        /// Whether the module has learnable per-channel affine parameters
        pub affine: bool,
    }
}

impl GroupNorm {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, num_channels, ...]`
    /// - output: the same
    ///
    /// # Panics
    ///
    /// Panics if the input has a rank below 2 or its second axis is not `num_channels`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        assert_shape!(input, [_, self.num_channels, ..]);
        match affine_parameters("group_norm", &input, self.affine, &self.gamma, &self.beta) {
            Some([gamma, beta]) => functional::group_norm(input, gamma, beta, self.num_groups, self.epsilon),
            None => self.clone().into_nn_group_norm().forward(input),
        }
    }
}

/// The scale and the shift, if `affine`. `None` if the stock module has to run: for inputs of at most two elements and missing
/// parameters, which it refuses, and for parameters of another dtype.
pub(super) fn affine_parameters<const D: usize>(
    operation: &'static str,
    input: &Tensor<D>,
    affine: bool,
    gamma: &Option<Param<Tensor<1>>>,
    beta: &Option<Param<Tensor<1>>>,
) -> Option<[Option<Tensor<1>>; 2]> {
    let parameters = [gamma, beta].map(|parameter| parameter.as_ref().filter(|_| affine).map(Param::val));
    let missing = affine && parameters.iter().any(Option::is_none);
    let dtypes = parameters.iter().flatten().all(|parameter| parameter.dtype() == input.dtype());
    let fit = require(input.shape().num_elements() > 2, Misfit::Shapes)
        .and(require(!missing, Misfit::MissingParameter))
        .and(require(dtypes, Misfit::Dtypes));
    let tracked = input.is_tracked() || parameters.iter().any(is_tracked);
    accepts(operation, fit, tracked, parameters[0].as_ref()).then_some(parameters)
}
