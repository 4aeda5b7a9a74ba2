//! The differences between Burn 0.22.1, which `Cargo.toml` pins, and the next Burn, for which `.ci/next-burn` sets `cfg(burn_next)`.
//!
//! All of them are here, except for an attribute in `nn/transformer/pwff.rs`. On the day of the release, one half of each pair is deleted.
#[cfg(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda"))]
use crate::backend::axis_map::Resized;
use burn::tensor::ops::{AttentionModuleOptions, AvgPoolOptions, InterpolateOptions};
#[cfg(burn_next)]
use burn::tensor::ops::{CausalAlignment, CoordinateTransformMode, InterpolateMode};

/// Declares an extension trait, whose calls Burn routes to the backend of the tensors. In front of the trait stands `[Autodiff]` if its
/// calls are also routed to backends under autodiff, and `[]` if only to plain ones.
#[cfg(not(burn_next))]
macro_rules! routed {
    ($($routed:tt)*) => { $crate::burn_next::routed_to!([NdArray: cfg(feature = "ndarray"),] $($routed)*); };
}
#[cfg(burn_next)] // has no NdArray
macro_rules! routed {
    ($($routed:tt)*) => { $crate::burn_next::routed_to!([] $($routed)*); };
}

macro_rules! routed_to {
    ([$($backends:tt)*] [$($autodiff:ident)?] $($item:tt)*) => {
        #[burn::backend::backend_extension(
            Flex: cfg(feature = "flex"),
            $($backends)*
            Cube: cfg(any(feature = "wgpu", feature = "cuda")),
            Remote: cfg(feature = "remote"),
            $($autodiff)?
        )]
        $($item)*
    };
}
pub(crate) use {routed, routed_to};

/// `avg_pool!(B::avg_pool2d(x, kernel, stride, padding; dilation; count_include_pad, ceil_mode))`. Only the next Burn takes the dilation.
#[cfg(not(burn_next))]
macro_rules! avg_pool {
    ($backend:ident::$pool:ident($($before:expr),+; $_:expr; $($behind:expr),+)) => { $backend::$pool($($before),+, $($behind),+) };
}
#[cfg(burn_next)]
macro_rules! avg_pool {
    ($backend:ident::$pool:ident($($before:expr),+; $dilation:expr; $($behind:expr),+)) => {
        $backend::$pool($($before),+, $dilation, $($behind),+)
    };
}
pub(crate) use avg_pool;

/// The distances between the elements of a window.
#[cfg(not(burn_next))]
pub(crate) fn dilation<const N: usize>(_: &AvgPoolOptions<N>) -> [usize; N] {
    [1; N]
}
#[cfg(burn_next)]
pub(crate) fn dilation<const N: usize>(options: &AvgPoolOptions<N>) -> [usize; N] {
    options.dilation
}

/// The extent of a window along each axis, from which a max pool computes the padding that keeps the size. Burn 0.22.1 ignores the
/// dilation.
#[cfg(not(burn_next))]
pub(crate) fn padded_for<const N: usize>(kernel: [usize; N], _: [usize; N]) -> [usize; N] {
    kernel
}
#[cfg(burn_next)]
pub(crate) fn padded_for<const N: usize>(kernel: [usize; N], dilation: [usize; N]) -> [usize; N] {
    core::array::from_fn(|axis| (kernel[axis] - 1) * dilation[axis] + 1)
}

/// The message with which a deformable convolution refuses padding whose two sides differ.
#[cfg(not(burn_next))]
pub(crate) fn refusal_of_asymmetric(
    _: [(usize, usize); 2],
    _: [usize; 2],
    _: [usize; 2],
    _: [usize; 2],
) -> String {
    "Asymmetric padding should be handled via calculate_padding_2d_pairs()".into()
}
#[cfg(burn_next)]
pub(crate) fn refusal_of_asymmetric(
    [(top, bottom), (left, right)]: [(usize, usize); 2],
    size: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
) -> String {
    format!(
        "Asymmetric calculated padding is not supported for DeformConv2d. Got top={top}, left={left}, bottom={bottom}, \
         right={right} for input size {size:?}, kernel size {kernel:?}, and stride {stride:?}."
    )
}

/// The score of a masked key in multi-head attention. With negative infinity, a query that sees no key has weights of zero.
pub(crate) fn masked_score(min_float: f64) -> f64 {
    if cfg!(burn_next) { f64::NEG_INFINITY } else { min_float }
}

/// Whether the last query of a causal attention sees every key, as it always does in Burn 0.22.1.
#[cfg(not(burn_next))]
pub(crate) fn sees_last_keys(_: &AttentionModuleOptions, _: usize, _: usize) -> bool {
    true
}
#[cfg(burn_next)]
pub(crate) fn sees_last_keys(options: &AttentionModuleOptions, queries: usize, keys: usize) -> bool {
    queries == keys || options.causal_alignment == CausalAlignment::BottomRight
}

/// Whether an interpolation maps outputs to input coordinates, and weights inputs, as in Burn 0.22.1.
#[cfg(not(burn_next))]
pub(crate) fn has_usual_coordinates(_: &InterpolateOptions) -> bool {
    true
}
#[cfg(burn_next)]
pub(crate) fn has_usual_coordinates(options: &InterpolateOptions) -> bool {
    let usual = InterpolateOptions::new(options.mode);
    let is_nearest = matches!(options.mode, InterpolateMode::Nearest | InterpolateMode::NearestExact);
    let is_half_pixel = !is_nearest && options.coordinate_transform == CoordinateTransformMode::HalfPixel;
    (is_half_pixel || options.coordinate_transform == usual.coordinate_transform)
        && (!is_nearest || options.nearest_mode == usual.nearest_mode)
        && (options.mode != InterpolateMode::Bicubic || options.cubic_options == usual.cubic_options)
        && options.scale_factor.is_none_or(|factors| factors.iter().all(|&factor| factor > 0.0))
}

/// How an axis is resized.
#[cfg(all(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda"), not(burn_next)))]
pub(crate) fn resized(options: &InterpolateOptions, _axis: usize, size: usize, out: usize) -> Resized {
    Resized { size, out, factor: None, align_corners: options.align_corners }
}
#[cfg(all(any(feature = "flex", feature = "wgpu", feature = "cuda"), burn_next))]
pub(crate) fn resized(options: &InterpolateOptions, axis: usize, size: usize, out: usize) -> Resized {
    let factor = options.scale_factor.map(|factors| f64::from(factors[axis]));
    Resized { size, out, factor, align_corners: options.align_corners() }
}

/// The input coordinate of output `at`, `at * size / out`, rounded as Flex and NdArray round it when they look for the nearest input.
#[cfg(all(any(feature = "flex", feature = "ndarray"), not(burn_next)))]
pub(crate) fn on_input(at: f64, resized: Resized) -> f64 {
    at * (resized.size as f64 / resized.out as f64)
}
#[cfg(all(feature = "flex", burn_next))]
pub(crate) fn on_input(at: f64, resized: Resized) -> f64 {
    resized.factor.map_or(at * resized.size as f64 / resized.out as f64, |factor| at / factor)
}

/// The type in which CubeCL takes a constant of a kernel.
#[cfg(all(any(feature = "wgpu", feature = "cuda"), not(burn_next)))]
pub(crate) type Constant = f32;
#[cfg(all(any(feature = "wgpu", feature = "cuda"), burn_next))]
pub(crate) type Constant = f64;

/// A [`config_twin!`](crate::nn::drop_in::config_twin) or [`drop_in!`](crate::nn::drop_in::drop_in) of an interpolation.
#[cfg(not(burn_next))]
macro_rules! interpolation {
    ($twin:ident! { $($all:tt)* }) => { $twin! { $($all)* } };
}
#[cfg(burn_next)] // with the fields that the next Burn adds
macro_rules! interpolation {
    (config_twin! {
        #[derive($($derive:tt)*)]
        pub struct $config:ident = $stock:path { $($fields:tt)* }
        $($init:tt)*
    }) => {
        config_twin! {
            #[derive($($derive)*)]
            pub struct $config = $stock {
                $($fields)*
                /// Coordinate transformation mode.
                #[config(default = "None")]
                pub coordinate_transform: Option<burn::tensor::ops::CoordinateTransformMode>,
                /// Nearest rounding mode.
                #[config(default = "None")]
                pub nearest_mode: Option<burn::tensor::ops::NearestRoundingMode>,
                /// Cubic interpolation options.
                #[config(default = "None")]
                pub cubic_options: Option<burn::tensor::ops::CubicOptions>,
            }
            $($init)*
        }
    };
    (drop_in! {
        $(#[$meta:meta])*
        pub struct $module:ident as $long:ident = $stock:path, $from:ident, $into:ident { $($fields:tt)* }
    }) => {
        drop_in! {
            $(#[$meta])*
            pub struct $module as $long = $stock, $from, $into {
                $($fields)*
                /// Coordinate transformation mode
                #[module(skip)]
                pub coordinate_transform: Option<burn::tensor::ops::CoordinateTransformMode>,
                /// Nearest rounding mode
                #[module(skip)]
                pub nearest_mode: Option<burn::tensor::ops::NearestRoundingMode>,
                /// Cubic interpolation options
                #[module(skip)]
                pub cubic_options: Option<burn::tensor::ops::CubicOptions>,
            }
        }
    };
}
pub(crate) use interpolation;

/// The options of an interpolation, without its sizes.
#[cfg(not(burn_next))]
macro_rules! interpolation_options {
    ($module:expr) => {
        InterpolateOptions::new($module.mode.clone().into()).with_align_corners($module.align_corners)
    };
}
#[cfg(burn_next)]
macro_rules! interpolation_options {
    ($module:expr) => {{
        let mut options =
            InterpolateOptions::new($module.mode.clone().into()).with_align_corners($module.align_corners);
        options.coordinate_transform = $module.coordinate_transform.unwrap_or(options.coordinate_transform);
        options.nearest_mode = $module.nearest_mode.unwrap_or(options.nearest_mode);
        options.cubic_options = $module.cubic_options.unwrap_or(options.cubic_options);
        options
    }};
}
pub(crate) use interpolation_options;

/// The options of an interpolation along the second axis of two, of which the first has one element.
#[cfg(not(burn_next))]
pub(crate) fn along_one_axis(options: InterpolateOptions) -> InterpolateOptions {
    options
}
#[cfg(burn_next)]
pub(crate) fn along_one_axis(mut options: InterpolateOptions) -> InterpolateOptions {
    if let CoordinateTransformMode::TfCropAndResize { roi, .. } = &mut options.coordinate_transform {
        roi[0] = [0.0, 1.0];
    }
    options
}

/// Pools that the next Burn adds, and that this library does not replace yet.
pub mod pools {
    #[cfg(burn_next)]
    pub use burn::nn::pool::{
        AvgPool3d, AvgPool3dConfig, LpPool1d, LpPool1dConfig, LpPool2d, LpPool2dConfig, MaxPool3d,
        MaxPool3dConfig,
    };
}

#[cfg(all(test, burn_next, feature = "flex"))]
mod tests {
    use super::*;
    use crate::{functional, nn};
    use burn::tensor::ops::{CubicOptions, NearestRoundingMode};
    use burn::tensor::{Device, Distribution, Int, Tensor, Tolerance, module};

    /// Outputs and gradients are those of Burn.
    fn check<const D: usize, const O: usize>(
        shape: [usize; D],
        ours: impl Fn(Tensor<D>) -> Tensor<O>,
        burns: impl Fn(Tensor<D>) -> Tensor<O>,
    ) {
        let x = Tensor::<D>::random(shape, Distribution::Default, &Device::flex().autodiff()).require_grad();
        let [ours, burns] = [ours(x.clone()), burns(x.clone())].map(|y| {
            let gradient = x.grad(&y.clone().powi_scalar(2).sum().backward()).expect("tracked");
            [y.into_data(), gradient.into_data()]
        });
        for (ours, burns) in ours.iter().zip(&burns) {
            ours.assert_approx_eq::<f32>(burns, Tolerance::default());
        }
    }

    #[test]
    fn new_options_are_those_of_burn() {
        let pool =
            || AvgPoolOptions::new([2, 3]).with_stride([1, 2]).with_padding([1, 1]).with_dilation([2, 1]);
        check([2, 3, 7, 8], |x| functional::avg_pool2d(x, pool()), |x| module::avg_pool2d(x, pool()));
        let pool = || AvgPoolOptions::new([2]).with_dilation([3]);
        check([2, 3, 9], |x| functional::avg_pool1d(x, pool()), |x| module::avg_pool1d(x, pool()));

        let options = AttentionModuleOptions {
            is_causal: true,
            causal_alignment: CausalAlignment::TopLeft,
            ..Default::default()
        };
        let parts = |x: &Tensor<4>| [x.clone().narrow(2, 0, 3), x.clone(), x.clone() * 0.5];
        check(
            [2, 2, 5, 4],
            |x| {
                let [q, k, v] = parts(&x);
                functional::attention(q, k, v, None, None, options)
            },
            |x| {
                let [q, k, v] = parts(&x);
                module::attention(q, k, v, None, None, options)
            },
        );
    }

    #[test]
    fn interpolations_are_those_of_burn() {
        use InterpolateMode::{Bicubic, Bilinear, Nearest, NearestExact};
        let of = |mode| InterpolateOptions::new(mode).with_output_size([7, 8]);
        let scaled =
            |mode, by| InterpolateOptions::new(mode).with_align_corners(false).with_scale_factor([by; 2]);
        let cubic = CubicOptions { a: -0.5, exclude_outside: true };
        for options in [
            scaled(Bilinear, 1.5),
            scaled(Bilinear, 2.0),
            scaled(Bicubic, 0.7),
            scaled(Nearest, 1.3),
            scaled(NearestExact, 1.7),
            scaled(Nearest, 0.5).with_align_corners(true),
            of(Nearest).with_nearest_mode(NearestRoundingMode::Ceil),
            of(NearestExact).with_coordinate_transform(CoordinateTransformMode::Asymmetric),
            of(Bilinear).with_coordinate_transform(CoordinateTransformMode::HalfPixelSymmetric),
            of(Bicubic).with_cubic_options(cubic),
        ] {
            let [ours, burns] = [options.clone(), options];
            check(
                [2, 3, 5, 5],
                |x| functional::interpolate(x, ours.clone()),
                |x| module::interpolate(x, burns.clone()),
            );
        }
    }

    #[test]
    fn modules_are_those_of_burn() {
        let pool = burn::nn::pool::MaxPool2dConfig::new([3, 3])
            .with_strides([2, 1])
            .with_dilation([2, 2])
            .with_padding(burn::nn::PaddingConfig2d::Same)
            .init();
        let ours = nn::pool::MaxPool2d::from(pool.clone());
        check([2, 3, 7, 8], |x| ours.forward(x), |x| pool.forward(x));

        let resize = burn::nn::interpolate::Interpolate1dConfig::new()
            .with_scale_factor(Some(1.5))
            .with_coordinate_transform(Some(CoordinateTransformMode::Asymmetric))
            .with_nearest_mode(Some(NearestRoundingMode::RoundPreferFloor))
            .init();
        let ours = nn::interpolate::Interpolate1d::from(resize.clone());
        assert_eq!(
            burn::nn::interpolate::Interpolate1d::from(ours.clone()).nearest_mode,
            resize.nearest_mode
        );
        check([2, 3, 7], |x| ours.forward(x), |x| resize.forward(x));

        let device = Device::flex().autodiff();
        let attention =
            burn::nn::attention::MultiHeadAttentionConfig::new(6, 2).with_dropout(0.0).init(&device);
        let ours = nn::attention::MultiHeadAttention::from(attention.clone());
        // The whole second sequence is hidden.
        let hidden = || {
            let number = Tensor::<1, Int>::arange(0..8, &device).reshape([2, 4]);
            number.greater_elem(1)
        };
        check(
            [2, 4, 6],
            |x| ours.forward(nn::attention::MhaInput::self_attn(x).mask_pad(hidden())).context,
            |x| attention.forward(burn::nn::attention::MhaInput::self_attn(x).mask_pad(hidden())).context,
        );
    }
}
