//! Compares modules of interpolation with those of stock Burn.
use super::*;
use InterpolateMode::*;

macro_rules! interpolations {
    ($($test:ident: $ours:ident = $config:ident, $rank:literal, $dims:literal, $each:ident;)+) => {$(
        /// Outputs of every mode on both backends; gradients where stock has them (0.22.1: but for Lanczos on Flex,
        /// nearest on NdArray), and everywhere against differences.
        #[test]
        fn $test() {
            let numbers = |range| prop::array::uniform::<_, $rank>(range);
            let size = (any::<bool>(), numbers(1..9usize));
            for (mode, corners) in [Nearest, Linear, Cubic, Lanczos].into_iter().flat_map(|mode| {
                [(mode.clone(), false), (mode, true)]
            }) {
                for_all(8, (numbers(2..8), size.clone(), leaves()), |(input, (scaled, size), setting)| {
                    let scale = scaled.then(|| $each(size.map(|size| size as f32 / 2.0)));
                    let config = $config::new()
                        .with_mode(mode.clone())
                        .with_align_corners(corners)
                        .with_output_size((!scaled).then(|| $each(size)))
                        .with_scale_factor(scale);
                    let check = check([Input::random(shape::<_, $dims>([2, 2], input))], setting);
                    same_layers!(check, $ours, |t| config.clone().init(), |layer| {
                        layer.forward(t.get(0)).detach()
                    });
                    let with_gradients: &[Backend] = match mode {
                        Nearest => &Backend::ALL,
                        Linear | Cubic => &[Backend::Flex],
                        _ => &[],
                    };
                    for &backend in with_gradients {
                        let check = check.clone().on(backend);
                        same_layers!(check, $ours, |t| config.clone().init(), |layer| {
                            layer.forward(t.get(0))
                        });
                    }
                    check.differentiate(&|t| $ours::from(config.clone().init()).forward(t.get(0)));
                });
            }
        }
    )+};
}
interpolations! {
    interpolate1d: MemSaveInterpolate1d = Interpolate1dConfig, 1, 3, only;
    interpolate2d: MemSaveInterpolate2d = Interpolate2dConfig, 2, 4, identity;
}

/// No size, two sizes, and a mode that no CPU backend of Burn 0.22.1 has.
#[test]
fn what_stock_refuses_is_refused() {
    let line = Check::new([Input::random([1, 2, 4])], Setting::default());
    let plane = Check::new([Input::random([1, 2, 4, 4])], Setting::default());
    let cases = [(None, None, Nearest), (Some(2), Some(0.5), Linear), (Some(2), None, NearestExact)];
    for (size, scale, mode) in cases.into_iter().take(if cfg!(burn_next) { 2 } else { 3 }) {
        let resize = Interpolate1dConfig::new()
            .with_mode(mode.clone())
            .with_output_size(size)
            .with_scale_factor(scale);
        both_refuse!(line, MemSaveInterpolate1d, |t| resize.clone().init(), |layer| {
            layer.forward(t.get(0))
        });
        let resize = Interpolate2dConfig::new()
            .with_mode(mode)
            .with_output_size(size.map(|size| [size; 2]))
            .with_scale_factor(scale.map(|scale| [scale; 2]));
        both_refuse!(plane, MemSaveInterpolate2d, |t| resize.clone().init(), |layer| {
            layer.forward(t.get(0))
        });
    }
}
