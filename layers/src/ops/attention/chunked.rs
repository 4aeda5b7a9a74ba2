//! The loops of attention over its chunks, forward and backward.
use super::{
    AttentionKernels, BIAS, KEY, QUERY, ScoreGrads, ScoreRows, Scores, VALUE,
    chunks::{Chunk, Sizes},
    parts::{Parts, Put, part, slices},
    sums::{BiasGrad, KeyGrads},
};
use crate::{
    backend::{Saved, wide},
    graph::tape,
    saved::packing::PackingKernels,
};
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::Shape;

/// What the weights are computed from.
#[derive(Clone, Debug)]
pub(super) struct Operands<B: Backend> {
    /// `[batch, heads, queries, width]`
    pub(super) query: FloatTensor<B>,
    /// `[batch, groups, keys, width]`, each group for equally many heads
    pub(super) key: FloatTensor<B>,
    pub(super) terms: Terms<B>,
}

/// How products of queries and keys become scores.
#[derive(Clone, Debug)]
pub(super) struct Terms<B: Backend> {
    /// `[batch, heads, queries, keys]`, or 1 in place of any of them.
    pub(super) mask: Option<BoolTensor<B>>,
    /// As the mask.
    pub(super) bias: Option<FloatTensor<B>>,
    pub(super) scores: Scores,
}

impl<B: Backend> Terms<B> {
    /// The terms of the rows of a chunk.
    fn rows(&self, chunk: &Chunk, sizes: &Sizes) -> ScoreRows<B> {
        let Chunk { batch, heads, queries, keys, .. } = chunk;
        let ranges = [batch, heads, queries, &(0..*keys)];
        ScoreRows {
            scores: self.scores,
            mask: self.mask.clone().map(|mask| match slices(&mask.shape(), ranges) {
                Some(slices) => B::bool_slice(mask, &slices),
                None => mask,
            }),
            bias: self.bias.clone().map(|bias| part::<B>(bias, ranges)),
            queries: queries.clone(),
            all_queries: sizes.queries,
            all_keys: sizes.keys,
        }
    }
}

/// Which weights were dropped, chunk by chunk.
#[derive(Clone, Debug)]
pub(super) struct DroppedWeights<M> {
    /// The bits that are set where a weight was kept.
    pub(super) masks: Vec<M>,
    /// The probability that a weight is kept.
    pub(super) keep: f64,
    /// The weights of a chunk, which may follow from the number of threads: so many in every pass that reads these masks.
    pub(super) elements: usize,
}

impl<M: Saved> Saved for DroppedWeights<M> {
    fn bytes(&self) -> usize {
        self.masks.iter().map(Saved::bytes).sum()
    }
}

/// The result of an attention.
pub(super) struct Weighted<B: Backend> {
    /// `[batch, heads, queries, value_width]`
    pub(super) output: FloatTensor<B>,
    /// The weights, `[batch, heads, queries, keys]`, after dropout, if they are wanted.
    pub(super) weights: Option<FloatTensor<B>>,
}

impl<B: AttentionKernels> Operands<B> {
    fn sizes(&self) -> Sizes {
        Sizes::of::<B>(&self.query, &self.key)
    }

    /// How many weights a chunk has, if there are enough.
    fn elements(&self) -> usize {
        B::chunk(&self.query.device(), self.sizes().keys)
    }

    /// The chunks of so many weights.
    fn chunks(&self, elements: usize) -> Vec<Chunk> {
        let (sizes, device, dtype) = (self.sizes(), self.query.device(), self.query.dtype());
        let [query, key] = [&self.query, &self.key].map(|x| x.shape().num_elements());
        // A single chunk drops its inputs before it makes its last result. So it may have more weights than other chunks at the same
        // peak: in the forward pass by the elements of the output; in the backward pass, which has weights and their gradients, by half
        // the elements of queries, keys and values. A bias has gradients, too.
        let more = query.min(query / 2 + key) / if self.terms.bias.is_some() { 3 } else { 1 };
        let most_of_one = (elements + more).min(B::largest(&device) / wide(dtype).size());
        sizes.one_or_chunks(&self.terms.scores, elements, most_of_one, B::CAUSAL_PARTS)
    }

    /// Draws which weights to drop.
    pub(super) fn drop_weights(&self, keep: f64) -> DroppedWeights<B::Mask> {
        let (device, dtype) = (self.query.device(), self.query.dtype());
        // A segment that runs again in another pool must find the chunks of these masks, too.
        tape::draw(|| {
            let elements = self.elements();
            let masks =
                self.chunks(elements).into_iter().map(|Chunk { batch, heads, queries, keys, .. }| {
                    let shape = Shape::new([batch.len(), heads.len(), queries.len(), keys]);
                    B::bernoulli_mask(shape, dtype, &device, keep)
                });
            let mut masks: Vec<_> = masks.collect();
            masks.shrink_to_fit(); // they were collected into the allocation of the chunks
            DroppedWeights { masks, keep, elements }
        })
    }

    /// The chunks of a pass with these masks, if any.
    fn chunks_with(&self, dropped: Option<&DroppedWeights<B::Mask>>) -> Vec<Chunk> {
        self.chunks(dropped.map_or_else(|| self.elements(), |dropped| dropped.elements))
    }

    /// The weighted values, and the weights, if they are wanted.
    pub(super) fn forward(
        self,
        value: FloatTensor<B>,
        dropped: Option<&DroppedWeights<B::Mask>>,
        wants_weights: bool,
    ) -> Weighted<B> {
        let (sizes, chunks, width) = (self.sizes(), self.chunks_with(dropped), value.shape()[3]);
        let Sizes { batch, heads, queries, keys, .. } = sizes;
        let Self { query, key, terms } = self;
        let like = (query.device(), query.dtype());
        // The heads of a query lie side by side in memory, so that merging them copies nothing.
        let mut output = Parts::<B>::covering(Shape::new([batch, queries, heads, width]));
        let all_weights = Shape::new([batch, heads, queries, keys]);
        let mut all_weights = match terms.scores.causal {
            true => Parts::<B>::new(all_weights), // chunks leave keys out
            false => Parts::covering(all_weights),
        };
        let mut inputs = ChunkInputs::<B, 3>::of([query, key, value], chunks.len());
        for (index, chunk) in chunks.iter().enumerate() {
            let [query, key, value] = inputs.next();
            let weights = B::attention_weights(chunk.products::<B>(query, key), &terms.rows(chunk, &sizes));
            let weights = apply_dropout::<B>(weights, dropped, index);
            let Chunk { batch, heads, queries, .. } = chunk;
            if wants_weights {
                all_weights.put([batch, heads, queries, &(0..chunk.keys)], weights.clone());
            }
            let weights = chunk.by_group::<B>(weights);
            let part = chunk.by_head::<B>(B::product(weights, chunk.keys_of::<B>(value)));
            output.put([batch, queries, heads, &(0..width)], B::float_swap_dims(part, 1, 2));
        }
        Weighted {
            output: B::float_swap_dims(output.finish(&like), 1, 2),
            weights: wants_weights.then(|| all_weights.finish(&like)),
        }
    }

    /// Only the gradient of the values.
    pub(super) fn value_backward(
        self,
        dropped: Option<&DroppedWeights<B::Mask>>,
        dy: FloatTensor<B>,
    ) -> FloatTensor<B> {
        let (sizes, chunks, like) = (self.sizes(), self.chunks_with(dropped), (dy.device(), dy.dtype()));
        let Sizes { batch, groups, keys, .. } = sizes;
        let mut dvalue = KeyGrads::<B>::new(Shape::new([batch, groups, keys, dy.shape()[3]]));
        let Self { query, key, terms } = self;
        let mut inputs = ChunkInputs::<B, 3>::of([query, key, dy], chunks.len());
        for (index, chunk) in chunks.iter().enumerate().rev() {
            let [query, key, dy] = inputs.next();
            let products = chunk.products::<B>(query, key);
            let weights = B::attention_weights(products, &terms.rows(chunk, &sizes));
            let weights = chunk.by_group::<B>(apply_dropout::<B>(weights, dropped, index));
            let dy = chunk.by_group::<B>(chunk.queries_of::<B>(dy));
            if let Some(put) = dvalue.add(chunk, &sizes, weights, dy) {
                put.put();
            }
        }
        dvalue.finish(&like)
    }

    /// Gives the wanted gradients of query, key, value and bias. If there is a single chunk, each is given before the next is made:
    /// where one tensor is several of these inputs, only the sum of its gradients then waits, not each of them.
    pub(super) fn backward(
        self,
        value: FloatTensor<B>,
        dropped: Option<&DroppedWeights<B::Mask>>,
        dy: FloatTensor<B>,
        wanted: [bool; 4],
        mut give: impl FnMut(usize, FloatTensor<B>),
    ) {
        let [wants_query, wants_key, wants_value, wants_bias] = wanted;
        let (sizes, chunks) = (self.sizes(), self.chunks_with(dropped));
        let Self { query, key, terms } = self;
        let like = (query.device(), query.dtype());
        let mut dquery = Parts::<B>::covering(query.shape());
        let [mut dkey, mut dvalue] = [&key, &value].map(|x| KeyGrads::<B>::new(x.shape()));
        let mut dbias = terms.bias.as_ref().map(|bias| BiasGrad::<B>::new(bias, &sizes));
        let mut inputs = ChunkInputs::<B, 4>::of([query, key, value, dy], chunks.len());
        for (index, chunk) in chunks.iter().enumerate().rev() {
            let mut parts = GradientParts { is_one: chunks.len() == 1, waiting: vec![], give: &mut give };
            let [query, key, value, dy] = inputs.next();
            let [query, dy] = [query, dy].map(|x| chunk.by_group::<B>(chunk.queries_of::<B>(x)));
            let [key, value] = [key, value].map(|x| chunk.keys_of::<B>(x));
            let products = B::product(query.clone(), B::float_transpose(key.clone()));
            let dweights = B::product(dy.clone(), B::float_transpose(value));
            let [products, dweights] = [products, dweights].map(|x| chunk.by_head::<B>(x));
            let dweights = apply_dropout::<B>(dweights, dropped, index);
            let rows = terms.rows(chunk, &sizes);
            let ScoreGrads { weights, products, bias } =
                B::attention_weights_backward(products, dweights, &rows, wants_bias);
            if let Some((weights, dy)) = wants_value.then_some((weights, dy)) {
                let weights = chunk.by_group::<B>(apply_dropout::<B>(weights, dropped, index));
                parts.put(VALUE, dvalue.add(chunk, &sizes, weights, dy));
            }
            if let (Some(dbias), Some(bias)) = (&mut dbias, bias) {
                dbias.add(chunk, bias, like.1);
            }
            let products = chunk.by_group::<B>(products);
            if let Some(query) = wants_key.then_some(query) {
                parts.put(KEY, dkey.add(chunk, &sizes, products.clone(), query));
            }
            if wants_query {
                let Chunk { batch, heads, queries, .. } = chunk.clone();
                let ranges = [batch, heads, queries, 0..key.shape()[3]];
                let part = chunk.by_head::<B>(B::product(products, key));
                parts.put(QUERY, Some(Put { whole: &mut dquery, ranges, part }));
            }
            B::put_all(parts.waiting);
        }
        if let Some(dbias) = dbias.filter(|_| wants_bias) {
            give(BIAS, dbias.finish(&like));
        }
        for (input, gradient) in [(QUERY, dquery.all), (KEY, dkey.all()), (VALUE, dvalue.all())] {
            gradient.into_iter().for_each(|gradient| give(input, gradient));
        }
    }
}

/// Where the parts of gradients go that a chunk makes.
struct GradientParts<'a, B: AttentionKernels, G> {
    /// Whether the chunk is the only one, so that its parts are the gradients.
    is_one: bool,
    /// Parts that are put into place together.
    waiting: Vec<Put<'a, B>>,
    give: G,
}

impl<'a, B: AttentionKernels, G: FnMut(usize, FloatTensor<B>)> GradientParts<'a, B, G> {
    fn put(&mut self, input: usize, part: Option<Put<'a, B>>) {
        match part {
            Some(Put { part, .. }) if self.is_one => (self.give)(input, part),
            Some(part) if !B::PUTS_TOGETHER => part.put(),
            part => self.waiting.extend(part),
        }
    }
}

/// Whether the weights take no more memory than what they are computed from, and fit into one tensor of the device. Expanded tensors
/// count as nothing, since they take no memory of their size.
pub(super) fn has_few_weights<B: AttentionKernels + PackingKernels>(
    query: &FloatTensor<B>,
    key: &FloatTensor<B>,
    mask: Option<&BoolTensor<B>>,
    bias: Option<&FloatTensor<B>>,
) -> bool {
    let size = query.dtype().size();
    let floats = [query, key].into_iter().chain(bias).filter(|x| !B::is_expanded(x));
    let floats = floats.map(|x| x.shape().num_elements() * size);
    let mask = mask.map(|mask| mask.shape().num_elements() * mask.dtype().size());
    let weights = Sizes::of::<B>(query, key).weights().saturating_mul(size);
    weights <= floats.chain(mask).sum() && weights <= B::largest(&query.device())
}

/// What all chunks read. The last chunk gets the only handles, and drops each after its last product.
struct ChunkInputs<B: Backend, const N: usize> {
    tensors: Option<[FloatTensor<B>; N]>,
    /// The chunks to come.
    left: usize,
}

impl<B: Backend, const N: usize> ChunkInputs<B, N> {
    fn of(tensors: [FloatTensor<B>; N], chunks: usize) -> Self {
        Self { tensors: Some(tensors), left: chunks }
    }

    /// The handles for the next chunk.
    fn next(&mut self) -> [FloatTensor<B>; N] {
        self.left -= 1;
        let tensors = if self.left == 0 { self.tensors.take() } else { self.tensors.clone() };
        tensors.expect("one chunk after the other")
    }
}

/// Zeroes what was dropped, and divides all else by the probability that a weight is kept.
fn apply_dropout<B: AttentionKernels>(
    x: FloatTensor<B>,
    dropped: Option<&DroppedWeights<B::Mask>>,
    chunk: usize,
) -> FloatTensor<B> {
    match dropped {
        Some(dropped) => B::scale_by_mask(x, &dropped.masks[chunk], [0.0, 1.0 / dropped.keep]),
        None => x,
    }
}

#[cfg(all(test, feature = "flex", feature = "rayon"))]
mod tests {
    use super::*;
    use crate::backend::cpu::parallel::pool;
    use crate::backend::testing::{assert_close, composed, random};
    use burn::backend::Flex;

    /// A pass may run in another pool than the one in which the masks were drawn, with other chunks by itself.
    #[test]
    fn the_same_weights_are_dropped_in_every_pool() {
        let (many, one) = (pool(16), pool(1));
        let [query, key, value, dy] = [(); 4].map(|()| random(&[1, 1, 1024, 4]));
        let scores =
            Scores { scale: 0.5, softcap: None, causal: false, masked: f64::NEG_INFINITY, quiet: false };
        let operands = || Operands::<Flex> {
            query: query.clone(),
            key: key.clone(),
            terms: Terms { mask: None, bias: None, scores },
        };
        let (dropped, mut recorded) = many.install(|| tape::record(|| operands().drop_weights(0.7)));
        let again = one.install(|| tape::probe(&mut recorded, || operands().drop_weights(0.7)));
        assert_eq!(again.masks.len(), dropped.masks.len(), "what a segment finds when it runs again");
        let others = one.install(|| operands().chunks_with(None));
        assert_ne!(dropped.masks.len(), others.len(), "pools of these sizes have other chunks");
        let run = |pool: &rayon::ThreadPool| {
            pool.install(|| {
                let mut results = vec![(0, operands().forward(value.clone(), Some(&again), false).output)];
                let wanted = [true, true, true, false];
                operands().backward(value.clone(), Some(&again), dy.clone(), wanted, |input, gradient| {
                    results.push((1 + input, gradient));
                });
                results.sort_by_key(|(input, _)| *input);
                results
            })
        };
        for ((input, in_many), (_, in_one)) in run(&many).into_iter().zip(run(&one)) {
            assert_close(&format!("result {input}"), composed(&in_one), in_many);
        }
    }
}
