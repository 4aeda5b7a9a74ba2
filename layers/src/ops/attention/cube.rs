//! Kernels for devices: a cube turns a row of products into weights, in place, and the gradients of weights into those of products.
//! Numbers are computed in f32 at least, and rounded once.
//!
//! These kernels are taken with fusion, too: Burn's fusion makes several kernels of the composition, one for each sum. If the bias has a
//! gradient, the composition makes the gradients.
//!
//! Products of few queries and keys have a kernel of their own: Burn's products by tiles would leave most units of a cube idle.
use super::{AttentionKernels, MaybeMask, ScoreGrads, ScoreRows, kernels::composed_backward, parts::Put};
use crate::backend::cube::{
    self, Grid, Output, Pair, SliceAssign, assign_slices, constant, launch, max_of_vector, max_over_units,
    number, row_of_unit, sum_of_vector, sum_over_units, types, unit_of_row, units_of_cube, units_of_row,
    vector_size, writable,
};
use crate::backend::optional::{MaybeTensor, UpToFour};
use burn::backend::cubecl::dtype_to_storage_type;
use burn::backend::{Backend, Cube, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewLaunch, LinearViewMut},
};
use burn_cubecl::tensor::CubeTensor;

impl AttentionKernels for Cube {
    fn product(lhs: FloatTensor<Self>, rhs: FloatTensor<Self>) -> FloatTensor<Self> {
        cube::product(lhs, rhs)
    }

    fn attention_weights(products: FloatTensor<Self>, rows: &ScoreRows<Self>) -> FloatTensor<Self> {
        let ScoreRows { mask, bias, .. } = rows.clone();
        Self::cube_attention_weights(products, mask.into(), bias.into(), Options::of(rows))
    }

    const PUTS_TOGETHER: bool = true;

    fn put_all(puts: Vec<Put<Self>>) {
        let is_whole = |put: &Put<Self>| put.part.shape() == put.whole.shape;
        let (wholes, parts): (Vec<_>, Vec<_>) = puts.into_iter().partition(is_whole);
        wholes.into_iter().for_each(Put::put);
        if parts.is_empty() {
            return;
        }
        debug_assert!(parts.len() <= 3, "gradients of queries, keys and values");
        let mut places = [[0; 4]; 3];
        let (mut tensors, mut of_tensors, mut targets) = (vec![], vec![], vec![]);
        for (Put { whole, ranges, part }, place) in parts.into_iter().zip(&mut places) {
            *place = ranges.map(|range| range.start);
            tensors.push(Some(whole.take(part.dtype(), &part.device())));
            of_tensors.push(Some(part));
            targets.push(whole);
        }
        let filled = Self::cube_assign_slices(UpToFour::new(tensors), UpToFour::new(of_tensors), places);
        for (whole, filled) in targets.into_iter().zip(filled.into_options()) {
            whole.all = filled;
        }
    }

    fn attention_weights_backward(
        products: FloatTensor<Self>,
        gradients: FloatTensor<Self>,
        rows: &ScoreRows<Self>,
        wants_bias: bool,
    ) -> ScoreGrads<Self> {
        if wants_bias {
            return composed_backward::<Self>(products, gradients, rows, wants_bias);
        }
        let options = Options::of(rows);
        let ScoreRows { mask, bias, .. } = rows.clone();
        let (weights, products) =
            Self::cube_attention_weights_backward(products, gradients, mask.into(), bias.into(), options);
        ScoreGrads { weights, products, bias: None }
    }
}

/// How the products of a chunk become weights.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    scale: f64,
    softcap: Option<f64>,
    masked: f64,
    quiet: bool,
    /// The last key that the first of the rows sees, if attention is causal; negative if it sees none.
    last_of_first: Option<i64>,
}

impl Options {
    fn of<B: Backend>(rows: &ScoreRows<B>) -> Self {
        let scores = rows.scores;
        let offset = rows.all_keys as i64 - rows.all_queries as i64;
        Self {
            scale: scores.scale,
            softcap: scores.softcap,
            masked: scores.masked,
            quiet: scores.quiet,
            last_of_first: scores.causal.then_some(rows.queries.start as i64 + offset),
        }
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait AttentionCube: Backend {
    /// See [`AttentionKernels::attention_weights`].
    #[fusion(dtype = products, shape = products)]
    fn cube_attention_weights(
        products: FloatTensor<Self>,
        #[extension_type] mask: MaybeMask<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self>;

    /// Puts parts into tensors, up to three.
    #[fusion(meta = |tensors, _parts, _starts| tensors.clone())]
    fn cube_assign_slices(
        #[extension_type] tensors: UpToFour<Self>,
        #[extension_type] parts: UpToFour<Self>,
        starts: [[usize; 4]; 3],
    ) -> UpToFour<Self>;

    /// The weights and the gradients of the products.
    #[fusion(meta = |products, gradients, _mask, _bias, _options| (products.clone(), gradients.clone()))]
    fn cube_attention_weights_backward(
        products: FloatTensor<Self>,
        gradients: FloatTensor<Self>,
        #[extension_type] mask: MaybeMask<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        options: Options,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);
}

impl AttentionCube for CubeBackend {
    fn cube_assign_slices(
        tensors: UpToFour<Self>,
        parts: UpToFour<Self>,
        starts: [[usize; 4]; 3],
    ) -> UpToFour<Self> {
        let pairs = tensors.into_options().into_iter().zip(parts.into_options()).zip(starts);
        let assigns = pairs.filter_map(|((whole, part), start)| {
            let (whole, value) = whole.zip(part)?;
            Some(SliceAssign { tensor: writable(whole), value, start })
        });
        UpToFour::new(assign_slices(&assigns.collect::<Vec<_>>()).into_iter().map(Some))
    }

    fn cube_attention_weights(
        products: FloatTensor<Self>,
        mask: MaybeMask<Self>,
        bias: MaybeTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self> {
        let weights = Output::replacing(&products, 0);
        let scores = Scores::of(&[&products, &weights.tensor], mask, bias, options);
        if let Some(Scores { grid, size, mask, bias, dtypes: [of_mask, of_bias], scoring, variant }) = scores
        {
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    weights_kernel,
                    grid,
                    size,
                    products.into_linear_view(),
                    weights.view(),
                    mask.into(),
                    bias.into(),
                    scoring,
                    variant,
                    grid.dtypes,
                    of_mask,
                    of_bias,
                );
            }
        }
        weights.tensor
    }

    fn cube_attention_weights_backward(
        products: FloatTensor<Self>,
        gradients: FloatTensor<Self>,
        mask: MaybeMask<Self>,
        bias: MaybeTensor<Self>,
        options: Options,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (weights, of_products) = (Output::replacing(&products, 0), Output::replacing(&gradients, 1));
        let tensors = [&products, &gradients, &weights.tensor, &of_products.tensor];
        let scores = Scores::of(&tensors, mask, bias, options);
        if let Some(Scores { grid, size, mask, bias, dtypes: [of_mask, of_bias], scoring, variant }) = scores
        {
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                launch!(
                    gradients_kernel,
                    grid,
                    size,
                    products.into_linear_view(),
                    gradients.into_linear_view(),
                    weights.view(),
                    of_products.view(),
                    mask.into(),
                    bias.into(),
                    scoring,
                    variant,
                    grid.dtypes,
                    of_mask,
                    of_bias,
                );
            }
        }
        (weights.tensor, of_products.tensor)
    }
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct AttentionVariant {
    units: usize,
    capped: bool,
    causal: bool,
    quiet: bool,
}

/// What both launches need to make scores of products.
struct Scores {
    grid: Grid,
    /// Elements of a vector.
    size: usize,
    mask: Option<LinearViewLaunch>,
    bias: Option<LinearViewLaunch>,
    /// Those of the mask and the bias.
    dtypes: [ElemType; 2],
    scoring: ScoringLaunch,
    variant: AttentionVariant,
}

impl Scores {
    /// For kernels over these tensors, the first of which are the products. `None` if there are no rows.
    fn of(
        tensors: &[&CubeTensor],
        mask: MaybeMask<CubeBackend>,
        bias: MaybeTensor<CubeBackend>,
        options: Options,
    ) -> Option<Self> {
        let products = tensors[0];
        let [batch, heads, queries, keys] = products.shape().dims();
        let (mask, bias): (Option<CubeTensor>, Option<CubeTensor>) = (mask.into_option(), bias.into_option());
        let read: Vec<&CubeTensor> =
            tensors.iter().copied().chain(mask.as_ref()).chain(bias.as_ref()).collect();
        let (rows, units) = (batch * heads * queries, units_of_row(keys, units_of_cube(&products.client)));
        let grid = Grid::of_rows(rows, units, &read)?;
        let Options { scale, softcap, masked, quiet, last_of_first } = options;
        let is_f64 = grid.dtypes[1] == types(DType::F64)[1];
        let lowest = if is_f64 { f64::MIN } else { f64::from(f32::MIN) };
        let [scale, cap, masked, unseen, lowest] =
            [scale, softcap.unwrap_or(1.0), masked, f64::NEG_INFINITY, lowest]
                .map(|number| grid.scalar(number));
        let last = last_of_first.unwrap_or(0).clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32;
        let of_mask = mask.as_ref().map_or(DType::I32, |mask| mask.dtype);
        let of_bias = bias.as_ref().map_or(products.dtype, |bias| bias.dtype);
        Some(Self {
            grid,
            size: vector_size(tensors, 4),
            dtypes: [of_mask, of_bias].map(dtype_to_storage_type),
            mask: mask.map(|mask| mask.into_linear_view_like(products)),
            bias: bias.map(|bias| bias.into_linear_view_like(products)),
            scoring: ScoringLaunch::new(rows, queries, keys, scale, cap, masked, unseen, lowest, last),
            variant: AttentionVariant {
                units,
                capped: softcap.is_some(),
                causal: last_of_first.is_some(),
                quiet,
            },
        })
    }
}

/// Rows of products, and how they become scores.
#[derive(CubeType, CubeLaunch)]
struct Scoring {
    rows: usize,
    /// Queries of a head.
    queries: usize,
    keys: usize,
    scale: InputScalar,
    cap: InputScalar,
    masked: InputScalar,
    /// Minus infinity, for which WGSL has no constant.
    unseen: InputScalar,
    /// The lowest finite number.
    lowest: InputScalar,
    last_of_first: i32,
}

/// Scores and their slopes, the derivatives by the products.
#[derive(CubeType, Clone, Copy)]
struct Scored<W: Float, N: Size> {
    score: Vector<W, N>,
    slope: Vector<W, N>,
}

#[cube]
fn scored<W: Float, M: Int, V: Float, N: Size>(
    products: Vector<W, N>,
    vector: usize,
    mask: &ComptimeOption<LinearView<'_, M>>,
    bias: &ComptimeOption<LinearView<'_, V>>,
    scoring: &Scoring,
    #[comptime] variant: AttentionVariant,
) -> Scored<W, N> {
    let scale = Vector::<W, N>::new(scoring.scale.get::<W>());
    let mut score = products * scale;
    let mut slope = scale;
    if comptime!(variant.capped) {
        let cap = Vector::<W, N>::new(scoring.cap.get::<W>());
        let tanh = (score / cap).tanh();
        score = cap * tanh;
        slope = scale * (number::<W, N>(1.0) - tanh * tanh);
    }
    let size = N::value().comptime();
    let row_of_all = row_of_unit(comptime!(variant.units));
    let row = row_of_all % scoring.queries;
    let first_key = (vector - row_of_all * (scoring.keys / size)) * size;
    #[unroll]
    for lane in 0..size {
        let at = vector * size + lane;
        let hidden: ComptimeOption<bool> = mask.as_ref().map(|mask| mask.read(at) != M::new(0));
        if hidden.unwrap_or(false) {
            score.insert(lane, scoring.masked.get::<W>());
            slope.insert(lane, W::new(0.0));
        }
        if comptime!(variant.causal) {
            let last = scoring.last_of_first + i32::cast_from(row);
            if i32::cast_from(first_key + lane) > last {
                score.insert(lane, scoring.unseen.get::<W>());
            }
        }
        let bias: ComptimeOption<V> = bias.as_ref().map(|bias| bias.read(at));
        let biased = score.extract(lane) + W::cast_from(bias.unwrap_or(V::new(0.0)));
        score.insert(lane, biased);
    }
    Scored::<W, N> { score, slope }
}

/// Sums over the scores of a row that a unit has read so far.
#[derive(CubeType, Clone, Copy)]
struct Sums<W: Float, N: Size> {
    /// The largest score so far. It is finite, so that the exponentials of a row that is hidden whole are 0.
    largest: Vector<W, N>,
    /// The sum of `exp(score - largest)`.
    weights: Vector<W, N>,
    /// The sum of the same, times the gradients of the weights.
    gradients: Vector<W, N>,
}

/// The sums over all units.
#[derive(CubeType, Clone, Copy)]
struct RowSums<W: Float> {
    largest: W,
    weights: W,
    gradients: W,
}

#[cube]
fn no_sums<W: Float, N: Size>(scoring: &Scoring) -> Sums<W, N> {
    let zero = Vector::<W, N>::new(W::new(0.0));
    Sums::<W, N> { largest: Vector::new(scoring.lowest.get::<W>()), weights: zero, gradients: zero }
}

#[cube]
fn over_units<W: Float, N: Size>(sums: Sums<W, N>, #[comptime] variant: AttentionVariant) -> RowSums<W> {
    let largest = max_over_units::<W>(max_of_vector::<W, N>(sums.largest), comptime!(variant.units));
    let scale = (sums.largest - Vector::new(largest)).exp();
    let of_unit = Pair::<W> {
        a: sum_of_vector::<W, N>(sums.weights * scale),
        b: sum_of_vector::<W, N>(sums.gradients * scale),
    };
    let total = sum_over_units::<W>(of_unit, comptime!(variant.units));
    let mut weights = total.a;
    if comptime!(variant.quiet) {
        weights += (-largest).exp();
    }
    let weights = max(weights, constant::<W>(comptime!(f32::MIN_POSITIVE)));
    RowSums::<W> { largest, weights, gradients: total.b }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn weights_kernel<T: Float, W: Float, M: Int, V: Float, N: Size>(
    products: LinearView<'_, Vector<T, N>>,
    mut weights: LinearViewMut<'_, Vector<T, N>>,
    mask: ComptimeOption<LinearView<'_, M>>,
    bias: ComptimeOption<LinearView<'_, V>>,
    scoring: Scoring,
    #[comptime] variant: AttentionVariant,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(M)] _of_mask: ElemType,
    #[define(V)] _of_bias: ElemType,
) {
    let units = comptime!(variant.units);
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= scoring.rows {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = scoring.keys / size;
    let start = row * vectors;
    let mut sums = no_sums::<W, N>(&scoring);
    let mut at = unit;
    while at < vectors {
        let products = Vector::<W, N>::cast_from(products.read(start + at));
        let score = scored::<W, M, V, N>(products, start + at, &mask, &bias, &scoring, variant).score;
        let before = sums.largest;
        sums.largest = before.max(score);
        sums.weights = sums.weights * (before - sums.largest).exp() + (score - sums.largest).exp();
        at += units;
    }
    let row = over_units::<W, N>(sums, variant);
    let mut at = unit;
    while at < vectors {
        let products = Vector::<W, N>::cast_from(products.read(start + at));
        let score = scored::<W, M, V, N>(products, start + at, &mask, &bias, &scoring, variant).score;
        let weight = (score - Vector::new(row.largest)).exp() / Vector::new(row.weights);
        weights.write(start + at, Vector::cast_from(weight));
        at += units;
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn gradients_kernel<T: Float, W: Float, M: Int, V: Float, N: Size>(
    products: LinearView<'_, Vector<T, N>>,
    gradients: LinearView<'_, Vector<T, N>>,
    mut weights: LinearViewMut<'_, Vector<T, N>>,
    mut of_products: LinearViewMut<'_, Vector<T, N>>,
    mask: ComptimeOption<LinearView<'_, M>>,
    bias: ComptimeOption<LinearView<'_, V>>,
    scoring: Scoring,
    #[comptime] variant: AttentionVariant,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(M)] _of_mask: ElemType,
    #[define(V)] _of_bias: ElemType,
) {
    let units = comptime!(variant.units);
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= scoring.rows {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = scoring.keys / size;
    let start = row * vectors;
    let mut sums = no_sums::<W, N>(&scoring);
    let mut at = unit;
    while at < vectors {
        let products = Vector::<W, N>::cast_from(products.read(start + at));
        let score = scored::<W, M, V, N>(products, start + at, &mask, &bias, &scoring, variant).score;
        let before = sums.largest;
        sums.largest = before.max(score);
        let (scale, weight) = ((before - sums.largest).exp(), (score - sums.largest).exp());
        let gradient = Vector::<W, N>::cast_from(gradients.read(start + at));
        sums.weights = sums.weights * scale + weight;
        sums.gradients = sums.gradients * scale + weight * gradient;
        at += units;
    }
    let row = over_units::<W, N>(sums, variant);
    let mean = Vector::<W, N>::new(row.gradients / row.weights);
    let mut at = unit;
    while at < vectors {
        let products = Vector::<W, N>::cast_from(products.read(start + at));
        let scored = scored::<W, M, V, N>(products, start + at, &mask, &bias, &scoring, variant);
        let weight = (scored.score - Vector::new(row.largest)).exp() / Vector::new(row.weights);
        let gradient = Vector::<W, N>::cast_from(gradients.read(start + at));
        weights.write(start + at, Vector::cast_from(weight));
        of_products.write(start + at, Vector::cast_from(weight * (gradient - mean) * scored.slope));
        at += units;
    }
}
