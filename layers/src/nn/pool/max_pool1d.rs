//! Max pooling over one axis.
use crate::burn_next::padded_for;
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::padding;
use burn::config::Config;
use burn::module::Module;
use burn::nn::PaddingConfig1d;
use burn::tensor::{Tensor, ops::MaxPoolOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct MaxPool1dConfig = burn::nn::pool::MaxPool1dConfig {
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
        /// The dilation.
        #[config(default = "1")]
        pub dilation: usize,
        /// If true, use ceiling instead of floor for output size calculation.
        #[config(default = "false")]
        pub ceil_mode: bool,
    }
    pub fn init(&self) -> MaxPool1d;
}

drop_in! {
    /// Max pooling over one axis: the maximum of every window.
    ///
    /// For the backward pass it keeps the position of each maximum in its window: one byte per output (two or four for windows
    /// of more than 255 elements; on remote devices eight). [`burn::nn::pool::MaxPool1d`] keeps its input and an index of four
    /// or eight bytes per output.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::pool::MaxPool1dConfig;
    ///
    /// let device = Device::flex();
    /// let pool = MaxPool1dConfig::new(2).init();
    /// assert_eq!(pool.forward(Tensor::<3>::ones([2, 3, 10], &device)).dims(), [2, 3, 5]);
    /// ```
    #[derive(Module, Debug)]
    pub struct MaxPool1d as MemSaveMaxPool1d = burn::nn::pool::MaxPool1d,
        from_nn_max_pool1d, into_nn_max_pool1d {
        /// The stride.
        pub stride: usize,
        /// The size of the kernel.
        pub kernel_size: usize,
        /// The padding configuration.
        #[module(skip)]
        pub padding: PaddingConfig1d,
        /// The dilation.
        pub dilation: usize,
        /// If true, use ceiling instead of floor for output size calculation.
        pub ceil_mode: bool,
    }
}

impl MaxPool1d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, length_in]`
    /// - output: `[batch_size, channels, length_out]`
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let [_, _, length] = input.dims();
        let [span] = padded_for([self.kernel_size], [self.dilation]);
        let padding = padding::pair_1d(&self.padding, length, span, self.stride);
        let options = MaxPoolOptions::new([self.kernel_size])
            .with_stride([self.stride])
            .with_padding_pairs([padding])
            .with_dilation([self.dilation])
            .with_ceil_mode(self.ceil_mode);
        functional::max_pool1d(input, options)
    }
}
