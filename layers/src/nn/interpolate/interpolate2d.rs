//! Interpolation along two axes.
use crate::burn_next::{interpolation, interpolation_options};
use crate::functional;
use crate::nn::drop_in::{config_twin, drop_in};
use burn::config::Config;
use burn::module::Module;
use burn::nn::interpolate::InterpolateMode;
use burn::tensor::{Tensor, ops::InterpolateOptions};

interpolation!(config_twin! {
    #[derive(Config, Debug)]
    pub struct Interpolate2dConfig = burn::nn::interpolate::Interpolate2dConfig {
        /// Output size of the interpolated tensor.
        /// Exactly one of `output_size` or `scale_factor` must be set.
        #[config(default = "None")]
        pub output_size: Option<[usize; 2]>,

        /// Scale factor for resizing the input tensor.
        /// The output size is `floor(input_size * scale_factor)`.
        /// Exactly one of `output_size` or `scale_factor` must be set.
        #[config(default = "None")]
        pub scale_factor: Option<[f32; 2]>,

        /// Interpolation mode to use for resizing.
        /// Determines how the output values are calculated.
        #[config(default = "InterpolateMode::Nearest")]
        pub mode: InterpolateMode,

        /// If `true`, the input and output tensors are aligned by their corner pixels.
        /// If `false`, half-pixel coordinate mapping is used instead.
        #[config(default = true)]
        pub align_corners: bool,
    }
    pub fn init(self) -> Interpolate2d;
});

interpolation!(drop_in! {
    /// Resizes two axes by interpolation.
    ///
    /// Keeps nothing for the backward pass; [`burn::nn::interpolate::Interpolate2d`] keeps its input.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::interpolate::Interpolate2dConfig;
    ///
    /// let device = Device::flex();
    /// let resize = Interpolate2dConfig::new().with_output_size(Some([8, 8])).init();
    /// assert_eq!(resize.forward(Tensor::<4>::ones([2, 3, 4, 4], &device)).dims(), [2, 3, 8, 8]);
    /// ```
    #[derive(Module, Debug)]
    pub struct Interpolate2d as MemSaveInterpolate2d = burn::nn::interpolate::Interpolate2d,
        from_nn_interpolate2d, into_nn_interpolate2d {
        /// Output size of the interpolated tensor
        pub output_size: Option<[usize; 2]>,

        /// Scale factor for resizing the input tensor
        pub scale_factor: Option<[f32; 2]>,

        /// Interpolation mode used for resizing
        #[module(skip)]
        pub mode: InterpolateMode,

        /// Whether to align corner pixels
        pub align_corners: bool,
    }
});

impl Interpolate2d {
    /// Applies the layer.
    ///
    /// # Shapes
    ///
    /// - input: `[batch_size, channels, height_in, width_in]`
    /// - output: `[batch_size, channels, height_out, width_out]`
    ///
    /// # Panics
    ///
    /// Panics unless exactly one of `output_size` and `scale_factor` is set.
    pub fn forward(&self, input: Tensor<4>) -> Tensor<4> {
        let mut options = interpolation_options!(self);
        options.output_size = self.output_size;
        options.scale_factor = self.scale_factor;
        functional::interpolate(input, options)
    }
}
