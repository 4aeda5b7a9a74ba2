use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::tensor::Tensor;

/// Configuration of [`AdaptiveAvgPool2d`]; the same as [`burn::nn::pool::AdaptiveAvgPool2dConfig`].
#[derive(Config, Debug)]
pub struct AdaptiveAvgPool2dConfig {
    /// The size of the output.
    pub output_size: [usize; 2],
}

config_twin!(AdaptiveAvgPool2dConfig = burn::nn::pool::AdaptiveAvgPool2dConfig { output_size });

/// Average pool over two axes to a given size.
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
#[module(custom_display)]
pub struct AdaptiveAvgPool2d {
    /// The size of the output.
    pub output_size: [usize; 2],
}

drop_in!(
    AdaptiveAvgPool2d = burn::nn::pool::AdaptiveAvgPool2d,
    from_nn_adaptive_avg_pool2d,
    into_nn_adaptive_avg_pool2d { output_size }
);

impl AdaptiveAvgPool2dConfig {
    /// Initializes the module, as the stock config does.
    pub fn init(&self) -> AdaptiveAvgPool2d {
        burn::nn::pool::AdaptiveAvgPool2dConfig::from(self.clone()).init().into()
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
