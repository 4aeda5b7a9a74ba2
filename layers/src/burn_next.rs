//! What differs between Burn 0.22.1, which `Cargo.toml` pins, and the next Burn, for which `.ci/next-burn` sets `cfg(burn_next)`; nothing
//! of the kind is elsewhere in this crate. On the day of the release one half of each pair goes.
use burn::tensor::ops::{AttentionModuleOptions, AvgPoolOptions, InterpolateOptions};
#[cfg(burn_next)]
use burn::tensor::ops::{CausalAlignment, CoordinateTransformMode, InterpolateMode};

/// Declares an extension trait, whose calls Burn routes to the backend of the tensors: `[Autodiff]` in front of the trait if to ours under
/// autodiff, too, `[]` if only to the plain ones.
macro_rules! routed {
    ([$($autodiff:ident)?] $($item:tt)*) => {
        $crate::burn_next::with_ndarray!([$($autodiff)?] $($item)*);
    };
}

#[cfg(not(burn_next))]
macro_rules! with_ndarray {
    ($($routed:tt)*) => { $crate::burn_next::routed_to!([NdArray: cfg(feature = "ndarray"),] $($routed)*); };
}
#[cfg(burn_next)] // has no NdArray
macro_rules! with_ndarray {
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
pub(crate) use {routed, routed_to, with_ndarray};

/// `avg_pool!(B::avg_pool2d(x, kernel, stride, padding; dilation; count_include_pad, ceil_mode))`: only the next Burn takes a dilation.
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
pub(crate) fn dilation<const N: usize>(_options: &AvgPoolOptions<N>) -> [usize; N] {
    #[cfg(burn_next)]
    return _options.dilation;
    #[cfg(not(burn_next))]
    [1; N]
}

/// Whether the last query of a causal attention sees every key, the only alignment of Burn 0.22.1; with as many of both there is one only.
pub(crate) fn sees_last_keys(_options: &AttentionModuleOptions, _queries: usize, _keys: usize) -> bool {
    #[cfg(burn_next)]
    return _queries == _keys || _options.causal_alignment == CausalAlignment::BottomRight;
    #[cfg(not(burn_next))]
    true
}

/// Whether outputs lie on the input as those of Burn 0.22.1 do, by the sizes of both and `align_corners`: others are Burn's operations.
pub(crate) fn is_by_sizes(_options: &InterpolateOptions, _size: [usize; 2], _out: [usize; 2]) -> bool {
    #[cfg(burn_next)]
    {
        let (ours, nearest) = (
            InterpolateOptions::new(_options.mode),
            [InterpolateMode::Nearest, InterpolateMode::NearestExact],
        );
        let half_pixel = _options.coordinate_transform == CoordinateTransformMode::HalfPixel;
        let transform = _options.coordinate_transform == ours.coordinate_transform
            || half_pixel && !nearest.contains(&_options.mode);
        let of_sizes = |axis: usize, scale: f32| {
            scale > 0.0
                && (_options.align_corners() || _size[axis] as f64 * f64::from(scale) == _out[axis] as f64)
        };
        return transform
            && _options.scale_factor.is_none_or(|[height, width]| of_sizes(0, height) && of_sizes(1, width))
            && (_options.nearest_mode == ours.nearest_mode || !nearest.contains(&_options.mode))
            && (_options.cubic_options == ours.cubic_options || _options.mode != InterpolateMode::Bicubic);
    }
    #[cfg(not(burn_next))]
    true
}

/// Whether the corners of input and output lie on each other.
pub(crate) fn aligns_corners(options: &InterpolateOptions) -> bool {
    #[cfg(burn_next)]
    return options.align_corners();
    #[cfg(not(burn_next))]
    options.align_corners
}

/// `at * size / out`, rounded as Flex and NdArray round it where they look for the nearest input.
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(crate) fn on_input(at: f64, size: f64, out: f64) -> f64 {
    if cfg!(burn_next) { at * size / out } else { at * (size / out) }
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
#[cfg(burn_next)] // with its fields of the next Burn
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
