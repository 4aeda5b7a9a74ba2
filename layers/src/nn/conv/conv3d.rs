//! Convolution over three axes.
use crate::frozen::weight_and_adapter;
use crate::functional;
use crate::nn::conv::norm_relu::norm_relu;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::padding;
use burn::config::Config;
use burn::module::{LoraAdapter, Module, Param};
use burn::nn::{Initializer, PaddingConfig3d};
use burn::tensor::{Device, Tensor, ops::ConvOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct Conv3dConfig = burn::nn::conv::Conv3dConfig {
        /// The number of channels.
        pub channels: [usize; 2],
        /// The size of the kernel.
        pub kernel_size: [usize; 3],
        /// The stride of the convolution.
        #[config(default = "[1, 1, 1]")]
        pub stride: [usize; 3],
        /// Spacing between kernel elements.
        #[config(default = "[1, 1, 1]")]
        pub dilation: [usize; 3],
        /// Controls the connections between input and output channels.
        #[config(default = "1")]
        pub groups: usize,
        /// The padding configuration.
        #[config(default = "PaddingConfig3d::Valid")]
        pub padding: PaddingConfig3d,
        /// If bias should be added to the output.
        #[config(default = true)]
        pub bias: bool,
        /// The type of function used to initialize neural network parameters
        #[config(
            default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0),fan_out_only:false}"
        )]
        pub initializer: Initializer,
    }
    pub fn init(&self, device: &Device) -> Conv3d, or panics;
}

drop_in! {
    /// Convolution over three axes.
    ///
    /// Keeps its input for the backward pass only if the weight is trainable, and a handle of the weight only if the input is
    /// tracked; [`burn::nn::conv::Conv3d`] always keeps its input. A frozen convolution copies nothing.
    ///
    /// With a [LoRA adapter](burn::module::LoraAdapter) that is narrower than the layer, the effective weight is not kept: see
    /// [`conv3d_lora`](functional::conv3d_lora). A quantized weight stays packed.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::conv::Conv3dConfig;
    ///
    /// let device = Device::flex();
    /// let conv = Conv3dConfig::new([3, 8], [3, 3, 3]).init(&device);
    /// assert_eq!(conv.forward(Tensor::<5>::ones([2, 3, 5, 5, 5], &device)).dims(), [2, 8, 3, 3, 3]);
    /// ```
    #[derive(Module, Debug)]
    pub struct Conv3d as MemSaveConv3d = burn::nn::conv::Conv3d, from_nn_conv3d, into_nn_conv3d {
        /// Tensor of shape `[channels_out, channels_in / groups, kernel_size_1, kernel_size_2, kernel_size_3]`
        pub weight: Param<Tensor<5>>,
        /// Tensor of shape `[channels_out]`
        pub bias: Option<Param<Tensor<1>>>,
        /// Stride of the convolution.
        pub stride: [usize; 3],
        /// Size of the kernel.
        pub kernel_size: [usize; 3],
        /// Spacing between kernel elements.
        pub dilation: [usize; 3],
        /// Controls the connections between input and output channels.
        pub groups: usize,
        /// The padding configuration.
        #[module(skip)]
        pub padding: PaddingConfig3d,
    }
}

impl Conv3d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels_in, depth_in, height_in, width_in]`
    /// - output: `[batch_size, channels_out, depth_out, height_out, width_out]`
    ///
    /// # Panics
    ///
    /// Panics if the input does not have `channels_in` channels.
    pub fn forward(&self, input: Tensor<5>) -> Tensor<5> {
        let (weight, adapter) = weight_and_adapter(&self.weight);
        self.forward_with(input, weight, adapter)
    }

    fn forward_with(&self, input: Tensor<5>, weight: Tensor<5>, adapter: Option<&LoraAdapter>) -> Tensor<5> {
        let options = self.options(&input);
        let bias = self.bias.as_ref().map(|bias| bias.val());
        match adapter {
            Some(adapter) => functional::conv3d_lora(input, weight, adapter, bias, options),
            None => functional::conv3d(input, weight, bias, options),
        }
    }

    fn options(&self, input: &Tensor<5>) -> ConvOptions<3> {
        let [_, _, depth, height, width] = input.dims();
        let size = [depth, height, width];
        let padding = padding::symmetric_3d(&self.padding, size, self.kernel_size, self.stride);
        ConvOptions::new(self.stride, padding, self.dilation, self.groups)
    }
}

norm_relu!(Conv3d, conv3d_norm_relu, 5);
