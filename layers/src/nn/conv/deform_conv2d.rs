//! Deformable convolution over two axes.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::padding;
use burn::config::Config;
use burn::module::{Module, Param};
use burn::nn::{Initializer, PaddingConfig2d};
use burn::tensor::{Device, Tensor, ops::DeformConvOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct DeformConv2dConfig = burn::nn::conv::DeformConv2dConfig {
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
        pub weight_groups: usize,
        /// Offset groups.
        #[config(default = "1")]
        pub offset_groups: usize,
        /// The padding configuration.
        ///
        /// ### Warning
        /// Only symmetric padding is currently supported. As such, using `Same` padding with an even kernel
        /// size is not supported as it will not produce the same output size.
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
    pub fn init(&self, device: &Device) -> DeformConv2d, or panics;
}

drop_in! {
    /// Deformable convolution over two axes.
    ///
    /// For the backward pass it keeps only the inputs that the requested gradients read; [`burn::nn::conv::DeformConv2d`] keeps
    /// all of them.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::conv::DeformConv2dConfig;
    ///
    /// let device = Device::flex();
    /// let conv = DeformConv2dConfig::new([3, 8], [3, 3]).init(&device);
    /// let offset = Tensor::<4>::zeros([2, 18, 8, 8], &device);
    /// assert_eq!(conv.forward(Tensor::ones([2, 3, 10, 10], &device), offset, None).dims(), [2, 8, 8, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct DeformConv2d as MemSaveDeformConv2d = burn::nn::conv::DeformConv2d,
        from_nn_deform_conv2d, into_nn_deform_conv2d {
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
        pub weight_groups: usize,
        /// Offset groups.
        pub offset_groups: usize,
        /// The padding configuration.
        #[module(skip)]
        pub padding: PaddingConfig2d,
    }
}

impl DeformConv2d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels_in, height_in, width_in]`
    /// - offset: `[batch_size, 2 * offset_groups * kernel_height * kernel_width, height_out, width_out]`
    /// - mask: `[batch_size, offset_groups * kernel_height * kernel_width, height_out, width_out]`
    /// - output: `[batch_size, channels_out, height_out, width_out]`
    ///
    /// # Panics
    ///
    /// Panics if the input does not have `channels_in` channels, or if the padding is asymmetric.
    pub fn forward(&self, input: Tensor<4>, offset: Tensor<4>, mask: Option<Tensor<4>>) -> Tensor<4> {
        let [_, _, height, width] = input.dims();
        let padding = padding::symmetric_2d(&self.padding, [height, width], self.kernel_size, self.stride);
        functional::deform_conv2d(
            input,
            offset,
            self.weight.val(),
            mask,
            self.bias.as_ref().map(|bias| bias.val()),
            DeformConvOptions::new(
                self.stride,
                padding,
                self.dilation,
                self.weight_groups,
                self.offset_groups,
            ),
        )
    }
}
