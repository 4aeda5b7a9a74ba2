//! Adaptive average pooling over two axes.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

config_twin! {
    #[derive(Config, Debug)]
    pub struct AdaptiveAvgPool2dConfig = burn::nn::pool::AdaptiveAvgPool2dConfig {
        /// The size of the output.
        pub output_size: [usize; 2],
    }
    pub fn init(&self) -> AdaptiveAvgPool2d;
}

drop_in! {
    /// Average pooling over two axes to a given output size.
    ///
    /// Keeps nothing for the backward pass; [`burn::nn::pool::AdaptiveAvgPool2d`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::pool::AdaptiveAvgPool2dConfig;
    ///
    /// let device = Device::flex();
    /// let pool = AdaptiveAvgPool2dConfig::new([3, 3]).init();
    /// assert_eq!(pool.forward(Tensor::<4>::ones([2, 3, 10, 10], &device)).dims(), [2, 3, 3, 3]);
    /// ```
    #[derive(Module, Debug)]
    pub struct AdaptiveAvgPool2d as MemSaveAdaptiveAvgPool2d = burn::nn::pool::AdaptiveAvgPool2d,
        from_nn_adaptive_avg_pool2d, into_nn_adaptive_avg_pool2d {
        /// The size of the output.
        pub output_size: [usize; 2],
    }
}

impl AdaptiveAvgPool2d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, height_in, width_in]`
    /// - output: `[batch_size, channels, height_out, width_out]`
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        functional::adaptive_avg_pool2d(input, self.output_size)
    }
}
