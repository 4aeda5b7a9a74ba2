//! Rows of pools and interpolation.
use super::{Check, IMAGES, LARGE, SIGNAL, Shapes, VOLUME, Visitor, kept, row};

const VARIANT: &[Check] = &[Check::Time];
const OTHER_SIZES: &str = "the same kernel as the row before it";
const NO_GRADIENTS: &str = "Burn has no such gradient there (0.22.1)";

pub fn visit(visitor: &mut impl Visitor) {
    use kept::{nothing, per_image};
    // Offsets have one byte in windows of up to 255 elements, and two in windows of up to 65535.
    row! {
        visitor, "max_pool1d", SIGNAL, per_image(8 * 150),
        config() |nn, _| {
            let padding = nn::PaddingConfig1d::Explicit(1, 1);
            nn::pool::MaxPool1dConfig::new(3).with_stride(2).with_padding(padding)
        }
    }
    row! {
        visitor, "max_pool1d, even", SIGNAL, per_image(8 * 150),
        config() |nn, _| nn::pool::MaxPool1dConfig::new(2),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "max_pool1d, 65536 elements", Shapes::only([1, 1, 66_000]), per_image(4 * 5),
        config() |nn, _| nn::pool::MaxPool1dConfig::new(1 << 16).with_stride(100),
        without(VARIANT, OTHER_SIZES)
    }
    macro_rules! max_pool {
        ($($name:literal, $bytes:expr, |$nn:ident| $pool:expr $(, $note:ident($($argument:expr),*))*;)+) => {$(
            row! {
                visitor, $name, LARGE, per_image($bytes), config() |$nn, _| $pool $(, $note($($argument),*))*
            }
        )+};
    }
    max_pool! {
        "max_pool2d", 8 * 12 * 10, |nn| {
            let padding = nn::PaddingConfig2d::Explicit(1, 1, 1, 1);
            nn::pool::MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(padding)
        };
        "max_pool2d, valid", 8 * 11 * 9, |nn| nn::pool::MaxPool2dConfig::new([3, 3]).with_strides([2, 2]),
            without(VARIANT, OTHER_SIZES);
        "max_pool2d, asymmetric", 8 * 12 * 10, |nn| {
            let padding = nn::PaddingConfig2d::Explicit(0, 1, 2, 1);
            nn::pool::MaxPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(padding)
        }, without(VARIANT, OTHER_SIZES);
        "max_pool2d, same", 8 * 24 * 20, |nn| {
            let pool = nn::pool::MaxPool2dConfig::new([2, 4]).with_strides([1, 1]);
            pool.with_padding(nn::PaddingConfig2d::Same)
        }, without(VARIANT, OTHER_SIZES);
        "max_pool2d, dilated", 8 * 8 * 9, |nn| {
            nn::pool::MaxPool2dConfig::new([3, 2]).with_dilation([1, 2])
        }, without(VARIANT, OTHER_SIZES);
        "max_pool2d, 255 elements", 8 * 5 * 2, |nn| {
            nn::pool::MaxPool2dConfig::new([15, 17]).with_strides([2, 2])
        }, without(VARIANT, OTHER_SIZES);
        "max_pool2d, 256 elements", 2 * 8 * 5 * 3, |nn| {
            nn::pool::MaxPool2dConfig::new([16, 16]).with_strides([2, 2])
        }, without(VARIANT, OTHER_SIZES);
    }
    row! {
        visitor, "avg_pool1d", SIGNAL, nothing, config() |nn, _| nn::pool::AvgPool1dConfig::new(2)
    }
    row! {
        visitor, "avg_pool1d, rounded up", SIGNAL, nothing,
        config() |nn, _| nn::pool::AvgPool1dConfig::new(7).with_ceil_mode(true),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "avg_pool1d, same", SIGNAL, nothing,
        config() |nn, _|
            nn::pool::AvgPool1dConfig::new(4).with_stride(1).with_padding(nn::PaddingConfig1d::Same),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "avg_pool2d", LARGE, nothing, config() |nn, _| nn::pool::AvgPool2dConfig::new([2, 2])
    }
    row! {
        visitor, "avg_pool2d, asymmetric", IMAGES, nothing,
        config() |nn, _| {
            let padding = nn::PaddingConfig2d::Explicit(0, 1, 2, 1);
            nn::pool::AvgPool2dConfig::new([3, 3]).with_strides([2, 2]).with_padding(padding)
        },
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "avg_pool2d, without padding", IMAGES, nothing,
        config() |nn, _| nn::pool::AvgPool2dConfig::new([3, 2]).with_count_include_pad(false),
        without(VARIANT, OTHER_SIZES)
    }
    row! {
        visitor, "adaptive_avg_pool1d", SIGNAL, nothing,
        config() |nn, _| nn::pool::AdaptiveAvgPool1dConfig::new(7)
    }
    row! {
        visitor, "adaptive_avg_pool2d", LARGE, nothing,
        config() |nn, _| nn::pool::AdaptiveAvgPool2dConfig::new([1, 1])
    }
    row! {
        visitor, "adaptive_avg_pool3d", VOLUME, nothing,
        config() |nn, _| nn::pool::AdaptiveAvgPool3dConfig::new([2, 2, 2])
    }
    row! {
        visitor, "adaptive_avg_pool3d, uneven", VOLUME, nothing,
        config() |nn, _| nn::pool::AdaptiveAvgPool3dConfig::new([2, 3, 2]),
        without(VARIANT, OTHER_SIZES)
    }

    row! {
        visitor, "interpolate1d", SIGNAL, nothing,
        config() |nn, [.., length]| {
            let resize = nn::interpolate::Interpolate1dConfig::new().with_output_size(Some(length / 2));
            resize.with_mode(nn::interpolate::InterpolateMode::Linear)
        },
        not_on_ndarray(NO_GRADIENTS), without(&[Check::TimeOnDevices], NO_GRADIENTS)
    }
    row! {
        visitor, "interpolate1d, nearest", SIGNAL, nothing,
        config() |nn, _| nn::interpolate::Interpolate1dConfig::new().with_output_size(Some(150)),
        without(VARIANT, OTHER_SIZES)
    }
    macro_rules! interpolate {
        ($($name:literal: $mode:ident $(, $note:ident($($argument:expr),*))*;)+) => {$(
            row! {
                visitor, $name, LARGE, nothing,
                config() |nn, [.., height, width]| {
                    // Benches resize to the size of `IMAGES`.
                    let resize = nn::interpolate::Interpolate2dConfig::new();
                    let resize = resize.with_output_size(Some([height / 2, width / 2]));
                    resize.with_mode(nn::interpolate::InterpolateMode::$mode)
                }
                $(, $note($($argument),*))*
            }
        )+};
    }
    interpolate! {
        "interpolate, nearest": Nearest;
        "interpolate, linear": Linear, not_on_ndarray(NO_GRADIENTS), without(&[Check::TimeOnDevices], NO_GRADIENTS);
        "interpolate, cubic": Cubic, not_on_ndarray(NO_GRADIENTS), without(&[Check::TimeOnDevices], NO_GRADIENTS);
    }
    row! {
        visitor, "interpolate, uneven", IMAGES, nothing,
        config() |nn, _| nn::interpolate::Interpolate2dConfig::new().with_output_size(Some([12, 30])),
        without(VARIANT, OTHER_SIZES)
    }
}
