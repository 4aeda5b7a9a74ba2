//! The position-wise feed-forward network of transformers.
use crate::nn::activation::{Activation, ActivationConfig};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::{Dropout, Linear};
use burn::config::Config;
use burn::module::Module;
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor, assert_shape};

config_twin! {
    #[derive(Config, Debug)]
    pub struct PositionWiseFeedForwardConfig = burn::nn::transformer::PositionWiseFeedForwardConfig {
        /// The size of the input and output features.
        pub d_model: usize,
        /// The size of the hidden inner features.
        pub d_ff: usize,
        /// The dropout rate. Default: 0.1
        #[config(default = 0.1)]
        pub dropout: f64,
        /// The type of function used to initialize neural network parameters
        #[config(
            default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0), fan_out_only:false}"
        )]
        pub initializer: Initializer,
        /// The activation function used between the two linear layers. Default: Gelu
        #[config(default = "ActivationConfig::Gelu")]
        pub activation: ActivationConfig,
    }
    pub fn init(&self, device: &Device) -> PositionWiseFeedForward;
}

drop_in! {
    /// Position-wise feed-forward network, `activation(x w1 + b1) w2 + b2`, after
    /// [Attention Is All You Need](https://arxiv.org/abs/1706.03762).
    ///
    /// For the backward pass it keeps its input (if its weights are trainable), the inner features before the activation, and
    /// under dropout one bit per inner feature. The output of the activation is recomputed.
    ///
    /// As in [`burn::nn::transformer::PositionWiseFeedForward`], the activation is not part of the record.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::transformer::PositionWiseFeedForwardConfig;
    ///
    /// let device = Device::flex();
    /// let layer = PositionWiseFeedForwardConfig::new(4, 16).init(&device);
    /// assert_eq!(layer.forward(Tensor::<3>::ones([2, 3, 4], &device)).dims(), [2, 3, 4]);
    /// ```
    #[derive(Module, Debug)]
    pub struct PositionWiseFeedForward as MemSavePositionWiseFeedForward =
        burn::nn::transformer::PositionWiseFeedForward, from_nn_position_wise_feed_forward, into_nn_position_wise_feed_forward {
        /// Linear layer with `d_model` input features and `d_ff` output features.
        pub linear_inner: Linear,
        /// Linear layer with `d_ff` input features and `d_model` output features.
        pub linear_outer: Linear,
        /// Dropout layer.
        pub dropout: Dropout,
        /// Activation function.
        #[cfg_attr(not(burn_next), module(skip))] // in the next Burn, it is part of the record
        pub activation: Activation,
    }
}

impl PositionWiseFeedForward {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[..., d_model]`
    /// - output: `[..., d_model]`
    ///
    /// # Panics
    ///
    /// Panics if the last axis of `input` is not `d_model`.
    pub fn forward<const D: usize>(&self, input: Tensor<D>) -> Tensor<D> {
        let [d_model, _] = self.linear_inner.weight.shape().dims();
        assert_shape!(input, [.., d_model]);
        let x = self.activation.forward(self.linear_inner.forward(input));
        self.linear_outer.forward(self.dropout.forward(x))
    }
}
