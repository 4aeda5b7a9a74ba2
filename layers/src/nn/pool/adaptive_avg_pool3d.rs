//! Adaptive average pooling over three axes.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

config_twin! {
    #[derive(Config, Debug)]
    pub struct AdaptiveAvgPool3dConfig = burn::nn::pool::AdaptiveAvgPool3dConfig {
        /// The size of the output.
        pub output_size: [usize; 3],
    }
    pub fn init(&self) -> AdaptiveAvgPool3d;
}

drop_in! {
    /// Average pooling over three axes to a given output size.
    ///
    /// Keeps nothing for the backward pass; [`burn::nn::pool::AdaptiveAvgPool3d`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::pool::AdaptiveAvgPool3dConfig;
    ///
    /// let device = Device::flex();
    /// let pool = AdaptiveAvgPool3dConfig::new([3, 3, 3]).init();
    /// assert_eq!(pool.forward(Tensor::<5>::ones([2, 3, 10, 10, 10], &device)).dims(), [2, 3, 3, 3, 3]);
    /// ```
    #[derive(Module, Debug)]
    pub struct AdaptiveAvgPool3d as MemSaveAdaptiveAvgPool3d = burn::nn::pool::AdaptiveAvgPool3d,
        from_nn_adaptive_avg_pool3d, into_nn_adaptive_avg_pool3d {
        /// The size of the output.
        pub output_size: [usize; 3],
    }
}

impl AdaptiveAvgPool3d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, depth_in, height_in, width_in]`
    /// - output: `[batch_size, channels, depth_out, height_out, width_out]`
    pub fn forward(&self, input: Tensor<5>) -> Tensor<5> {
        functional::adaptive_avg_pool3d(input, self.output_size)
    }
}
