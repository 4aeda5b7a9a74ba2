//! Instance normalization: group normalization with one channel per group.
use super::group::affine_parameters;
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct InstanceNormConfig = burn::nn::InstanceNormConfig {
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
    pub fn init(&self, device: &Device) -> InstanceNorm;
}

drop_in! {
    /// Instance normalization of `[batch_size, num_channels, ...]`: `y = (x - mean) / sqrt(variance + epsilon) * gamma + beta`,
    /// with the mean and variance of every channel of every element of the batch, after
    /// [arXiv 1607.08022](https://arxiv.org/abs/1607.08022).
    ///
    /// Keeps its input for the backward pass; [`burn::nn::InstanceNorm`] keeps two tensors of that size.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::InstanceNormConfig;
    ///
    /// let device = Device::flex();
    /// let norm = InstanceNormConfig::new(2).init(&device);
    /// let y = norm.forward(Tensor::<3>::from_floats([[[1.0, 3.0], [5.0, 3.0]]], &device));
    /// y.to_data().assert_approx_eq::<f32>(&[[[-1.0f32, 1.0], [1.0, -1.0]]].into(), Tolerance::default());
    /// ```
    #[derive(Module, Debug)]
    pub struct InstanceNorm as MemSaveInstanceNorm = burn::nn::InstanceNorm,
        from_nn_instance_norm, into_nn_instance_norm {
        /// The learnable weight
        pub gamma: Option<Param<Tensor<1>>>,
        /// The learnable bias
        pub beta: Option<Param<Tensor<1>>>,
        /// The number of channels expected in the input
        pub num_channels: usize,
        /// A value required for numerical stability
        pub epsilon: f64,
        /// Whether the module has learnable per-channel affine parameters
        pub affine: bool,
    }
}

impl InstanceNorm {
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
        match affine_parameters("instance_norm", &input, self.affine, &self.gamma, &self.beta) {
            Some([gamma, beta]) => {
                functional::group_norm(input, gamma, beta, self.num_channels, self.epsilon)
            }
            None => self.clone().into_nn_instance_norm().forward(input),
        }
    }
}
