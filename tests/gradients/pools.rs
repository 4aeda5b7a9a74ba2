//! Compares pools and interpolation with stock Burn.
use crate::common::*;
use burn::tensor::{
    DType, Device, Distribution, Tensor, module,
    ops::{AvgPoolOptions, InterpolateMode, InterpolateOptions, MaxPoolOptions},
    quantization::QuantValue,
};
use burn_memsave::functional as F;
use proptest::prelude::*;

/// One axis of a pool.
#[derive(Clone, Copy, Debug)]
struct Axis {
    size: usize,
    kernel: usize,
    stride: usize,
    padding: (usize, usize),
    /// Only of a max pool.
    dilation: usize,
}

/// Any axis, also one whose window does not fit.
fn any_axis() -> impl Strategy<Value = Axis> {
    let padding = prop_oneof![(0..3usize).prop_map(|padding| (padding, padding)), (0..3usize, 0..3usize),];
    (1..10usize, 1..5usize, 1..5usize, padding, 1..3usize).prop_map(
        |(size, kernel, stride, padding, dilation)| Axis { size, kernel, stride, padding, dilation },
    )
}

/// An axis whose padding is at most half of the kernel, and whose window fits.
fn usual_axis() -> impl Strategy<Value = Axis> {
    any_axis().prop_map(|mut axis| {
        let half = axis.kernel / 2;
        axis.padding = (axis.padding.0.min(half), axis.padding.1.min(half));
        axis.size += axis.dilation * (axis.kernel - 1);
        axis
    })
}

impl Axis {
    /// Whether some window may lie in the padding alone.
    fn has_empty_windows(&self) -> bool {
        let Axis { size, kernel, stride, padding: (begin, end), dilation } = *self;
        let starts = (0..begin + size + end).step_by(stride);
        let meets =
            |start: usize| (0..kernel).any(|tap| (begin..begin + size).contains(&(start + tap * dilation)));
        !starts.into_iter().all(meets)
    }
}

fn max_options<const N: usize>(axes: [Axis; N], ceil_mode: bool) -> MaxPoolOptions<N> {
    MaxPoolOptions::new(axes.map(|a| a.kernel))
        .with_stride(axes.map(|a| a.stride))
        .with_padding_pairs(axes.map(|a| a.padding))
        .with_dilation(axes.map(|a| a.dilation))
        .with_ceil_mode(ceil_mode)
}

fn avg_options<const N: usize>(
    axes: [Axis; N],
    ceil_mode: bool,
    count_include_pad: bool,
) -> AvgPoolOptions<N> {
    AvgPoolOptions::new(axes.map(|a| a.kernel))
        .with_stride(axes.map(|a| a.stride))
        .with_padding_pairs(axes.map(|a| a.padding))
        .with_ceil_mode(ceil_mode)
        .with_count_include_pad(count_include_pad)
}

/// An input of one or two spatial axes.
trait Spatial {
    fn shape<const D: usize>(&self, planes: [usize; 2]) -> [usize; D];
}

impl<const N: usize> Spatial for [Axis; N] {
    fn shape<const D: usize>(&self, planes: [usize; 2]) -> [usize; D] {
        std::array::from_fn(|axis| if axis < 2 { planes[axis] } else { self[axis - 2].size })
    }
}

macro_rules! max_pool {
    ($pool:ident, $rank:literal, $dims:literal) => {
        mod $pool {
            use super::*;

            fn ours(options: MaxPoolOptions<$rank>) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| F::$pool(t.get(0), options.clone())
            }

            fn stock(options: MaxPoolOptions<$rank>) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| module::$pool(t.get(0), options.clone())
            }

            fn axes<A: Strategy<Value = Axis>>(axis: fn() -> A) -> impl Strategy<Value = [Axis; $rank]> {
                prop::array::uniform::<_, $rank>(axis())
            }

            #[test]
            fn equals_stock() {
                let planes = [1..3usize, 1..4];
                for_all(
                    128,
                    (planes, axes(usual_axis), any::<bool>(), settings()),
                    |(planes, axes, ceil_mode, setting)| {
                        let options = max_options(axes, ceil_mode);
                        let shape: [usize; $dims] = axes.shape(planes);
                        for input in [Input::random(shape), Input::steps(shape, 3)] {
                            let check = Check::new([input], setting).same_output();
                            check.compare(&ours(options.clone()), &stock(options.clone()));
                        }
                    },
                );
            }

            /// NdArray 0.22.1 sends the gradient of a window of padding to the first element.
            #[test]
            fn treats_odd_windows_as_stock() {
                for_all(192, (axes(any_axis), any::<bool>()), |(axes, ceil_mode)| {
                    let options = max_options(axes, ceil_mode);
                    let check = Check::new([Input::random::<$dims>(axes.shape([1, 2]))], Setting::default());
                    let check = match axes.iter().any(Axis::has_empty_windows) {
                        true => check.on(Backend::Flex),
                        false => check,
                    };
                    check.same_output().compare_panics(&ours(options.clone()), &stock(options.clone()));
                });
                let options = max_options([FIXED; $rank], false);
                for planes in [[0, 2], [2, 0]] {
                    Check::new([Input::random::<$dims>([FIXED; $rank].shape(planes))], Setting::default())
                        .compare_panics(&ours(options.clone()), &stock(options.clone()));
                }
            }

            #[test]
            fn equals_stock_in_half_precision() {
                for axes in AXES.map(|axis| [axis; $rank]) {
                    let options = max_options(axes, true);
                    for dtype in HALF {
                        Check::new([Input::random::<$dims>(axes.shape([2, 2]))], Setting::of(dtype))
                            .compare(&ours(options.clone()), &stock(options.clone()));
                    }
                }
            }

            #[test]
            fn is_differentiated() {
                let options = max_options([FIXED; $rank], true);
                Check::new([Input::random::<$dims>([FIXED; $rank].shape([2, 2]))], Setting::default())
                    .differentiate(&ours(options));
            }

            /// The gradient of a window without a number above -inf: NdArray 0.22.1 sends it to the first element of all,
            /// and Burn to the padding, if that is asymmetric.
            #[test]
            fn equals_stock_for_special_values() {
                const NAN: f64 = f64::NAN;
                const INF: f64 = f64::INFINITY;
                let paddings = [(0, 0), (1, 1), (1, 0)];
                let patterns: [(&[f64], &[Backend], &[(usize, usize)]); 5] = [
                    (&[1.0], &Backend::ALL, &paddings),
                    (&[0.0, -0.0, INF, 1.0, -INF], &Backend::ALL, &paddings),
                    (&[1.0, NAN, 2.0, NAN, 3.0, -INF, 0.0], &Backend::ALL, &paddings), // a number in each window
                    (&[-INF], &[Backend::Flex], &paddings[..2]),
                    (&[NAN], &[Backend::Flex], &paddings),
                ];
                for (pattern, backends, paddings) in patterns {
                    for (&padding, axis) in paddings.iter().flat_map(|p| AXES.map(|axis| (p, axis))) {
                        let axes = [Axis { padding, ..axis }; $rank];
                        let shape: [usize; $dims] = axes.shape([1, 2]);
                        let values = pattern.iter().copied().cycle().take(shape.iter().product());
                        let input = Input::given(shape, values.collect::<Vec<_>>());
                        let options = max_options(axes, false);
                        for (backend, dtype) in
                            backends.iter().flat_map(|b| [(*b, DType::F32), (*b, DType::F64)])
                        {
                            let check = Check::new([input.clone()], Setting::of(dtype)).on(backend).same();
                            check.compare(&ours(options.clone()), &stock(options.clone()));
                        }
                    }
                }
            }

            /// To the first element of its window, as on Flex.
            #[test]
            fn passes_the_gradient_of_minus_infinity() {
                for (axis, windows) in [(FIXED, 3f64), (LONG, 14.0)] {
                    let axes = [axis; $rank];
                    let shape: [usize; $dims] = axes.shape([1, 2]);
                    let gradient = |device: Device| {
                        let x = Tensor::<$dims>::full(shape, f32::NEG_INFINITY, &device).require_grad();
                        let y = F::$pool(x.clone(), max_options(axes, false));
                        numbers(&x.grad(&y.sum().backward()).unwrap().into_data())
                    };
                    let gradients = Backend::ALL.map(|backend| gradient(backend.device().autodiff()));
                    assert_eq!(gradients[0].iter().sum::<f64>(), 2.0 * windows.powi($rank), "one per window");
                    assert!(gradients.iter().all(|gradient| *gradient == gradients[0]));
                }
            }
        }
    };
}
max_pool!(max_pool1d, 1, 3);
max_pool!(max_pool2d, 2, 4);

const FIXED: Axis = Axis { size: 6, kernel: 3, stride: 2, padding: (1, 1), dilation: 1 };
/// Of more windows than kernels look at one by one.
const LONG: Axis = Axis { size: 27, ..FIXED };
/// Those of a max pool whose elements are read in different ways.
const AXES: [Axis; 4] = [FIXED, LONG, Axis { stride: 1, ..LONG }, Axis { stride: 3, ..LONG }];

/// Windows whose positions need one byte, two and four.
#[test]
fn max_pool2d_of_large_windows_equals_stock() {
    for kernel in [[15, 17], [16, 16], [256, 257]] {
        let options = MaxPoolOptions::new(kernel).with_stride([1, 2]);
        let input = Input::random([1, 1, kernel[0] + 1, kernel[1] + 2]);
        Check::new([input], Setting::default())
            .same()
            .compare::<4>(&|t| F::max_pool2d(t.get(0), options.clone()), &|t| {
                module::max_pool2d(t.get(0), options.clone())
            });
    }
}

/// Enough planes for several threads.
#[test]
fn pools_of_many_elements_equal_stock() {
    let check = |shape: [usize; 4]| Check::new([Input::steps(shape, 50)], Setting::default()).same_output();
    let max = MaxPoolOptions::new([3, 3]).with_stride([2, 2]).with_padding([1, 1]);
    let avg = AvgPoolOptions::new([3, 3]).with_stride([2, 2]).with_padding([1, 1]);
    let bilinear = InterpolateOptions::new(InterpolateMode::Bilinear).with_output_size([50, 30]);
    for shape in [[3, 40, 33, 35], [1, 1, 300, 301]] {
        check(shape).compare::<4>(&|t| F::max_pool2d(t.get(0), max.clone()), &|t| {
            module::max_pool2d(t.get(0), max.clone())
        });
        check(shape).compare::<4>(&|t| F::avg_pool2d(t.get(0), avg.clone()), &|t| {
            module::avg_pool2d(t.get(0), avg.clone())
        });
        check(shape).compare::<4>(&|t| F::adaptive_avg_pool2d(t.get(0), [7, 9]), &|t| {
            module::adaptive_avg_pool2d(t.get(0), [7, 9])
        });
        check(shape).on(Backend::Flex).compare::<4>(&|t| F::interpolate(t.get(0), bilinear.clone()), &|t| {
            module::interpolate(t.get(0), bilinear.clone())
        });
    }
}

/// Burn dequantizes them.
#[test]
fn quantized_inputs_are_burns() {
    let _generator = generator();
    let device = Device::flex();
    let x = Tensor::<4>::random([1, 2, 6, 6], Distribution::Default, &device);
    let x = x.quantize_dynamic(&device.settings().quantization.scheme.with_value(QuantValue::Q8S));
    let same = |ours: Tensor<4>, stock: Tensor<4>| assert_eq!(ours.into_data(), stock.into_data());
    let (avg, max) = (AvgPoolOptions::new([2, 2]), MaxPoolOptions::new([2, 2]));
    let nearest = InterpolateOptions::new(InterpolateMode::Nearest).with_output_size([3, 4]);
    same(F::avg_pool2d(x.clone(), avg.clone()), module::avg_pool2d(x.clone(), avg));
    same(F::max_pool2d(x.clone(), max.clone()), module::max_pool2d(x.clone(), max));
    same(F::adaptive_avg_pool2d(x.clone(), [2, 3]), module::adaptive_avg_pool2d(x.clone(), [2, 3]));
    same(F::interpolate(x.clone(), nearest.clone()), module::interpolate(x, nearest));
}

macro_rules! avg_pool {
    ($pool:ident, $rank:literal, $dims:literal) => {
        mod $pool {
            use super::*;

            fn ours(options: AvgPoolOptions<$rank>) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| F::$pool(t.get(0), options.clone())
            }

            fn stock(options: AvgPoolOptions<$rank>) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| module::$pool(t.get(0), options.clone())
            }

            fn axes<A: Strategy<Value = Axis>>(axis: fn() -> A) -> impl Strategy<Value = [Axis; $rank]> {
                prop::array::uniform::<_, $rank>(axis().prop_map(|axis| Axis { dilation: 1, ..axis }))
            }

            #[test]
            fn equals_stock() {
                let (planes, flags) = ([1..3usize, 1..4], [any::<bool>(), any::<bool>()]);
                for_all(
                    128,
                    (planes, axes(usual_axis), flags, settings()),
                    |(planes, axes, [ceil_mode, include_pad], setting)| {
                        let options = avg_options(axes, ceil_mode, include_pad);
                        Check::new([Input::random::<$dims>(axes.shape(planes))], setting)
                            .same_output()
                            .compare(&ours(options.clone()), &stock(options.clone()));
                    },
                );
            }

            /// NdArray 0.22.1 panics in the backward pass of a window of padding.
            #[test]
            fn treats_odd_windows_as_stock() {
                let flags = [any::<bool>(), any::<bool>()];
                for_all(192, (axes(any_axis), flags), |(axes, [ceil_mode, include_pad])| {
                    let options = avg_options(axes, ceil_mode, include_pad);
                    let check = Check::new([Input::random::<$dims>(axes.shape([1, 2]))], Setting::default());
                    let check = match axes.iter().any(Axis::has_empty_windows) {
                        true => check.on(Backend::Flex),
                        false => check,
                    };
                    check.same_output().compare_panics(&ours(options.clone()), &stock(options.clone()));
                });
                let options = avg_options([FIXED; $rank], false, false);
                for planes in [[0, 2], [2, 0]] {
                    Check::new([Input::random::<$dims>([FIXED; $rank].shape(planes))], Setting::default())
                        .compare_panics(&ours(options.clone()), &stock(options.clone()));
                }
            }

            #[test]
            fn equals_stock_in_half_precision() {
                for (dtype, include_pad) in HALF.into_iter().zip([false, true]) {
                    let options = avg_options([FIXED; $rank], true, include_pad);
                    Check::new([Input::random::<$dims>([FIXED; $rank].shape([2, 2]))], Setting::of(dtype))
                        .compare(&ours(options.clone()), &stock(options.clone()));
                }
            }

            #[test]
            fn is_differentiated() {
                for padding in [(1, 1), (0, 1)] {
                    let axes = [Axis { padding, ..FIXED }; $rank];
                    let options = avg_options(axes, true, false);
                    Check::new([Input::random::<$dims>(axes.shape([2, 2]))], Setting::default())
                        .differentiate(&ours(options));
                }
            }
        }
    };
}
avg_pool!(avg_pool1d, 1, 3);
avg_pool!(avg_pool2d, 2, 4);

macro_rules! adaptive_avg_pool {
    ($pool:ident, $rank:literal, $dims:literal, $size:expr) => {
        mod $pool {
            use super::*;

            type Sizes = [usize; $rank];

            fn ours(output: Sizes) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| F::$pool(t.get(0), $size(output))
            }

            fn stock(output: Sizes) -> impl Fn(&Operands) -> Tensor<$dims> {
                move |t| module::$pool(t.get(0), $size(output))
            }

            fn input(planes: [usize; 2], sizes: Sizes) -> Input {
                let shape =
                    std::array::from_fn::<_, $dims, _>(
                        |axis| {
                            if axis < 2 { planes[axis] } else { sizes[axis - 2] }
                        },
                    );
                Input::random(shape)
            }

            fn sizes(range: std::ops::Range<usize>) -> impl Strategy<Value = Sizes> {
                prop::array::uniform::<_, $rank>(range)
            }

            #[test]
            fn equals_stock() {
                let planes = [1..3usize, 1..4];
                for_all(
                    48,
                    (planes, sizes(1..8), sizes(1..7), settings()),
                    |(planes, sizes, output, setting)| {
                        let check = Check::new([input(planes, sizes)], setting).same_output();
                        check.compare(&ours(output), &stock(output));
                    },
                );
            }

            #[test]
            fn equals_stock_in_half_precision() {
                for dtype in HALF {
                    let check = Check::new([input([2, 2], [5; $rank])], Setting::of(dtype));
                    check.compare(&ours([3; $rank]), &stock([3; $rank]));
                }
            }

            #[test]
            fn is_differentiated() {
                let check = Check::new([input([2, 2], [5; $rank])], Setting::default());
                check.differentiate(&ours([3; $rank]));
            }

            #[test]
            fn treats_odd_shapes_as_stock() {
                for (planes, size, output) in [([0, 2], 3, 2), ([2, 2], 1, 1), ([2, 2], 3, 0), ([1, 1], 0, 1)]
                {
                    let check = Check::new([input(planes, [size; $rank])], Setting::default());
                    check.compare_panics(&ours([output; $rank]), &stock([output; $rank]));
                }
            }
        }
    };
}
adaptive_avg_pool!(adaptive_avg_pool1d, 1, 3, |[size]: [usize; 1]| size);
adaptive_avg_pool!(adaptive_avg_pool2d, 2, 4, |sizes: [usize; 2]| sizes);
adaptive_avg_pool!(adaptive_avg_pool3d, 3, 5, |sizes: [usize; 3]| sizes);

mod interpolate {
    use super::*;
    use InterpolateMode::*;

    fn ours(options: InterpolateOptions) -> impl Fn(&Operands) -> Tensor<4> {
        move |t| F::interpolate(t.get(0), options.clone())
    }

    fn stock(options: InterpolateOptions) -> impl Fn(&Operands) -> Tensor<4> {
        move |t| module::interpolate(t.get(0), options.clone())
    }

    fn modes(modes: &[InterpolateMode]) -> impl Strategy<Value = InterpolateOptions> + use<> {
        let size = prop_oneof![
            [1..9usize, 1..9].prop_map(|size| (Some(size), None)),
            [1..9u8, 1..9].prop_map(|scale| (None, Some(scale.map(|scale| f32::from(scale) / 2.0)))),
        ];
        (prop::sample::select(modes.to_vec()), any::<bool>(), size).prop_map(|(mode, corners, size)| {
            let options = InterpolateOptions::new(mode).with_align_corners(corners);
            match size {
                (Some(size), _) => options.with_output_size(size),
                (_, scale) => options.with_scale_factor(scale.expect("a size or a scale")),
            }
        })
    }

    /// NdArray 0.22.1 has gradients for nearest only.
    #[test]
    fn equals_stock() {
        let shape = [1..3usize, 1..3, 2..8, 2..8];
        let modes_of_flex = [Nearest, Bilinear, Bicubic];
        for_all(128, (shape.clone(), modes(&modes_of_flex), settings()), |(shape, options, setting)| {
            let check = Check::new([Input::random(shape)], setting).on(Backend::Flex).same_output();
            check.compare(&ours(options.clone()), &stock(options));
        });
        for_all(32, (shape, modes(&[Nearest]), settings()), |(shape, options, setting)| {
            let check = Check::new([Input::random(shape)], setting).same_output();
            check.compare(&ours(options.clone()), &stock(options));
        });
    }

    #[test]
    fn is_differentiated() {
        let shape = [1..3usize, 1..3, 1..7, 1..7];
        let all = [Nearest, Bilinear, Bicubic, Lanczos3];
        for_all(60, (shape, modes(&all)), |(shape, options)| {
            Check::new([Input::random(shape)], Setting::default()).differentiate(&ours(options));
        });
    }

    #[test]
    fn equals_stock_in_half_precision() {
        for dtype in HALF {
            for mode in [Nearest, Bilinear, Bicubic] {
                let options = InterpolateOptions::new(mode).with_output_size([5, 7]);
                let check = Check::new([Input::random([2, 2, 4, 3])], Setting::of(dtype));
                check.compare(&ours(options.clone()), &stock(options));
            }
        }
    }

    #[test]
    fn treats_odd_shapes_as_stock() {
        for (shape, output) in [([0, 2, 3, 3], [2, 2]), ([2, 2, 1, 1], [1, 1]), ([1, 1, 1, 1], [3, 3])] {
            let options = InterpolateOptions::new(Nearest).with_output_size(output);
            let check = Check::new([Input::random(shape)], Setting::default());
            check.compare_panics(&ours(options.clone()), &stock(options));
        }
        let check = Check::new([Input::random([1, 1, 3, 3])], Setting::default());
        let without_gradient = InterpolateOptions::new(NearestExact).with_output_size([2, 2]);
        check
            .clone()
            .on(Backend::Flex)
            .compare_panics(&ours(without_gradient.clone()), &stock(without_gradient));
        let sizeless = InterpolateOptions::new(Bilinear);
        check.compare_panics(&ours(sizeless.clone()), &stock(sizeless));
    }
}

/// Windows of more elements than f16 counts to, of planes that differ: Flex sums in f16, where they would be half as large.
#[test]
fn means_of_many_elements_in_half_precision() {
    let plain = Device::flex();
    for device in [plain.clone(), plain.autodiff()] {
        let planes = Tensor::<1, burn::tensor::Int>::arange(0..36, &device).float().reshape([4, 9, 1, 1]);
        let x = planes.clone().expand([4, 9, 64, 65]).cast(DType::F16);
        let x = if device.is_autodiff() { x.detach().require_grad() } else { x };
        let options = AvgPoolOptions::new([64, 65]).with_stride([1, 1]);
        let row = |x: Tensor<4>| x.narrow(2, 0, 1).squeeze_dim::<3>(2).repeat_dim(2, 64);
        let one = AvgPoolOptions::new([4160]).with_stride([1]);
        let means = [
            F::adaptive_avg_pool2d(x.clone(), [1, 1]),
            F::avg_pool2d(x.clone(), options),
            F::adaptive_avg_pool1d(row(x.clone()), 1).unsqueeze_dim(3),
            F::avg_pool1d(row(x.clone()), one).unsqueeze_dim(3),
            F::adaptive_avg_pool3d(x.unsqueeze_dim(2), [1, 1, 1]).squeeze_dim(2),
        ];
        for mean in means {
            assert_eq!(mean.dtype(), DType::F16);
            assert_eq!(mean.cast(DType::F32).into_data(), planes.to_data());
        }
    }
}
