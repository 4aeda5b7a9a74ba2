//! Compares modules of pooling with those of stock Burn.
use super::{windows::*, *};

macro_rules! pools {
    ($(
        $max_test:ident: $max:ident = $max_config:ident,
        $avg_test:ident: $avg:ident = $avg_config:ident,
        $rank:literal, $dims:literal, $each:ident, $with_stride:ident;
    )+) => {$(
        /// With ties and without.
        #[test]
        fn $max_test() {
            let flags = [any::<bool>(), any::<bool>()];
            for_all(48, (windows::<$rank>(), flags, leaves()), |(windows, [ceil, ties], setting)| {
                let config = $max_config::new($each(windows.kernel()))
                    .$with_stride($each(windows.stride()))
                    .with_dilation($each(windows.dilation()))
                    .with_padding(windows.padding())
                    .with_ceil_mode(ceil);
                let shape = shape::<_, $dims>([2, 3], windows.sizes());
                let input = if ties { Input::steps(shape, 3) } else { Input::random(shape) };
                let check = check([input], setting);
                same_layers!(check, $max, |t| config.init(), |layer| layer.forward(t.get(0)));
            });
        }

        #[test]
        fn $avg_test() {
            let flags = [any::<bool>(), any::<bool>()];
            for_all(48, (windows::<$rank>(), flags, leaves()), |(windows, [ceil, include], setting)| {
                let config = $avg_config::new($each(windows.kernel()))
                    .$with_stride($each(windows.stride()))
                    .with_padding(windows.padding())
                    .with_count_include_pad(include)
                    .with_ceil_mode(ceil);
                let input = Input::random(shape::<_, $dims>([2, 3], windows.sizes()));
                let check = check([input], setting);
                same_layers!(check, $avg, |t| config.init(), |layer| layer.forward(t.get(0)));
            });
        }
    )+};
}
pools! {
    max_pool1d: MemSaveMaxPool1d = MaxPool1dConfig,
        avg_pool1d: MemSaveAvgPool1d = AvgPool1dConfig, 1, 3, only, with_stride;
    max_pool2d: MemSaveMaxPool2d = MaxPool2dConfig,
        avg_pool2d: MemSaveAvgPool2d = AvgPool2dConfig, 2, 4, identity, with_strides;
}

macro_rules! adaptive_pools {
    ($($test:ident: $ours:ident = $config:ident, $rank:literal, $dims:literal, $each:ident;)+) => {$(
        #[test]
        fn $test() {
            let sizes = |range| prop::array::uniform::<_, $rank>(range);
            for_all(32, (sizes(1..8usize), sizes(1..7usize), leaves()), |(sizes, outputs, setting)| {
                let config = $config::new($each(outputs));
                let check = check([Input::random(shape::<_, $dims>([2, 3], sizes))], setting);
                same_layers!(check, $ours, |t| config.init(), |layer| layer.forward(t.get(0)));
            });
        }
    )+};
}
adaptive_pools! {
    adaptive_avg_pool1d: MemSaveAdaptiveAvgPool1d = AdaptiveAvgPool1dConfig, 1, 3, only;
    adaptive_avg_pool2d: MemSaveAdaptiveAvgPool2d = AdaptiveAvgPool2dConfig, 2, 4, identity;
    adaptive_avg_pool3d: MemSaveAdaptiveAvgPool3d = AdaptiveAvgPool3dConfig, 3, 5, identity;
}
