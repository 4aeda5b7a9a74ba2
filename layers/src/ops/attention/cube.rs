//! Kernels for devices: one cube for every row of weights, which are made in the place of the products, and their gradients in the
//! place of those of the weights. All of it is computed in f32 at least, and rounded once.
//!
//! Burn's fusion makes several kernels of the composition, one for each sum: ours are taken there, too. Only where the bias has a
//! gradient the composition makes the gradients.
//!
//! Products of few queries and keys are a kernel of ours: those by tiles, which are Burn's, leave most units of a cube idle there.
use super::{AttentionKernels, MaybeMask, ScoreGrads, ScoreRows, kernels::composed_backward, sums::Put};
use crate::backend::cube::{
    self, Output, Pair, address_type, constant, grid_of_rows, max_of_vector, max_over_units, number,
    row_of_unit, sum_of_vector, sum_over_units, types, unit_of_row, units_of_row, vector_size, writable,
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
        let filled = Self::cube_put(UpToFour::new(tensors), UpToFour::new(of_tensors), places);
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

/// How the rows of a chunk become weights.
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

    /// The tensors, into each of which a part is put, up to three.
    #[fusion(meta = |tensors, _parts, _starts| tensors.clone())]
    fn cube_put(
        #[extension_type] tensors: UpToFour<Self>,
        #[extension_type] parts: UpToFour<Self>,
        starts: [[usize; 4]; 3],
    ) -> UpToFour<Self>;

    /// The weights, and the gradients of the products.
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
    fn cube_put(tensors: UpToFour<Self>, parts: UpToFour<Self>, starts: [[usize; 4]; 3]) -> UpToFour<Self> {
        let pairs = tensors.into_options().into_iter().zip(parts.into_options()).zip(starts);
        let puts = pairs.filter_map(|((whole, part), start)| {
            let (whole, part) = whole.zip(part)?;
            Some(cube::Put { whole: writable(whole), part, start })
        });
        UpToFour::new(cube::put(&puts.collect::<Vec<_>>()).into_iter().map(Some))
    }

    fn cube_attention_weights(
        products: FloatTensor<Self>,
        mask: MaybeMask<Self>,
        bias: MaybeTensor<Self>,
        options: Options,
    ) -> FloatTensor<Self> {
        let weights = Output::replacing(&products, 0);
        let launch = Launch::new(&[&products, &weights.tensor], mask, bias, options);
        let (client, dtypes) = (products.client.clone(), types(products.dtype));
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            weights_kernel::launch_unchecked(
                &client,
                launch.count,
                launch.dim,
                launch.addresses,
                launch.size,
                products.into_linear_view(),
                weights.view(),
                launch.mask.into(),
                launch.bias.into(),
                launch.shape,
                launch.of,
                dtypes,
                launch.of_mask,
                launch.of_bias,
            );
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
        let launch = Launch::new(&tensors, mask, bias, options);
        let (client, dtypes) = (products.client.clone(), types(products.dtype));
        // SAFETY: the kernel compares every position with the shapes.
        unsafe {
            gradients_kernel::launch_unchecked(
                &client,
                launch.count,
                launch.dim,
                launch.addresses,
                launch.size,
                products.into_linear_view(),
                gradients.into_linear_view(),
                weights.view(),
                of_products.view(),
                launch.mask.into(),
                launch.bias.into(),
                launch.shape,
                launch.of,
                dtypes,
                launch.of_mask,
                launch.of_bias,
            );
        }
        (weights.tensor, of_products.tensor)
    }
}

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Of {
    units: usize,
    capped: bool,
    causal: bool,
    quiet: bool,
}

/// What both launches have in common.
struct Launch {
    count: CubeCount,
    dim: CubeDim,
    size: usize,
    addresses: AddressType,
    mask: Option<LinearViewLaunch>,
    bias: Option<LinearViewLaunch>,
    of_mask: ElemType,
    of_bias: ElemType,
    shape: RowsLaunch,
    of: Of,
}

impl Launch {
    /// For kernels over these tensors, of which the first are products.
    fn new(
        tensors: &[&CubeTensor],
        mask: MaybeMask<CubeBackend>,
        bias: MaybeTensor<CubeBackend>,
        options: Options,
    ) -> Self {
        let products = tensors[0];
        let [batch, heads, queries, keys] = products.shape().dims();
        let (mask, bias): (Option<CubeTensor>, Option<CubeTensor>) = (mask.into_option(), bias.into_option());
        let size = vector_size(tensors, 4);
        let read: Vec<&CubeTensor> =
            tensors.iter().copied().chain(mask.as_ref()).chain(bias.as_ref()).collect();
        let Options { scale, softcap, masked, quiet, last_of_first } = options;
        let wide = types(products.dtype)[1];
        let lowest = if wide == types(DType::F64)[1] { f64::MIN } else { f64::from(f32::MIN) };
        let [scale, cap, masked, unseen, lowest] =
            [scale, softcap.unwrap_or(1.0), masked, f64::NEG_INFINITY, lowest]
                .map(|number| InputScalar::new(number, wide));
        let (rows, units) = (batch * heads * queries, units_of_row(keys));
        let (count, dim) = grid_of_rows(&products.client, rows, units);
        let last = last_of_first.unwrap_or(0).clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32;
        Self {
            count,
            dim,
            size,
            addresses: address_type(&read),
            of_mask: dtype_to_storage_type(mask.as_ref().map_or(DType::I32, |mask| mask.dtype)),
            of_bias: dtype_to_storage_type(bias.as_ref().map_or(products.dtype, |bias| bias.dtype)),
            mask: mask.map(|mask| mask.into_linear_view_like(products)),
            bias: bias.map(|bias| bias.into_linear_view_like(products)),
            shape: RowsLaunch::new(rows, queries, keys, scale, cap, masked, unseen, lowest, last),
            of: Of { units, capped: softcap.is_some(), causal: last_of_first.is_some(), quiet },
        }
    }
}

/// Rows of products, and how they become scores.
#[derive(CubeType, CubeLaunch)]
struct Rows {
    rows: usize,
    /// Of a head.
    queries: usize,
    keys: usize,
    scale: InputScalar,
    cap: InputScalar,
    masked: InputScalar,
    /// Minus infinity, of which WGSL has no constant.
    unseen: InputScalar,
    /// The lowest finite number.
    lowest: InputScalar,
    last_of_first: i32,
}

/// Scores, and their slopes: the derivatives by the products.
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
    rows: &Rows,
    #[comptime] of: Of,
) -> Scored<W, N> {
    let scale = Vector::<W, N>::new(rows.scale.get::<W>());
    let mut score = products * scale;
    let mut slope = scale;
    if comptime!(of.capped) {
        let cap = Vector::<W, N>::new(rows.cap.get::<W>());
        let tanh = (score / cap).tanh();
        score = cap * tanh;
        slope = scale * (number::<W, N>(1.0) - tanh * tanh);
    }
    let size = N::value().comptime();
    let row_of_all = row_of_unit(comptime!(of.units));
    let row = row_of_all % rows.queries;
    let first_key = (vector - row_of_all * (rows.keys / size)) * size;
    #[unroll]
    for lane in 0..size {
        let at = vector * size + lane;
        let hidden: ComptimeOption<bool> = mask.as_ref().map(|mask| mask.read(at) != M::new(0));
        if hidden.unwrap_or(false) {
            score.insert(lane, rows.masked.get::<W>());
            slope.insert(lane, W::new(0.0));
        }
        if comptime!(of.causal) {
            let last = rows.last_of_first + i32::cast_from(row);
            if i32::cast_from(first_key + lane) > last {
                score.insert(lane, rows.unseen.get::<W>());
            }
        }
        let bias: ComptimeOption<V> = bias.as_ref().map(|bias| bias.read(at));
        let biased = score.extract(lane) + W::cast_from(bias.unwrap_or(V::new(0.0)));
        score.insert(lane, biased);
    }
    Scored::<W, N> { score, slope }
}

/// Sums over the scores of a row, as far as a unit has read it.
#[derive(CubeType, Clone, Copy)]
struct Sums<W: Float, N: Size> {
    /// The largest score so far: finite, so that the exponentials of a row that is all hidden are 0.
    largest: Vector<W, N>,
    /// Of `exp(score - largest)`.
    weights: Vector<W, N>,
    /// The same, times the gradients of the weights.
    gradients: Vector<W, N>,
}

/// Those of all units.
#[derive(CubeType, Clone, Copy)]
struct RowSums<W: Float> {
    largest: W,
    weights: W,
    gradients: W,
}

#[cube]
fn no_sums<W: Float, N: Size>(rows: &Rows) -> Sums<W, N> {
    let zero = Vector::<W, N>::new(W::new(0.0));
    Sums::<W, N> { largest: Vector::new(rows.lowest.get::<W>()), weights: zero, gradients: zero }
}

#[cube]
fn over_units<W: Float, N: Size>(sums: Sums<W, N>, #[comptime] of: Of) -> RowSums<W> {
    let largest = max_over_units::<W>(max_of_vector::<W, N>(sums.largest), comptime!(of.units));
    let scale = (sums.largest - Vector::new(largest)).exp();
    let of_unit = Pair::<W> {
        a: sum_of_vector::<W, N>(sums.weights * scale),
        b: sum_of_vector::<W, N>(sums.gradients * scale),
    };
    let total = sum_over_units::<W>(of_unit, comptime!(of.units));
    let mut weights = total.a;
    if comptime!(of.quiet) {
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
    rows: Rows,
    #[comptime] of: Of,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(M)] _of_mask: ElemType,
    #[define(V)] _of_bias: ElemType,
) {
    let units = comptime!(of.units);
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= rows.rows {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = rows.keys / size;
    let start = row * vectors;
    let mut sums = no_sums::<W, N>(&rows);
    let mut at = unit;
    while at < vectors {
        let products = Vector::<W, N>::cast_from(products.read(start + at));
        let score = scored::<W, M, V, N>(products, start + at, &mask, &bias, &rows, of).score;
        let before = sums.largest;
        sums.largest = before.max(score);
        sums.weights = sums.weights * (before - sums.largest).exp() + (score - sums.largest).exp();
        at += units;
    }
    let row = over_units::<W, N>(sums, of);
    let mut at = unit;
    while at < vectors {
        let products = Vector::<W, N>::cast_from(products.read(start + at));
        let score = scored::<W, M, V, N>(products, start + at, &mask, &bias, &rows, of).score;
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
    rows: Rows,
    #[comptime] of: Of,
    #[define(T, W)] _dtypes: [ElemType; 2],
    #[define(M)] _of_mask: ElemType,
    #[define(V)] _of_bias: ElemType,
) {
    let units = comptime!(of.units);
    let (row, unit) = (row_of_unit(units), unit_of_row(units));
    if row >= rows.rows {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = rows.keys / size;
    let start = row * vectors;
    let mut sums = no_sums::<W, N>(&rows);
    let mut at = unit;
    while at < vectors {
        let products = Vector::<W, N>::cast_from(products.read(start + at));
        let score = scored::<W, M, V, N>(products, start + at, &mask, &bias, &rows, of).score;
        let before = sums.largest;
        sums.largest = before.max(score);
        let (scale, weight) = ((before - sums.largest).exp(), (score - sums.largest).exp());
        let gradient = Vector::<W, N>::cast_from(gradients.read(start + at));
        sums.weights = sums.weights * scale + weight;
        sums.gradients = sums.gradients * scale + weight * gradient;
        at += units;
    }
    let row = over_units::<W, N>(sums, of);
    let mean = Vector::<W, N>::new(row.gradients / row.weights);
    let mut at = unit;
    while at < vectors {
        let products = Vector::<W, N>::cast_from(products.read(start + at));
        let scored = scored::<W, M, V, N>(products, start + at, &mask, &bias, &rows, of);
        let weight = (scored.score - Vector::new(row.largest)).exp() / Vector::new(row.weights);
        let gradient = Vector::<W, N>::cast_from(gradients.read(start + at));
        weights.write(start + at, Vector::cast_from(weight));
        of_products.write(start + at, Vector::cast_from(weight * (gradient - mean) * scored.slope));
        at += units;
    }
}
