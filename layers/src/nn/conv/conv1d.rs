//! Convolution over one axis.
use crate::frozen::weight_and_adapter;
use crate::functional;
use crate::nn::conv::norm_relu::norm_relu;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::padding;
use burn::config::Config;
use burn::module::{LoraAdapter, Module, Param};
use burn::nn::{Initializer, PaddingConfig1d};
use burn::tensor::{Device, Tensor, ops::ConvOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct Conv1dConfig = burn::nn::conv::Conv1dConfig {
        /// The number of input channels.
        pub channels_in: usize,
        /// The number of output channels.
        pub channels_out: usize,
        /// The size of the kernel.
        pub kernel_size: usize,
        /// The stride of the convolution.
        #[config(default = "1")]
        pub stride: usize,
        /// Spacing between kernel elements.
        #[config(default = "1")]
        pub dilation: usize,
        /// Controls the connections between input and output channels.
        #[config(default = "1")]
        pub groups: usize,
        /// The padding configuration.
        ///
        /// Supports symmetric and asymmetric padding. `Same` padding with even kernel sizes
        /// will automatically use asymmetric padding to preserve input dimensions.
        #[config(default = "PaddingConfig1d::Valid")]
        pub padding: PaddingConfig1d,
        /// If bias should be added to the output.
        #[config(default = true)]
        pub bias: bool,
        /// The type of function used to initialize neural network parameters
        #[config(
            default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0),fan_out_only:false}"
        )]
        pub initializer: Initializer,
    }
    pub fn init(&self, device: &Device) -> Conv1d, or panics;
}

drop_in! {
    /// Convolution over one axis.
    ///
    /// Keeps its input for the backward pass only if the weight is trainable, and a handle of the weight only if the input is
    /// tracked; [`burn::nn::conv::Conv1d`] always keeps its input. A frozen convolution copies nothing.
    ///
    /// With a [LoRA adapter](burn::module::LoraAdapter) that is narrower than the layer, the effective weight is not kept: see
    /// [`conv1d_lora`](functional::conv1d_lora). A quantized weight stays packed.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::conv::Conv1dConfig;
    ///
    /// let device = Device::flex();
    /// let conv = Conv1dConfig::new(3, 8, 3).init(&device);
    /// assert_eq!(conv.forward(Tensor::<3>::ones([2, 3, 10], &device)).dims(), [2, 8, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct Conv1d as MemSaveConv1d = burn::nn::conv::Conv1d, from_nn_conv1d, into_nn_conv1d {
        /// Tensor of shape `[channels_out, channels_in / groups, kernel_size]`
        pub weight: Param<Tensor<3>>,
        /// Tensor of shape `[channels_out]`
        pub bias: Option<Param<Tensor<1>>>,
        /// Stride of the convolution.
        pub stride: usize,
        /// Size of the kernel.
        pub kernel_size: usize,
        /// Spacing between kernel elements.
        pub dilation: usize,
        /// Controls the connections between input and output channels.
        pub groups: usize,
        /// Padding configuration.
        #[module(skip)]
        pub padding: PaddingConfig1d,
    }
}

impl Conv1d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels_in, length_in]`
    /// - output: `[batch_size, channels_out, length_out]`
    ///
    /// # Panics
    ///
    /// Panics if the input does not have `channels_in` channels.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let (weight, adapter) = weight_and_adapter(&self.weight);
        self.forward_with(input, weight, adapter)
    }

    fn forward_with(&self, input: Tensor<3>, weight: Tensor<3>, adapter: Option<&LoraAdapter>) -> Tensor<3> {
        let options = self.options(&input);
        let bias = self.bias.as_ref().map(|bias| bias.val());
        match adapter {
            Some(adapter) => functional::conv1d_lora(input, weight, adapter, bias, options),
            None => functional::conv1d(input, weight, bias, options),
        }
    }

    fn options(&self, input: &Tensor<3>) -> ConvOptions<1> {
        let [_, _, length] = input.dims();
        let padding = padding::pair_1d(&self.padding, length, self.kernel_size, self.stride);
        ConvOptions::new_with_padding([self.stride], [padding], [self.dilation], self.groups)
    }
}

norm_relu!(Conv1d, conv1d_norm_relu, 3);
