//! Kernels for devices, of one pass each, which draws the slopes.
use super::RReluKernels;
use crate::backend::Saved;
use crate::backend::cube::{
    GROUP, Grid, Output, TURNS, bit, draw_seed, empty_words, group_of_unit, is_set, join, launch, random,
    split, vector_size, words,
};
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

/// Slopes that are drawn whenever they are read, and where they apply.
#[derive(Clone, Debug)]
pub struct DrawnSlopes {
    bounds: [f64; 2],
    seed: IntTensor<Cube>,
    /// One bit per element, where `x` was negative.
    negative: IntTensor<Cube>,
}

impl Saved for DrawnSlopes {
    fn bytes(&self) -> usize {
        [&self.seed, &self.negative].map(|words| size_of::<u32>() * words.shape().num_elements()).iter().sum()
    }
}

impl RReluKernels for Cube {
    type Slopes = DrawnSlopes;

    fn rrelu(x: FloatTensor<Self>, bounds: [f64; 2]) -> (FloatTensor<Self>, DrawnSlopes) {
        let seed = draw_seed(&x.device());
        let (y, negative) = Self::cube_rrelu(x, seed.clone(), bounds);
        (y, DrawnSlopes { bounds, seed, negative })
    }

    fn rrelu_times(x: FloatTensor<Self>, slopes: &DrawnSlopes) -> FloatTensor<Self> {
        Self::cube_rrelu_times(x, slopes.seed.clone(), slopes.negative.clone(), slopes.bounds)
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait RReluCube: Backend {
    /// `x` times its factors, and the words of a mask that tells where `x` is negative.
    #[fusion(meta = |x, _seed, _bounds| (x.clone(), crate::backend::cube::described_words(x)))]
    fn cube_rrelu(
        x: FloatTensor<Self>,
        seed: IntTensor<Self>,
        bounds: [f64; 2],
    ) -> (FloatTensor<Self>, IntTensor<Self>);

    /// See [`RReluKernels::rrelu_times`].
    #[fusion(dtype = x, shape = x)]
    fn cube_rrelu_times(
        x: FloatTensor<Self>,
        seed: IntTensor<Self>,
        negative: IntTensor<Self>,
        bounds: [f64; 2],
    ) -> FloatTensor<Self>;
}

impl RReluCube for CubeBackend {
    fn cube_rrelu(
        x: FloatTensor<Self>,
        seed: IntTensor<Self>,
        bounds: [f64; 2],
    ) -> (FloatTensor<Self>, IntTensor<Self>) {
        let negative = empty_words(&x);
        let y = Output::replacing(&x, 0);
        let size = vector_size(&[&x, &y.tensor], GROUP);
        if let Some(grid) = Grid::of_units(words(x.meta.num_elements()), &[&x]) {
            let [lower, upper] = bounds.map(|bound| grid.scalar(bound));
            let (x, y, seed) = (x.into_linear_view(), y.view(), seed.into_linear_view());
            let packed = negative.clone().into_linear_view();
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(forward_kernel, grid, size, x, y, packed, seed, lower, upper, grid.dtypes) };
        }
        (y.tensor, negative)
    }

    fn cube_rrelu_times(
        x: FloatTensor<Self>,
        seed: IntTensor<Self>,
        negative: IntTensor<Self>,
        bounds: [f64; 2],
    ) -> FloatTensor<Self> {
        let y = Output::replacing(&x, 0);
        let size = vector_size(&[&x, &y.tensor], GROUP);
        if let Some(grid) = Grid::of_units(words(x.meta.num_elements()), &[&x]) {
            let [lower, upper] = bounds.map(|bound| grid.scalar(bound));
            let (x, y, seed) = (x.into_linear_view(), y.view(), seed.into_linear_view());
            let packed = negative.into_linear_view();
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(times_kernel, grid, size, x, y, packed, seed, lower, upper, grid.dtypes) };
        }
        y.tensor
    }
}

/// The slopes of one vector of a group.
#[cube]
fn slopes<W: Float, N: Size>(
    numbers: &random::Numbers,
    #[comptime] part: usize,
    lower: W,
    upper: W,
) -> Vector<W, N> {
    let size = N::value().comptime();
    let mut slopes = Vector::<W, N>::new(lower);
    #[unroll]
    for lane in 0..size {
        let unit = random::unit::<W>(numbers.get(comptime!(part * size + lane)));
        slopes.insert(lane, lower + (upper - lower) * unit);
    }
    slopes
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    mut packed: LinearViewMut<'_, u32>,
    seed: LinearView<'_, u32>,
    lower: InputScalar,
    upper: InputScalar,
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
        if y.is_in_bounds(group * vectors) {
            let numbers = random::numbers(&seed, group);
            #[unroll]
            for part in 0..vectors {
                let at = group * vectors + part;
                if y.is_in_bounds(at) {
                    let x = Vector::<W, N>::cast_from(x.read(at));
                    let negative = x.less_than(&Vector::new(W::new(0.0)));
                    let slopes = slopes::<W, N>(&numbers, part, lower.get::<W>(), upper.get::<W>());
                    y.write(at, Vector::cast_from(select_many(negative, x * slopes, x)));
                    let bit = Vector::new(comptime!(bit(turn, part, size)));
                    lanes |= select_many(negative, bit, Vector::new(0u32));
                }
            }
        }
    }
    packed.write(ABSOLUTE_POS, join::<N>(lanes));
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn times_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    packed: LinearView<'_, u32>,
    seed: LinearView<'_, u32>,
    lower: InputScalar,
    upper: InputScalar,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    if !packed.is_in_bounds(ABSOLUTE_POS) {
        terminate!();
    }
    let lanes = split::<N>(packed.read(ABSOLUTE_POS));
    let size = N::value().comptime();
    let vectors = comptime!(GROUP / size);
    #[unroll]
    for turn in 0..TURNS {
        let group = group_of_unit(ABSOLUTE_POS, turn);
        if y.is_in_bounds(group * vectors) {
            let numbers = random::numbers(&seed, group);
            #[unroll]
            for part in 0..vectors {
                let at = group * vectors + part;
                if y.is_in_bounds(at) {
                    let x = Vector::<W, N>::cast_from(x.read(at));
                    let negative = is_set::<N>(lanes, comptime!(bit(turn, part, size)));
                    let slopes = slopes::<W, N>(&numbers, part, lower.get::<W>(), upper.get::<W>());
                    y.write(at, Vector::cast_from(select_many(negative, x * slopes, x)));
                }
            }
        }
    }
}
