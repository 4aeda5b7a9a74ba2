//! Average pooling over one axis.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::padding;
use burn::config::Config;
use burn::module::Module;
use burn::nn::PaddingConfig1d;
use burn::tensor::{Tensor, ops::AvgPoolOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct AvgPool1dConfig = burn::nn::pool::AvgPool1dConfig {
        /// The size of the kernel.
        pub kernel_size: usize,
        /// The stride.
        #[config(default = "kernel_size")]
        pub stride: usize,
        /// The padding configuration.
        ///
        /// Supports symmetric and asymmetric padding. `Same` padding with even kernel sizes
        /// will automatically use asymmetric padding to preserve input dimensions.
        #[config(default = "PaddingConfig1d::Valid")]
        pub padding: PaddingConfig1d,
        /// If the padding is counted in the denominator when computing the average.
        #[config(default = "true")]
        pub count_include_pad: bool,
        /// If true, use ceiling instead of floor for output size calculation.
        #[config(default = "false")]
        pub ceil_mode: bool,
    }
    pub fn init(&self) -> AvgPool1d;
}

drop_in! {
    /// Average pooling over one axis: the mean of every window.
    ///
    /// Keeps nothing for the backward pass; [`burn::nn::pool::AvgPool1d`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::pool::AvgPool1dConfig;
    ///
    /// let device = Device::flex();
    /// let pool = AvgPool1dConfig::new(2).init();
    /// assert_eq!(pool.forward(Tensor::<3>::ones([2, 3, 10], &device)).dims(), [2, 3, 5]);
    /// ```
    #[derive(Module, Debug)]
    pub struct AvgPool1d as MemSaveAvgPool1d = burn::nn::pool::AvgPool1d,
        from_nn_avg_pool1d, into_nn_avg_pool1d {
        /// The stride.
        pub stride: usize,
        /// The size of the kernel.
        pub kernel_size: usize,
        /// The padding configuration.
        #[module(skip)]
        pub padding: PaddingConfig1d,
        /// If the padding is counted in the denominator when computing the average.
        pub count_include_pad: bool,
        /// If true, use ceiling instead of floor for output size calculation.
        pub ceil_mode: bool,
    }
}

impl AvgPool1d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, length_in]`
    /// - output: `[batch_size, channels, length_out]`
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let [_, _, length] = input.dims();
        let padding = padding::pair_1d(&self.padding, length, self.kernel_size, self.stride);
        let options = AvgPoolOptions::new([self.kernel_size])
            .with_stride([self.stride])
            .with_padding_pairs([padding])
            .with_count_include_pad(self.count_include_pad)
            .with_ceil_mode(self.ceil_mode);
        functional::avg_pool1d(input, options)
    }
}
