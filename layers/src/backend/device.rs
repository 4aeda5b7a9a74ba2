//! Any backend, by Burn's own operations: device backends, and remote ones.
//!
//! Bits are packed in 32-bit words of an integer tensor, so that they stay on the device.
use super::Saved;

mod cross_entropy;
mod element_loss;
mod low_rank;
mod recurrent;
mod softmax;

pub use cross_entropy::{log_sum_exp, logits_gradient, sum_log_probabilities};
pub use element_loss::{element_loss, element_loss_backward, element_loss_slopes, element_loss_sum, scale};
pub use low_rank::add_product;
pub use recurrent::{recurrent_backward, recurrent_forward, recurrent_replay};
pub use softmax::{softmax_along, softmax_along_backward};

use burn::backend::{
    Backend, Distribution, TensorMetadata, get_or_init_device_settings,
    ops::{InterpolateOptions, PadMode},
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{
    DType, IntDType, Shape, Slice, TensorData,
    ops::{AvgPoolOptions, MaxPoolOptions},
};

/// One bit per element, in words on the device.
#[derive(Clone, Debug)]
pub struct DeviceMask<B: Backend> {
    words: IntTensor<B>,
    shape: Shape,
}

impl<B: Backend> Saved for DeviceMask<B> {
    fn bytes(&self) -> usize {
        size_of::<i32>() * self.words.shape().num_elements()
    }
}

/// The winners of a max pool: Burn's indices.
#[derive(Clone, Debug)]
pub struct DeviceOffsets<B: Backend> {
    indices: IntTensor<B>,
    /// The shape of the input as Burn pooled it, padded already if the padding is asymmetric.
    pooled: Shape,
}

impl<B: Backend> Saved for DeviceOffsets<B> {
    fn bytes(&self) -> usize {
        self.indices.dtype().size() * self.indices.shape().num_elements()
    }
}

const BITS: usize = i32::BITS as usize;

/// Bit `i` of a word, for every `i`.
fn powers<B: Backend>(device: &B::Device) -> IntTensor<B> {
    let powers: Vec<i32> = (0..BITS).map(|bit| 1i32.wrapping_shl(bit as u32)).collect();
    B::int_from_data(TensorData::new(powers, [1, BITS]), device)
}

/// Packs a tensor of booleans. Sums of distinct powers of two never overflow, nor does a part of such a sum.
pub fn pack<B: Backend>(bits: BoolTensor<B>) -> DeviceMask<B> {
    let (shape, device) = (bits.shape(), bits.device());
    let len = shape.num_elements();
    let words = len.div_ceil(BITS);
    let bits = B::bool_into_int(B::bool_reshape(bits, Shape::new([len])), IntDType::I32);
    let padding = words * BITS - len;
    let bits = match padding {
        0 => bits,
        _ => B::int_cat(vec![bits, B::int_zeros(Shape::new([padding]), &device, IntDType::I32)], 0),
    };
    let bits = B::int_reshape(bits, Shape::new([words, BITS]));
    let powers = B::int_expand(powers::<B>(&device), Shape::new([words, BITS]));
    DeviceMask { words: B::int_sum_dim(B::int_mul(bits, powers), 1), shape }
}

/// The booleans that were packed.
fn unpack<B: Backend>(mask: &DeviceMask<B>) -> BoolTensor<B> {
    let device = mask.words.device();
    let spread = Shape::new([mask.words.shape()[0], BITS]);
    let words = B::int_expand(mask.words.clone(), spread.clone());
    let bits = B::bitwise_and(words, B::int_expand(powers::<B>(&device), spread.clone()));
    let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
    let clear = B::int_equal_elem(bits, 0.into(), bools);
    let clear = B::bool_reshape(clear, Shape::new([spread.num_elements()]));
    let clear = B::bool_slice(clear, &[Slice::from(0..mask.shape.num_elements())]);
    B::bool_reshape(B::bool_not(clear), mask.shape.clone())
}

/// See [`Masks::scale_by_mask`](super::Masks::scale_by_mask).
pub fn scale_by_mask<B: Backend>(
    x: FloatTensor<B>,
    mask: &DeviceMask<B>,
    slopes: [f64; 2],
) -> FloatTensor<B> {
    let scaled = |x: FloatTensor<B>, slope: f64| match slope {
        1.0 => x,
        _ => B::float_mul_scalar(x, slope.into()),
    };
    let set = unpack(mask);
    match slopes {
        [0.0, on] => B::float_mask_fill(scaled(x, on), B::bool_not(set), 0.into()),
        [off, on] => B::float_mask_where(scaled(x.clone(), off), set, scaled(x, on)),
    }
}

/// See [`Masks::bernoulli_mask`](super::Masks::bernoulli_mask).
pub fn bernoulli_mask<B: Backend>(
    shape: Shape,
    dtype: DType,
    device: &B::Device,
    probability: f64,
) -> DeviceMask<B> {
    let bools = get_or_init_device_settings::<B>(device).bool_dtype;
    let drawn = B::float_random(shape, Distribution::Bernoulli(probability), device, dtype.into());
    pack::<B>(B::float_not_equal_elem(drawn, 0.into(), bools))
}

/// Sums `x` over all axes in which `shape` has one element.
fn sum_to<B: Backend>(x: FloatTensor<B>, shape: Shape) -> FloatTensor<B> {
    let axes: Vec<usize> = (0..shape.num_dims()).filter(|&axis| shape[axis] != x.shape()[axis]).collect();
    match axes.is_empty() {
        true => x,
        false => B::float_reshape(B::float_sum_dims(x, &axes), shape),
    }
}

/// See [`MemBackend::prelu_x_backward`](super::MemBackend::prelu_x_backward).
pub fn prelu_x_backward<B: Backend>(
    mask: &DeviceMask<B>,
    alpha: FloatTensor<B>,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    B::float_mask_where(B::float_mul(dy.clone(), alpha), unpack(mask), dy)
}

/// See [`MemBackend::prelu_alpha_backward`](super::MemBackend::prelu_alpha_backward).
pub fn prelu_alpha_backward<B: Backend>(
    x: FloatTensor<B>,
    alpha: Shape,
    dy: FloatTensor<B>,
) -> FloatTensor<B> {
    sum_to::<B>(B::float_mul(B::float_clamp_max(x, 0.into()), dy), alpha)
}

/// Burn pads before it pools if the padding is asymmetric: the input as Burn pools it, and the padding that is left.
fn prepad<B: Backend>(x: FloatTensor<B>, options: &MaxPoolOptions<2>) -> (FloatTensor<B>, [usize; 2]) {
    match options.is_asymmetric() {
        false => (x, options.padding.map(|(begin, _)| begin)),
        true => {
            let [rows, columns] = options.padding;
            let padding = [(0, 0), (0, 0), rows, columns];
            (B::float_pad(x, &padding, PadMode::Constant(f32::NEG_INFINITY)), [0; 2])
        }
    }
}

/// The first `shape` elements of every axis, after `start`.
fn crop<B: Backend>(x: FloatTensor<B>, start: [usize; 4], shape: &Shape) -> FloatTensor<B> {
    let range = |axis: usize| Slice::from(start[axis]..start[axis] + shape[axis]);
    B::float_slice(x, &[range(0), range(1), range(2), range(3)])
}

/// See [`MemBackend::max_pool2d_with_offsets`](super::MemBackend::max_pool2d_with_offsets).
pub fn max_pool2d_with_offsets<B: Backend>(
    x: FloatTensor<B>,
    options: &MaxPoolOptions<2>,
) -> (FloatTensor<B>, DeviceOffsets<B>) {
    let shape = x.shape();
    let out = |axis: usize| {
        super::pool_output_size(
            shape[axis + 2],
            options.kernel_size[axis],
            options.stride[axis],
            options.padding[axis],
            options.dilation[axis],
            options.ceil_mode,
            options.is_asymmetric(),
        )
    };
    let out = Shape::new([shape[0], shape[1], out(0), out(1)]);
    let (x, padding) = prepad::<B>(x, options);
    let pooled = x.shape();
    let ints = get_or_init_device_settings::<B>(&x.device()).int_dtype;
    let result = B::max_pool2d_with_indices(
        x,
        options.kernel_size,
        options.stride,
        padding,
        options.dilation,
        options.ceil_mode,
        ints,
    );
    // The gradient of the windows that Burn drops is zero; their indices stay, so that the shapes agree.
    (crop::<B>(result.output, [0; 4], &out), DeviceOffsets { indices: result.indices, pooled })
}

/// See [`MemBackend::max_pool2d_with_offsets_backward`](super::MemBackend::max_pool2d_with_offsets_backward).
pub fn max_pool2d_with_offsets_backward<B: Backend>(
    x: Shape,
    offsets: &DeviceOffsets<B>,
    dy: FloatTensor<B>,
    options: &MaxPoolOptions<2>,
) -> FloatTensor<B> {
    let windows = offsets.indices.shape();
    let dropped = [0, 1, 2, 3].map(|axis| (0, windows[axis] - dy.shape()[axis]));
    let dy = match dropped.iter().all(|&(_, end)| end == 0) {
        true => dy,
        false => B::float_pad(dy, &dropped, PadMode::Constant(0.0)),
    };
    let like = shape_only::<B>(offsets.pooled.clone(), dy.dtype(), &dy.device());
    let padding = match options.is_asymmetric() {
        true => [0; 2],
        false => options.padding.map(|(begin, _)| begin),
    };
    let dx = B::max_pool2d_with_indices_backward(
        like,
        options.kernel_size,
        options.stride,
        padding,
        options.dilation,
        options.ceil_mode,
        dy,
        offsets.indices.clone(),
    );
    let [rows, columns] = options.padding.map(|(begin, _)| begin);
    match options.is_asymmetric() {
        true => crop::<B>(dx.x_grad, [0, 0, rows, columns], &x),
        false => dx.x_grad,
    }
}

/// See [`MemBackend::avg_pool2d_adjoint`](super::MemBackend::avg_pool2d_adjoint).
pub fn avg_pool2d_adjoint<B: Backend>(
    x: Shape,
    dy: FloatTensor<B>,
    options: &AvgPoolOptions<2>,
) -> FloatTensor<B> {
    let (device, dtype) = (dy.device(), dy.dtype());
    let pool = |x: Shape, dy: FloatTensor<B>, padding: [usize; 2], count_include_pad: bool| {
        let like = shape_only::<B>(x, dtype, &device);
        let (kernel, stride) = (options.kernel_size, options.stride);
        B::avg_pool2d_backward(like, dy, kernel, stride, padding, count_include_pad, options.ceil_mode)
    };
    if !options.is_asymmetric() {
        return pool(x, dy, options.padding.map(|(begin, _)| begin), options.count_include_pad);
    }
    // As Burn's forward pass: pool what is padded; where the padding does not count, divide by the share of the window
    // that is input.
    let [rows, columns] = options.padding;
    let padded = Shape::new([x[0], x[1], x[2] + rows.0 + rows.1, x[3] + columns.0 + columns.1]);
    let dy = match options.count_include_pad {
        true => dy,
        false => {
            let ones = B::float_ones(Shape::new([1, 1, x[2], x[3]]), &device, dtype.into());
            let padding = [(0, 0), (0, 0), rows, columns];
            let ones = B::float_pad(ones, &padding, PadMode::Constant(0.0));
            let (kernel, stride) = (options.kernel_size, options.stride);
            let share = B::avg_pool2d(ones, kernel, stride, [0; 2], false, options.ceil_mode);
            let share = crop::<B>(share, [0; 4], &Shape::new([1, 1, dy.shape()[2], dy.shape()[3]]));
            let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
            let empty = B::float_equal_elem(share.clone(), 0.into(), bools);
            B::float_div(dy, B::float_mask_fill(share, empty, 1.into()))
        }
    };
    let dx = pool(padded, dy, [0; 2], options.count_include_pad);
    crop::<B>(dx, [0, 0, rows.0, columns.0], &x)
}

/// See [`MemBackend::adaptive_avg_pool_adjoint`](super::MemBackend::adaptive_avg_pool_adjoint).
pub fn adaptive_avg_pool_adjoint<B: Backend>(x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
    let rank = x.num_dims();
    let like = shape_only::<B>(x, dy.dtype(), &dy.device());
    match rank {
        3 => B::adaptive_avg_pool1d_backward(like, dy),
        4 => B::adaptive_avg_pool2d_backward(like, dy),
        _ => B::adaptive_avg_pool3d_backward(like, dy),
    }
}

/// See [`MemBackend::interpolate_adjoint`](super::MemBackend::interpolate_adjoint).
pub fn interpolate_adjoint<B: Backend>(
    x: Shape,
    dy: FloatTensor<B>,
    options: InterpolateOptions,
) -> FloatTensor<B> {
    let out = [dy.shape()[2], dy.shape()[3]];
    let like = shape_only::<B>(x, dy.dtype(), &dy.device());
    B::interpolate_backward(like, dy, out, options)
}

/// See [`MemBackend::shape_only`](super::MemBackend::shape_only).
pub fn shape_only<B: Backend>(shape: Shape, dtype: DType, device: &B::Device) -> FloatTensor<B> {
    B::float_empty(shape, device, dtype.into())
}

/// Implements [`MemBackend`](super::MemBackend) by the functions of this module.
#[allow(unused_macros)] // without a device backend there is nobody to implement it for
macro_rules! device_backend {
    ($backend:ty) => {
        impl super::MemBackend for $backend {
            type Offsets = DeviceOffsets<Self>;

            fn prelu_x_backward(
                mask: &Self::Mask,
                alpha: FloatTensor<Self>,
                dy: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                prelu_x_backward::<Self>(mask, alpha, dy)
            }
            fn prelu_alpha_backward(
                x: FloatTensor<Self>,
                alpha: Shape,
                dy: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                prelu_alpha_backward::<Self>(x, alpha, dy)
            }
            fn recurrent_forward(
                step: &crate::backend::RecurrentStep,
                gates: &mut [FloatTensor<Self>],
                products: Vec<Option<FloatTensor<Self>>>,
                biases: &[[Option<FloatTensor<Self>>; 2]],
                state: crate::backend::RecurrentState<Self>,
            ) -> crate::backend::RecurrentState<Self> {
                recurrent_forward::<Self>(step, gates, products, biases, state)
            }
            fn recurrent_replay(
                step: &crate::backend::RecurrentStep,
                gates: &[FloatTensor<Self>],
                state: crate::backend::RecurrentState<Self>,
            ) -> crate::backend::RecurrentState<Self> {
                recurrent_replay::<Self>(step, gates, state)
            }
            fn recurrent_backward(
                step: &crate::backend::RecurrentStep,
                gates: &mut [FloatTensor<Self>],
                extra: Option<&mut FloatTensor<Self>>,
                state: crate::backend::RecurrentState<Self>,
                grads: crate::backend::RecurrentState<Self>,
            ) -> crate::backend::RecurrentState<Self> {
                recurrent_backward::<Self>(step, gates, extra, state, grads)
            }
            fn add_product(
                y: FloatTensor<Self>,
                u: FloatTensor<Self>,
                v: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                add_product::<Self>(y, u, v)
            }
            fn softmax_along(
                x: FloatTensor<Self>,
                f: crate::backend::Softmax,
                dim: usize,
            ) -> FloatTensor<Self> {
                softmax_along::<Self>(x, f, dim)
            }
            fn softmax_along_backward(
                y: FloatTensor<Self>,
                f: crate::backend::Softmax,
                dim: usize,
                dy: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                softmax_along_backward::<Self>(y, f, dim, dy)
            }
            fn log_sum_exp(x: FloatTensor<Self>) -> FloatTensor<Self> {
                log_sum_exp::<Self>(x)
            }
            fn sum_log_probabilities(
                x: FloatTensor<Self>,
                log_sum_exp: FloatTensor<Self>,
                weights: Option<FloatTensor<Self>>,
            ) -> FloatTensor<Self> {
                sum_log_probabilities::<Self>(x, log_sum_exp, weights)
            }
            fn logits_gradient(
                x: FloatTensor<Self>,
                gradient: crate::backend::LogitsGradient<Self>,
            ) -> FloatTensor<Self> {
                logits_gradient::<Self>(x, gradient)
            }
            fn element_loss(
                x: FloatTensor<Self>,
                targets: Option<FloatTensor<Self>>,
                f: crate::backend::ElementLoss,
            ) -> FloatTensor<Self> {
                element_loss::<Self>(x, targets, f)
            }
            fn element_loss_sum(
                x: FloatTensor<Self>,
                targets: Option<FloatTensor<Self>>,
                f: crate::backend::ElementLoss,
                scale: f64,
            ) -> FloatTensor<Self> {
                element_loss_sum::<Self>(x, targets, f, scale)
            }
            fn element_loss_slopes(
                x: FloatTensor<Self>,
                targets: Option<FloatTensor<Self>>,
                f: crate::backend::ElementLoss,
                side: crate::backend::Side,
                factor: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                element_loss_slopes::<Self>(x, targets, f, side, factor)
            }
            fn element_loss_backward(
                x: FloatTensor<Self>,
                targets: Option<FloatTensor<Self>>,
                f: crate::backend::ElementLoss,
                side: crate::backend::Side,
                dy: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                element_loss_backward::<Self>(x, targets, f, side, dy)
            }
            fn scale(x: FloatTensor<Self>, factor: FloatTensor<Self>) -> FloatTensor<Self> {
                scale::<Self>(x, factor)
            }
            fn max_pool2d_with_offsets(
                x: FloatTensor<Self>,
                options: &MaxPoolOptions<2>,
            ) -> (FloatTensor<Self>, Self::Offsets) {
                max_pool2d_with_offsets::<Self>(x, options)
            }
            fn max_pool2d_with_offsets_backward(
                x: Shape,
                offsets: &Self::Offsets,
                dy: FloatTensor<Self>,
                options: &MaxPoolOptions<2>,
            ) -> FloatTensor<Self> {
                max_pool2d_with_offsets_backward::<Self>(x, offsets, dy, options)
            }
            fn avg_pool2d_adjoint(
                x: Shape,
                dy: FloatTensor<Self>,
                options: &AvgPoolOptions<2>,
            ) -> FloatTensor<Self> {
                avg_pool2d_adjoint::<Self>(x, dy, options)
            }
            fn adaptive_avg_pool_adjoint(x: Shape, dy: FloatTensor<Self>) -> FloatTensor<Self> {
                adaptive_avg_pool_adjoint::<Self>(x, dy)
            }
            fn interpolate_adjoint(
                x: Shape,
                dy: FloatTensor<Self>,
                options: InterpolateOptions,
            ) -> FloatTensor<Self> {
                interpolate_adjoint::<Self>(x, dy, options)
            }
            fn shape_only(shape: Shape, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
                shape_only::<Self>(shape, dtype, device)
            }
        }
    };
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
device_backend!(burn::backend::Cube);
#[cfg(feature = "remote")]
device_backend!(burn::backend::Remote);

/// These functions run on any backend, so their results on Flex must be those of its own kernels.
#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::{
        Cell, ElementLoss, LogitsGradient, MemBackend, RecurrentState, RecurrentStep, Side, Softmax, Stage,
    };
    use burn::backend::{
        Flex,
        flex::FlexDevice,
        ops::{ActivationOps, FloatTensorOps},
        read_sync,
    };
    use burn::tensor::FloatDType;

    type Float = FloatTensor<Flex>;

    fn random(shape: &[usize]) -> Float {
        let shape = Shape::from(shape.to_vec());
        Flex::float_random(shape, Distribution::Normal(0.0, 1.0), &FlexDevice, FloatDType::F32)
    }

    fn assert_close(what: &str, device: Float, cpu: Float) {
        let [device, cpu] = [device, cpu].map(|x| read_sync(Flex::float_into_data(x)).expect("a CPU tensor"));
        assert_eq!(device.shape(), cpu.shape(), "{what}");
        for (device, cpu) in device.iter::<f32>().zip(cpu.iter::<f32>()) {
            assert!((device - cpu).abs() <= 3e-5 * cpu.abs().max(1.0), "{what}: {device}, kernel {cpu}");
        }
    }

    #[test]
    fn cross_entropies_equal_the_kernels() {
        let x = Flex::float_mul_scalar(random(&[5, 19]), 3.0.into());
        let (weights, rows) = (random(&[19]), || random(&[5, 1]));
        let log = Flex::log_sum_exp(x.clone());
        assert_close("log_sum_exp", log_sum_exp::<Flex>(x.clone()), log.clone());
        for weights in [None, Some(weights)] {
            let device = sum_log_probabilities::<Flex>(x.clone(), log.clone(), weights.clone());
            let cpu = Flex::sum_log_probabilities(x.clone(), log.clone(), weights.clone());
            assert_close("sum of the logarithms", device, cpu);
            for of_weight in [None, Some(rows())] {
                let of_probability = rows();
                let gradient = || LogitsGradient::<Flex> {
                    log_sum_exp: log.clone(),
                    of_probability: of_probability.clone(),
                    of_weight: of_weight.clone(),
                    weights: weights.clone(),
                };
                let cpu = Flex::logits_gradient(x.clone(), gradient());
                assert_close("dx", logits_gradient::<Flex>(x.clone(), gradient()), cpu.clone());
                let unique = Flex::float_mul_scalar(x.clone(), 1.0.into());
                assert_close("dx in place", Flex::logits_gradient(unique, gradient()), cpu);
            }
        }
    }

    #[test]
    fn losses_of_elements_equal_the_kernels() {
        let probabilities =
            || <Flex as ActivationOps<Flex>>::sigmoid(Flex::float_mul_scalar(random(&[5, 13]), 3.0.into()));
        let alone = [
            ElementLoss::Square,
            ElementLoss::Huber { delta: 0.5, bias: 0.125 },
            ElementLoss::LogAbove { min: 0.3 },
        ];
        let with_targets = [
            ElementLoss::BinaryLogits,
            ElementLoss::BinaryProbabilities,
            ElementLoss::Divergence { min: 0.3 },
            ElementLoss::LogDivergence,
        ];
        let cases = alone.map(|f| (f, None)).into_iter();
        for (f, targets) in cases.chain(with_targets.map(|f| (f, Some(probabilities())))) {
            let (x, dy) = (probabilities(), random(&[5, 13]));
            let arguments = || (x.clone(), targets.clone());
            let ((x1, t1), (x2, t2)) = (arguments(), arguments());
            assert_close("loss", element_loss::<Flex>(x1, t1, f), Flex::element_loss(x2, t2, f));
            let ((x1, t1), (x2, t2)) = (arguments(), arguments());
            let device = element_loss_sum::<Flex>(x1, t1, f, 0.5);
            assert_close("sum", device, Flex::element_loss_sum(x2, t2, f, 0.5));
            let sides = if targets.is_some() { &[Side::X, Side::Target][..] } else { &[Side::X] };
            for &side in sides {
                let binary = matches!(f, ElementLoss::BinaryLogits | ElementLoss::BinaryProbabilities);
                if binary && side == Side::Target {
                    continue; // has no gradient
                }
                let ((x1, t1), (x2, t2)) = (arguments(), arguments());
                let device = element_loss_backward::<Flex>(x1, t1, f, side, dy.clone());
                assert_close("dx", device, Flex::element_loss_backward(x2, t2, f, side, dy.clone()));
                let (factor, (x1, t1), (x2, t2)) = (random(&[1]), arguments(), arguments());
                let device = element_loss_slopes::<Flex>(x1, t1, f, side, factor.clone());
                assert_close("slope", device, Flex::element_loss_slopes(x2, t2, f, side, factor));
            }
        }
        let (x, factor) = (random(&[5, 13]), random(&[1]));
        assert_close("scaled", scale::<Flex>(x.clone(), factor.clone()), Flex::scale(x, factor));
    }

    #[test]
    fn softmaxes_equal_the_kernels() {
        for f in [Softmax::Softmax, Softmax::LogSoftmax, Softmax::Softmin, Softmax::QuietSoftmax] {
            for dim in 0..3 {
                let x = Flex::float_mul_scalar(random(&[4, 5, 19]), 3.0.into());
                let (y, dy) = (Flex::softmax_along(x.clone(), f, dim), random(&[4, 5, 19]));
                assert_close("y", softmax_along::<Flex>(x, f, dim), y.clone());
                let device = softmax_along_backward::<Flex>(y.clone(), f, dim, dy.clone());
                assert_close("dx", device, Flex::softmax_along_backward(y, f, dim, dy));
            }
        }
    }

    #[test]
    fn recurrent_steps_equal_the_kernels() {
        let cells = [
            Cell::Rnn,
            Cell::Gru { reset_after: true },
            Cell::Lstm { coupled: false },
            Cell::Lstm { coupled: true },
        ];
        for batch_first in [true, false] {
            for clip in [None, Some(0.3)] {
                let step =
                    |stage| RecurrentStep { stage, clip, batch_first, batch: 3, steps: 4, hidden: 5, at: 2 };
                for cell in cells {
                    recurrent_step_equals_the_kernels(&step(Stage::Whole(cell)), [cell.gates(); 2]);
                }
                recurrent_step_equals_the_kernels(&step(Stage::Reset), [2, 1]);
                recurrent_step_equals_the_kernels(&step(Stage::New), [2, 2]);
            }
        }
    }

    /// `gates`: so many go forwards, and backwards.
    fn recurrent_step_equals_the_kernels(step: &RecurrentStep, [forwards, backwards]: [usize; 2]) {
        let matrix = || random(&[step.batch, step.hidden]);
        let state = || RecurrentState::<Flex> { h: Some(matrix()), c: Some(matrix()) };
        let gates = |count| -> Vec<Float> {
            let values = (0..count).map(|_| random(&[step.batch * step.steps, step.hidden]));
            values.map(<Flex as ActivationOps<Flex>>::sigmoid).collect()
        };
        let compare = |what: &str, device: RecurrentState<Flex>, cpu: RecurrentState<Flex>| {
            for (device, cpu) in [(device.h, cpu.h), (device.c, cpu.c)] {
                let zeros = || Flex::float_zeros(Shape::new([3, 5]), &FlexDevice, FloatDType::F32);
                let [device, cpu] = [device, cpu].map(|state| state.unwrap_or_else(zeros));
                assert_close(&format!("{what}, {step:?}"), device, cpu);
            }
        };
        let compare_gates = |what: &str, device: Vec<Float>, cpu: Vec<Float>| {
            for (device, cpu) in device.into_iter().zip(cpu) {
                assert_close(&format!("{what}, {step:?}"), device, cpu);
            }
        };

        for state in [state(), RecurrentState { h: None, c: None }] {
            let inputs = gates(forwards);
            let products: Vec<_> = (0..forwards).map(|_| state.h.is_some().then(matrix)).collect();
            let biases: Vec<_> = (0..forwards)
                .map(|gate| if gate == 0 { [None, None] } else { [Some(random(&[5])), Some(random(&[5]))] })
                .collect();
            let (mut of_device, mut of_cpu) = (inputs.clone(), inputs);
            let device =
                recurrent_forward::<Flex>(step, &mut of_device, products.clone(), &biases, state.clone());
            let cpu = Flex::recurrent_forward(step, &mut of_cpu, products, &biases, state.clone());
            compare("state", device, cpu);
            compare_gates("gates", of_device, of_cpu.clone());
            let device = recurrent_replay::<Flex>(step, &of_cpu, state.clone());
            compare("replayed state", device, Flex::recurrent_replay(step, &of_cpu, state));
        }

        let (before, grads) = (state(), state());
        let values = gates(backwards);
        let extra = matches!(step.stage, Stage::Whole(Cell::Gru { .. })).then(|| gates(1).remove(0));
        let (mut of_device, mut of_cpu) = (values.clone(), values);
        let (mut extra_of_device, mut extra_of_cpu) = (extra.clone(), extra);
        let device = recurrent_backward::<Flex>(
            step,
            &mut of_device,
            extra_of_device.as_mut(),
            before.clone(),
            grads.clone(),
        );
        let cpu = Flex::recurrent_backward(step, &mut of_cpu, extra_of_cpu.as_mut(), before, grads);
        compare("gradient of the state", device, cpu);
        of_device.extend(extra_of_device);
        of_cpu.extend(extra_of_cpu);
        compare_gates("gradients of gates", of_device, of_cpu);
    }

    #[test]
    fn pools_equal_the_kernels() {
        for padding in [[(1, 1), (0, 0)], [(0, 1), (1, 0)]] {
            for ceil_mode in [false, true] {
                let options = MaxPoolOptions {
                    kernel_size: [3, 2],
                    stride: [2, 3],
                    padding,
                    dilation: [1, 2],
                    ceil_mode,
                };
                let x = random(&[2, 3, 8, 9]);
                let (device, device_offsets) = max_pool2d_with_offsets::<Flex>(x.clone(), &options);
                let (cpu, offsets) = Flex::max_pool2d_with_offsets(x.clone(), &options);
                let dy = random(&cpu.shape().to_vec());
                assert_close("max pool", device, cpu);
                let device = max_pool2d_with_offsets_backward::<Flex>(
                    x.shape(),
                    &device_offsets,
                    dy.clone(),
                    &options,
                );
                let cpu = Flex::max_pool2d_with_offsets_backward(x.shape(), &offsets, dy.clone(), &options);
                assert_close("max pool, dx", device, cpu);
            }
        }
        for (padding, count_include_pad) in
            [([(1, 1), (0, 0)], false), ([(0, 1), (1, 0)], true), ([(0, 1), (1, 0)], false)]
        {
            let options = AvgPoolOptions {
                kernel_size: [3, 2],
                stride: [2, 2],
                padding,
                count_include_pad,
                ceil_mode: false,
            };
            let dy = random(&[2, 3, 4, 4]);
            let x = Shape::new([2, 3, 8, if padding[1] == (1, 0) { 7 } else { 8 }]);
            let device = avg_pool2d_adjoint::<Flex>(x.clone(), dy.clone(), &options);
            assert_close("average pool, dx", device, Flex::avg_pool2d_adjoint(x, dy, &options));
        }
        let dy = random(&[2, 3, 4, 5]);
        let x = Shape::new([2, 3, 7, 9]);
        let device = adaptive_avg_pool_adjoint::<Flex>(x.clone(), dy.clone());
        assert_close("adaptive pool, dx", device, Flex::adaptive_avg_pool_adjoint(x.clone(), dy.clone()));
    }
}
