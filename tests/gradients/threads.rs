//! Compares results in pools of 1, 2, 4, 16 and 64 threads: of few planes and of few long rows, which many threads cut. Outputs and
//! gradients of inputs are the same to the last bit, whatever the number of threads; those of parameters are the same to rounding.
use burn::tensor::{
    DType, Device, Int, Tensor, TensorData, module,
    ops::{
        AvgPoolOptions, ConvOptions, ConvTransposeOptions, InterpolateMode, InterpolateOptions,
        MaxPoolOptions,
    },
};
use burn_memsave::functional as F;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::sync::OnceLock;

const POOLS: [usize; 5] = [1, 2, 4, 16, 64];

fn pools() -> &'static [ThreadPool] {
    static MADE: OnceLock<Vec<ThreadPool>> = OnceLock::new();
    MADE.get_or_init(|| {
        let pool = |threads| ThreadPoolBuilder::new().num_threads(threads).build().expect("so many threads");
        POOLS.into_iter().map(pool).collect()
    })
}

/// Numbers between -1 and 1 in no order, others for every `seed`.
fn numbers<const D: usize>(shape: [usize; D], seed: u64, dtype: DType) -> Tensor<D> {
    let number = |at: u64| {
        let mixed = (at + (seed << 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product::<usize>() as u64).map(number).collect();
    Tensor::<D>::from_data(TensorData::new(values, shape), &Device::flex().autodiff()).cast(dtype)
}

/// Compares `forward(x, parameters)` in all pools.
fn alike<const D: usize, const O: usize>(
    name: &str,
    x: ([usize; D], DType),
    parameters: &[usize],
    forward: impl Fn(Tensor<D>, &[Tensor<1>]) -> Tensor<O> + Sync,
) {
    alike_within(1e-6, name, x, parameters, forward);
}

/// [`alike`], where gradients of parameters in f32 differ by so much at most, in parts of the largest.
fn alike_within<const D: usize, const O: usize>(
    bound: f64,
    name: &str,
    (shape, dtype): ([usize; D], DType),
    parameters: &[usize],
    forward: impl Fn(Tensor<D>, &[Tensor<1>]) -> Tensor<O> + Sync,
) {
    let forward: &(dyn Fn(Tensor<D>, &[Tensor<1>]) -> Tensor<O> + Sync) = &forward;
    let run = |pool: &ThreadPool| {
        pool.install(|| {
            let x = numbers(shape, 1, dtype).require_grad();
            let of = |(seed, &len): (u64, &usize)| numbers([len], seed, dtype).require_grad();
            let parameters: Vec<Tensor<1>> = (2..).zip(parameters).map(of).collect();
            let y = forward(x.clone(), &parameters);
            let loss = (y.clone() * numbers(y.dims(), 10, dtype)).sum();
            let mut grads = loss.backward();
            let of_parameters = parameters.iter().map(|parameter| parameter.grad_remove(&mut grads));
            let of_parameters: Vec<_> = of_parameters.map(|grad| grad.map(Tensor::into_data)).collect();
            let of_x = x.grad_remove(&mut grads).map(Tensor::into_data);
            ([Some(y.into_data()), of_x], of_parameters)
        })
    };
    let (exact, rounded) = run(&pools()[0]);
    for (threads, pool) in POOLS.into_iter().zip(pools()) {
        let (others, parameters) = run(pool);
        for ((what, one), other) in ["output", "gradient of x"].into_iter().zip(&exact).zip(&others) {
            assert!(
                one.is_some() && one == other,
                "{name} of {shape:?} in {dtype:?}: {what}, {threads} threads"
            );
        }
        for (one, other) in rounded.iter().zip(&parameters) {
            let [one, other] = [one, other].map(|grad| {
                let grad = grad.as_ref().expect("a gradient of every parameter");
                grad.iter::<f64>().collect::<Vec<_>>()
            });
            let largest = one.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
            let bound = largest * if dtype == DType::F32 { bound } else { 1e-2 };
            let close = one.iter().zip(&other).all(|(one, other)| (one - other).abs() <= bound);
            assert!(close, "{name} of {shape:?} in {dtype:?}: gradient of a parameter, {threads} threads");
        }
    }
}

/// For weights whose gradients are summed in pieces, as many as threads need.
const IN_PIECES: f64 = 5e-6;

const LONG: usize = 1 << 16;

#[test]
fn softmaxes_of_long_rows() {
    for (rows, length) in [(1, 3 * LONG + 17), (3, LONG + 1), (5, LONG)] {
        for dtype in [DType::F32, DType::BF16] {
            let shape = ([rows, length], dtype);
            alike("softmax", shape, &[], |x, _| F::softmax(x * 9.0, 1));
            alike("log_softmax", shape, &[], |x, _| F::log_softmax(x * 9.0, 1));
        }
        let shape = ([rows, length], DType::F32);
        alike("softmin", shape, &[], |x, _| F::softmin(x, 1));
        alike("quiet_softmax", shape, &[], |x, _| F::quiet_softmax(x, 1));
    }
}

#[test]
fn softmaxes_of_long_columns() {
    let compare = |shape: [usize; 3], dtype| {
        alike("softmax", (shape, dtype), &[], |x, _| F::softmax(x * 9.0, 1));
        alike("log_softmax", (shape, dtype), &[], |x, _| F::log_softmax(x * 9.0, 1));
    };
    for shape in [
        [1, 70_001, 3],
        [1, 2100, 65],
        [2, 5000, 40],
        [1, 600, 1030],
        [3, 33_000, 2],
        [1, 2100, 1500],
        [2, 3000, 200],
    ] {
        [DType::F32, DType::BF16, DType::F64].into_iter().for_each(|dtype| compare(shape, dtype));
        alike("softmin", (shape, DType::F32), &[], |x, _| F::softmin(x, 1));
        alike("quiet_softmax", (shape, DType::F32), &[], |x, _| F::quiet_softmax(x, 1));
    }
}

#[test]
fn norms_of_long_rows() {
    for dtype in [DType::F32, DType::BF16] {
        for (rows, length) in [(1, 3 * LONG + 17), (3, LONG + 16), (40, 1 << 13)] {
            let shape = ([rows, length], dtype);
            let norm = |x, of: &[Tensor<1>]| F::layer_norm(x, of[0].clone(), Some(of[1].clone()), 1e-5);
            alike("layer_norm", shape, &[length; 2], norm);
            alike("rms_norm", shape, &[length], |x, of| F::rms_norm(x, of[0].clone(), 1e-5));
            let alone = move |x, _: &[Tensor<1>]| {
                F::layer_norm(
                    x,
                    Tensor::<1>::ones([length], &Device::flex().autodiff()).cast(dtype),
                    None,
                    1e-5,
                )
            };
            alike("layer_norm of x alone", shape, &[], alone);
        }
        for (shape, groups) in [([1, 6, 300, 301], 1), ([2, 4, 260, 130], 2), ([3, 8, 64, 160], 1)] {
            alike("group_norm", (shape, dtype), &[shape[1]; 2], |x, of| {
                F::group_norm(x, Some(of[0].clone()), Some(of[1].clone()), groups, 1e-5)
            });
            alike("group_norm of x alone", (shape, dtype), &[], |x, _| {
                F::group_norm(x, None, None, groups, 1e-5)
            });
        }
    }
}

#[test]
fn cross_entropies_of_many_classes() {
    for (rows, classes) in [(1, 128_256), (3, LONG + 1), (7, LONG - 1)] {
        let targets = || {
            let targets: Vec<i64> = (0..rows).map(|row| (row * 60_013 % classes) as i64).collect();
            Tensor::<1, Int>::from_data(TensorData::new(targets, [rows]), &Device::flex().autodiff())
        };
        for (dtype, smoothing) in [(DType::F32, None), (DType::F32, Some(0.1)), (DType::BF16, Some(0.1))] {
            let shape = ([rows, classes], dtype);
            alike("cross_entropy", shape, &[], |x, _| F::cross_entropy(x, targets(), None, smoothing));
            let weights = || Some(numbers([classes], 20, dtype).abs());
            alike("weighted cross_entropy", shape, &[], |x, _| {
                F::cross_entropy(x, targets(), weights(), smoothing)
            });
        }
    }
}

#[test]
fn max_pools_of_few_planes() {
    for shape in [[1, 1, 257, 300], [3, 1, 200, 5], [1, 3, 90, 1001]] {
        for (kernel, stride, padding, dilation) in [(3, 2, 1, 1), (2, 2, 0, 1), (5, 1, 2, 1), (3, 3, 1, 2)] {
            let options = || {
                let options = MaxPoolOptions::new([kernel; 2]).with_stride([stride; 2]);
                let options = options.with_padding_pairs([(padding, padding); 2]);
                options.with_dilation([dilation, 1]).with_ceil_mode(true)
            };
            for dtype in [DType::F32, DType::BF16] {
                alike("max_pool2d", (shape, dtype), &[], |x, _| F::max_pool2d(x, options()));
            }
        }
    }
}

#[test]
fn maps_along_axes_of_few_planes() {
    for dtype in [DType::F32, DType::BF16] {
        for shape in [[1, 1, 257, 300], [1, 3, 90, 501]] {
            let pool = |kernel, stride, padding| {
                let options = AvgPoolOptions::new([kernel; 2]).with_stride([stride; 2]);
                options.with_padding_pairs([(padding, padding); 2]).with_ceil_mode(true)
            };
            for (kernel, stride, padding) in [(2, 2, 0), (3, 1, 1), (5, 3, 2)] {
                alike("avg_pool2d", (shape, dtype), &[], |x, _| {
                    F::avg_pool2d(x, pool(kernel, stride, padding))
                });
            }
            for size in [[1, 1], [7, 5], [400, 450]] {
                alike("adaptive", (shape, dtype), &[], |x, _| F::adaptive_avg_pool2d(x, size));
            }
            for mode in [
                InterpolateMode::Nearest,
                InterpolateMode::Bilinear,
                InterpolateMode::Bicubic,
                InterpolateMode::Lanczos3,
            ] {
                for size in [[2 * shape[2], 2 * shape[3]], [100, 211]] {
                    let options = InterpolateOptions::new(mode.clone()).with_output_size(size);
                    alike("interpolate", (shape, dtype), &[], |x, _| F::interpolate(x, options.clone()));
                }
            }
        }
        alike("avg_pool1d", ([1, 1, 300_001], dtype), &[], |x, _| {
            F::avg_pool1d(x, AvgPoolOptions::new([4]).with_stride([3]))
        });
    }
}

#[test]
fn depthwise_convolutions_of_few_planes() {
    for (shape, kernel, stride, dilation) in [
        ([1, 2, 257, 300], 3, 1, 1),
        ([1, 32, 112, 112], 3, 1, 1),
        ([1, 3, 200, 333], 5, 2, 1),
        ([1, 2, 129, 401], 3, 1, 3),
        ([1, 3, 700, 90], 7, 1, 1),
        ([5, 2, 129, 140], 3, 2, 1),
    ] {
        let channels = shape[1];
        let options = || ConvOptions::new([stride; 2], [kernel / 2; 2], [dilation; 2], channels);
        for dtype in [DType::F32, DType::BF16] {
            let weight = channels * kernel * kernel;
            alike_within(IN_PIECES, "depthwise", (shape, dtype), &[weight, channels], |x, of| {
                let weight = of[0].clone().reshape([channels, 1, kernel, kernel]);
                F::conv2d(x, weight, Some(of[1].clone()), options())
            });
        }
    }
}

/// Planes of a single row.
#[test]
fn signals() {
    for shape in [[1, 1, 200_001], [2, 2, 70_000], [1, 3, 40_961]] {
        let channels = shape[1];
        for dtype in [DType::F32, DType::BF16] {
            for (kernel, stride, dilation) in [(3, 1, 1), (25, 2, 1), (3, 1, 4000), (40, 17, 1), (1, 1, 1)] {
                let lengths = [channels * kernel, channels];
                let weight = |of: &Tensor<1>| of.clone().reshape([channels, 1, kernel]);
                alike_within(IN_PIECES, "conv1d", (shape, dtype), &lengths, |x, of| {
                    let options = ConvOptions::new([stride], [kernel / 2], [dilation], channels);
                    F::conv1d(x, weight(&of[0]), Some(of[1].clone()), options)
                });
                let kept = shape[2] / stride;
                let shape = [shape[0], channels, kept];
                alike_within(IN_PIECES, "conv_transpose1d", (shape, dtype), &lengths, |x, of| {
                    let options = ConvTransposeOptions::new([stride], [0], [0], [dilation], channels);
                    F::conv_transpose1d(x, weight(&of[0]), Some(of[1].clone()), options)
                });
            }
            for (kernel, stride, padding, dilation) in
                [(2, 2, 0, 1), (5, 1, 2, 1), (3, 3, 1, 100), (400, 160, 7, 1)]
            {
                let options = || {
                    let options = MaxPoolOptions::new([kernel]).with_stride([stride]);
                    let options = options.with_padding_pairs([(padding, padding)]);
                    options.with_dilation([dilation]).with_ceil_mode(true)
                };
                alike("max_pool1d", (shape, dtype), &[], |x, _| F::max_pool1d(x, options()));
            }
        }
    }
}

#[test]
fn local_responses_of_few_planes() {
    for shape in [[1, 2, 300, 301], [2, 1, 500, 260], [1, 5, 1, 70_001]] {
        alike("local_response_norm", (shape, DType::F32), &[], |x, _| {
            F::local_response_norm(x, 3, 1e-2, 0.75, 1.0)
        });
    }
}

/// Asserts that a result in f32 is that of stock Burn in f64.
fn close_to_f64<const D: usize>(what: &str, ours: Tensor<D>, stock: Tensor<D>) {
    assert_eq!(ours.dims(), stock.dims());
    let [ours, stock] = [ours, stock].map(|x| x.into_data().iter::<f64>().collect::<Vec<_>>());
    let scale = stock.iter().fold(0.0, |scale: f64, x| scale.max(x.abs()));
    for (ours, stock) in ours.into_iter().zip(stock) {
        assert!((ours - stock).abs() <= 1e-5 * scale, "{what}: {ours} beside {stock}, of {scale}");
    }
}

/// The truth: stock Burn's results of the same signals, in a pool of many threads.
#[test]
fn signals_are_computed_as_in_stock_burn() {
    let channels = 3;
    pools()[4].install(|| {
        for (kernel, stride, dilation) in [(3, 1, 1), (25, 2, 1), (3, 1, 4000), (40, 17, 1)] {
            let run = |dtype, conv: &dyn Fn(Tensor<3>, Tensor<3>) -> Tensor<3>| {
                let x = numbers([2, channels, 50_031], 1, dtype).require_grad();
                let weight = numbers([channels, 1, kernel], 2, dtype).require_grad();
                let y = conv(x.clone(), weight.clone());
                let mut grads = (y.clone() * numbers(y.dims(), 3, dtype)).sum().backward();
                let of = |tensor: &Tensor<3>, grads: &mut _| tensor.grad_remove(grads).expect("a gradient");
                let of_x = of(&x, &mut grads);
                (y.inner(), of_x, of(&weight, &mut grads))
            };
            let options = || ConvOptions::new([stride], [kernel / 2], [dilation], channels);
            let transposed = || ConvTransposeOptions::new([stride], [1], [0], [dilation], channels);
            for (what, ours, stock) in [
                (
                    "conv1d",
                    run(DType::F32, &|x, weight| F::conv1d(x, weight, None, options())),
                    run(DType::F64, &|x, weight| module::conv1d(x, weight, None, options())),
                ),
                (
                    "conv_transpose1d",
                    run(DType::F32, &|x, weight| F::conv_transpose1d(x, weight, None, transposed())),
                    run(DType::F64, &|x, weight| module::conv_transpose1d(x, weight, None, transposed())),
                ),
            ] {
                let case = format!("{what}, kernel {kernel}, stride {stride}, dilation {dilation}");
                close_to_f64(&case, ours.0, stock.0);
                close_to_f64(&format!("{case}, x"), ours.1, stock.1);
                close_to_f64(&format!("{case}, weight"), ours.2, stock.2);
            }
        }
    });
}

/// The truth: stock Burn's results of the same columns, in a pool of many threads.
#[test]
fn few_long_columns_are_computed_as_in_stock_burn() {
    pools()[4].install(|| {
        for shape in [[1, 20_001, 3], [2, 3000, 65]] {
            let run = |dtype, f: &dyn Fn(Tensor<3>) -> Tensor<3>| {
                let x = numbers(shape, 1, dtype).require_grad();
                let y = f(x.clone() * 9.0);
                let mut grads = (y.clone() * numbers(shape, 2, dtype)).sum().backward();
                [y.inner(), x.grad_remove(&mut grads).expect("a gradient")]
            };
            let softmax = [
                run(DType::F32, &|x| F::softmax(x, 1)),
                run(DType::F64, &|x| burn::tensor::activation::softmax(x, 1)),
            ];
            let log_softmax = [
                run(DType::F32, &|x| F::log_softmax(x, 1)),
                run(DType::F64, &|x| burn::tensor::activation::log_softmax(x, 1)),
            ];
            for [ours, stock] in [softmax, log_softmax] {
                for (ours, stock) in ours.into_iter().zip(stock) {
                    close_to_f64(&format!("softmaxes of {shape:?}"), ours, stock);
                }
            }
        }
    });
}

/// The truth: stock Burn's results of the same rows and planes, in a pool of many threads.
#[test]
fn few_long_rows_and_planes_are_computed_as_in_stock_burn() {
    let close = |name: &str, ours: Tensor<2>, stock: Tensor<2>| {
        let scale = stock.clone().abs().max().into_scalar::<f32>();
        let difference = (ours - stock).abs().max().into_scalar::<f32>();
        assert!(difference <= 1e-5 * scale, "{name}: {difference} of {scale}");
    };
    pools()[4].install(|| {
        let x = || numbers([2, 2 * LONG + 33], 1, DType::F32).require_grad();
        let dy = numbers([2, 2 * LONG + 33], 2, DType::F32);
        let compare = |name: &str,
                       ours: &dyn Fn(Tensor<2>) -> Tensor<2>,
                       stock: &dyn Fn(Tensor<2>) -> Tensor<2>| {
            let [(y, dx), (stock_y, stock_dx)] = [ours, stock].map(|forward| {
                let x = x();
                let y = forward(x.clone());
                let mut grads = (y.clone() * dy.clone()).sum().backward();
                (Tensor::<2>::from_data(y.into_data(), &Device::flex()), x.grad_remove(&mut grads).unwrap())
            });
            close(name, y, Tensor::from_data(stock_y.into_data(), &Device::flex()));
            close(
                name,
                Tensor::from_data(dx.into_data(), &Device::flex()),
                Tensor::from_data(stock_dx.into_data(), &Device::flex()),
            );
        };
        compare("softmax", &|x| F::softmax(x, 1), &|x| burn::tensor::activation::softmax(x, 1));
        compare("log_softmax", &|x| F::log_softmax(x, 1), &|x| burn::tensor::activation::log_softmax(x, 1));
        let ones = || Tensor::ones([2 * LONG + 33], &Device::flex().autodiff());
        compare("layer_norm", &|x| F::layer_norm(x, ones(), None, 1e-5), &|x| {
            module::layer_norm(x, ones(), None, 1e-5)
        });
    });
}
