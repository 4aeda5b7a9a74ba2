//! Average pooling over two axes.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::padding;
use burn::config::Config;
use burn::module::Module;
use burn::nn::PaddingConfig2d;
use burn::tensor::{Tensor, ops::AvgPoolOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct AvgPool2dConfig = burn::nn::pool::AvgPool2dConfig {
        /// The size of the kernel.
        pub kernel_size: [usize; 2],
        /// The strides.
        #[config(default = "kernel_size")]
        pub strides: [usize; 2],
        /// The padding configuration.
        ///
        /// Supports symmetric and asymmetric padding. `Same` padding with even kernel sizes
        /// will automatically use asymmetric padding to preserve input dimensions.
        #[config(default = "PaddingConfig2d::Valid")]
        pub padding: PaddingConfig2d,
        /// If the padding is counted in the denominator when computing the average.
        #[config(default = "true")]
        pub count_include_pad: bool,
        /// If true, use ceiling instead of floor for output size calculation.
        #[config(default = "false")]
        pub ceil_mode: bool,
    }
    pub fn init(&self) -> AvgPool2d;
}

drop_in! {
    /// Average pooling over two axes: the mean of every window.
    ///
    /// Keeps nothing for the backward pass; [`burn::nn::pool::AvgPool2d`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::pool::AvgPool2dConfig;
    ///
    /// let device = Device::flex();
    /// let pool = AvgPool2dConfig::new([2, 2]).init();
    /// assert_eq!(pool.forward(Tensor::<4>::ones([2, 3, 10, 10], &device)).dims(), [2, 3, 5, 5]);
    /// ```
    #[derive(Module, Debug)]
    pub struct AvgPool2d as MemSaveAvgPool2d = burn::nn::pool::AvgPool2d,
        from_nn_avg_pool2d, into_nn_avg_pool2d {
        /// Stride of the pooling.
        pub stride: [usize; 2],
        /// Size of the kernel.
        pub kernel_size: [usize; 2],
        /// Padding configuration.
        #[module(skip)]
        pub padding: PaddingConfig2d,
        /// If the padding is counted in the denominator when computing the average.
        pub count_include_pad: bool,
        /// If true, use ceiling instead of floor for output size calculation.
        pub ceil_mode: bool,
    }
}

impl AvgPool2d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, height_in, width_in]`
    /// - output: `[batch_size, channels, height_out, width_out]`
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let [_, _, height, width] = input.dims();
        let padding = padding::pairs_2d(&self.padding, [height, width], self.kernel_size, self.stride);
        let options = AvgPoolOptions::new(self.kernel_size)
            .with_stride(self.stride)
            .with_padding_pairs(padding)
            .with_count_include_pad(self.count_include_pad)
            .with_ceil_mode(self.ceil_mode);
        functional::avg_pool2d(input, options)
    }
}
