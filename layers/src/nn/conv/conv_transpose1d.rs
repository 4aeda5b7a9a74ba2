//! Transposed convolution over one axis.
use crate::frozen::weight_and_adapter;
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::Initializer;
use burn::tensor::{Device, Tensor, ops::ConvTransposeOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct ConvTranspose1dConfig = burn::nn::conv::ConvTranspose1dConfig {
        /// The number of channels.
        pub channels: [usize; 2],
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
        #[config(default = "0")]
        pub padding: usize,
        /// The padding output configuration.
        #[config(default = "0")]
        pub padding_out: usize,
        /// If bias should be added to the output.
        #[config(default = true)]
        pub bias: bool,
        /// The type of function used to initialize neural network parameters
        #[config(
            default = "Initializer::KaimingUniform{gain:1.0/num_traits::Float::sqrt(3.0),fan_out_only:false}"
        )]
        pub initializer: Initializer,
    }
    pub fn init(&self, device: &Device) -> ConvTranspose1d, or panics;
}

drop_in! {
    /// Transposed convolution over one axis.
    ///
    /// Keeps its input for the backward pass only if the weight is trainable, and a handle of the weight only if the input is
    /// tracked; [`burn::nn::conv::ConvTranspose1d`] always keeps its input.
    ///
    /// With a [LoRA adapter](burn::module::LoraAdapter) that is narrower than the layer, the effective weight is not kept: see
    /// [`conv_transpose1d_lora`](functional::conv_transpose1d_lora). A quantized weight stays packed.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::conv::ConvTranspose1dConfig;
    ///
    /// let device = Device::flex();
    /// let conv = ConvTranspose1dConfig::new([3, 8], 3).init(&device);
    /// assert_eq!(conv.forward(Tensor::<3>::ones([2, 3, 10], &device)).dims(), [2, 8, 12]);
    /// ```
    #[derive(Module, Debug)]
    pub struct ConvTranspose1d as MemSaveConvTranspose1d = burn::nn::conv::ConvTranspose1d,
        from_nn_conv_transpose1d, into_nn_conv_transpose1d {
        /// Tensor of shape `[channels_in, channels_out / groups, kernel_size]`
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
        /// The padding configuration.
        pub padding: usize,
        /// The padding output configuration.
        pub padding_out: usize,
        /// The number of channels.
        pub channels: [usize; 2],
    }
}

impl ConvTranspose1d {
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
        let options = ConvTransposeOptions::new(
            [self.stride],
            [self.padding],
            [self.padding_out],
            [self.dilation],
            self.groups,
        );
        let bias = self.bias.as_ref().map(|bias| bias.val());
        let (weight, adapter) = weight_and_adapter(&self.weight);
        match adapter {
            Some(adapter) => functional::conv_transpose1d_lora(input, weight, adapter, bias, options),
            None => functional::conv_transpose1d(input, weight, bias, options),
        }
    }
}
