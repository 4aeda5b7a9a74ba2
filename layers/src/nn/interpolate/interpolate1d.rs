//! Interpolation along one axis.
use crate::burn_next::{along_one_axis, interpolation, interpolation_options};
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::nn::interpolate::InterpolateMode;
use burn::tensor::{Tensor, ops::InterpolateOptions};

interpolation!(config_twin! {
    #[derive(Config, Debug)]
    pub struct Interpolate1dConfig = burn::nn::interpolate::Interpolate1dConfig {
        /// Output size of the interpolated tensor.
        /// Exactly one of `output_size` or `scale_factor` must be set.
        #[config(default = "None")]
        pub output_size: Option<usize>,

        /// Scale factor for resizing the input tensor.
        /// The output size is `floor(input_size * scale_factor)`.
        /// Exactly one of `output_size` or `scale_factor` must be set.
        #[config(default = "None")]
        pub scale_factor: Option<f32>,

        /// Interpolation mode to use for resizing.
        /// Determines how the output values are calculated.
        #[config(default = "InterpolateMode::Nearest")]
        pub mode: InterpolateMode,

        /// If `true`, the input and output tensors are aligned by their corner pixels.
        /// If `false`, half-pixel coordinate mapping is used instead.
        #[config(default = true)]
        pub align_corners: bool,
    }
    pub fn init(self) -> Interpolate1d;
});

interpolation!(drop_in! {
    /// Resizes one axis by interpolation.
    ///
    /// Keeps nothing for the backward pass; [`burn::nn::interpolate::Interpolate1d`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::interpolate::Interpolate1dConfig;
    ///
    /// let device = Device::flex();
    /// let resize = Interpolate1dConfig::new().with_output_size(Some(8)).init();
    /// assert_eq!(resize.forward(Tensor::<3>::ones([2, 3, 4], &device)).dims(), [2, 3, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct Interpolate1d as MemSaveInterpolate1d = burn::nn::interpolate::Interpolate1d,
        from_nn_interpolate1d, into_nn_interpolate1d {
        /// Output size of the interpolated tensor
        pub output_size: Option<usize>,

        /// Scale factor for resizing the input tensor
        pub scale_factor: Option<f32>,

        /// Interpolation mode used for resizing
        #[module(skip)]
        pub mode: InterpolateMode,

        /// Whether to align corner pixels
        pub align_corners: bool,
    }
});

impl Interpolate1d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, length_in]`
    /// - output: `[batch_size, channels, length_out]`
    ///
    /// # Panics
    ///
    /// Panics unless exactly one of `output_size` and `scale_factor` is set.
    pub fn forward(&self, input: Tensor<3>) -> Tensor<3> {
        let mut options = along_one_axis(interpolation_options!(self));
        options.output_size = self.output_size.map(|size| [1, size]);
        options.scale_factor = self.scale_factor.map(|scale| [1.0, scale]);
        functional::interpolate1d(input, options)
    }
}
