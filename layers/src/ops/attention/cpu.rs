//! The kernels of attention on a CPU: fused loops that turn a row of scores into weights while it is in the cache.
use super::{AttentionKernels, ScoreGrads, ScoreRows, Scores};
use crate::backend::cpu::{CpuBackend, CpuElement, exp::COST, parallel, sums, with_element};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};
use core::ops::Range;
use num_traits::{Float, Zero};

/// Threads that have enough to do with a chunk of [`AttentionKernels::CHUNK`] weights.
const FEW: usize = 4;

impl<B: CpuBackend> AttentionKernels for B {
    const WIDE_PRODUCTS: bool = true;
    const CHUNK: usize = 1 << 18; // so that the weights of a chunk stay in the cache
    const CAUSAL_PARTS: usize = 8;

    fn chunk(_: &Self::Device, keys: usize) -> usize {
        weights_at_once(Self::CHUNK, keys, parallel::threads())
    }

    fn attention_weights(products: FloatTensor<B>, rows: &ScoreRows<B>) -> FloatTensor<B> {
        let mut products = B::contiguous(products);
        let [_, heads, _, keys] = products.shape().dims();
        with_element!(products.dtype(), "attention", E => {
            with_rows::<B, E, _>(rows, heads, keys, |rows| rows.weights(B::as_slice_mut(&mut products)));
        });
        products
    }

    fn attention_weights_backward(
        products: FloatTensor<B>,
        gradients: FloatTensor<B>,
        rows: &ScoreRows<B>,
        wants_bias: bool,
    ) -> ScoreGrads<B> {
        let (mut products, mut gradients) = (B::contiguous(products), B::contiguous(gradients));
        let shape = products.shape();
        with_element!(products.dtype(), "attention", E => {
            let score_grads = with_rows::<B, E, _>(rows, shape[1], shape[3], |rows| {
                let weights = B::as_slice_mut::<E>(&mut products);
                rows.backward(weights, B::as_slice_mut(&mut gradients), wants_bias)
            });
            let bias = score_grads.map(|score_grads| B::from_vec(score_grads, shape));
            ScoreGrads { weights: products, products: gradients, bias }
        })
    }
}

/// The weights of a chunk for so many threads, of which [`FEW`] have `chunk`. With more threads, more weights: a chunk ends where all
/// threads wait for each other. They are the same number of rows for every thread, unless rows are very long.
fn weights_at_once(chunk: usize, keys: usize, threads: usize) -> usize {
    let of_thread = chunk / FEW;
    match (of_thread + keys / 2).checked_div(keys) {
        Some(rows) if threads > FEW && rows > 0 => threads * rows * keys,
        _ => chunk * threads.div_ceil(FEW),
    }
}

/// Calls `f` with rows of scores as slices.
fn with_rows<B: CpuBackend, E: CpuElement, R>(
    rows: &ScoreRows<B>,
    heads: usize,
    keys: usize,
    f: impl FnOnce(Rows<'_, E>) -> R,
) -> R {
    let mask = rows.mask.clone().map(B::contiguous_bools);
    let bias = rows.bias.clone().map(B::contiguous);
    f(Rows {
        scores: &rows.scores,
        mask: mask.as_ref().map(|mask| Broadcast::new(B::as_bytes(mask), mask.shape().dims())),
        bias: bias.as_ref().map(|bias| Broadcast::new(B::as_slice(bias), bias.shape().dims())),
        heads,
        queries: rows.queries.clone(),
        all_queries: rows.all_queries,
        keys,
        all_keys: rows.all_keys,
    })
}

/// A tensor `[batch, heads, rows, keys]`, or 1 in place of any of these sizes.
struct Broadcast<'a, T> {
    values: &'a [T],
    sizes: [usize; 4],
}

/// A row of a [`Broadcast`].
enum Row<'a, T> {
    Each(&'a [T]),
    All(T),
}

impl<'a, T: Copy> Broadcast<'a, T> {
    fn new(values: &'a [T], sizes: [usize; 4]) -> Self {
        Self { values, sizes }
    }

    fn row(&self, at: [usize; 3]) -> Row<'a, T> {
        let [_, _, _, keys] = self.sizes;
        let index = at.iter().zip(self.sizes).fold(0, |index, (&at, size)| index * size + at.min(size - 1));
        match keys {
            1 => Row::All(self.values[index]),
            _ => Row::Each(&self.values[index * keys..][..keys]),
        }
    }
}

/// Consecutive rows of scores: of queries, of heads, of a batch.
struct Rows<'a, E> {
    scores: &'a Scores,
    /// Zero where nothing is hidden.
    mask: Option<Broadcast<'a, u8>>,
    bias: Option<Broadcast<'a, E>>,
    heads: usize,
    /// Which queries of a head these are.
    queries: Range<usize>,
    all_queries: usize,
    /// The scores of a row.
    keys: usize,
    all_keys: usize,
}

/// The scores of one row.
struct Buffers<A> {
    scores: Vec<A>,
    /// The slopes of the soft cap, if there is one.
    slopes: Vec<A>,
}

impl<E: CpuElement> Rows<'_, E> {
    fn buffers(&self) -> Buffers<E::Acc> {
        let zeros = |len| vec![<E::Acc as Zero>::zero(); len];
        let slopes = if self.scores.softcap.is_some() { self.keys } else { 0 };
        Buffers { scores: zeros(self.keys), slopes: zeros(slopes) }
    }

    /// Batch, head and query of a row.
    fn place(&self, row: usize) -> [usize; 3] {
        let queries = self.queries.len();
        [row / queries / self.heads, row / queries % self.heads, row % queries]
    }

    /// The number of keys that a row sees.
    fn visible(&self, [_, _, query]: [usize; 3]) -> usize {
        self.scores.visible(self.queries.start + query, self.all_queries, self.all_keys).min(self.keys)
    }

    /// Writes the scores of a row, and their slopes if there is a soft cap.
    #[inline(always)]
    fn score(&self, place: [usize; 3], products: &[E], buffers: &mut Buffers<E::Acc>) {
        let num = <E::Acc as CpuElement>::from_f64;
        let Buffers { scores, slopes } = buffers;
        let scale = num(self.scores.scale);
        let scores = &mut scores[..products.len()];
        scores.iter_mut().zip(products).for_each(|(score, product)| *score = scale * product.widen());
        if let Some(softcap) = self.scores.softcap {
            let (cap, inverse, one) = (num(softcap), num(1.0 / softcap), num(1.0));
            for (score, slope) in scores.iter_mut().zip(slopes) {
                let tanh = (*score * inverse).fast_tanh();
                *score = cap * tanh;
                *slope = one - tanh * tanh;
            }
        }
        let masked = num(self.scores.masked);
        match self.mask.as_ref().map(|mask| mask.row(place)) {
            Some(Row::Each(hidden)) => {
                let pairs = scores.iter_mut().zip(hidden);
                pairs.for_each(|(score, &hidden)| *score = if hidden != 0 { masked } else { *score });
            }
            Some(Row::All(hidden)) if hidden != 0 => scores.fill(masked),
            _ => {}
        }
        match self.bias.as_ref().map(|bias| bias.row(place)) {
            Some(Row::Each(bias)) => {
                scores.iter_mut().zip(bias).for_each(|(score, bias)| *score = *score + bias.widen());
            }
            Some(Row::All(bias)) => scores.iter_mut().for_each(|score| *score = *score + bias.widen()),
            None => {}
        }
    }

    /// Replaces products by weights.
    fn weights(&self, products: &mut [E]) {
        let task = parallel::items_per_task(products.len() / self.keys, self.keys);
        let work = parallel::Work::of([COST, products.len()]);
        parallel::chunks_mut(products, task * self.keys, work, |index, products| {
            let mut buffers = self.buffers();
            for (row, products) in (index * task..).zip(products.chunks_exact_mut(self.keys)) {
                let place = self.place(row);
                let (seen, hidden) = products.split_at_mut(self.visible(place));
                self.score(place, seen, &mut buffers);
                self.softmax(&mut buffers.scores[..seen.len()]);
                let weights = seen.iter_mut().zip(&buffers.scores);
                weights.for_each(|(weight, &value)| *weight = E::narrow(value));
                hidden.fill(E::zero());
            }
        });
    }

    /// Replaces a row of scores by weights.
    #[inline(always)]
    fn softmax(&self, scores: &mut [E::Acc]) {
        // Finite, so that in a row whose keys are all masked the exponentials are 0.
        let max = sums::larger(<E::Acc as Float>::min_value(), sums::max(scores));
        let mut sum = sums::map_and_sum(scores, |score| (score - max).fast_exp());
        if self.scores.quiet {
            sum += (-max.into_f64()).exp();
        }
        if sum == 0.0 {
            sum = 1.0; // everything is masked: weights of 0
        }
        let inverse = <E::Acc as CpuElement>::from_f64(1.0 / sum);
        scores.iter_mut().for_each(|score| *score = *score * inverse);
    }

    /// Replaces products by weights, and gradients of weights by gradients of products. Returns the gradients of the scores, if wanted.
    fn backward(&self, products: &mut [E], gradients: &mut [E], wants_scores: bool) -> Option<Vec<E::Acc>> {
        let mut score_grads = wants_scores.then(|| vec![<E::Acc as Zero>::zero(); products.len()]);
        let task = parallel::items_per_task(products.len() / self.keys, self.keys);
        let work = parallel::Work::of([2, COST, products.len()]);
        let size = task * self.keys;
        let mut wanted = score_grads.as_mut().map(|score_grads| score_grads.chunks_mut(size));
        let gradients = gradients.chunks_mut(size);
        let mut others: Vec<_> =
            gradients.map(|chunk| (chunk, wanted.as_mut().and_then(Iterator::next))).collect();
        parallel::zip_chunks_mut(products, &mut others, [size, 1], work, |index, products, others| {
            let [(gradients, score_grads)] = others else { return };
            let mut buffers = self.buffers();
            let mut score_grads =
                score_grads.as_mut().map(|score_grads| score_grads.chunks_exact_mut(self.keys));
            let rows = products.chunks_exact_mut(self.keys).zip(gradients.chunks_exact_mut(self.keys));
            for (row, (products, gradients)) in (index * task..).zip(rows) {
                let score_grads = score_grads.as_mut().and_then(Iterator::next);
                self.row_backward(row, products, gradients, score_grads, &mut buffers);
            }
        });
        score_grads
    }

    #[inline(always)]
    fn row_backward(
        &self,
        row: usize,
        products: &mut [E],
        gradients: &mut [E],
        score_grads: Option<&mut [E::Acc]>,
        buffers: &mut Buffers<E::Acc>,
    ) {
        let place = self.place(row);
        let visible = self.visible(place);
        let (seen, hidden) = products.split_at_mut(visible);
        let (gradients, hidden_grads) = gradients.split_at_mut(visible);
        hidden.fill(E::zero());
        hidden_grads.fill(E::zero());
        self.score(place, seen, buffers);
        let Buffers { scores, slopes } = buffers;
        let weights = &mut scores[..visible];
        self.softmax(weights);
        let mean_grad = sums::sum_pairs(weights, gradients, |weight, gradient| weight * gradient.widen());
        let mean_grad = <E::Acc as CpuElement>::from_f64(mean_grad);
        let scale = <E::Acc as CpuElement>::from_f64(self.scores.scale);
        for ((product, gradient), weight) in seen.iter_mut().zip(&*gradients).zip(&mut *weights) {
            *product = E::narrow(*weight);
            *weight = *weight * (gradient.widen() - mean_grad);
        }
        let row_grads = weights; // each weight has become the gradient of its score
        if let Some(score_grads) = score_grads {
            score_grads[..visible].copy_from_slice(row_grads);
        }
        row_grads.iter_mut().for_each(|gradient| *gradient = *gradient * scale);
        if self.scores.softcap.is_some() {
            row_grads.iter_mut().zip(slopes).for_each(|(gradient, slope)| *gradient = *gradient * *slope);
        }
        gradients.iter_mut().zip(row_grads).for_each(|(gradient, &mut value)| *gradient = E::narrow(value));
        // The score of a masked key does not depend on its product, but if it is finite, the key may have a weight.
        match self.mask.as_ref().map(|mask| mask.row(place)) {
            Some(Row::Each(hidden)) => {
                let pairs = gradients.iter_mut().zip(hidden);
                pairs.for_each(|(gradient, &hidden)| {
                    *gradient = if hidden != 0 { E::zero() } else { *gradient }
                });
            }
            Some(Row::All(hidden)) if hidden != 0 => gradients.fill(E::zero()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Before, 64 threads took 83 rows of 50,000 keys at a time, in two turns: 1.5 times as long as evenly divided rows.
    #[test]
    fn chunks_have_whole_rows_for_every_thread() {
        const CHUNK: usize = 1 << 18;
        for keys in [1, 64, 1000, 4096, 10_000, 43_000, 50_000, 1 << 16, 100_000, 1 << 17, 1 << 20] {
            for threads in [1, 2, FEW, 6, 8, 12, 16, 48, 64, 100, 256] {
                let weights = weights_at_once(CHUNK, keys, threads);
                if threads <= FEW || keys > CHUNK / 2 {
                    assert_eq!(weights, CHUNK * threads.div_ceil(FEW));
                    continue;
                }
                assert!(
                    weights.is_multiple_of(threads * keys) && weights > 0,
                    "{keys} keys, {threads} threads"
                );
                let of_thread = weights / threads;
                assert!(3 * of_thread <= 4 * keys.max(CHUNK / FEW), "{keys} keys: {of_thread} per thread");
                assert!(3 * of_thread >= 2 * CHUNK / FEW, "{keys} keys: {of_thread} per thread");
            }
        }
    }
}
