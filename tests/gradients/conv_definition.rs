//! Compares convolutions with their definition: sums in f64, one product after the other. Sizes are close to those of the tiles in the
//! CPU kernels: 64 and 160 points, 128 products, 6 rows, 16 lanes.
use crate::common::*;
use burn::tensor::{
    DType, Device, Tensor, TensorData,
    ops::{ConvOptions, ConvTransposeOptions},
};
use burn_memsave::functional as F;
use proptest::prelude::*;

/// Axes that the definition has; a convolution over fewer has leading axes of size 1.
const AXES: usize = 3;

/// `large[n, (o,) i, stride t + dilation k - padding]` belongs to `small[n, o, t]` and `weight[o, i, k]`. A convolution makes
/// `small` from `large`, a transposed one `large` from `small`.
#[derive(Clone, Debug)]
struct Definition {
    batch: usize,
    groups: usize,
    /// Channels of a group: of what is large, and of what is small.
    channels: [usize; 2],
    large: [usize; AXES],
    small: [usize; AXES],
    kernel: [usize; AXES],
    stride: [usize; AXES],
    dilation: [usize; AXES],
    padding: [usize; AXES],
}

/// Places in `[batch, channels, axes...]`.
fn places(sizes: [usize; AXES]) -> impl Iterator<Item = [usize; AXES]> {
    (0..sizes.iter().product()).map(move |place| {
        let [_, second, third] = sizes;
        [place / third / second, place / third % second, place % third]
    })
}

fn place(sizes: [usize; AXES], at: [usize; AXES]) -> usize {
    (at[0] * sizes[1] + at[1]) * sizes[2] + at[2]
}

impl Definition {
    fn lens(&self) -> [usize; 3] {
        let Self { batch, groups, channels: [i, o], .. } = self;
        let product = |sizes: [usize; AXES]| sizes.iter().product::<usize>();
        [
            batch * groups * i * product(self.large),
            batch * groups * o * product(self.small),
            groups * o * i * product(self.kernel),
        ]
    }

    /// Calls `f` with the places of every triple in `large`, `small` and `weight`.
    fn triples(&self, mut f: impl FnMut(usize, usize, usize)) {
        let &Self { batch, groups, channels: [inputs, outputs], large, small, kernel, .. } = self;
        let [of_large, of_small, of_kernel] =
            [large, small, kernel].map(|sizes| sizes.iter().product::<usize>());
        for k in places(kernel) {
            for t in places(small) {
                let at: Option<Vec<usize>> = (0..AXES)
                    .map(|axis| {
                        let at = self.stride[axis] * t[axis] + self.dilation[axis] * k[axis];
                        at.checked_sub(self.padding[axis]).filter(|&at| at < large[axis])
                    })
                    .collect();
                let Some(at) = at else { continue };
                let [at, t] = [place(large, [at[0], at[1], at[2]]), place(small, t)];
                for n in 0..batch {
                    for o in 0..groups * outputs {
                        for i in 0..inputs {
                            let large = (n * groups + o / outputs) * inputs + i;
                            f(
                                large * of_large + at,
                                (n * groups * outputs + o) * of_small + t,
                                (o * inputs + i) * of_kernel + place(kernel, k),
                            );
                        }
                    }
                }
            }
        }
    }
}

/// Numbers between -1 and 1 that repeat late, exact in f32.
fn numbers(len: usize, seed: usize) -> Vec<f64> {
    (0..len).map(|at| f64::from(((at * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0)).collect()
}

fn assert_close(what: &str, definition: &Definition, found: Tensor<1>, expected: &[f64]) {
    let tolerance = if found.dtype() == DType::F64 { 1e-11 } else { 1e-4 };
    let found: Vec<f64> = found.cast(DType::F64).into_data().try_to_vec().expect("of f64");
    assert_eq!(found.len(), expected.len(), "{what} of {definition:?}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error <= tolerance * (1.0 + expected.abs()),
            "{what} of {definition:?}: {found} at {at}, not {expected}"
        );
    }
}

/// Any sizes, along `rank` axes.
fn definitions(rank: usize, transposed: bool) -> impl Strategy<Value = Definition> {
    let most = [150usize, 20, 9][rank - 1]; // with the channels, enough for kernels of ours and for Burn's
    let axis = (1..=most, 1..4usize, 1..4usize, 1..3usize, 0..3usize, 0..3usize).prop_map(
        move |(size, kernel, stride, dilation, padding, rest)| {
            let extent = dilation * (kernel - 1) + 1;
            let small = size.div_ceil(stride);
            let reached = (small - 1) * stride + extent;
            if transposed {
                // Output padding of a stride or more makes room that no window belongs to.
                let padding = padding.min((reached + rest - 1) / 2);
                return [reached + rest - 2 * padding, small, kernel, stride, dilation, padding];
            }
            let large = reached.saturating_sub(2 * padding).max(1) + rest.min(stride - 1);
            let small = (large + 2 * padding - extent) / stride + 1;
            [large, small, kernel, stride, dilation, padding]
        },
    );
    let axes = prop::array::uniform3(axis);
    (1..4usize, 1..4usize, 1..18usize, 1..30usize, axes).prop_map(
        move |(batch, groups, inputs, outputs, mut axes)| {
            axes[..AXES - rank].fill([1, 1, 1, 1, 1, 0]);
            let of = |number: usize| axes.map(|axis| axis[number]);
            Definition {
                batch,
                groups,
                channels: [inputs, outputs],
                large: of(0),
                small: of(1),
                kernel: of(2),
                stride: of(3),
                dilation: of(4),
                padding: of(5),
            }
        },
    )
}

macro_rules! equals_its_definition {
    ($($conv:ident, $transposed:ident, $rank:literal, $dims:literal, $cases:literal;)+) => {$(
        #[test]
        fn $conv() {
            for_all($cases, definitions($rank, false), |definition| check_conv::$conv(&definition, Backend::Flex, DType::F64));
        }

        #[test]
        fn $transposed() {
            for_all($cases, definitions($rank, true), |definition| check_transposed::$conv(&definition, Backend::Flex, DType::F64));
        }
    )+

    mod check_conv {
        use super::*;
        $(pub fn $conv(definition: &Definition, backend: Backend, dtype: DType) {
            let tail = AXES - $rank;
            let options = ConvOptions::new(
                std::array::from_fn::<_, $rank, _>(|axis| definition.stride[axis + tail]),
                std::array::from_fn(|axis| definition.padding[axis + tail]),
                std::array::from_fn(|axis| definition.dilation[axis + tail]),
                definition.groups,
            );
            check::<$dims>(definition, backend, dtype, false, &|x, weight, bias| {
                F::$conv(x, weight, Some(bias), options.clone())
            });
        })+
    }

    mod check_transposed {
        use super::*;
        $(pub fn $conv(definition: &Definition, backend: Backend, dtype: DType) {
            let tail = AXES - $rank;
            let Definition { large, small, kernel, stride, dilation, padding, .. } = *definition;
            let rest = |axis: usize| {
                large[axis] + 2 * padding[axis] - (small[axis] - 1) * stride[axis] - dilation[axis] * (kernel[axis] - 1) - 1
            };
            let options = ConvTransposeOptions::new(
                std::array::from_fn::<_, $rank, _>(|axis| stride[axis + tail]),
                std::array::from_fn(|axis| padding[axis + tail]),
                std::array::from_fn(|axis| rest(axis + tail)),
                std::array::from_fn(|axis| dilation[axis + tail]),
                definition.groups,
            );
            check::<$dims>(definition, backend, dtype, true, &|x, weight, bias| {
                F::$transposed(x, weight, Some(bias), options.clone())
            });
        })+
    }
    };
}
equals_its_definition! {
    conv1d, conv_transpose1d, 1, 3, 48;
    conv2d, conv_transpose2d, 2, 4, 64;
    conv3d, conv_transpose3d, 3, 5, 32;
}

type Op<'a, const D: usize> = &'a dyn Fn(Tensor<D>, Tensor<D>, Tensor<1>) -> Tensor<D>;

/// Result and gradients of a convolution, or of a transposed one, against sums over all triples.
fn check<const D: usize>(
    definition: &Definition,
    backend: Backend,
    dtype: DType,
    transposed: bool,
    op: Op<D>,
) {
    let Definition { batch, groups, channels: [inputs, outputs], large, small, kernel, .. } = *definition;
    let device: Device = backend.device().autodiff();
    let [of_large, of_small, of_weight] = definition.lens();
    let [x_values, weight_values, dy_values] = match transposed {
        false => [of_large, of_weight, of_small],
        true => [of_small, of_weight, of_large],
    }
    .map(|len| numbers(len, len));
    let shape = |head: [usize; 2], tail: [usize; AXES]| -> [usize; D] {
        std::array::from_fn(|axis| if axis < 2 { head[axis] } else { tail[axis + AXES - D] })
    };
    let [all_inputs, all_outputs] = [inputs, outputs].map(|channels| channels * groups);
    let (of_x, of_y) = match transposed {
        false => (shape([batch, all_inputs], large), shape([batch, all_outputs], small)),
        true => (shape([batch, all_outputs], small), shape([batch, all_inputs], large)),
    };
    let bias_values = numbers(of_y[1], 3);
    let tensor = |values: &[f64], shape: [usize; D]| {
        Tensor::<D>::from_data(TensorData::new(values.to_vec(), shape), (&device, dtype)).require_grad()
    };
    let x = tensor(&x_values, of_x);
    let weight = tensor(&weight_values, shape([all_outputs, inputs], kernel));
    let bias = TensorData::new(bias_values.clone(), [of_y[1]]);
    let bias = Tensor::<1>::from_data(bias, (&device, dtype)).require_grad();
    let dy = tensor(&dy_values, of_y).detach().set_require_grad(false);

    let y = op(x.clone(), weight.clone(), bias.clone());
    assert_eq!(y.dims(), of_y, "{definition:?}");
    let gradients = (y.clone() * dy).sum().backward();

    let per_channel: usize = of_y[2..].iter().product();
    let mut expected_y: Vec<f64> =
        (0..dy_values.len()).map(|at| bias_values[at / per_channel % of_y[1]]).collect();
    let mut expected_dx = vec![0.0; x_values.len()];
    let mut expected_dweight = vec![0.0; weight_values.len()];
    definition.triples(|large, small, weight| {
        let (x, y) = if transposed { (small, large) } else { (large, small) };
        expected_y[y] += x_values[x] * weight_values[weight];
        expected_dx[x] += dy_values[y] * weight_values[weight];
        expected_dweight[weight] += x_values[x] * dy_values[y];
    });
    let mut expected_dbias = vec![0.0; of_y[1]];
    dy_values.iter().enumerate().for_each(|(at, dy)| expected_dbias[at / per_channel % of_y[1]] += dy);

    let gradient = |tensor: &Tensor<D>| tensor.grad(&gradients).expect("tracked").flatten(0, D - 1);
    assert_close("y", definition, y.flatten(0, D - 1), &expected_y);
    assert_close("dx", definition, gradient(&x), &expected_dx);
    assert_close("dweight", definition, gradient(&weight), &expected_dweight);
    assert_close("dbias", definition, bias.grad(&gradients).expect("tracked"), &expected_dbias);
}

/// A square over the last two axes.
fn square(size: usize) -> [usize; AXES] {
    [1, size, size]
}

impl Definition {
    /// A kernel of 3x3 over squares that stay as large as they are.
    fn square(batch: usize, channels: [usize; 2], size: usize) -> Self {
        let (large, small, kernel) = (square(size), square(size), square(3));
        let (stride, dilation, padding) = ([1; AXES], [1; AXES], [0, 1, 1]);
        Self { batch, groups: 1, channels, large, small, kernel, stride, dilation, padding }
    }
}

/// Large enough for several threads, several tiles per thread, and several parts of every sum; sizes next to those of tiles.
#[test]
fn of_many_tiles() {
    let base = Definition::square(3, [15, 13], 31);
    let definitions = [
        base.clone(),
        Definition { batch: 1, channels: [65, 67], large: square(9), small: square(9), ..base.clone() },
        Definition { small: square(16), stride: [1, 2, 2], ..base.clone() },
        Definition { kernel: square(1), padding: [0; AXES], channels: [129, 17], ..base.clone() },
        Definition { kernel: square(1), padding: [0; AXES], channels: [17, 129], ..base.clone() },
        // A weight that is larger than what it is multiplied with.
        Definition {
            kernel: square(1),
            padding: [0; AXES],
            channels: [50, 70],
            large: square(2),
            small: square(2),
            ..base.clone()
        },
        Definition { groups: 40, channels: [1, 1], ..base.clone() },
        Definition { groups: 40, channels: [1, 1], small: square(16), stride: [1, 2, 2], ..base.clone() },
        Definition { groups: 4, channels: [5, 7], ..base.clone() },
        Definition {
            kernel: square(12),
            large: square(40),
            small: square(29),
            padding: [0; AXES],
            channels: [2, 3],
            ..base
        },
    ];
    for definition in definitions {
        for backend in Backend::ALL {
            for dtype in [DType::F64, DType::F32] {
                check_conv::conv2d(&definition, backend, dtype);
                check_transposed::conv2d(&definition, backend, dtype);
            }
        }
    }
}

/// Many threads also divide channels, and sums over points into smaller parts.
#[test]
#[cfg(all(feature = "flex", feature = "rayon"))]
fn by_many_threads() {
    let base = Definition::square(1, [67, 130], 9);
    let pointwise = Definition { kernel: square(1), padding: [0; AXES], ..base.clone() };
    let definitions = [
        base.clone(),
        Definition { channels: [130, 67], small: square(5), stride: [1, 2, 2], ..base.clone() },
        Definition { groups: 3, channels: [33, 70], ..base },
        pointwise.clone(),
        Definition { batch: 3, channels: [130, 67], ..pointwise },
    ];
    for threads in [8, 64] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for definition in &definitions {
            pool.install(|| {
                check_conv::conv2d(definition, Backend::Flex, DType::F32);
                check_transposed::conv2d(definition, Backend::Flex, DType::F32);
            });
        }
    }
}

/// Padding of the input and of the output that cancel: as many results as there are inputs, but not in the same places.
#[test]
fn of_a_shifted_point() {
    let definition = Definition {
        batch: 2,
        groups: 1,
        channels: [3, 2],
        large: [1, 1, 200],
        small: [1, 1, 200],
        kernel: [1; AXES],
        stride: [1; AXES],
        dilation: [1; AXES],
        padding: [0, 0, 1],
    };
    check_transposed::conv1d(&definition, Backend::Flex, DType::F64);
}
