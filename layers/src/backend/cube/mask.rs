//! Masks of one bit per element, on devices.
//!
//! A word holds the bits of 32 elements, and one unit of a kernel writes or reads it. The elements are not neighbors: at each of eight
//! turns, the units of 32 words take 32 neighboring groups of [`GROUP`] elements, so that a device reads whole lines of memory. Each
//! element of a group has a byte of the word. Which bit belongs to an element depends only on the element's number in logical order.
use super::random::{self, GROUP};
use super::{Grid, Output, empty, launch, vector_size};
use crate::backend::{Masks, Saved};
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{
    Backend, BackendTypes, Cube, Distribution, TensorMetadata, backend_extension,
    ops::IntTensorOps,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, IntDType, Shape};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};
use burn_cubecl::{CubeBackend, tensor::CubeTensor};

/// Units that take neighboring groups.
const LANES: usize = 32;
/// Groups of a unit.
pub(crate) const TURNS: usize = 8;
/// Bits of a word.
const BITS_PER_UNIT: usize = GROUP * TURNS;

/// The number of words for so many elements.
pub(crate) fn words(elements: usize) -> usize {
    let block = LANES * BITS_PER_UNIT;
    elements / block * LANES + (elements % block).div_ceil(GROUP).min(LANES)
}

/// The words of a mask of `x`, not written yet.
pub(crate) fn empty_words(x: &CubeTensor) -> CubeTensor {
    empty(x, Shape::new([words(x.shape().num_elements())]), DType::I32)
}

/// The shape and dtype of the words of a mask of `x`, where operations are fused.
#[cfg(feature = "fusion")]
pub(crate) fn described_words(x: &TensorSpec) -> TensorSpec {
    TensorSpec { shape: Shape::new([words(x.shape.num_elements())]), dtype: DType::I32 }
}

/// The number of the group that the unit of a word takes at a turn.
#[cube]
pub(crate) fn group_of_unit(word: usize, #[comptime] turn: usize) -> usize {
    (word / LANES * TURNS + turn) * LANES + word % LANES
}

/// The bits of a mask.
#[derive(Clone, Debug)]
pub struct CubeMask(MaskBits);

#[derive(Clone, Debug)]
enum MaskBits {
    /// In memory.
    Words(IntTensor<Cube>),
    /// Drawn with a probability whenever they are read.
    Drawn { seed: IntTensor<Cube>, probability: f64 },
}

impl CubeMask {
    /// From the words that a kernel wrote.
    pub(crate) fn of_words(words: IntTensor<Cube>) -> Self {
        Self(MaskBits::Words(words))
    }

    /// The words of a mask that is not drawn.
    pub(crate) fn written(&self) -> IntTensor<Cube> {
        match &self.0 {
            MaskBits::Words(words) => words.clone(),
            MaskBits::Drawn { .. } => unreachable!("only dropout draws, which scales and nothing else"),
        }
    }
}

impl Saved for CubeMask {
    fn bytes(&self) -> usize {
        match &self.0 {
            MaskBits::Words(tensor) | MaskBits::Drawn { seed: tensor, .. } => {
                size_of::<u32>() * tensor.shape().num_elements()
            }
        }
    }
}

impl Masks for Cube {
    type Mask = CubeMask;

    fn pack(bits: BoolTensor<Self>) -> CubeMask {
        CubeMask::of_words(Self::cube_pack(bits))
    }

    fn scale_by_mask(x: FloatTensor<Self>, mask: &CubeMask, slopes: [f64; 2]) -> FloatTensor<Self> {
        match &mask.0 {
            MaskBits::Words(words) => Self::cube_scale_by_words(x, words.clone(), slopes),
            MaskBits::Drawn { seed, probability } => {
                Self::cube_scale_by_draw(x, seed.clone(), *probability, slopes)
            }
        }
    }

    fn bernoulli_mask(_: Shape, _: DType, device: &Self::Device, probability: f64) -> CubeMask {
        CubeMask(MaskBits::Drawn { seed: draw_seed(device), probability })
    }
}

/// A seed from which kernels draw numbers.
pub(crate) fn draw_seed(device: &<Cube as BackendTypes>::Device) -> IntTensor<Cube> {
    let halves = Distribution::Uniform(0.0, f64::from(1 << 16));
    Cube::int_random(Shape::new([random::SEED_WORDS]), halves, device, IntDType::I32)
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait MaskKernels: Backend {
    /// The words of a mask, from booleans.
    #[fusion(dtype = DType::I32, shape = Shape::new([words(bits.num_elements())]))]
    fn cube_pack(bits: BoolTensor<Self>) -> IntTensor<Self>;

    /// See [`Masks::scale_by_mask`].
    #[fusion(dtype = x, shape = x)]
    fn cube_scale_by_words(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        slopes: [f64; 2],
    ) -> FloatTensor<Self>;

    /// The same, with bits that are drawn.
    #[fusion(dtype = x, shape = x)]
    fn cube_scale_by_draw(
        x: FloatTensor<Self>,
        seed: IntTensor<Self>,
        probability: f64,
        slopes: [f64; 2],
    ) -> FloatTensor<Self>;
}

impl MaskKernels for CubeBackend {
    fn cube_pack(bits: BoolTensor<Self>) -> IntTensor<Self> {
        let packed = empty_words(&bits);
        let size = vector_size(&[&bits], GROUP);
        if let Some(grid) = Grid::of_units(words(bits.meta.num_elements()), &[&bits]) {
            let (bits, packed) = (bits.into_linear_view(), packed.clone().into_linear_view());
            // SAFETY: the kernel compares every position with the shapes.
            unsafe { launch!(pack_kernel, grid, size, bits, packed, grid.dtypes[0]) };
        }
        packed
    }

    fn cube_scale_by_words(
        x: FloatTensor<Self>,
        words: IntTensor<Self>,
        slopes: [f64; 2],
    ) -> FloatTensor<Self> {
        scale(x, words, slopes, None)
    }

    fn cube_scale_by_draw(
        x: FloatTensor<Self>,
        seed: IntTensor<Self>,
        probability: f64,
        slopes: [f64; 2],
    ) -> FloatTensor<Self> {
        scale(x, seed, slopes, Some(probability))
    }
}

/// The slopes for which a kernel is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Slope {
    Zero,
    One,
    Other,
}

impl Slope {
    fn of(slope: f64) -> Self {
        match slope {
            0.0 => Self::Zero,
            1.0 => Self::One,
            _ => Self::Other,
        }
    }
}

/// `x * slope`; 0 for a slope of 0, whatever `x` is.
#[cube]
fn times<W: Float, N: Size>(x: Vector<W, N>, slope: W, #[comptime] kind: Slope) -> Vector<W, N> {
    match comptime!(kind) {
        Slope::Zero => Vector::new(W::new(0.0)),
        Slope::One => x,
        Slope::Other => x * Vector::new(slope),
    }
}

/// `bits` are the words, or the seed from which bits with the probability `drawn` are drawn.
fn scale(x: CubeTensor, bits: CubeTensor, slopes: [f64; 2], drawn: Option<f64>) -> CubeTensor {
    let y = Output::alike(&x, 0);
    let size = vector_size(&[&x, &y.tensor], GROUP);
    let Some(grid) = Grid::of_units(words(x.meta.num_elements()), &[&x, &bits]) else { return y.tensor };
    let slopes = match drawn {
        Some(probability) if probability <= 0.0 => [slopes[0]; 2],
        Some(probability) if probability >= 1.0 => [slopes[1]; 2],
        _ => slopes,
    };
    let [off, on] = slopes.map(|slope| grid.scalar(slope));
    // SAFETY: the kernel compares every position with the shapes.
    unsafe {
        launch!(
            scale_kernel,
            grid,
            size,
            x.into_linear_view(),
            y.view(),
            bits.into_linear_view(),
            off,
            on,
            drawn.map_or(0, random::threshold),
            drawn.is_some(),
            slopes.map(Slope::of),
            grid.dtypes,
        );
    }
    y.tensor
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn scale_kernel<T: Float, W: Float, N: Size>(
    x: LinearView<'_, Vector<T, N>>,
    mut y: LinearViewMut<'_, Vector<T, N>>,
    bits: LinearView<'_, u32>,
    off: InputScalar,
    on: InputScalar,
    threshold: u32,
    #[comptime] drawn: bool,
    #[comptime] slopes: [Slope; 2],
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let mut lanes = Vector::<u32, N>::new(0);
    if comptime!(!drawn) {
        lanes = split::<N>(bits.read_checked(ABSOLUTE_POS));
    }
    let size = N::value().comptime();
    let vectors = comptime!(GROUP / size);
    #[unroll]
    for turn in 0..TURNS {
        let group = group_of_unit(ABSOLUTE_POS, turn);
        if comptime!(drawn) && y.is_in_bounds(group * vectors) {
            lanes = split::<N>(drawn_bits(&bits, group, threshold) << comptime!(turn as u32));
        }
        #[unroll]
        for part in 0..vectors {
            let at = group * vectors + part;
            if y.is_in_bounds(at) {
                let set = is_set::<N>(lanes, comptime!(bit(turn, part, size)));
                let x = Vector::<W, N>::cast_from(x.read(at));
                let low = times::<W, N>(x, off.get::<W>(), comptime!(slopes[0]));
                let high = times::<W, N>(x, on.get::<W>(), comptime!(slopes[1]));
                y.write(at, Vector::cast_from(select_many(set, high, low)));
            }
        }
    }
}

/// One bit for each element of a group, the first of its byte in a word: whether the number of the element is below the threshold.
#[cube]
fn drawn_bits(seed: &LinearView<'_, u32>, group: usize, threshold: u32) -> u32 {
    let numbers = random::numbers(seed, group);
    let mut bits = 0u32;
    #[unroll]
    for element in 0..GROUP {
        bits |= u32::cast_from(numbers.get(element) < threshold) << comptime!((element * TURNS) as u32);
    }
    bits
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn pack_kernel<B: Int, N: Size>(
    bits: LinearView<'_, Vector<B, N>>,
    mut packed: LinearViewMut<'_, u32>,
    #[define(B)] _dtype: ElemType,
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
            if bits.is_in_bounds(at) {
                let set = Vector::<bool, N>::cast_from(bits.read(at));
                let bit = Vector::new(comptime!(bit(turn, part, size)));
                lanes |= select_many(set, bit, Vector::new(0u32));
            }
        }
    }
    packed.write(ABSOLUTE_POS, join::<N>(lanes));
}

/// The bit, in the word of a lane, of the elements that a unit reads as a vector of `size` at a turn. In the word of the mask, each lane
/// has a byte.
pub(crate) fn bit(turn: usize, part: usize, size: usize) -> u32 {
    1 << (turn + TURNS * size * part)
}

/// The word of the mask, from the words of the lanes.
#[cube]
pub(crate) fn join<N: Size>(lanes: Vector<u32, N>) -> u32 {
    let size = N::value().comptime();
    let mut word = lanes.extract(0usize);
    #[unroll]
    for lane in 1..size {
        word |= lanes.extract(lane) << comptime!((TURNS * lane) as u32);
    }
    word
}

/// The words of the lanes, with the bits of other lanes above theirs.
#[cube]
pub(crate) fn split<N: Size>(word: u32) -> Vector<u32, N> {
    let size = N::value().comptime();
    let mut lanes = Vector::<u32, N>::new(word);
    #[unroll]
    for lane in 1..size {
        lanes.insert(lane, word >> comptime!((TURNS * lane) as u32));
    }
    lanes
}

/// In which lanes a bit is set.
#[cube]
pub(crate) fn is_set<N: Size>(lanes: Vector<u32, N>, #[comptime] bit: u32) -> Vector<bool, N> {
    (lanes & Vector::new(bit)).greater_than(&Vector::new(0u32))
}
