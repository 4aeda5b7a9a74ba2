//! Cross entropy of a dense layer's outputs, which never exist all at once.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows of `logits = x weight + bias`, `loss` as in [`cross_entropy`](super::cross_entropy) |
//! | keeps | the gradients of what is tracked, and nothing else; |
//! | | with `weight` tracked and fewer rows than `d_input`: `dlogits`, `x` (a handle), and, `x` tracked, `weight` (a handle) |
//! | backward | `dx = dlogits weight^T`, `dweight = x^T dlogits`, `dbias = sum(dlogits)` |
//!
//! The forward pass takes a few rows at a time, and makes the gradients at once, as
//! [Liger-Kernel](https://arxiv.org/abs/2410.10989) does. Only for few rows would the gradient of the weight be more than the
//! logits, which stock keeps: then their gradient, which takes their place, is kept, and the backward pass makes the rest.
use super::{
    MaybeTensor,
    cross_entropy::Labels,
    kept::{Keeper, Kept},
};
use crate::backend::{MemBackend, plain_backends, zeros};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Shape, Slice};
use core::ops::Range;

/// How a cross entropy of a dense layer is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCrossEntropy {
    /// Label smoothing.
    pub smoothing: Option<f32>,
    /// The bytes of the logits that exist at a time; at least those of one row, and those of all rows if their gradient is kept.
    pub chunk_bytes: usize,
}

/// Cross entropies of dense layers.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    NdArray: cfg(feature = "ndarray"),
    Cube: cfg(any(feature = "wgpu", feature = "cuda")),
    Remote: cfg(feature = "remote"),
    Autodiff
)]
pub trait LinearCrossEntropyOps: Backend {
    /// The sum of `factors` times the losses, `[1]`; x `[rows, d_input]`, weight `[d_input, classes]`, bias `[classes]`. Not
    /// tracked are targets and factors `[rows]`, and the weights of the classes `[classes]`.
    fn memsave_linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        targets: IntTensor<Self>,
        factors: FloatTensor<Self>,
        #[extension_type] class_weights: MaybeTensor<Self>,
        options: LinearCrossEntropy,
    ) -> FloatTensor<Self>;
}
plain_backends!(LinearCrossEntropyOps {
    fn memsave_linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        targets: IntTensor<Self>,
        factors: FloatTensor<Self>,
        class_weights: MaybeTensor<Self>,
        options: LinearCrossEntropy,
    ) -> FloatTensor<Self> {
        let labels = Labels::<Self>::new(targets, class_weights.into_option(), options.smoothing);
        let loss = Loss::<Self> { labels, factors, chunk_bytes: options.chunk_bytes };
        loss.sum(&Head { weight, bias: bias.into_option() }, &x, None)
    }
});

impl<B: LinearCrossEntropyOps + MemBackend, C: CheckpointStrategy> LinearCrossEntropyOps for Autodiff<B, C> {
    fn memsave_linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        targets: IntTensor<Self>,
        factors: FloatTensor<Self>,
        class_weights: MaybeTensor<Self>,
        options: LinearCrossEntropy,
    ) -> FloatTensor<Self> {
        let class_weights = class_weights.into_option().map(|weights| weights.into_primitive());
        let loss = Loss {
            labels: Labels::<B>::new(targets, class_weights, options.smoothing),
            factors: factors.into_primitive(),
            chunk_bytes: options.chunk_bytes,
        };
        let nodes = [x.node(), weight.node()];
        match bias.into_option() {
            None => record::<B, C, 2>(loss, x, weight, None, nodes),
            Some(bias) => {
                let ([x_node, weight_node], node) = (nodes, bias.node());
                record::<B, C, 3>(loss, x, weight, Some(bias), [x_node, weight_node, node])
            }
        }
    }
}

/// What the logits of the rows are compared with, and how much each row counts.
#[derive(Debug)]
struct Loss<B: Backend> {
    labels: Labels<B>,
    /// `[rows]`
    factors: FloatTensor<B>,
    chunk_bytes: usize,
}

/// A dense layer.
struct Head<B: Backend> {
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
}

/// The bytes of a product that is added to the gradient of the weight: it stays in the cache.
const BLOCK_BYTES: usize = 1 << 20;

fn rows_of<B: Backend>(x: &FloatTensor<B>, rows: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &[Slice::from(rows.clone())])
}

/// Ranges of equal length that cover `0..len`, of so many items of `item` bytes as a chunk can have.
fn chunks(len: usize, item: usize, chunk_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let size = (chunk_bytes / item.max(1)).clamp(1, len.max(1));
    let size = len.div_ceil(len.div_ceil(size).max(1)).max(1);
    (0..len).step_by(size).map(move |start| start..(start + size).min(len))
}

impl<B: Backend> Head<B> {
    fn classes(&self) -> usize {
        self.weight.shape()[1]
    }

    fn logits(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let logits = B::float_matmul(x, self.weight.clone());
        match self.bias.clone() {
            None => logits,
            Some(bias) => B::float_add(logits, B::float_reshape(bias, Shape::new([1, self.classes()]))),
        }
    }
}

impl<B: MemBackend> Loss<B> {
    /// The sum over the rows, `[1]`. Hands over the gradient of the logits of a chunk of rows, if that is wanted.
    fn sum(
        self,
        head: &Head<B>,
        x: &FloatTensor<B>,
        mut dlogits: Option<&mut dyn FnMut(Range<usize>, FloatTensor<B>)>,
    ) -> FloatTensor<B> {
        let ([rows, _], dtype) = (x.shape().dims(), x.dtype());
        let factors = B::float_reshape(self.factors, Shape::new([rows, 1]));
        let mut losses = Vec::new();
        for chunk in chunks(rows, head.classes() * dtype.size(), self.chunk_bytes) {
            let labels = self.labels.rows(&chunk);
            let logits = head.logits(rows_of::<B>(x, &chunk));
            let log_sum_exp = B::log_sum_exp(logits.clone());
            let factors = B::float_cast(rows_of::<B>(&factors, &chunk), log_sum_exp.dtype().into());
            let loss = labels.losses(logits.clone(), log_sum_exp.clone());
            losses.push(B::float_mul(loss, factors.clone()));
            if let Some(dlogits) = &mut dlogits {
                dlogits(chunk, labels.backward(logits, log_sum_exp, factors));
            }
        }
        let sum = B::float_reshape(B::float_sum(B::float_cat(losses, 0)), Shape::new([1]));
        B::float_cast(sum, dtype.into())
    }
}

/// Gradients of x, weight and bias, those that are wanted.
type Gradients3<B> = [Option<FloatTensor<B>>; 3];

/// Adds what a chunk of rows adds.
fn accumulate<B: Backend>(
    gradients: &mut Gradients3<B>,
    head: &Head<B>,
    x: &FloatTensor<B>,
    chunk: Range<usize>,
    dlogits: FloatTensor<B>,
) {
    let [dx, dweight, dbias] = gradients;
    if let Some(sum) = dweight.take() {
        let x = B::float_transpose(rows_of::<B>(x, &chunk));
        *dweight = Some(add_product::<B>(sum, x, dlogits.clone()));
    }
    if let Some(sum) = dbias.take() {
        *dbias = Some(B::float_add(sum, sum_of_rows::<B>(dlogits.clone())));
    }
    if let Some(all) = dx.take() {
        let gradient = B::float_matmul(dlogits, B::float_transpose(head.weight.clone()));
        *dx = Some(B::float_slice_assign(all, &[Slice::from(chunk)], gradient));
    }
}

/// `[classes]`
fn sum_of_rows<B: Backend>(dlogits: FloatTensor<B>) -> FloatTensor<B> {
    let classes = dlogits.shape()[1];
    B::float_reshape(B::float_sum_dim(dlogits, 0), Shape::new([classes]))
}

/// `sum + u v` in `sum`, a few columns at a time.
fn add_product<B: Backend>(mut sum: FloatTensor<B>, u: FloatTensor<B>, v: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, columns] = sum.shape().dims();
    for block in chunks(columns, rows * sum.dtype().size(), BLOCK_BYTES) {
        let block_of = |x: &FloatTensor<B>, rows| {
            B::float_slice(x.clone(), &[Slice::from(0..rows), Slice::from(block.clone())])
        };
        let product = B::float_matmul(u.clone(), block_of(&v, v.shape()[0]));
        let more = B::float_add(product, block_of(&sum, rows));
        sum = B::float_slice_assign(sum, &[Slice::from(0..rows), Slice::from(block)], more);
    }
    sum
}

fn record<B, C, const N: usize>(
    loss: Loss<B>,
    x: FloatTensor<Autodiff<B, C>>,
    weight: FloatTensor<Autodiff<B, C>>,
    bias: Option<FloatTensor<Autodiff<B, C>>>,
    parents: [NodeGuard; N],
) -> FloatTensor<Autodiff<B, C>>
where
    B: MemBackend,
    C: CheckpointStrategy,
{
    let plain = |tensor: &FloatTensor<Autodiff<B, C>>| tensor.primitive().clone();
    let head = Head::<B> { weight: plain(&weight), bias: bias.as_ref().map(plain) };
    match Step.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            const REASON: &str = "made in the forward pass";
            let keeper = Keeper::new("linear_cross_entropy", Some(weight.id()));
            let [rows, d_input] = x.shape().dims();
            if weight.is_tracked() && rows < d_input {
                let whole = Loss { chunk_bytes: usize::MAX, ..loss };
                let mut dlogits = None;
                let sum = whole.sum(&head, x.primitive(), Some(&mut |_, gradient| dlogits = Some(gradient)));
                let saved = Saved::Logits {
                    dlogits: keeper.keep_tensor("dlogits", dlogits.expect("there are rows"), REASON),
                    x: keeper.keep(&mut prep, "x", &x, "weight is tracked"),
                    weight: x.is_tracked().then(|| keeper.keep(&mut prep, "weight", &weight, "x is tracked")),
                };
                return prep.finish(saved, sum);
            }
            let zeros = |of: &FloatTensor<Autodiff<B, C>>| {
                of.is_tracked().then(|| zeros::<B>(of.shape(), of.primitive()))
            };
            let mut gradients = [zeros(&x), zeros(&weight), bias.as_ref().and_then(zeros)];
            let plain = x.primitive();
            let sum = loss.sum(
                &head,
                plain,
                Some(&mut |chunk, dlogits| accumulate(&mut gradients, &head, plain, chunk, dlogits)),
            );
            let [dx, dweight, dbias] = gradients;
            let keep = |name, gradient: Option<FloatTensor<B>>| {
                gradient.map(|gradient| keeper.keep_tensor(name, gradient, REASON))
            };
            let saved = [keep("dx", dx), keep("dweight", dweight), keep("dbias", dbias)];
            prep.finish(Saved::Gradients(saved), sum)
        }
        OpsKind::UnTracked(prep) => prep.finish(loss.sum(&head, x.primitive(), None)),
    }
}

#[derive(Debug)]
struct Step;

/// What the backward pass reads: gradients, for a gradient of 1.
#[derive(Clone, Debug)]
enum Saved<B: MemBackend> {
    Gradients(Gradients3<B>),
    Logits { dlogits: FloatTensor<B>, x: Kept, weight: Option<Kept> },
}

impl<B: MemBackend, const N: usize> Backward<B, N> for Step {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dloss = grads.consume::<B>(&ops.node);
        let mut parents = ops.parents.into_iter();
        let nodes: [_; 3] = core::array::from_fn(|_| parents.next().flatten());
        let gradients = match ops.state {
            Saved::Gradients(gradients) => {
                gradients.map(|gradient| gradient.map(|gradient| B::scale(gradient, dloss.clone())))
            }
            Saved::Logits { dlogits, x, weight } => {
                let dlogits = B::scale(dlogits, dloss);
                let x = x.get::<B>(checkpointer);
                let weight = weight.map(|weight| weight.get::<B>(checkpointer));
                [
                    weight.map(|weight| B::float_matmul(dlogits.clone(), B::float_transpose(weight))),
                    Some(B::float_matmul(B::float_transpose(x), dlogits.clone())),
                    nodes[2].is_some().then(|| sum_of_rows::<B>(dlogits)),
                ]
            }
        };
        for (node, gradient) in nodes.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}
