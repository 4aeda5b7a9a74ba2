//! Chunks: which weights attention makes at a time.
use super::{AttentionKernels, Scores, parts::part};
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;
use core::ops::Range;

/// Some queries of some heads, whose weights exist at the same time.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chunk {
    pub(super) batch: Range<usize>,
    pub(super) heads: Range<usize>,
    /// The groups of these heads, that is, their heads of keys and values.
    pub(super) groups: Range<usize>,
    pub(super) queries: Range<usize>,
    /// How many keys these queries see.
    pub(super) keys: usize,
}

/// Causal attention skips the keys that no query of a chunk sees. With more parts than this, it would skip few more.
const MOST_CAUSAL_PARTS: usize = 8;
/// With fewer queries than this, a matrix product is inefficient.
const MIN_QUERIES: usize = 64;

/// The sizes of an attention.
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) heads: usize,
    /// The heads of keys and values, each of which equally many heads of queries share.
    pub(super) groups: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
}

impl Sizes {
    pub(super) fn of<B: Backend>(query: &FloatTensor<B>, key: &FloatTensor<B>) -> Self {
        let [batch, heads, queries, _] = query.shape().dims();
        let [_, groups, keys, _] = key.shape().dims();
        Self { batch, heads, groups, queries, keys }
    }

    /// The number of weights.
    pub(super) fn weights(&self) -> usize {
        [self.heads, self.queries, self.keys].into_iter().fold(self.batch, usize::saturating_mul)
    }

    /// How many heads a group has.
    fn of_group(&self) -> usize {
        (self.heads / self.groups.max(1)).max(1)
    }

    /// How many heads to take at a time, at most `most`: whole groups, or an equal part of one.
    fn head_step(&self, most: usize) -> usize {
        let of_group = self.of_group();
        match most / of_group {
            0 => (1..=most).rev().find(|step| of_group.is_multiple_of(*step)).unwrap_or(1),
            groups => groups * of_group,
        }
    }

    /// A single chunk, if it has at most `most_of_one` weights; else [`chunks`](Self::chunks).
    pub(super) fn one_or_chunks(
        &self,
        scores: &Scores,
        elements: usize,
        most_of_one: usize,
        causal_parts: usize,
    ) -> Vec<Chunk> {
        let weights = self.weights();
        let one = (weights <= most_of_one).then(|| self.chunks(scores, elements.max(weights), causal_parts));
        one.filter(|one| one.len() == 1).unwrap_or_else(|| self.chunks(scores, elements, causal_parts))
    }

    /// The chunks: whole heads if they fit into `elements` weights, else some queries of one head. They are in the order of the weights,
    /// in which dropout is drawn. Causal attention has no dropout: it takes some queries of several heads, and divides the queries into
    /// `causal_parts` parts, or into as many as there are chunks anyway. In both cases, a part of a head has at least 64 queries. The
    /// chunks of a group follow each other.
    pub(super) fn chunks(&self, scores: &Scores, elements: usize, causal_parts: usize) -> Vec<Chunk> {
        let &Self { batch, heads, queries, keys, .. } = self;
        let fitting = elements / keys.max(1); // rows
        let whole = (fitting / queries.max(1)).max(1); // heads
        let step = match scores.causal {
            true => {
                let chunks = (batch * heads * queries).div_ceil(fitting.max(1));
                fitting.min(queries.div_ceil(chunks.clamp(causal_parts, MOST_CAUSAL_PARTS)))
            }
            false => fitting,
        };
        let step = step.max(MIN_QUERIES);
        let (batch_step, head_step, query_step) = if step >= queries {
            ((whole / heads.max(1)).max(1), whole.min(heads.max(1)), queries.max(1))
        } else if scores.causal {
            let several = elements / (step * keys.max(1)); // heads
            let steps = heads.div_ceil(several.clamp(1, heads.max(1)));
            ((several / heads.max(1)).max(1), heads.div_ceil(steps.max(1)).max(1), step)
        } else {
            (1, 1, step)
        };
        let head_step = self.head_step(head_step);
        let ranges = |len: usize, step: usize| (0..len).step_by(step).map(move |at| at..(at + step).min(len));
        ranges(batch, batch_step)
            .flat_map(|batch| ranges(heads, head_step).map(move |heads| (batch.clone(), heads)))
            .flat_map(|(batch, heads)| {
                ranges(queries, query_step).map(move |queries| (batch.clone(), heads.clone(), queries))
            })
            .map(|(batch, heads, queries)| {
                let keys = scores.visible(queries.end.saturating_sub(1), self.queries, keys);
                let of_group = self.of_group();
                let groups = heads.start / of_group..heads.end.div_ceil(of_group);
                Chunk { batch, heads, groups, queries, keys: keys.max(1) }
            })
            .collect()
    }
}

/// The rows `[batch, .., rows, width]` divided among `heads` heads.
pub(super) fn with_heads<B: Backend>(x: FloatTensor<B>, heads: usize) -> FloatTensor<B> {
    let [batch, now, rows, width] = x.shape().dims();
    if now == heads {
        return x;
    }
    B::float_reshape(x, Shape::new([batch, heads, now * rows / heads, width]))
}

impl Chunk {
    /// The part of `[batch, heads, queries, ..]`.
    pub(super) fn queries_of<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let width = 0..x.shape()[3];
        part::<B>(x, [&self.batch, &self.heads, &self.queries, &width])
    }

    /// The part of `[batch, groups, keys, ..]`.
    pub(super) fn keys_of<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let width = 0..x.shape()[3];
        part::<B>(x, [&self.batch, &self.groups, &(0..self.keys), &width])
    }

    /// The rows `[batch, heads, queries, ..]` of this chunk by group: `[batch, groups, heads of a group * queries, ..]`.
    pub(super) fn by_group<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        with_heads::<B>(x, self.groups.len())
    }

    /// The inverse of [`by_group`](Self::by_group).
    pub(super) fn by_head<B: Backend>(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        with_heads::<B>(x, self.heads.len())
    }

    /// The products of its queries and keys, by head.
    pub(super) fn products<B: AttentionKernels>(
        &self,
        query: FloatTensor<B>,
        key: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (query, key) = (self.by_group::<B>(self.queries_of::<B>(query)), self.keys_of::<B>(key));
        self.by_head::<B>(B::product(query, B::float_transpose(key)))
    }

    /// Whether the chunk has all queries of its groups.
    pub(super) fn holds_its_groups(&self, sizes: &Sizes) -> bool {
        self.queries == (0..sizes.queries) && self.heads.len() == self.groups.len() * sizes.of_group()
    }

    /// Whether the chunk has the first queries of its groups.
    pub(super) fn begins_its_groups(&self, sizes: &Sizes) -> bool {
        self.queries.start == 0 && self.heads.start == self.groups.start * sizes.of_group()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCORES: Scores =
        Scores { scale: 1.0, softcap: None, causal: false, masked: f64::NEG_INFINITY, quiet: false };

    fn sizes([batch, heads, queries, keys]: [usize; 4], groups: usize) -> Sizes {
        Sizes { batch, heads, groups, queries, keys }
    }

    fn chunks(of: [usize; 4], causal: bool, elements: usize) -> Vec<Chunk> {
        sizes(of, of[1]).chunks(&Scores { causal, ..SCORES }, elements, 8)
    }

    /// Every weight is in exactly one chunk, except those that no query sees; in row-major order, unless attention is causal.
    #[test]
    fn chunks_cover_the_weights_in_order() {
        for (sizes, causal, elements) in [
            ([2, 3, 5, 7], false, 1 << 20),
            ([2, 3, 5, 7], false, 70),
            ([4, 3, 5, 7], false, 4 * 3 * 5 * 7 / 2),
            ([2, 2, 300, 200], false, 1 << 14),
            ([1, 2, 600, 600], true, 1 << 20),
            ([2, 5, 600, 600], true, 1 << 17),
            ([5, 2, 300, 300], true, 1 << 17),
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
            if causal {
                rows.sort_unstable();
            }
            rows.windows(2).for_each(|pair| assert_ne!(pair[0], pair[1]));
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
            [Chunk { batch: 0..2, heads: 0..3, groups: 0..3, queries: 0..5, keys: 7 }]
        );
    }

    #[test]
    fn one_chunk_of_more_weights_where_there_can_be_one() {
        let count = |causal, most_of_one| {
            let scores = Scores { causal, ..SCORES };
            sizes([8, 2, 128, 32], 2).one_or_chunks(&scores, 1 << 14, most_of_one, 2).len()
        };
        assert_eq!([count(false, 1 << 16), count(false, (1 << 16) - 1)], [1, 4]);
        // Causal attention is in several parts, which would all hold the inputs.
        assert_eq!(count(true, 1 << 16), chunks([8, 2, 128, 32], true, 1 << 14).len());
    }

    /// On a device, where a chunk is several kernels, causal attention has few chunks: the queries are in more parts only where there are
    /// many chunks anyway, and a chunk has the heads of several batches.
    #[test]
    fn causal_chunks_are_no_more_than_memory_and_parts_ask_for() {
        for (of, elements, most) in [
            ([1, 16, 1024, 1024], 1 << 24, 2),
            ([8, 16, 512, 512], 1 << 24, 2),
            ([1, 16, 4096, 4096], 1 << 24, 16),
            ([2, 4, 2048, 2048], 1 << 24, 2),
            ([3, 4, 2048, 2048], 1 << 24, 6),
        ] {
            let scores = Scores { causal: true, ..SCORES };
            let chunks = sizes(of, of[1]).chunks(&scores, elements, 2);
            assert!(chunks.len() <= most, "{of:?}: {}", chunks.len());
            let weights =
                |chunk: &Chunk| chunk.batch.len() * chunk.heads.len() * chunk.queries.len() * chunk.keys;
            assert!(chunks.iter().all(|chunk| weights(chunk) <= elements), "{of:?}");
        }
    }

    /// The chunks of a group follow each other, from its first queries on; each has as many heads of every group.
    #[test]
    fn chunks_of_groups_are_whole_groups_or_parts_of_one() {
        for of @ [_, heads, queries, _] in [[2, 12, 5, 7], [1, 12, 300, 200], [2, 6, 100, 1000]] {
            for groups in (1..=heads).filter(|&groups| heads % groups == 0) {
                for (causal, elements) in
                    [(false, 1), (false, 500), (true, 1 << 14), (true, 1 << 17), (false, 1 << 20)]
                {
                    let sizes = sizes(of, groups);
                    let mut rows = 0; // of groups whose chunks are not all seen
                    for chunk in sizes.chunks(&Scores { causal, ..SCORES }, elements, 8) {
                        let Chunk { heads, groups, queries: some, .. } = &chunk;
                        assert!(heads.clone().all(|head| groups.contains(&(head / sizes.of_group()))));
                        assert_eq!(heads.len() % groups.len(), 0);
                        assert!(groups.len() == 1 || heads.len() == groups.len() * sizes.of_group());
                        assert_eq!(chunk.begins_its_groups(&sizes), rows == 0);
                        rows += heads.len() * some.len();
                        let all = groups.len() * sizes.of_group() * queries;
                        assert_eq!(
                            chunk.holds_its_groups(&sizes),
                            chunk.begins_its_groups(&sizes) && rows == all
                        );
                        rows %= all;
                    }
                    assert_eq!(rows, 0);
                }
            }
        }
    }

    #[test]
    fn the_last_query_is_aligned_with_the_last_key() {
        let causal = Scores { causal: true, ..SCORES };
        assert_eq!((0..3).map(|row| causal.visible(row, 3, 5)).collect::<Vec<_>>(), [3, 4, 5]);
        assert_eq!((0..5).map(|row| causal.visible(row, 5, 3)).collect::<Vec<_>>(), [0, 0, 1, 2, 3]);
    }
}
