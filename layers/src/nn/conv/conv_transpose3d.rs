//! Transposed convolution over three axes.
use crate::frozen::weight_and_adapter;
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor, ops::ConvTransposeOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct ConvTranspose3dConfig = burn::nn::conv::ConvTranspose3dConfig {
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
        #[config(default = "[0, 0, 0]")]
        pub padding: [usize; 3],
        /// The padding output configuration.
        #[config(default = "[0, 0, 0]")]
        pub padding_out: [usize; 3],
        /// If bias should be added to the output.
        #[config(default = true)]
        pub bias: bool,
        /// The type of function used to initialize neural network parameters
        #[config(
            default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0),fan_out_only:false}"
        )]
        pub initializer: Initializer,
    }
    pub fn init(&self, device: &Device) -> ConvTranspose3d, or panics;
}

drop_in! {
    /// Transposed convolution over three axes.
    ///
    /// Keeps its input for the backward pass only if the weight is trainable, and a handle of the weight only if the input is
    /// tracked; [`burn::nn::conv::ConvTranspose3d`] always keeps its input.
    ///
    /// With a [LoRA adapter](burn::module::LoraAdapter) that is narrower than the layer, the effective weight is not kept: see
    /// [`conv_transpose3d_lora`](functional::conv_transpose3d_lora). A quantized weight stays packed.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::conv::ConvTranspose3dConfig;
    ///
    /// let device = Device::flex();
    /// let conv = ConvTranspose3dConfig::new([3, 8], [3, 3, 3]).init(&device);
    /// assert_eq!(conv.forward(Tensor::<5>::ones([2, 3, 5, 5, 5], &device)).dims(), [2, 8, 7, 7, 7]);
    /// ```
    #[derive(Module, Debug)]
    pub struct ConvTranspose3d as MemSaveConvTranspose3d = burn::nn::conv::ConvTranspose3d,
        from_nn_conv_transpose3d, into_nn_conv_transpose3d {
        /// Tensor of shape `[channels_in, channels_out / groups, kernel_size_1, kernel_size_2, kernel_size_3]`
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
        /// Padding configuration.
        pub padding: [usize; 3],
        /// Padding output configuration.
        pub padding_out: [usize; 3],
        /// Number of channels.
        pub channels: [usize; 2],
    }
}

impl ConvTranspose3d {
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
        let options = ConvTransposeOptions::new(
            self.stride,
            self.padding,
            self.padding_out,
            self.dilation,
            self.groups,
        );
        let bias = self.bias.as_ref().map(|bias| bias.val());
        let (weight, adapter) = weight_and_adapter(&self.weight);
        match adapter {
            Some(adapter) => functional::conv_transpose3d_lora(input, weight, adapter, bias, options),
            None => functional::conv_transpose3d(input, weight, bias, options),
        }
    }
}
