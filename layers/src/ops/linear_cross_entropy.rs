//! Cross entropy of a dense layer's outputs, which never exist all at once.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows of `logits = x weight + bias`, `loss` as in [`cross_entropy`](super::cross_entropy) |
//! | keeps | `weight` frozen, or at least as many rows as `d_input`: the gradients of what is tracked, and nothing else |
//! | | otherwise `x`, `weight`, `bias` (handles), the targets, and per row `log(sum(exp(logits)))` and `factor` |
//! | backward | `dx = dlogits weight^T`, `dweight = x^T dlogits`, `dbias = sum(dlogits)` |
//!
//! The forward pass takes a few rows at a time, and makes the gradients at once, as
//! [Liger-Kernel](https://arxiv.org/abs/2410.10989) does. Only for few rows would the gradient of the weight be more than the
//! logits that stock keeps: then the backward pass computes the logits again, a few classes at a time, so that each block of
//! that gradient is final.
use super::{
    MaybeTensor,
    cross_entropy::Labels,
    kept::{Keeper, Kept},
};
use crate::backend::{LogitsGradient, MemBackend, plain_backends};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    backend_extension, get_or_init_device_settings,
    tensor::{FloatTensor, IndexingUpdateOp, IntTensor},
};
use burn::tensor::{Shape, Slice};
use core::ops::Range;

/// How a cross entropy of a dense layer is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearCrossEntropy {
    /// Label smoothing.
    pub smoothing: Option<f32>,
    /// The bytes of the logits that exist at a time; at least those of one row, or of one class.
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
        let labels = Labels::new(targets, class_weights.into_option(), options.smoothing);
        let head = Head::<Self> { weight, bias: bias.into_option() };
        head.forward(&x, &labels, factors, options.chunk_bytes, Wanted::Loss).loss
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
            labels: Labels::new(targets, class_weights, options.smoothing),
            factors: factors.into_primitive(),
            chunk_bytes: options.chunk_bytes,
        };
        let (bias, nodes) = (bias.into_option(), [x.node(), weight.node()]);
        let [rows, d_input] = x.shape().dims();
        let at_once = !weight.is_tracked() || rows >= d_input;
        match bias {
            None if at_once => record_at_once::<B, C, 2>(loss, x, weight, None, nodes),
            None => record::<B, C, 2>(loss, x, weight, None, nodes),
            Some(bias) => {
                let ([x_node, weight_node], node) = (nodes, bias.node());
                let nodes = [x_node, weight_node, node];
                match at_once {
                    true => record_at_once::<B, C, 3>(loss, x, weight, Some(bias), nodes),
                    false => record::<B, C, 3>(loss, x, weight, Some(bias), nodes),
                }
            }
        }
    }
}

/// What the logits of the rows are compared with, and how much each row counts.
#[derive(Debug)]
struct Loss<B: Backend> {
    labels: Labels<B>,
    factors: FloatTensor<B>,
    chunk_bytes: usize,
}

/// A dense layer.
struct Head<B: Backend> {
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
}

/// What the forward pass gives besides the loss.
#[derive(Clone, Copy, PartialEq)]
enum Wanted {
    Loss,
    LogSumExp,
    /// Those of x, weight and bias.
    Gradients([bool; 3]),
}

/// Gradients of x, weight and bias, those that are wanted.
type Gradients3<B> = [Option<FloatTensor<B>>; 3];

struct Forward<B: Backend> {
    /// `[1]`
    loss: FloatTensor<B>,
    /// `[rows, 1]`
    log_sum_exp: Option<FloatTensor<B>>,
    gradients: Gradients3<B>,
}

/// The bytes of a product that is added to the gradient of the weight: it stays in the cache.
const BLOCK_BYTES: usize = 1 << 20;

fn rows_of<B: Backend>(x: &FloatTensor<B>, rows: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &[Slice::from(rows.clone())])
}

fn columns_of<B: Backend>(x: &FloatTensor<B>, columns: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &[Slice::from(0..x.shape()[0]), Slice::from(columns.clone())])
}

/// Ranges of equal length that cover `0..len`, of so many items of `item` bytes as a chunk can have.
fn chunks(len: usize, item: usize, chunk_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let size = (chunk_bytes / item.max(1)).clamp(1, len.max(1));
    let size = len.div_ceil(len.div_ceil(size).max(1)).max(1);
    (0..len).step_by(size).map(move |start| start..(start + size).min(len))
}

/// `float_full` and not `float_zeros`, which takes twice the memory for a moment on Flex 0.22.1.
fn zeros<B: Backend>(shape: Shape, like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_full(shape, 0.into(), &like.device(), like.dtype().into())
}

impl<B: MemBackend> Head<B> {
    fn classes(&self) -> usize {
        self.weight.shape()[1]
    }

    /// The logits of some classes.
    fn logits(&self, x: FloatTensor<B>, weight: FloatTensor<B>, classes: &Range<usize>) -> FloatTensor<B> {
        let logits = B::float_matmul(x, weight);
        match &self.bias {
            None => logits,
            Some(bias) => {
                let bias = rows_of::<B>(bias, classes);
                B::float_add(logits, B::float_reshape(bias, Shape::new([1, classes.len()])))
            }
        }
    }

    fn forward(
        &self,
        x: &FloatTensor<B>,
        labels: &Labels<B>,
        factors: FloatTensor<B>,
        chunk_bytes: usize,
        wanted: Wanted,
    ) -> Forward<B> {
        let ([rows, _], dtype) = (x.shape().dims(), x.dtype());
        let factors = B::float_reshape(factors, Shape::new([rows, 1]));
        let [wants_x, wants_weight, wants_bias] = match wanted {
            Wanted::Gradients(wanted) => wanted,
            _ => [false; 3],
        };
        let mut dx = wants_x.then(|| zeros::<B>(x.shape(), x));
        let mut dweight = wants_weight.then(|| zeros::<B>(self.weight.shape(), &self.weight));
        let mut dbias = None;
        let (mut losses, mut logs) = (Vec::new(), Vec::new());
        for chunk in chunks(rows, self.classes() * dtype.size(), chunk_bytes) {
            let labels = labels.rows(&chunk);
            let logits = self.logits(rows_of::<B>(x, &chunk), self.weight.clone(), &(0..self.classes()));
            let log_sum_exp = B::log_sum_exp(logits.clone());
            let factors = B::float_cast(rows_of::<B>(&factors, &chunk), log_sum_exp.dtype().into());
            let loss = labels.losses(logits.clone(), log_sum_exp.clone());
            losses.push(B::float_mul(loss, factors.clone()));
            match wanted {
                Wanted::Loss => {}
                Wanted::LogSumExp => logs.push(log_sum_exp),
                Wanted::Gradients(_) => {
                    let dlogits = labels.backward(logits, log_sum_exp, factors);
                    dweight = dweight.map(|dweight| {
                        let x = B::float_transpose(rows_of::<B>(x, &chunk));
                        add_product::<B>(dweight, x, dlogits.clone())
                    });
                    if wants_bias {
                        let sum = B::float_sum_dim(dlogits.clone(), 0);
                        dbias = Some(match dbias {
                            Some(dbias) => B::float_add(dbias, sum),
                            None => sum,
                        });
                    }
                    dx = dx.map(|dx| {
                        let gradient = B::float_matmul(dlogits, B::float_transpose(self.weight.clone()));
                        B::float_slice_assign(dx, &[Slice::from(chunk)], gradient)
                    });
                }
            }
        }
        let dbias = dbias.map(|dbias| B::float_reshape(dbias, Shape::new([self.classes()])));
        let sum = B::float_reshape(B::float_sum(B::float_cat(losses, 0)), Shape::new([1]));
        Forward {
            loss: B::float_cast(sum, dtype.into()),
            log_sum_exp: (wanted == Wanted::LogSumExp).then(|| B::float_cat(logs, 0)),
            gradients: [dx, dweight, dbias],
        }
    }

    /// The gradients of x, weight and bias, those that are wanted, from `dlosses` `[rows, 1]`.
    fn backward(
        &self,
        x: FloatTensor<B>,
        labels: &Labels<B>,
        log_sum_exp: FloatTensor<B>,
        dlosses: FloatTensor<B>,
        chunk_bytes: usize,
        wanted: [bool; 3],
    ) -> Gradients3<B> {
        let ([rows, _], dtype) = (x.shape().dims(), x.dtype());
        let of_target = B::float_cast(B::float_neg(labels.times_target(dlosses.clone())), dtype.into());
        let all = labels.gradient(log_sum_exp, dlosses, self.classes());
        let [_, wants_weight, wants_bias] = wanted;
        let mut dx: Option<FloatTensor<B>> = None;
        let mut dweight = wants_weight.then(|| zeros::<B>(self.weight.shape(), &self.weight));
        let mut dbias = wants_bias.then(|| zeros::<B>(Shape::new([self.classes()]), &x));
        for block in chunks(self.classes(), rows * dtype.size(), chunk_bytes) {
            let weight = columns_of::<B>(&self.weight, &block);
            let logits = self.logits(x.clone(), weight.clone(), &block);
            let gradient = LogitsGradient {
                log_sum_exp: all.log_sum_exp.clone(),
                of_probability: all.of_probability.clone(),
                of_weight: all.of_weight.clone(),
                weights: all.weights.as_ref().map(|weights| rows_of::<B>(weights, &block)),
            };
            let dlogits = B::logits_gradient(logits, gradient);
            let dlogits = add_at_targets::<B>(dlogits, labels.targets.clone(), of_target.clone(), &block);
            dweight = dweight.map(|dweight| {
                let gradient = B::float_matmul(B::float_transpose(x.clone()), dlogits.clone());
                let d_input = Slice::from(0..dweight.shape()[0]);
                B::float_slice_assign(dweight, &[d_input, Slice::from(block.clone())], gradient)
            });
            dbias = dbias.map(|dbias| {
                let sum = B::float_reshape(B::float_sum_dim(dlogits.clone(), 0), Shape::new([block.len()]));
                B::float_slice_assign(dbias, &[Slice::from(block)], sum)
            });
            if wanted[0] {
                let gradient = B::float_matmul(dlogits, B::float_transpose(weight));
                dx = Some(match dx {
                    Some(dx) => B::float_add(dx, gradient),
                    None => gradient,
                });
            }
        }
        [dx, dweight, dbias]
    }
}

/// `sum + u v` in `sum`, a few columns at a time.
fn add_product<B: Backend>(mut sum: FloatTensor<B>, u: FloatTensor<B>, v: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, columns] = sum.shape().dims();
    for block in chunks(columns, rows * sum.dtype().size(), BLOCK_BYTES) {
        let product = B::float_matmul(u.clone(), columns_of::<B>(&v, &block));
        let more = B::float_add(product, columns_of::<B>(&sum, &block));
        sum = B::float_slice_assign(sum, &[Slice::from(0..rows), Slice::from(block)], more);
    }
    sum
}

/// Adds a value per row at its target, if that is one of the classes `block`, whose columns `x` has.
fn add_at_targets<B: Backend>(
    x: FloatTensor<B>,
    targets: IntTensor<B>,
    values: FloatTensor<B>,
    block: &Range<usize>,
) -> FloatTensor<B> {
    let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
    let last = block.len() - 1;
    let column = B::int_sub_scalar(targets, block.start.into());
    let before = B::int_lower_elem(column.clone(), 0.into(), bools);
    let outside = B::bool_or(before, B::int_greater_elem(column.clone(), last.into(), bools));
    let values = B::float_mask_fill(values, outside, 0.into());
    B::float_scatter(1, x, B::int_clamp(column, 0.into(), last.into()), values, IndexingUpdateOp::Add)
}

/// The gradients are made in the forward pass.
fn record_at_once<B, C, const N: usize>(
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
    const REASON: &str = "made in the forward pass";
    let keeper = Keeper::new("linear_cross_entropy", Some(weight.id()));
    let bias_is_tracked = bias.as_ref().is_some_and(|bias| bias.is_tracked());
    let wanted = Wanted::Gradients([x.is_tracked(), weight.is_tracked(), bias_is_tracked]);
    let head = Head::<B> { weight: weight.into_primitive(), bias: bias.map(|bias| bias.into_primitive()) };
    let Loss { labels, factors, chunk_bytes } = loss;
    let forward = |x, wanted| head.forward(&x, &labels, factors, chunk_bytes, wanted);
    match AtOnce.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prep) => {
            let Forward { loss, gradients: [dx, dweight, dbias], .. } = forward(x.into_primitive(), wanted);
            let keep = |name, gradient: Option<FloatTensor<B>>| {
                gradient.map(|gradient| keeper.keep_tensor(name, gradient, REASON))
            };
            prep.finish([keep("dx", dx), keep("dweight", dweight), keep("dbias", dbias)], loss)
        }
        OpsKind::UnTracked(prep) => prep.finish(forward(x.into_primitive(), Wanted::Loss).loss),
    }
}

#[derive(Debug)]
struct AtOnce;

impl<B: MemBackend, const N: usize> Backward<B, N> for AtOnce {
    /// For a gradient of 1.
    type State = Gradients3<B>;

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, _: &mut Checkpointer) {
        let dloss = grads.consume::<B>(&ops.node);
        for (node, gradient) in ops.parents.into_iter().zip(ops.state) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node.id, B::scale(gradient, dloss.clone()));
            }
        }
    }
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
    const REASON: &str = "weight or bias is tracked";
    let Loss { labels, factors, chunk_bytes } = loss;
    let plain = |tensor: &FloatTensor<Autodiff<B, C>>| tensor.primitive().clone();
    let head = Head::<B> { weight: plain(&weight), bias: bias.as_ref().map(plain) };
    match (Step { chunk_bytes }).prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let keeper = Keeper::new("linear_cross_entropy", Some(weight.id()));
            let forward =
                head.forward(x.primitive(), &labels, factors.clone(), chunk_bytes, Wanted::LogSumExp);
            let log_sum_exp = forward.log_sum_exp.expect("wanted");
            let saved = Saved {
                x: keeper.keep(&mut prep, "x", &x, REASON),
                weight: keeper.keep(&mut prep, "weight", &weight, REASON),
                bias: bias.as_ref().map(|bias| keeper.keep(&mut prep, "bias", bias, REASON)),
                log_sum_exp: keeper.keep_tensor("log_sum_exp", log_sum_exp, REASON),
                factors: keeper.keep_tensor("factors", factors, REASON),
                labels: labels.kept_by(&keeper),
            };
            prep.finish(saved, forward.loss)
        }
        OpsKind::UnTracked(prep) => {
            prep.finish(head.forward(x.primitive(), &labels, factors, chunk_bytes, Wanted::Loss).loss)
        }
    }
}

#[derive(Debug)]
struct Step {
    chunk_bytes: usize,
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<B: MemBackend> {
    x: Kept,
    weight: Kept,
    bias: Option<Kept>,
    /// Of the logits of every row, `[rows, 1]`.
    log_sum_exp: FloatTensor<B>,
    /// How much each row counts.
    factors: FloatTensor<B>,
    labels: Labels<B>,
}

impl<B: MemBackend, const N: usize> Backward<B, N> for Step {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dloss = grads.consume::<B>(&ops.node);
        let Saved { x, weight, bias, log_sum_exp, factors, labels } = ops.state;
        let x = x.get::<B>(checkpointer);
        let head = Head::<B> {
            weight: weight.get::<B>(checkpointer),
            bias: bias.map(|bias| bias.get::<B>(checkpointer)),
        };
        let factors =
            B::float_cast(B::float_reshape(factors, log_sum_exp.shape()), log_sum_exp.dtype().into());
        let dloss = B::float_cast(B::float_reshape(dloss, Shape::new([1, 1])), log_sum_exp.dtype().into());
        let dlosses = B::float_mul(factors, dloss);
        let mut parents = ops.parents.into_iter();
        let nodes: [_; 3] = core::array::from_fn(|_| parents.next().flatten());
        let wanted = nodes.each_ref().map(Option::is_some);
        let gradients = head.backward(x, &labels, log_sum_exp, dlosses, self.chunk_bytes, wanted);
        for (node, gradient) in nodes.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<B>(node.id, gradient);
            }
        }
    }
}
