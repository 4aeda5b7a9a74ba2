//! Convolution over two axes.
use crate::frozen::weight_and_adapter;
use crate::functional;
use crate::nn::conv::norm_relu::norm_relu;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::padding;
use burn::config::Config;
use burn::module::{LoraAdapter, Module, Param};
use burn::nn::{Initializer, PaddingConfig2d};
use burn::tensor::{Device, Tensor, ops::ConvOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct Conv2dConfig = burn::nn::conv::Conv2dConfig {
        /// The number of channels.
        pub channels: [usize; 2],
        /// The size of the kernel.
        pub kernel_size: [usize; 2],
        /// The stride of the convolution.
        #[config(default = "[1, 1]")]
        pub stride: [usize; 2],
        /// Spacing between kernel elements.
        #[config(default = "[1, 1]")]
        pub dilation: [usize; 2],
        /// Controls the connections between input and output channels.
        #[config(default = "1")]
        pub groups: usize,
        /// The padding configuration.
        ///
        /// Supports symmetric and asymmetric padding. `Same` padding with even kernel sizes
        /// will automatically use asymmetric padding to preserve input dimensions.
        #[config(default = "PaddingConfig2d::Valid")]
        pub padding: PaddingConfig2d,
        /// If bias should be added to the output.
        #[config(default = true)]
        pub bias: bool,
        /// The type of function used to initialize neural network parameters
        #[config(
            default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0),fan_out_only:false}"
        )]
        pub initializer: Initializer,
    }
    pub fn init(&self, device: &Device) -> Conv2d, or panics;
}

drop_in! {
    /// Convolution over two axes.
    ///
    /// Keeps its input for the backward pass only if the weight is trainable, and a handle of the weight only if the input is
    /// tracked; [`burn::nn::conv::Conv2d`] always keeps its input. A frozen convolution copies nothing.
    ///
    /// With a [LoRA adapter](burn::module::LoraAdapter) that is narrower than the layer, the effective weight is not kept: see
    /// [`conv2d_lora`](functional::conv2d_lora). A quantized weight stays packed.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::conv::Conv2dConfig;
    ///
    /// let device = Device::flex();
    /// let conv = Conv2dConfig::new([3, 8], [3, 3]).init(&device);
    /// assert_eq!(conv.forward(Tensor::<4>::ones([2, 3, 10, 10], &device)).dims(), [2, 8, 8, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct Conv2d as MemSaveConv2d = burn::nn::conv::Conv2d, from_nn_conv2d, into_nn_conv2d {
        /// Tensor of shape `[channels_out, channels_in / groups, kernel_size_1, kernel_size_2]`
        pub weight: Param<Tensor<4>>,
        /// Tensor of shape `[channels_out]`
        pub bias: Option<Param<Tensor<1>>>,
        /// Stride of the convolution.
        pub stride: [usize; 2],
        /// Size of the kernel.
        pub kernel_size: [usize; 2],
        /// Spacing between kernel elements.
        pub dilation: [usize; 2],
        /// Controls the connections between input and output channels.
        pub groups: usize,
        /// The padding configuration.
        #[module(skip)]
        pub padding: PaddingConfig2d,
    }
}

impl Conv2d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels_in, height_in, width_in]`
    /// - output: `[batch_size, channels_out, height_out, width_out]`
    ///
    /// # Panics
    ///
    /// Panics if the input does not have `channels_in` channels.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let (weight, adapter) = weight_and_adapter(&self.weight);
        self.forward_with(input, weight, adapter)
    }

    fn forward_with(&self, input: Tensor<4>, weight: Tensor<4>, adapter: Option<&LoraAdapter>) -> Tensor<4> {
        let options = self.options(&input);
        let bias = self.bias.as_ref().map(|bias| bias.val());
        match adapter {
            Some(adapter) => functional::conv2d_lora(input, weight, adapter, bias, options),
            None => functional::conv2d(input, weight, bias, options),
        }
    }

    fn options(&self, input: &Tensor<4>) -> ConvOptions<2> {
        let [_, _, height, width] = input.dims();
        let padding = padding::pairs_2d(&self.padding, [height, width], self.kernel_size, self.stride);
        ConvOptions::new_with_padding(self.stride, padding, self.dilation, self.groups)
    }
}

norm_relu!(Conv2d, conv2d_norm_relu, 4);
