use super::{MemBackend, zeros};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{DType, FloatDType, Shape, Slice};
use core::ops::Range;

/// How the products of queries and keys become scores, and scores become weights.
///
/// `score = softcap * tanh(scale * product / softcap)`, or `scale * product` without a cap; then what is masked gets its own
/// score, and the bias is added. A row of weights is the softmax of a row of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores {
    /// What the products are multiplied by.
    pub scale: f64,
    /// The limit of the absolute values.
    pub softcap: Option<f64>,
    /// Whether a query sees only the keys that are not after it; the last query is aligned with the last key.
    pub causal: bool,
    /// The score of what a mask hides: minus infinity, or finite.
    pub masked: f64,
    /// Whether `exp(0)` is added to the sum of a row: weights then may sum to less than 1
    /// (<https://www.evanmiller.org/attention-is-off-by-one.html>).
    pub quiet: bool,
}

impl Scores {
    /// The number of keys that row number `row` of `rows` sees.
    pub(crate) fn visible(&self, row: usize, rows: usize, keys: usize) -> usize {
        match self.causal {
            true => (keys + row + 1).saturating_sub(rows).min(keys),
            false => keys,
        }
    }
}

/// Some rows of the scores of an attention.
#[derive(Clone, Debug)]
pub struct ScoreRows<B: Backend> {
    /// How scores are made.
    pub scores: Scores,
    /// What is hidden: `[batch, heads, rows, keys]` of these rows, or 1 in place of any of them.
    pub mask: Option<BoolTensor<B>>,
    /// What is added to the scores; as the mask.
    pub bias: Option<FloatTensor<B>>,
    /// Which of the queries these are.
    pub queries: Range<usize>,
    /// How many queries there are.
    pub all_queries: usize,
    /// How many keys there are; the rows may hold fewer, the first ones.
    pub all_keys: usize,
}

/// Gradients of some rows of scores.
pub struct ScoreGrads<B: Backend> {
    /// The weights.
    pub weights: FloatTensor<B>,
    /// Gradient of the products of queries and keys.
    pub products: FloatTensor<B>,
    /// Gradient of the scores that the bias was added to, in f32 at least, if wanted.
    pub bias: Option<FloatTensor<B>>,
}

/// What the weights of an attention are of.
#[derive(Clone, Debug)]
pub(crate) struct Inputs<B: Backend> {
    /// `[batch, heads, queries, width]`
    pub(crate) query: FloatTensor<B>,
    /// `[batch, heads, keys, width]`
    pub(crate) key: FloatTensor<B>,
    /// `[batch, heads, queries, keys]`, or 1 in place of any of them.
    pub(crate) mask: Option<BoolTensor<B>>,
    /// As the mask.
    pub(crate) bias: Option<FloatTensor<B>>,
}

/// What was dropped from the weights, chunk by chunk.
#[derive(Clone, Debug)]
pub(crate) struct Dropped<M> {
    /// The bits that are set where a weight was kept.
    pub(crate) masks: Vec<M>,
    /// The probability to be kept.
    pub(crate) keep: f64,
}

/// Part of the queries of some heads: what is worked on at once.
#[derive(Clone, Debug, PartialEq)]
struct Chunk {
    batch: Range<usize>,
    heads: Range<usize>,
    queries: Range<usize>,
    /// The keys that these queries see.
    keys: usize,
}

/// A causal attention leaves out the keys that none of the queries of a chunk sees: so many chunks make that worth while.
const CAUSAL_CHUNKS: usize = 8;
/// Fewer queries than this waste a matrix product.
const FEW_QUERIES: usize = 64;

/// The sizes of an attention.
struct Sizes {
    batch: usize,
    heads: usize,
    queries: usize,
    keys: usize,
}

impl Sizes {
    fn of<B: Backend>(query: &FloatTensor<B>, key: &FloatTensor<B>) -> Self {
        let [batch, heads, queries, _] = query.shape().dims();
        let [_, _, keys, _] = key.shape().dims();
        Self { batch, heads, queries, keys }
    }

    /// The chunks, in the order of the weights: whole heads where several heads fit in `elements`, else part of one.
    fn chunks(&self, scores: &Scores, elements: usize) -> Vec<Chunk> {
        let &Self { batch, heads, queries, keys } = self;
        let fitting = elements / keys.max(1); // rows
        let whole = (fitting / queries.max(1)).max(1); // heads
        let step = match scores.causal {
            true => fitting.min(queries.div_ceil(CAUSAL_CHUNKS)),
            false => fitting,
        };
        let step = step.max(FEW_QUERIES);
        let (of_batch, of_heads, of_queries) = if step < queries {
            (1, 1, step)
        } else {
            ((whole / heads.max(1)).max(1), whole.min(heads.max(1)), queries.max(1))
        };
        let ranges = |len: usize, step: usize| (0..len).step_by(step).map(move |at| at..(at + step).min(len));
        ranges(batch, of_batch)
            .flat_map(|batch| ranges(heads, of_heads).map(move |heads| (batch.clone(), heads)))
            .flat_map(|(batch, heads)| {
                ranges(queries, of_queries).map(move |queries| (batch.clone(), heads.clone(), queries))
            })
            .map(|(batch, heads, queries)| {
                let keys = scores.visible(queries.end.saturating_sub(1), self.queries, keys);
                Chunk { batch, heads, queries, keys: keys.max(1) }
            })
            .collect()
    }
}

/// The part of a tensor; of an axis of length 1, all.
fn slices(shape: &Shape, ranges: [&Range<usize>; 4]) -> Option<Vec<Slice>> {
    let ranges = shape.iter().zip(ranges).map(|(&len, range)| if len == 1 { 0..1 } else { range.clone() });
    let ranges: Vec<_> = ranges.collect();
    let all = shape.iter().zip(&ranges).all(|(&len, range)| *range == (0..len));
    (!all).then(|| ranges.into_iter().map(Slice::from).collect())
}

fn part<B: Backend>(x: &FloatTensor<B>, ranges: [&Range<usize>; 4]) -> FloatTensor<B> {
    match slices(&x.shape(), ranges) {
        Some(slices) => B::float_slice(x.clone(), &slices),
        None => x.clone(),
    }
}

/// Half precision is too coarse for exponentials and for sums of partial results.
pub(crate) fn widened<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    match x.dtype() {
        DType::F16 | DType::BF16 => B::float_cast(x, FloatDType::F32),
        _ => x,
    }
}

pub(crate) fn narrowed<B: Backend>(x: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if x.dtype() == dtype { x } else { B::float_cast(x, dtype.into()) }
}

/// A tensor that is filled part by part. Where one part is all, nothing else is made.
struct Parts<B: Backend> {
    shape: Shape,
    all: Option<FloatTensor<B>>,
}

impl<B: Backend> Parts<B> {
    fn new(shape: Shape) -> Self {
        Self { shape, all: None }
    }

    fn all(&mut self, like: &FloatTensor<B>) -> FloatTensor<B> {
        let shape = self.shape.clone();
        self.all.take().unwrap_or_else(|| zeros::<B>(shape, like))
    }

    fn put(&mut self, ranges: [&Range<usize>; 4], part: FloatTensor<B>) {
        self.all = Some(match slices(&self.shape, ranges) {
            None => part,
            Some(slices) => B::float_slice_assign(self.all(&part), &slices, part),
        });
    }

    fn add(&mut self, ranges: [&Range<usize>; 4], more: FloatTensor<B>) {
        if self.all.is_none() && more.shape() == self.shape {
            self.all = Some(more);
            return;
        }
        let all = self.all(&more);
        self.all = Some(match slices(&self.shape, ranges) {
            None => B::float_add(all, more),
            Some(slices) => {
                let sum = B::float_add(more, B::float_slice(all.clone(), &slices));
                B::float_slice_assign(all, &slices, sum)
            }
        });
    }

    fn finish(mut self, like: &FloatTensor<B>) -> FloatTensor<B> {
        self.all(like)
    }
}

/// A gradient of keys or values, which the queries of a head add to: their chunks come in reverse order.
struct KeyGrads<B: Backend> {
    all: Parts<B>,
    /// What the chunks of these heads add up to until now.
    sum: Option<Parts<B>>,
}

impl<B: Backend> KeyGrads<B> {
    fn new(shape: Shape) -> Self {
        Self { all: Parts::new(shape), sum: None }
    }

    /// Adds `rows^T x` of a chunk of `queries` queries.
    fn add(&mut self, chunk: &Chunk, queries: usize, rows: FloatTensor<B>, x: FloatTensor<B>) {
        let (all_keys, width) = (0..self.all.shape[2], 0..self.all.shape[3]);
        let ranges = [&chunk.batch, &chunk.heads, &all_keys, &width];
        let rows = B::float_transpose(rows);
        if chunk.queries == (0..queries) {
            return self.all.put(ranges, B::float_matmul(rows, x));
        }
        // The products are widened before they are made: where they cancel out, it is their rounding that remains.
        let dtype = x.dtype();
        let more = B::float_matmul(widened::<B>(rows), widened::<B>(x));
        let shape = [chunk.batch.len(), chunk.heads.len(), all_keys.len(), width.len()];
        let sum = self.sum.get_or_insert_with(|| Parts::new(Shape::new(shape)));
        sum.add([&(0..shape[0]), &(0..shape[1]), &(0..chunk.keys), &width], more);
        if chunk.queries.start == 0
            && let Some(Parts { all: Some(sum), .. }) = self.sum.take()
        {
            self.all.put(ranges, narrowed::<B>(sum, dtype));
        }
    }

    fn finish(self, like: &FloatTensor<B>) -> FloatTensor<B> {
        self.all.finish(like)
    }
}

/// The gradient of a bias. Chunks add to it where it is 1 in place of an axis of theirs.
struct BiasGrad<B: Backend> {
    all: Parts<B>,
    is_sum: bool,
}

impl<B: Backend> BiasGrad<B> {
    fn new(bias: &FloatTensor<B>, sizes: &Sizes) -> Self {
        let (shape, weights) = (bias.shape(), [sizes.batch, sizes.heads, sizes.queries, sizes.keys]);
        let is_sum = shape.iter().zip(weights).any(|(&len, of)| len != of);
        Self { all: Parts::new(shape), is_sum }
    }

    /// Adds gradients of scores, in f32 at least.
    fn add(&mut self, chunk: &Chunk, scores: FloatTensor<B>, dtype: DType) {
        let ranges = [&chunk.batch, &chunk.heads, &chunk.queries, &(0..chunk.keys)];
        if !self.is_sum {
            return self.all.put(ranges, narrowed::<B>(scores, dtype));
        }
        let sum = (0..4).filter(|&axis| self.all.shape[axis] == 1).fold(scores, B::float_sum_dim);
        self.all.add(ranges, sum);
    }

    fn finish(self, like: &FloatTensor<B>) -> FloatTensor<B> {
        narrowed::<B>(self.all.finish(like), like.dtype())
    }
}

impl<B: MemBackend> Inputs<B> {
    fn chunks(&self, scores: &Scores) -> Vec<Chunk> {
        Sizes::of::<B>(&self.query, &self.key).chunks(scores, B::ATTENTION_CHUNK)
    }

    /// Draws what to drop.
    pub(crate) fn drop_weights(&self, scores: &Scores, keep: f64) -> Dropped<B::Mask> {
        let (device, dtype) = (self.query.device(), self.query.dtype());
        let chunks = self.chunks(scores).into_iter();
        let masks = chunks.map(|Chunk { batch, heads, queries, keys }| {
            let shape = Shape::new([batch.len(), heads.len(), queries.len(), keys]);
            B::bernoulli_mask(&B::shape_only(shape, dtype, &device), keep)
        });
        Dropped { masks: masks.collect(), keep }
    }

    fn rows(&self, scores: &Scores, chunk: &Chunk) -> ScoreRows<B> {
        let Chunk { batch, heads, queries, keys } = chunk;
        let ranges = [batch, heads, queries, &(0..*keys)];
        ScoreRows {
            scores: *scores,
            mask: self.mask.clone().map(|mask| match slices(&mask.shape(), ranges) {
                Some(slices) => B::bool_slice(mask, &slices),
                None => mask,
            }),
            bias: self.bias.as_ref().map(|bias| part::<B>(bias, ranges)),
            queries: queries.clone(),
            all_queries: self.query.shape()[2],
            all_keys: self.key.shape()[2],
        }
    }

    /// The output `[batch, heads, queries, value_width]` for values `[batch, heads, keys, value_width]`, and the logarithm of
    /// the sum of the exponentials of every row of scores, `[batch, heads, queries, 1]`, if it is wanted.
    pub(crate) fn forward(
        self,
        value: FloatTensor<B>,
        scores: &Scores,
        dropped: Option<&Dropped<B::Mask>>,
        wants_log_sums: bool,
    ) -> (FloatTensor<B>, Option<FloatTensor<B>>) {
        let [batch, heads, queries, _] = self.query.shape().dims();
        let width = value.shape()[3];
        // In memory the heads of a query follow each other: merging them is free.
        let mut output = Parts::<B>::new(Shape::new([batch, queries, heads, width]));
        let mut log_sums = Parts::<B>::new(Shape::new([batch, heads, queries, 1]));
        for (index, chunk) in self.chunks(scores).into_iter().enumerate() {
            let [query, key] = [chunk.queries_of::<B>(&self.query), chunk.keys_of::<B>(&self.key)];
            let products = B::float_matmul(query, B::float_transpose(key));
            let (weights, sums) = B::attention_weights(products, &self.rows(scores, &chunk));
            let weights = drop_some::<B>(weights, dropped, index);
            let part = B::float_matmul(weights, chunk.keys_of::<B>(&value));
            let Chunk { batch, heads, queries, .. } = &chunk;
            output.put([batch, queries, heads, &(0..width)], B::float_swap_dims(part, 1, 2));
            if wants_log_sums {
                log_sums.put([batch, heads, queries, &(0..1)], sums);
            }
        }
        let log_sums = wants_log_sums.then(|| log_sums.finish(&self.query));
        (B::float_swap_dims(output.finish(&self.query), 1, 2), log_sums)
    }

    /// The gradient of the values alone.
    pub(crate) fn value_backward(
        self,
        scores: &Scores,
        dropped: Option<&Dropped<B::Mask>>,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let [batch, heads, keys, _] = self.key.shape().dims();
        let mut dvalue = KeyGrads::<B>::new(Shape::new([batch, heads, keys, dy.shape()[3]]));
        for (index, chunk) in self.chunks(scores).iter().enumerate().rev() {
            let [query, key] = [chunk.queries_of::<B>(&self.query), chunk.keys_of::<B>(&self.key)];
            let products = B::float_matmul(query, B::float_transpose(key));
            let (weights, _) = B::attention_weights(products, &self.rows(scores, chunk));
            let weights = drop_some::<B>(weights, dropped, index);
            dvalue.add(chunk, self.query.shape()[2], weights, chunk.queries_of::<B>(&dy));
        }
        dvalue.finish(&dy)
    }

    /// The gradients that are wanted, of query, key, value and bias.
    pub(crate) fn backward(
        self,
        value: FloatTensor<B>,
        scores: &Scores,
        dropped: Option<&Dropped<B::Mask>>,
        log_sums: FloatTensor<B>,
        dy: FloatTensor<B>,
        wanted: [bool; 4],
    ) -> [Option<FloatTensor<B>>; 4] {
        let [wants_query, wants_key, wants_value, wants_bias] = wanted;
        let sizes = Sizes::of::<B>(&self.query, &self.key);
        let mut dquery = Parts::<B>::new(self.query.shape());
        let [mut dkey, mut dvalue] = [&self.key, &value].map(|x| KeyGrads::<B>::new(x.shape()));
        let mut dbias = self.bias.as_ref().map(|bias| BiasGrad::<B>::new(bias, &sizes));
        let (queries, dtype) = (sizes.queries, self.query.dtype());
        for (index, chunk) in self.chunks(scores).iter().enumerate().rev() {
            let [query, key] = [chunk.queries_of::<B>(&self.query), chunk.keys_of::<B>(&self.key)];
            let dy = chunk.queries_of::<B>(&dy);
            let products = B::float_matmul(query.clone(), B::float_transpose(key.clone()));
            let dweights = B::float_matmul(dy.clone(), B::float_transpose(chunk.keys_of::<B>(&value)));
            let dweights = drop_some::<B>(dweights, dropped, index);
            let log_sums = chunk.queries_of::<B>(&log_sums);
            let rows = self.rows(scores, chunk);
            let ScoreGrads { weights, products, bias } =
                B::attention_weights_backward(products, dweights, log_sums, &rows, wants_bias);
            if wants_value {
                let weights = drop_some::<B>(weights, dropped, index);
                dvalue.add(chunk, queries, weights, dy);
            }
            if let (Some(dbias), Some(bias)) = (&mut dbias, bias) {
                dbias.add(chunk, bias, dtype);
            }
            if wants_key {
                dkey.add(chunk, queries, products.clone(), query);
            }
            if wants_query {
                let Chunk { batch, heads, queries, .. } = chunk;
                let all = 0..key.shape()[3];
                dquery.put([batch, heads, queries, &all], B::float_matmul(products, key));
            }
        }
        [
            wants_query.then(|| dquery.finish(&dy)),
            wants_key.then(|| dkey.finish(&dy)),
            wants_value.then(|| dvalue.finish(&dy)),
            dbias.filter(|_| wants_bias).map(|dbias| dbias.finish(&dy)),
        ]
    }
}

impl Chunk {
    /// The part of `[batch, heads, queries, ..]`.
    fn queries_of<B: Backend>(&self, x: &FloatTensor<B>) -> FloatTensor<B> {
        part::<B>(x, [&self.batch, &self.heads, &self.queries, &(0..x.shape()[3])])
    }

    /// The part of `[batch, heads, keys, ..]`.
    fn keys_of<B: Backend>(&self, x: &FloatTensor<B>) -> FloatTensor<B> {
        part::<B>(x, [&self.batch, &self.heads, &(0..self.keys), &(0..x.shape()[3])])
    }
}

/// Zeroes what was dropped, and divides the rest by the probability to be kept.
fn drop_some<B: MemBackend>(
    x: FloatTensor<B>,
    dropped: Option<&Dropped<B::Mask>>,
    chunk: usize,
) -> FloatTensor<B> {
    match dropped {
        Some(dropped) => B::scale_by_mask(x, &dropped.masks[chunk], [0.0, 1.0 / dropped.keep]),
        None => x,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCORES: Scores =
        Scores { scale: 1.0, softcap: None, causal: false, masked: f64::NEG_INFINITY, quiet: false };

    fn chunks(sizes: [usize; 4], causal: bool, elements: usize) -> Vec<Chunk> {
        let [batch, heads, queries, keys] = sizes;
        Sizes { batch, heads, queries, keys }.chunks(&Scores { causal, ..SCORES }, elements)
    }

    /// In row-major order every weight is in exactly one chunk, but for those that nobody sees.
    #[test]
    fn chunks_cover_the_weights_in_order() {
        for (sizes, causal, elements) in [
            ([2, 3, 5, 7], false, 1 << 20),
            ([2, 3, 5, 7], false, 70),
            ([4, 3, 5, 7], false, 4 * 3 * 5 * 7 / 2),
            ([2, 2, 300, 200], false, 1 << 14),
            ([1, 2, 600, 600], true, 1 << 20),
            ([1, 1, 100, 300], true, 1),
            ([1, 1, 300, 100], true, 1),
        ] {
            let [batch, heads, queries, keys] = sizes;
            let mut rows = vec![];
            for chunk in chunks(sizes, causal, elements) {
                for batch in chunk.batch.clone() {
                    for head in chunk.heads.clone() {
                        rows.extend(chunk.queries.clone().map(|query| (batch, head, query, chunk.keys)));
                    }
                }
            }
            let scores = Scores { causal, ..SCORES };
            assert_eq!(rows.len(), batch * heads * queries);
            assert!(rows.is_sorted_by_key(|&(batch, head, query, _)| (batch, head, query)));
            assert!(rows.iter().all(|&(_, _, query, seen)| seen >= scores.visible(query, queries, keys)));
            if !causal {
                assert!(rows.iter().all(|&(.., seen)| seen == keys));
            }
        }
    }

    #[test]
    fn one_chunk_where_everything_fits() {
        assert_eq!(
            chunks([2, 3, 5, 7], false, 210),
            [Chunk { batch: 0..2, heads: 0..3, queries: 0..5, keys: 7 }]
        );
    }

    #[test]
    fn the_last_query_is_aligned_with_the_last_key() {
        let causal = Scores { causal: true, ..SCORES };
        assert_eq!((0..3).map(|row| causal.visible(row, 3, 5)).collect::<Vec<_>>(), [3, 4, 5]);
        assert_eq!((0..5).map(|row| causal.visible(row, 5, 3)).collect::<Vec<_>>(), [0, 0, 1, 2, 3]);
    }
}
