//! Kernels for devices: one pass over `x` for the output and the bits of the mask, where the composition has ten.
//!
//! | | fused | not fused |
//! | --- | --- | --- |
//! | without bits | Burn's kernel, fused with the operations around it | our kernel |
//! | ReLU with bits | Burn's kernel, and one of ours for the bits of its output: after a norm and a sum, one pass less | our kernel |
//! | others with bits | our kernel | our kernel |
use super::{PiecewiseLinear, PiecewiseLinearKernels};
use crate::backend::cube::{
    CubeMask, GROUP, Grid, Output, TURNS, bit, empty_words, group_of_unit, join, launch, vector_size, words,
};
#[cfg(feature = "fusion")]
use burn::backend::ops::ActivationOps;
use burn::backend::{
    Backend, Cube, backend_extension,
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
            // Fused with the norm and the sum before it. The bits of the output are those of the input.
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
        let y = Output::alike(&x, 0);
        let words = words_and_values(x, f, Some(&y));
        (y.tensor, words)
    }

    fn cube_piecewise_words(x: FloatTensor<Self>, f: PiecewiseLinear) -> IntTensor<Self> {
        words_and_values(x, f, None)
    }
}

/// The words of the mask; `f(x)` is written to `y`.
fn words_and_values(x: CubeTensor, f: PiecewiseLinear, y: Option<&Output>) -> CubeTensor {
    let packed = empty_words(&x);
    let tensors: Vec<&CubeTensor> = [&x].into_iter().chain(y.map(|y| &y.tensor)).collect();
    let size = vector_size(&tensors, GROUP);
    if let Some(grid) = Grid::of_units(words(x.meta.num_elements()), &[&x]) {
        let (kind, [p, q]) = kind(f, &grid);
        let (x, y, packed) = (x.into_linear_view(), y.map(Output::view), packed.clone().into_linear_view());
        // SAFETY: the kernel compares every position with the shapes.
        unsafe { launch!(words_kernel, grid, size, x, y.into(), packed, p, q, kind, grid.dtypes) };
    }
    packed
}

/// `f(x)`
#[cfg(not(feature = "fusion"))]
fn values(x: CubeTensor, f: PiecewiseLinear) -> CubeTensor {
    let y = Output::alike(&x, 0);
    let size = vector_size(&[&x, &y.tensor], GROUP);
    if let Some(grid) = Grid::of_units(x.meta.num_elements() / size, &[&x]) {
        let (kind, [p, q]) = kind(f, &grid);
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            launch!(value_kernel, grid, size, x.into_linear_view(), y.view(), p, q, kind, grid.dtypes);
        }
    }
    y.tensor
}

/// The function without its numbers, for which a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum PieceKind {
    Relu,
    LeakyRelu,
    Clamp,
    HardSigmoid,
    Shrink,
    Threshold,
}

/// The kind of a function and its two numbers.
fn kind(f: PiecewiseLinear, grid: &Grid) -> (PieceKind, [InputScalar; 2]) {
    let (kind, parameters) = match f {
        PiecewiseLinear::Relu => (PieceKind::Relu, [0.0; 2]),
        PiecewiseLinear::LeakyRelu { negative_slope } => (PieceKind::LeakyRelu, [negative_slope, 0.0]),
        PiecewiseLinear::Clamp { min, max } => (PieceKind::Clamp, [min, max]),
        PiecewiseLinear::HardSigmoid { alpha, beta } => (PieceKind::HardSigmoid, [alpha, beta]),
        PiecewiseLinear::Shrink { lambda, bias } => (PieceKind::Shrink, [lambda, bias]),
        PiecewiseLinear::Threshold { threshold, value } => (PieceKind::Threshold, [threshold, value]),
    };
    (kind, parameters.map(|parameter| grid.scalar(parameter)))
}

/// The values of the function, and the bits of the mask.
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
    #[comptime] kind: PieceKind,
) -> Piece<W, N> {
    let (p, q) = (Vector::<W, N>::new(p), Vector::<W, N>::new(q));
    let (zero, one) = (Vector::<W, N>::new(W::new(0.0)), Vector::<W, N>::new(W::new(1.0)));
    let (clear, set) = (Vector::<u32, N>::new(0), Vector::<u32, N>::new(bit));
    match comptime!(kind) {
        PieceKind::Relu => {
            let off = x.less_equal(&zero);
            Piece::<W, N> { y: select_many(off, zero, x), set: select_many(off, clear, set) }
        }
        PieceKind::LeakyRelu => {
            let off = x.less_than(&zero);
            Piece::<W, N> { y: select_many(off, x * p, x), set: select_many(off, clear, set) }
        }
        PieceKind::Clamp => clamped::<W, N>(x, p, q, bit),
        PieceKind::HardSigmoid => clamped::<W, N>(x * p + q, zero, one, bit),
        PieceKind::Shrink => {
            let off = x.abs().less_equal(&p);
            let shrunk = select_many(x.less_than(&zero), x + q, x - q);
            Piece::<W, N> { y: select_many(off, zero, shrunk), set: select_many(off, clear, set) }
        }
        PieceKind::Threshold => {
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
    #[comptime] kind: PieceKind,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !y.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let x = Vector::<W, N>::cast_from(x.read(ABSOLUTE_POS));
    let piece = piece::<W, N>(x, p.get::<W>(), q.get::<W>(), 0u32, kind);
    y.write(ABSOLUTE_POS, Vector::cast_from(piece.y));
}

/// The words of the mask, and the values if they are wanted.
#[cube(launch_unchecked, address_type = "dynamic")]
fn words_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: ComptimeOption<LinearViewMut<'_, Vector<T, N>>>,
    mut packed: LinearViewMut<'_, u32>,
    p: InputScalar,
    q: InputScalar,
    #[comptime] kind: PieceKind,
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
                #[comptime]
                if let ComptimeOption::Some(y) = &mut y {
                    y.write(at, Vector::cast_from(piece.y));
                }
                lanes |= piece.set;
            }
        }
    }
    packed.write(ABSOLUTE_POS, join::<N>(lanes));
}
