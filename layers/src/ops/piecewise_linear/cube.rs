//! Kernels for devices: one pass over `x` for the output and the bits, where the composition has ten.
//!
//! | | fused | not fused |
//! | --- | --- | --- |
//! | without bits | Burn's, which joins what is around it | one kernel of ours |
//! | ReLU with bits | Burn's, and a kernel for the bits of its output: after a norm and a sum that is a pass less | one kernel of ours |
//! | others with bits | one kernel of ours | one kernel of ours |
use super::{PiecewiseLinear, PiecewiseLinearKernels};
use crate::backend::cube::{
    CubeMask, GROUP, Output, TURNS, address_type, bit, empty_words, group_of_unit, join, types, units,
    vector_size, words,
};
#[cfg(feature = "fusion")]
use burn::backend::ops::ActivationOps;
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::tensor::CubeTensor;

impl PiecewiseLinearKernels for Cube {
    #[cfg(not(feature = "fusion"))]
    fn piecewise_linear(x: FloatTensor<Self>, f: PiecewiseLinear) -> FloatTensor<Self> {
        values(x, f)
    }

    fn piecewise_linear_with_mask(x: FloatTensor<Self>, f: PiecewiseLinear) -> (FloatTensor<Self>, CubeMask) {
        #[cfg(feature = "fusion")]
        if f == PiecewiseLinear::Relu {
            // Joined with the norm and the sum before it; the bits of the output are those of the input.
            let y = Self::relu(x);
            let words = Self::cube_piecewise_words(y.clone(), f);
            return (y, CubeMask::of_words(words));
        }
        let (y, words) = Self::cube_piecewise_linear_with_words(x, f);
        (y, CubeMask::of_words(words))
    }

    fn piecewise_mask(x: FloatTensor<Self>, f: PiecewiseLinear) -> CubeMask {
        CubeMask::of_words(Self::cube_piecewise_words(x, f))
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait PiecewiseLinearCube: Backend {
    /// `f(x)`, and the words of its mask.
    #[fusion(meta = |x, _f| (x.clone(), crate::backend::cube::described_words(x)))]
    fn cube_piecewise_linear_with_words(
        x: FloatTensor<Self>,
        f: PiecewiseLinear,
    ) -> (FloatTensor<Self>, IntTensor<Self>);

    /// The words of the mask.
    #[fusion(meta = |x, _f| crate::backend::cube::described_words(x))]
    fn cube_piecewise_words(x: FloatTensor<Self>, f: PiecewiseLinear) -> IntTensor<Self>;
}

impl PiecewiseLinearCube for CubeBackend {
    fn cube_piecewise_linear_with_words(
        x: FloatTensor<Self>,
        f: PiecewiseLinear,
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let packed = empty_words(&x);
        let y = Output::alike(&x, 0);
        if let Some(Launch { units: (count, dim), dtypes, kind, parameters: [p, q] }) = launch(&x, f) {
            let size = vector_size(&[&x, &y.tensor], GROUP);
            let (client, at) = (x.client.clone(), address_type(&[&x]));
            let (x, y, packed) = (x.into_linear_view(), y.view(), packed.clone().into_linear_view());
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                both_kernel::launch_unchecked(
                    &client, count, dim, at, size, x, y, packed, p, q, kind, dtypes,
                );
            }
        }
        (y.tensor, packed)
    }

    fn cube_piecewise_words(x: FloatTensor<Self>, f: PiecewiseLinear) -> IntTensor<Self> {
        let packed = empty_words(&x);
        if let Some(Launch { units: (count, dim), dtypes, kind, parameters: [p, q] }) = launch(&x, f) {
            let size = vector_size(&[&x], GROUP);
            let (client, at) = (x.client.clone(), address_type(&[&x]));
            let (x, packed) = (x.into_linear_view(), packed.clone().into_linear_view());
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                words_kernel::launch_unchecked(&client, count, dim, at, size, x, packed, p, q, kind, dtypes);
            }
        }
        packed
    }
}

/// `f(x)`.
#[cfg(not(feature = "fusion"))]
fn values(x: CubeTensor, f: PiecewiseLinear) -> CubeTensor {
    let len = x.shape().num_elements();
    let y = Output::alike(&x, 0);
    if len > 0 {
        let size = vector_size(&[&x, &y.tensor], GROUP);
        let (count, dim) = units(&x.client, len / size);
        let dtypes = types(x.dtype);
        let (kind, [p, q]) = kind(f, dtypes[1]);
        let at = address_type(&[&x]);
        let client = x.client.clone();
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            value_kernel::launch_unchecked(
                &client,
                count,
                dim,
                at,
                size,
                x.into_linear_view(),
                y.view(),
                p,
                q,
                kind,
                dtypes,
            );
        }
    }
    y.tensor
}

/// What the kernels with bits are launched with.
struct Launch {
    units: (CubeCount, CubeDim),
    dtypes: [ElemType; 2],
    kind: Kind,
    parameters: [InputScalar; 2],
}

/// `None` for a tensor without elements.
fn launch(x: &CubeTensor, f: PiecewiseLinear) -> Option<Launch> {
    let words = words(x.shape().num_elements());
    let dtypes = types(x.dtype);
    let (kind, parameters) = kind(f, dtypes[1]);
    (words > 0).then(|| Launch { units: units(&x.client, words), dtypes, kind, parameters })
}

/// The function without its numbers, for which a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Relu,
    LeakyRelu,
    Clamp,
    HardSigmoid,
    Shrink,
    Threshold,
}

fn kind(f: PiecewiseLinear, dtype: ElemType) -> (Kind, [InputScalar; 2]) {
    let (kind, parameters) = match f {
        PiecewiseLinear::Relu => (Kind::Relu, [0.0; 2]),
        PiecewiseLinear::LeakyRelu { negative_slope } => (Kind::LeakyRelu, [negative_slope, 0.0]),
        PiecewiseLinear::Clamp { min, max } => (Kind::Clamp, [min, max]),
        PiecewiseLinear::HardSigmoid { alpha, beta } => (Kind::HardSigmoid, [alpha, beta]),
        PiecewiseLinear::Shrink { lambda, bias } => (Kind::Shrink, [lambda, bias]),
        PiecewiseLinear::Threshold { threshold, value } => (Kind::Threshold, [threshold, value]),
    };
    (kind, parameters.map(|parameter| InputScalar::new(parameter, dtype)))
}

/// The values of the function, and the bit where it is set.
#[derive(CubeType)]
struct Piece<W: Float, N: Size> {
    y: Vector<W, N>,
    set: Vector<u32, N>,
}

#[cube]
fn piece<W: Float, N: Size>(
    x: Vector<W, N>,
    p: W,
    q: W,
    #[comptime] bit: u32,
    #[comptime] kind: Kind,
) -> Piece<W, N> {
    let (p, q) = (Vector::<W, N>::new(p), Vector::<W, N>::new(q));
    let (zero, one) = (Vector::<W, N>::new(W::new(0.0)), Vector::<W, N>::new(W::new(1.0)));
    let (clear, set) = (Vector::<u32, N>::new(0), Vector::<u32, N>::new(bit));
    match comptime!(kind) {
        Kind::Relu => {
            let off = x.less_equal(&zero);
            Piece::<W, N> { y: select_many(off, zero, x), set: select_many(off, clear, set) }
        }
        Kind::LeakyRelu => {
            let off = x.less_than(&zero);
            Piece::<W, N> { y: select_many(off, x * p, x), set: select_many(off, clear, set) }
        }
        Kind::Clamp => clamped::<W, N>(x, p, q, bit),
        Kind::HardSigmoid => clamped::<W, N>(x * p + q, zero, one, bit),
        Kind::Shrink => {
            let off = x.abs().less_equal(&p);
            let shrunk = select_many(x.less_than(&zero), x + q, x - q);
            Piece::<W, N> { y: select_many(off, zero, shrunk), set: select_many(off, clear, set) }
        }
        Kind::Threshold => {
            let off = x.less_equal(&p);
            Piece::<W, N> { y: select_many(off, q, x), set: select_many(off, clear, set) }
        }
    }
}

#[cube]
fn clamped<W: Float, N: Size>(
    x: Vector<W, N>,
    min: Vector<W, N>,
    max: Vector<W, N>,
    #[comptime] bit: u32,
) -> Piece<W, N> {
    let (clear, set) = (Vector::<u32, N>::new(0), Vector::<u32, N>::new(bit));
    let (below, above) = (x.less_than(&min), x.greater_than(&max));
    Piece::<W, N> {
        y: select_many(below, min, select_many(above, max, x)),
        set: select_many(below, clear, select_many(above, clear, set)),
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn value_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: Kind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let x = Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS));
    let piece = piece::<W, N>(x, p.get::<W>(), q.get::<W>(), 0u32, kind);
    y.write(ABSOLUTE_POS, Vector::cast_from(piece.y));
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn both_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    mut packed: LinearViewMut<'_, u32>,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: Kind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !packed.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let mut lanes = Vector::<u32, N>::new(0);
    let size = N::value().comptime();
    let vectors = comptime!(GROUP / size);
    #[unroll]
    for turn in 0..TURNS {
        let group = group_of_unit(ABSOLUTE_POS, turn);
        #[unroll]
        for part in 0..vectors {
            let at = group * vectors + part;
            if y.is_in_bounds(at) {
                let x = Vector::<W, N>::cast_from(x.read(at));
                let bit = comptime!(bit(turn, part, size));
                let piece = piece::<W, N>(x, p.get::<W>(), q.get::<W>(), bit, kind);
                y.write(at, Vector::cast_from(piece.y));
                lanes |= piece.set;
            }
        }
    }
    packed.write(ABSOLUTE_POS, join::<N>(lanes));
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn words_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut packed: LinearViewMut<'_, u32>,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: Kind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !packed.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let mut lanes = Vector::<u32, N>::new(0);
    let size = N::value().comptime();
    let vectors = comptime!(GROUP / size);
    #[unroll]
    for turn in 0..TURNS {
        let group = group_of_unit(ABSOLUTE_POS, turn);
        #[unroll]
        for part in 0..vectors {
            let at = group * vectors + part;
            if x.is_in_bounds(at) {
                let x = Vector::<W, N>::cast_from(x.read(at));
                let bit = comptime!(bit(turn, part, size));
                let piece = piece::<W, N>(x, p.get::<W>(), q.get::<W>(), bit, kind);
                lanes |= piece.set;
            }
        }
    }
    packed.write(ABSOLUTE_POS, join::<N>(lanes));
}
