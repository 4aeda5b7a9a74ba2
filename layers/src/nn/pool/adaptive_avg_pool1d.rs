//! Adaptive average pooling over one axis.
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

config_twin! {
    #[derive(Config, Debug)]
    pub struct AdaptiveAvgPool1dConfig = burn::nn::pool::AdaptiveAvgPool1dConfig {
        /// The size of the output.
        pub output_size: usize,
    }
    pub fn init(&self) -> AdaptiveAvgPool1d;
}

drop_in! {
    /// Average pooling over one axis to a given output size.
    ///
    /// Keeps nothing for the backward pass; [`burn::nn::pool::AdaptiveAvgPool1d`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::pool::AdaptiveAvgPool1dConfig;
    ///
    /// let device = Device::flex();
    /// let pool = AdaptiveAvgPool1dConfig::new(3).init();
    /// assert_eq!(pool.forward(Tensor::<3>::ones([2, 3, 10], &device)).dims(), [2, 3, 3]);
    /// ```
    #[derive(Module, Debug)]
    pub struct AdaptiveAvgPool1d as MemSaveAdaptiveAvgPool1d = burn::nn::pool::AdaptiveAvgPool1d,
        from_nn_adaptive_avg_pool1d, into_nn_adaptive_avg_pool1d {
        /// The size of the output.
        pub output_size: usize,
    }
}

impl AdaptiveAvgPool1d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, length_in]`
    /// - output: `[batch_size, channels, length_out]`
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        functional::adaptive_avg_pool1d(input, self.output_size)
    }
}
