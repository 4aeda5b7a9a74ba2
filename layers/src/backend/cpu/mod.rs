//! Fused kernels on slices, shared by the CPU backends.
use super::{MemBackend, ScoreGrads, ScoreRows};
use burn::backend::{
    Backend, TensorMetadata,
    ops::{InterpolateMode, InterpolateOptions},
    tensor::{BoolTensor, FloatTensor, QuantizedTensor},
};
use burn::tensor::{
    DType, Element, Shape, bf16, f16,
    ops::{AvgPoolOptions, MaxPoolOptions},
};
use num_traits::Float;

mod attention;
pub(crate) mod axis_map;
pub(crate) mod bit_mask;
pub(crate) mod channels;
pub(crate) mod exp;
mod low_rank;
mod max_pool;
pub(crate) mod parallel;
mod prelu;
mod quantized;
mod rotary;
pub(crate) mod sums;

use axis_map::AxisMap;
pub use bit_mask::BitMask;
pub use max_pool::WindowOffsets;
pub use quantized::QuantizedMatrix;

/// An element type that kernels compute with: in `Acc`, which is f32 for the half precisions.
pub trait CpuElement: Element + bytemuck::Pod + Float + Send + Sync {
    /// The type that sums and products are made in.
    type Acc: CpuElement<Acc = Self::Acc>;
    /// To the type that sums and products are made in.
    fn widen(self) -> Self::Acc;
    /// From the type that sums and products are made in.
    fn narrow(value: Self::Acc) -> Self;
    /// From an f64, rounded.
    fn from_f64(value: f64) -> Self;
    /// To an f64.
    fn into_f64(self) -> f64;
    /// `e^self`; in f32 by a function that loops of it are compiled for vectors with.
    fn fast_exp(self) -> Self;
    /// The error function; in f32 likewise.
    fn fast_erf(self) -> Self;
    /// The hyperbolic tangent; in f32 likewise.
    fn fast_tanh(self) -> Self;
}

macro_rules! cpu_element {
    ($element:ty, $acc:ty, $widen:expr, $narrow:expr, $from_f64:expr, $to_f64:expr, $exp:expr, $erf:expr, $tanh:expr) => {
        impl CpuElement for $element {
            type Acc = $acc;
            #[inline(always)]
            fn widen(self) -> $acc {
                $widen(self)
            }
            #[inline(always)]
            fn narrow(value: $acc) -> Self {
                $narrow(value)
            }
            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                $from_f64(value)
            }
            #[inline(always)]
            fn into_f64(self) -> f64 {
                $to_f64(self)
            }
            #[inline(always)]
            fn fast_exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn fast_erf(self) -> Self {
                $erf(self)
            }
            #[inline(always)]
            fn fast_tanh(self) -> Self {
                $tanh(self)
            }
        }
    };
}
cpu_element!(f32, f32, |v| v, |v| v, |v| v as f32, f64::from, exp::exp, exp::erf, exp::tanh);
cpu_element!(f64, f64, |v| v, |v| v, |v| v, |v| v, f64::exp, libm::erf, f64::tanh);
macro_rules! half_element {
    ($half:ident) => {
        cpu_element!(
            $half,
            f32,
            $half::to_f32,
            $half::from_f32,
            $half::from_f64,
            $half::to_f64,
            |v| $half::from_f32(exp::exp($half::to_f32(v))),
            |v| $half::from_f32(exp::erf($half::to_f32(v))),
            |v| $half::from_f32(exp::tanh($half::to_f32(v)))
        );
    };
}
half_element!(f16);
half_element!(bf16);

/// A backend whose tensors are slices in memory.
pub trait CpuBackend: Backend {
    /// Whether a NaN wins its window in this backend's max pool.
    const NAN_WINS_MAX_POOL: bool;

    /// The tensor with its elements in row-major order and nothing else in its buffer, copied only if they are not.
    fn contiguous(x: FloatTensor<Self>) -> FloatTensor<Self>;

    /// The elements of a [contiguous](Self::contiguous) tensor of dtype `E`.
    fn as_slice<E: CpuElement>(x: &FloatTensor<Self>) -> &[E];

    /// The elements of a [contiguous](Self::contiguous) tensor of dtype `E`; copied first if the tensor is shared.
    fn as_slice_mut<E: CpuElement>(x: &mut FloatTensor<Self>) -> &mut [E];

    /// A tensor of dtype `E` that owns `values`.
    fn from_vec<E: CpuElement>(values: Vec<E>, shape: Shape) -> FloatTensor<Self>;

    /// The bytes of booleans in row-major order, with nothing else in the buffer: zero where false.
    fn contiguous_bools(x: BoolTensor<Self>) -> BoolTensor<Self>;

    /// The bytes of [contiguous](Self::contiguous_bools) booleans.
    fn as_bytes(x: &BoolTensor<Self>) -> &[u8];

    /// See [`MemBackend::shape_only`].
    fn shape_only(shape: Shape, dtype: DType, device: &Self::Device) -> FloatTensor<Self>;

    /// The elements of a quantized matrix, if they lie in row-major order and its scales can be read.
    fn quantized_matrix(weight: &QuantizedTensor<Self>) -> Option<QuantizedMatrix<'_>>;
}

/// Runs the expression with `$E` bound to the element type of a dtype.
macro_rules! with_element {
    ($dtype:expr, $op:literal, $E:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $E = f32;
                $body
            }
            DType::F64 => {
                type $E = f64;
                $body
            }
            DType::F16 => {
                type $E = f16;
                $body
            }
            DType::BF16 => {
                type $E = bf16;
                $body
            }
            dtype => panic!("{}: the dtype {dtype:?} is not a floating-point type of this backend", $op),
        }
    };
}

pub(crate) use with_element;

impl<B: CpuBackend> super::ChannelSums for B {
    fn sum_to_channels(x: FloatTensor<B>) -> FloatTensor<B> {
        let x = B::contiguous(x);
        with_element!(x.dtype(), "sum", E => {
            let sums = channels::Channels::of(B::as_slice::<E>(&x), &x.shape()).sums();
            let shape = Shape::new([sums.len()]);
            B::from_vec(sums.into_iter().map(E::from_f64).collect(), shape)
        })
    }
}

impl<B: CpuBackend> super::Scaling for B {
    fn scale(x: FloatTensor<B>, factor: FloatTensor<B>) -> FloatTensor<B> {
        let mut x = B::contiguous(x);
        with_element!(x.dtype(), "scale", E => {
            let factor = scalar::<B, E>(factor);
            let work = x.shape().num_elements();
            parallel::chunks_mut(B::as_slice_mut::<E>(&mut x), 1 << 14, work, |_, x| {
                x.iter_mut().for_each(|x| *x = E::narrow(x.widen() * factor));
            });
        });
        x
    }
}

impl<B: CpuBackend> MemBackend for B {
    type Offsets = WindowOffsets;

    fn prelu_x_backward(mask: &BitMask, alpha: FloatTensor<B>, dy: FloatTensor<B>) -> FloatTensor<B> {
        let alpha = B::contiguous(alpha);
        let mut dx = B::contiguous(dy);
        let inner = prelu::inner_size(&dx.shape(), &alpha.shape());
        with_element!(dx.dtype(), "prelu", E => {
            prelu::x_backward::<E>(mask, B::as_slice(&alpha), B::as_slice_mut(&mut dx), inner)
        });
        dx
    }

    fn prelu_alpha_backward(x: FloatTensor<B>, alpha: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        let (x, dy) = (B::contiguous(x), B::contiguous(dy));
        let inner = prelu::inner_size(&dy.shape(), &alpha);
        with_element!(dy.dtype(), "prelu", E => {
            let dalpha = prelu::alpha_backward::<E>(B::as_slice(&x), B::as_slice(&dy), alpha.num_elements(), inner);
            B::from_vec(dalpha, alpha)
        })
    }

    fn rotate(x: FloatTensor<B>, factors: FloatTensor<B>, adjoint: bool) -> FloatTensor<B> {
        let (mut x, factors) = (B::contiguous(x), B::contiguous(factors));
        let [_, features, _] = factors.shape().dims();
        with_element!(x.dtype(), "rotary_encoding", E => {
            rotary::rotate(B::as_slice_mut::<E>(&mut x), B::as_slice(&factors), features, adjoint);
        });
        x
    }

    const ATTENTION_CHUNK: usize = 1 << 18; // the weights of a chunk stay in the cache

    fn attention_weights(products: FloatTensor<B>, rows: &ScoreRows<B>) -> (FloatTensor<B>, FloatTensor<B>) {
        let mut products = B::contiguous(products);
        let [batch, heads, queries, keys] = products.shape().dims();
        with_element!(products.dtype(), "attention", E => {
            let log_sums = with_rows::<B, E, _>(rows, heads, keys, |rows| {
                rows.weights(B::as_slice_mut::<E>(&mut products))
            });
            (products, B::from_vec(log_sums, Shape::new([batch, heads, queries, 1])))
        })
    }

    fn attention_weights_backward(
        products: FloatTensor<B>,
        gradients: FloatTensor<B>,
        log_sums: FloatTensor<B>,
        rows: &ScoreRows<B>,
        wants_bias: bool,
    ) -> ScoreGrads<B> {
        let (mut products, mut gradients) = (B::contiguous(products), B::contiguous(gradients));
        let log_sums = B::contiguous(log_sums);
        let shape = products.shape();
        with_element!(products.dtype(), "attention", E => {
            let of_scores = with_rows::<B, E, _>(rows, shape[1], shape[3], |rows| {
                let weights = B::as_slice_mut::<E>(&mut products);
                rows.backward(weights, B::as_slice_mut(&mut gradients), B::as_slice(&log_sums), wants_bias)
            });
            let bias = of_scores.map(|of_scores| B::from_vec(of_scores, shape));
            ScoreGrads { weights: products, products: gradients, bias }
        })
    }

    fn add_product(y: FloatTensor<B>, u: FloatTensor<B>, v: FloatTensor<B>) -> FloatTensor<B> {
        with_element!(y.dtype(), "add_product", E => low_rank::add_product::<B, E>(y, u, v))
    }

    fn max_pool2d_with_offsets(
        x: FloatTensor<B>,
        options: &MaxPoolOptions<2>,
    ) -> (FloatTensor<B>, WindowOffsets) {
        let x = B::contiguous(x);
        let geometry = max_pool::Geometry::new(&x.shape(), options);
        with_element!(x.dtype(), "max_pool2d", E => {
            let (y, offsets) = geometry.forward(B::as_slice::<E>(&x), B::NAN_WINS_MAX_POOL);
            (B::from_vec(y, geometry.output_shape()), offsets)
        })
    }

    fn max_pool2d_with_offsets_backward(
        x: Shape,
        offsets: &WindowOffsets,
        dy: FloatTensor<B>,
        options: &MaxPoolOptions<2>,
    ) -> FloatTensor<B> {
        let dy = B::contiguous(dy);
        let geometry = max_pool::Geometry::new(&x, options);
        with_element!(dy.dtype(), "max_pool2d", E => {
            B::from_vec(geometry.backward(offsets, B::as_slice::<E>(&dy)), x)
        })
    }

    fn avg_pool2d_adjoint(x: Shape, dy: FloatTensor<B>, options: &AvgPoolOptions<2>) -> FloatTensor<B> {
        let out = dy.shape();
        let axes: [AxisMap; 2] = core::array::from_fn(|axis| {
            AxisMap::mean_windows(
                x[axis + 2],
                out[axis + 2],
                options.kernel_size[axis],
                options.stride[axis],
                options.padding[axis],
                options.count_include_pad,
            )
        });
        adjoint::<B>(x, dy, &axes)
    }

    fn adaptive_avg_pool_adjoint(x: Shape, dy: FloatTensor<B>) -> FloatTensor<B> {
        let out = dy.shape();
        let axes: Vec<_> = (2..x.num_dims()).map(|axis| AxisMap::adaptive_mean(x[axis], out[axis])).collect();
        adjoint::<B>(x, dy, &axes)
    }

    fn interpolate_adjoint(x: Shape, dy: FloatTensor<B>, options: InterpolateOptions) -> FloatTensor<B> {
        let out = dy.shape();
        let corners = options.align_corners;
        let axes: [AxisMap; 2] = core::array::from_fn(|axis| {
            let (size, out) = (x[axis + 2], out[axis + 2]);
            match options.mode {
                InterpolateMode::Nearest => AxisMap::nearest(size, out),
                InterpolateMode::NearestExact => AxisMap::nearest_exact(size, out),
                InterpolateMode::Bilinear => AxisMap::linear(size, out, corners),
                InterpolateMode::Bicubic => AxisMap::cubic(size, out, corners),
                InterpolateMode::Lanczos3 => AxisMap::lanczos3(size, out, corners),
            }
        });
        adjoint::<B>(x, dy, &axes)
    }

    fn shape_only(shape: Shape, dtype: DType, device: &B::Device) -> FloatTensor<B> {
        <B as CpuBackend>::shape_only(shape, dtype, device)
    }
}

/// The one element of a tensor of any dtype.
pub(crate) fn scalar<B: CpuBackend, E: CpuElement>(x: FloatTensor<B>) -> E::Acc {
    B::as_slice::<E::Acc>(&B::contiguous(B::float_cast(x, E::Acc::dtype().into())))[0]
}

/// Calls `f` with rows of scores as slices.
fn with_rows<B: CpuBackend, E: CpuElement, R>(
    rows: &ScoreRows<B>,
    heads: usize,
    keys: usize,
    f: impl FnOnce(attention::Rows<'_, E>) -> R,
) -> R {
    let mask = rows.mask.clone().map(B::contiguous_bools);
    let bias = rows.bias.clone().map(B::contiguous);
    f(attention::Rows {
        scores: &rows.scores,
        mask: mask.as_ref().map(|mask| attention::Broadcast::new(B::as_bytes(mask), mask.shape().dims())),
        bias: bias.as_ref().map(|bias| attention::Broadcast::new(B::as_slice(bias), bias.shape().dims())),
        heads,
        queries: rows.queries.clone(),
        all_queries: rows.all_queries,
        keys,
        all_keys: rows.all_keys,
    })
}

/// `dx` of shape `x` from `dy`, one map per spatial axis.
fn adjoint<B: CpuBackend>(x: Shape, dy: FloatTensor<B>, axes: &[AxisMap]) -> FloatTensor<B> {
    let (dy, planes) = (B::contiguous(dy), x[..2].iter().product());
    with_element!(dy.dtype(), "pool", E => B::from_vec(axis_map::adjoint(axes, planes, B::as_slice::<E>(&dy)), x))
}
