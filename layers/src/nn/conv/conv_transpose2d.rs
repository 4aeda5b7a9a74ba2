//! Transposed convolution over two axes.
use crate::frozen::weight_and_adapter;
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor, ops::ConvTransposeOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct ConvTranspose2dConfig = burn::nn::conv::ConvTranspose2dConfig {
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
        #[config(default = "[0, 0]")]
        pub padding: [usize; 2],
        /// The padding output configuration.
        #[config(default = "[0, 0]")]
        pub padding_out: [usize; 2],
        /// If bias should be added to the output.
        #[config(default = true)]
        pub bias: bool,
        /// The type of function used to initialize neural network parameters
        #[config(
            default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0),fan_out_only:false}"
        )]
        pub initializer: Initializer,
    }
    pub fn init(&self, device: &Device) -> ConvTranspose2d, or panics;
}

drop_in! {
    /// Transposed convolution over two axes.
    ///
    /// Keeps its input for the backward pass only if the weight is trainable, and a handle of the weight only if the input is
    /// tracked; [`burn::nn::conv::ConvTranspose2d`] always keeps its input.
    ///
    /// With a [LoRA adapter](burn::module::LoraAdapter) that is narrower than the layer, the effective weight is not kept: see
    /// [`conv_transpose2d_lora`](functional::conv_transpose2d_lora). A quantized weight stays packed.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::conv::ConvTranspose2dConfig;
    ///
    /// let device = Device::flex();
    /// let conv = ConvTranspose2dConfig::new([3, 8], [3, 3]).init(&device);
    /// assert_eq!(conv.forward(Tensor::<4>::ones([2, 3, 10, 10], &device)).dims(), [2, 8, 12, 12]);
    /// ```
    #[derive(Module, Debug)]
    pub struct ConvTranspose2d as MemSaveConvTranspose2d = burn::nn::conv::ConvTranspose2d,
        from_nn_conv_transpose2d, into_nn_conv_transpose2d {
        /// Tensor of shape `[channels_in, channels_out / groups, kernel_size_1, kernel_size_2]`
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
        /// Padding configuration.
        pub padding: [usize; 2],
        /// Padding output configuration.
        pub padding_out: [usize; 2],
        /// Number of channels.
        pub channels: [usize; 2],
    }
}

impl ConvTranspose2d {
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
            Some(adapter) => functional::conv_transpose2d_lora(input, weight, adapter, bias, options),
            None => functional::conv_transpose2d(input, weight, bias, options),
        }
    }
}
