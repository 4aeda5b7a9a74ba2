//! Any backend, by Burn's own operations: device backends, and remote ones.
//!
//! Bits are packed in 32-bit words of an integer tensor, so that they stay on the device.
use super::Saved;

mod attention;
mod low_rank;
mod rotary;

pub use attention::{attention_weights, attention_weights_backward};
pub use low_rank::add_product;
pub use rotary::rotate;

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
pub fn bernoulli_mask<B: Backend>(like: &FloatTensor<B>, probability: f64) -> DeviceMask<B> {
    let device = like.device();
    let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
    let bernoulli = Distribution::Bernoulli(probability);
    let drawn = B::float_random(like.shape(), bernoulli, &device, like.dtype().into());
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
            fn rotate(x: FloatTensor<Self>, factors: FloatTensor<Self>, adjoint: bool) -> FloatTensor<Self> {
                rotate::<Self>(x, factors, adjoint)
            }

            const ATTENTION_CHUNK: usize = 1 << 24; // launching kernels takes longer than on a CPU

            fn attention_weights(
                products: FloatTensor<Self>,
                rows: &crate::backend::ScoreRows<Self>,
            ) -> (FloatTensor<Self>, FloatTensor<Self>) {
                attention_weights::<Self>(products, rows)
            }
            fn attention_weights_backward(
                products: FloatTensor<Self>,
                gradients: FloatTensor<Self>,
                log_sums: FloatTensor<Self>,
                rows: &crate::backend::ScoreRows<Self>,
                wants_bias: bool,
            ) -> crate::backend::ScoreGrads<Self> {
                attention_weights_backward::<Self>(products, gradients, log_sums, rows, wants_bias)
            }
            fn add_product(
                y: FloatTensor<Self>,
                u: FloatTensor<Self>,
                v: FloatTensor<Self>,
            ) -> FloatTensor<Self> {
                add_product::<Self>(y, u, v)
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
    use crate::backend::{MemBackend, ScoreGrads, ScoreRows, Scores};
    use burn::backend::{
        Flex,
        flex::FlexDevice,
        ops::{BoolTensorOps, FloatTensorOps},
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
    fn attention_equals_the_kernels() {
        let bools = |shape: &[usize], seed: usize| {
            let hidden =
                (0..shape.iter().product()).map(|at: usize| (at * 7 + seed) % 5 == 1).collect::<Vec<_>>();
            Flex::bool_from_data(TensorData::new(hidden, shape.to_vec()), &Default::default())
        };
        for (softcap, causal, quiet, masked) in [
            (None, false, false, f64::NEG_INFINITY),
            (Some(1.5), true, false, -3.0),
            (None, true, true, -2.0),
        ] {
            let rows = |mask: Option<&[usize]>, bias: Option<&[usize]>| ScoreRows::<Flex> {
                scores: Scores { scale: 0.7, softcap, causal, masked, quiet },
                mask: mask.map(|shape| bools(shape, 3)),
                bias: bias.map(random),
                queries: 2..5,
                all_queries: 6,
                all_keys: 7,
            };
            let full = &[2, 3, 3, 6][..];
            for rows in [
                rows(None, None),
                rows(Some(full), Some(full)),
                rows(Some(&[1, 3, 1, 6]), Some(&[2, 1, 3, 1])),
                rows(Some(&[2, 1, 3, 1]), None),
            ] {
                let (products, gradients) = (random(full), random(full));
                let device = attention_weights::<Flex>(products.clone(), &rows);
                let cpu = Flex::attention_weights(products.clone(), &rows);
                assert_close("weights", device.0, cpu.0);
                assert_close("sums", device.1, cpu.1.clone());
                let run = |backward: ScoresBackward| {
                    backward(products.clone(), gradients.clone(), cpu.1.clone(), &rows, true)
                };
                let device = run(attention_weights_backward::<Flex>);
                let cpu = run(Flex::attention_weights_backward);
                assert_close("weights again", device.weights, cpu.weights);
                assert_close("products", device.products, cpu.products);
                assert_close("bias", device.bias.expect("wanted"), cpu.bias.expect("wanted"));
            }
        }
    }

    type ScoresBackward = fn(Float, Float, Float, &ScoreRows<Flex>, bool) -> ScoreGrads<Flex>;

    #[test]
    fn rotation_equals_the_kernel() {
        for adjoint in [false, true] {
            let (x, factors) = (random(&[2, 3, 5, 4]), random(&[5, 4, 2]));
            let device = rotate::<Flex>(x.clone(), factors.clone(), adjoint);
            assert_close("rotation", device, Flex::rotate(x, factors, adjoint));
        }
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
