//! Max pooling over two axes.
use crate::burn_next::padded_for;
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use crate::nn::padding;
use burn::config::Config;
use burn::module::Module;
use burn::nn::PaddingConfig2d;
use burn::tensor::{Tensor, ops::MaxPoolOptions};

config_twin! {
    #[derive(Config, Debug)]
    pub struct MaxPool2dConfig = burn::nn::pool::MaxPool2dConfig {
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
        /// The dilation.
        #[config(default = "[1, 1]")]
        pub dilation: [usize; 2],
        /// If true, use ceiling instead of floor for output size calculation.
        #[config(default = "false")]
        pub ceil_mode: bool,
    }
    pub fn init(&self) -> MaxPool2d;
}

drop_in! {
    /// Max pooling over two axes: the maximum of every window.
    ///
    /// For the backward pass it keeps the position of each maximum in its window: one byte per output (two or four for windows
    /// of more than 255 elements; on remote devices eight). [`burn::nn::pool::MaxPool2d`] keeps its input and an index of four
    /// or eight bytes per output.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::pool::MaxPool2dConfig;
    ///
    /// let device = Device::flex();
    /// let pool = MaxPool2dConfig::new([2, 2]).init();
    /// assert_eq!(pool.forward(Tensor::<4>::ones([2, 3, 10, 10], &device)).dims(), [2, 3, 5, 5]);
    /// ```
    #[derive(Module, Debug)]
    pub struct MaxPool2d as MemSaveMaxPool2d = burn::nn::pool::MaxPool2d,
        from_nn_max_pool2d, into_nn_max_pool2d {
        /// The strides.
        pub stride: [usize; 2],
        /// The size of the kernel.
        pub kernel_size: [usize; 2],
        /// The padding configuration.
        #[module(skip)]
        pub padding: PaddingConfig2d,
        /// The dilation.
        pub dilation: [usize; 2],
        /// If true, use ceiling instead of floor for output size calculation.
        pub ceil_mode: bool,
    }
}

impl MaxPool2d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, height_in, width_in]`
    /// - output: `[batch_size, channels, height_out, width_out]`
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let [_, _, height, width] = input.dims();
        let span = padded_for(self.kernel_size, self.dilation);
        let padding = padding::pairs_2d(&self.padding, [height, width], span, self.stride);
        let options = MaxPoolOptions::new(self.kernel_size)
            .with_stride(self.stride)
            .with_padding_pairs(padding)
            .with_dilation(self.dilation)
            .with_ceil_mode(self.ceil_mode);
        functional::max_pool2d(input, options)
    }
}
