//! Cross entropy of a dense layer's outputs, which never exist all at once.
//!
//! | | |
//! | --- | --- |
//! | computes | `sum(factor loss)` over the rows of `logits = x weight + bias`, `loss` as in [`cross_entropy`](super::cross_entropy) |
//! | keeps | the gradients of what is tracked, and nothing else, but |
//! | | with `weight` tracked and fewer rows than `d_input`: `dlogits`, `x` (a handle), and, `x` tracked, `weight` (a handle); |
//! | | with `weight` tracked in half precision: instead of its gradient `x`, `weight` (handles), `log(sum(exp(logits)))` per row |
//! | backward | `dx = dlogits weight^T`, `dweight = x^T dlogits`, `dbias = sum(dlogits)` |
//!
//! The forward pass takes a few rows at a time, and makes the gradients at once, as
//! [Liger-Kernel](https://arxiv.org/abs/2410.10989) does. Only for few rows would the gradient of the weight be more than the
//! logits, which stock keeps: then their gradient, which takes their place, is kept, and the backward pass makes the rest.
//!
//! In half precision, what many chunks of rows add to the gradient of the weight would have to be added up in f32, at twice its
//! size, of products that are rounded each. So the backward pass makes it block by block of the classes: every block is one product over
//! all rows, as in stock, from logits that are computed again. What f16 keeps is scaled so that its largest possible value
//! fills the range of f16: an upstream gradient that scales the loss finds what it would bring into this range.
//!
//! Rows with a factor of 0, such as padding, count as rows of zeros in `x`, whatever they hold, and have no loss.
use super::{
    MaybeTensor,
    cross_entropy::Labels,
    kept::{Keeper, Kept},
};
use crate::backend::{MemBackend, plain_backends, wide, widen, zeros};
use burn::backend::{
    Backend, TensorMetadata,
    autodiff::{
        Autodiff,
        checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
        grads::Gradients,
        ops::{Backward, NodeGuard, Ops, OpsKind},
    },
    backend_extension, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, Shape, Slice};
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
    /// The sum of `factors` times the losses, `[1]`, or their mean; x `[rows, d_input]`, weight `[d_input, classes]`, bias
    /// `[classes]`. Not tracked are targets and factors `[rows]`, and the weights of the classes `[classes]`.
    fn memsave_linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        #[extension_type] bias: MaybeTensor<Self>,
        targets: IntTensor<Self>,
        #[extension_type] factors: MaybeTensor<Self>,
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
        factors: MaybeTensor<Self>,
        class_weights: MaybeTensor<Self>,
        options: LinearCrossEntropy,
    ) -> FloatTensor<Self> {
        let labels = Labels::<Self>::new(targets, class_weights.into_option(), options.smoothing);
        let loss = Loss::<Self>::new(labels, factors.into_option(), &x, options.chunk_bytes);
        loss.sum(&Head { weight, bias: bias.into_option() }, &x, &mut |_| ())
    }
});

impl<B: LinearCrossEntropyOps + MemBackend, C: CheckpointStrategy> LinearCrossEntropyOps for Autodiff<B, C> {
    fn memsave_linear_cross_entropy(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: MaybeTensor<Self>,
        targets: IntTensor<Self>,
        factors: MaybeTensor<Self>,
        class_weights: MaybeTensor<Self>,
        options: LinearCrossEntropy,
    ) -> FloatTensor<Self> {
        let class_weights = class_weights.into_option().map(|weights| weights.into_primitive());
        let factors = factors.into_option().map(|factors| factors.into_primitive());
        let labels = Labels::<B>::new(targets, class_weights, options.smoothing);
        let loss = Loss::new(labels, factors, x.primitive(), options.chunk_bytes);
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
#[derive(Clone, Debug)]
struct Loss<B: MemBackend> {
    labels: Labels<B>,
    /// `[rows, 1]`, in f32 at least.
    factors: FloatTensor<B>,
    /// The rows with a factor of 0, `[rows, 1]`, if there may be any.
    padding: Option<BoolTensor<B>>,
    chunk_bytes: usize,
}

/// A dense layer, or some of its outputs.
struct Head<B: Backend> {
    weight: FloatTensor<B>,
    bias: Option<FloatTensor<B>>,
}

/// The bytes of a product that is added to the gradient of the weight: it stays in the cache.
const BLOCK_BYTES: usize = 1 << 20;

/// Of a block of a weight of half precision: a product with fewer is slow, and one with a single column is made in f16 on Flex.
const FEWEST_COLUMNS: usize = 64;

fn rows_of<B: Backend>(x: &FloatTensor<B>, rows: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &[Slice::from(rows.clone())])
}

fn columns_of<B: Backend>(x: &FloatTensor<B>, columns: &Range<usize>) -> FloatTensor<B> {
    B::float_slice(x.clone(), &[Slice::from(0..x.shape()[0]), Slice::from(columns.clone())])
}

/// Ranges that cover `0..len`, of so many items of `item` bytes as a chunk can have, and at most one item longer than others: a
/// product with a single row is made in f16 on Flex.
fn chunks(len: usize, item: usize, chunk_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let most = (chunk_bytes / item.max(1)).clamp(1, len.max(1));
    let count = len.div_ceil(most);
    (0..count).map(move |chunk| len * chunk / count..len * (chunk + 1) / count)
}

impl<B: Backend> Head<B> {
    fn classes(&self) -> usize {
        self.weight.shape()[1]
    }

    fn columns(&self, columns: &Range<usize>) -> Self {
        let bias = self.bias.clone().map(|bias| B::float_slice(bias, &[Slice::from(columns.clone())]));
        Self { weight: columns_of::<B>(&self.weight, columns), bias }
    }

    fn logits(&self, x: FloatTensor<B>) -> FloatTensor<B> {
        let logits = B::float_matmul(x, self.weight.clone());
        match self.bias.clone() {
            None => logits,
            Some(bias) => B::float_add(logits, B::float_reshape(bias, Shape::new([1, self.classes()]))),
        }
    }
}

/// The logits of some rows, and what their gradient is made of.
struct Chunk<B: MemBackend> {
    rows: Range<usize>,
    /// `[rows, d_input]`
    x: FloatTensor<B>,
    logits: FloatTensor<B>,
    labels: Labels<B>,
    log_sum_exp: FloatTensor<B>,
    factors: FloatTensor<B>,
}

impl<B: MemBackend> Chunk<B> {
    /// The gradient of the logits, for an upstream gradient of 1, or of that scale.
    fn dlogits(self, scale: Option<&FloatTensor<B>>) -> FloatTensor<B> {
        let classes = self.logits.shape()[1];
        let dloss = match scale {
            None => self.factors,
            Some(scale) => B::float_mul(self.factors, B::float_reshape(scale.clone(), Shape::new([1, 1]))),
        };
        let dloss = B::float_cast(dloss, self.log_sum_exp.dtype().into());
        self.labels.gradient(self.log_sum_exp, dloss, classes).of(self.logits)
    }
}

impl<B: MemBackend> Loss<B> {
    /// Without factors every row counts the same, so that the sum is the mean.
    fn new(
        labels: Labels<B>,
        factors: Option<FloatTensor<B>>,
        x: &FloatTensor<B>,
        chunk_bytes: usize,
    ) -> Self {
        let (shape, device, dtype) = (Shape::new([x.shape()[0], 1]), x.device(), wide(x.dtype()));
        let Some(factors) = factors else {
            let mean = (shape[0] as f64).recip().into();
            let factors = B::float_full(shape, mean, &device, dtype.into());
            return Self { labels, factors, padding: None, chunk_bytes };
        };
        let factors = B::float_reshape(B::float_cast(factors, dtype.into()), shape);
        let bools = get_or_init_device_settings::<B>(&device).bool_dtype;
        let padding = Some(B::float_equal_elem(factors.clone(), 0.into(), bools));
        Self { labels, factors, padding, chunk_bytes }
    }

    /// The sum over the rows, `[1]`. Hands over the logits of a chunk of rows after the other.
    fn sum(&self, head: &Head<B>, x: &FloatTensor<B>, visit: &mut dyn FnMut(Chunk<B>)) -> FloatTensor<B> {
        let ([rows, _], dtype) = (x.shape().dims(), x.dtype());
        let mut losses = Vec::new();
        for chunk in chunks(rows, head.classes() * dtype.size(), self.chunk_bytes) {
            let labels = self.labels.rows(&chunk);
            let factors = rows_of::<B>(&self.factors, &chunk);
            let padding = self.padding.clone();
            let padding = padding.map(|all| B::bool_slice(all, &[Slice::from(chunk.clone())]));
            let x = zero_rows::<B>(rows_of::<B>(x, &chunk), &padding);
            let logits = head.logits(x.clone());
            let log_sum_exp = B::log_sum_exp(logits.clone());
            let loss = widen::<B>(labels.losses(logits.clone(), log_sum_exp.clone()));
            losses.push(B::float_mul(zero_rows::<B>(loss, &padding), factors.clone()));
            visit(Chunk { rows: chunk, x, logits, labels, log_sum_exp, factors });
        }
        let sum = B::float_reshape(B::float_sum(B::float_cat(losses, 0)), Shape::new([1]));
        B::float_cast(sum, dtype.into())
    }

    /// What the gradient of the logits of f16 is multiplied with, `[1]`, in f32: the power of two with which neither it nor, given
    /// the head, its product with the weight overflows. Other types have the range of f32.
    fn scale(&self, head: &Head<B>, of_product: bool) -> Option<FloatTensor<B>> {
        if head.weight.dtype() != DType::F16 {
            return None;
        }
        let one = |x: FloatTensor<B>| B::float_cast(B::float_reshape(x, Shape::new([1])), FloatDType::F32);
        let larger = |a: FloatTensor<B>, b: FloatTensor<B>| B::float_max(B::float_cat(vec![a, b], 0));
        // Of a row, the absolute values of the gradient have a sum of 2 factors times the weight of a class.
        let mut bound = one(B::float_max_abs(self.factors.clone()));
        if let Some(weights) = self.labels.weights() {
            bound = B::float_mul(bound, one(B::float_max_abs(weights.clone())));
        }
        if of_product {
            // Not the largest absolute value: that of Flex and CubeCL makes a tensor of the size of the weight.
            let largest = one(B::float_max(head.weight.clone()));
            let smallest = one(B::float_neg(B::float_min(head.weight.clone())));
            let weight = B::float_mul_scalar(one(larger(largest, smallest)), 2.into());
            bound = B::float_mul(bound, B::float_clamp_min(weight, 1.into()));
        }
        let bound = B::float_clamp_min(bound, f64::from(f32::MIN_POSITIVE).sqrt().into());
        let log = B::float_mul_scalar(B::float_log(bound), core::f64::consts::LOG2_E.into());
        let exponent = B::float_floor(B::float_add_scalar(B::float_neg(log), LARGEST_EXPONENT.into()));
        let two = B::float_full(exponent.shape(), 2.into(), &exponent.device(), FloatDType::F32);
        Some(B::float_powf(two, exponent))
    }
}

/// Twice 2 to this is just below what f16 can hold.
const LARGEST_EXPONENT: f64 = 15.0;

/// `x` `[rows, columns]` with zeros in the rows of padding.
fn zero_rows<B: Backend>(x: FloatTensor<B>, padding: &Option<BoolTensor<B>>) -> FloatTensor<B> {
    match padding.clone() {
        None => x,
        Some(padding) => {
            let padding = B::bool_expand(padding, x.shape());
            B::float_mask_fill(x, padding, 0.into())
        }
    }
}

/// Gradients that the forward pass makes, of those that are wanted.
#[derive(Clone, Debug)]
struct Made<T> {
    x: Option<T>,
    weight: Option<T>,
    /// In f32 at least.
    bias: Option<T>,
}

/// Adds what a chunk of rows adds.
fn accumulate<B: MemBackend>(
    gradients: &mut Made<FloatTensor<B>>,
    head: &Head<B>,
    chunk: Chunk<B>,
    scale: Option<&FloatTensor<B>>,
) {
    let (rows, x) = (chunk.rows.clone(), chunk.x.clone());
    let dlogits = chunk.dlogits(scale);
    if let Some(sum) = gradients.weight.take() {
        gradients.weight = Some(add_product::<B>(sum, B::float_transpose(x), dlogits.clone()));
    }
    if let Some(sum) = gradients.bias.take() {
        gradients.bias = Some(B::float_add(sum, sum_of_rows::<B>(dlogits.clone())));
    }
    if let Some(all) = gradients.x.take() {
        let dx = B::float_matmul(dlogits, B::float_transpose(head.weight.clone()));
        gradients.x = Some(B::float_slice_assign(all, &[Slice::from(rows)], dx));
    }
}

/// `[classes]`, in f32 at least.
fn sum_of_rows<B: Backend>(dlogits: FloatTensor<B>) -> FloatTensor<B> {
    let [rows, classes] = dlogits.shape().dims();
    let wide = wide(dlogits.dtype());
    let sums = if dlogits.dtype() == wide {
        B::float_sum_dim(dlogits, 0)
    } else {
        let sum = |block| B::float_sum_dim(widen::<B>(columns_of::<B>(&dlogits, &block)), 0);
        B::float_cat(chunks(classes, rows * wide.size(), BLOCK_BYTES).map(sum).collect(), 1)
    };
    B::float_reshape(sums, Shape::new([classes]))
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
            let is_half = wide(x.dtype()) != x.dtype();
            if weight.is_tracked() && rows < d_input {
                let scale = loss.scale(&head, false);
                let padding = loss.padding.clone();
                let mut dlogits = None;
                let whole = Loss { chunk_bytes: usize::MAX, ..loss };
                let sum =
                    whole.sum(&head, x.primitive(), &mut |all| dlogits = Some(all.dlogits(scale.as_ref())));
                let of = OfLogits {
                    dlogits: keeper.keep_tensor("dlogits", dlogits.expect("there are rows"), REASON),
                    padding,
                    x: keeper.keep(&mut prep, "x", &x, "weight is tracked"),
                    weight: x.is_tracked().then(|| keeper.keep(&mut prep, "weight", &weight, "x is tracked")),
                };
                return prep.finish(Saved { scale, gradients: Kind::OfLogits(of) }, sum);
            }
            let blocks = weight.is_tracked() && is_half;
            let scale = loss.scale(&head, x.is_tracked());
            let zeros = |of: &FloatTensor<Autodiff<B, C>>, dtype: DType| {
                let zeros = || B::float_full(of.shape(), 0.into(), &x.device(), dtype.into());
                of.is_tracked().then(zeros)
            };
            let mut gradients = Made {
                x: zeros(&x, x.dtype()),
                weight: if blocks { None } else { zeros(&weight, weight.dtype()) },
                bias: bias.as_ref().and_then(|bias| zeros(bias, wide(bias.dtype()))),
            };
            let mut log_sum_exp = Vec::new();
            let sum = loss.sum(&head, x.primitive(), &mut |chunk| {
                if blocks {
                    log_sum_exp.push(chunk.log_sum_exp.clone());
                }
                if gradients.x.is_some() || gradients.weight.is_some() || gradients.bias.is_some() {
                    accumulate(&mut gradients, &head, chunk, scale.as_ref());
                }
            });
            let keep = |name, gradient: Option<FloatTensor<B>>| {
                gradient.map(|gradient| keeper.keep_tensor(name, gradient, REASON))
            };
            let made = Made {
                x: keep("dx", gradients.x),
                weight: keep("dweight", gradients.weight),
                bias: keep("dbias", gradients.bias),
            };
            let blocks = blocks.then(|| {
                const REASON: &str = "weight is tracked";
                Blocks {
                    x: keeper.keep(&mut prep, "x", &x, REASON),
                    weight: keeper.keep(&mut prep, "weight", &weight, REASON),
                    bias: bias.as_ref().map(|bias| keeper.keep(&mut prep, "bias", bias, REASON)),
                    log_sum_exp: keeper.keep_tensor("log_sum_exp", B::float_cat(log_sum_exp, 0), REASON),
                    loss: Loss { labels: loss.labels.kept_by(&keeper, REASON), ..loss },
                }
            });
            prep.finish(Saved { scale, gradients: Kind::Made(made, blocks) }, sum)
        }
        OpsKind::UnTracked(prep) => prep.finish(loss.sum(&head, x.primitive(), &mut |_| ())),
    }
}

#[derive(Debug)]
struct Step;

/// What the backward pass reads.
#[derive(Clone, Debug)]
struct Saved<B: MemBackend> {
    /// What the kept gradients are for, `[1]`; else for an upstream gradient of 1.
    scale: Option<FloatTensor<B>>,
    gradients: Kind<B>,
}

#[derive(Clone, Debug)]
enum Kind<B: MemBackend> {
    Made(Made<FloatTensor<B>>, Option<Blocks<B>>),
    OfLogits(OfLogits<B>),
}

/// For few rows.
#[derive(Clone, Debug)]
struct OfLogits<B: MemBackend> {
    dlogits: FloatTensor<B>,
    padding: Option<BoolTensor<B>>,
    x: Kept,
    weight: Option<Kept>,
}

/// What the gradient of a weight of half precision is made of, block by block of the classes.
#[derive(Clone, Debug)]
struct Blocks<B: MemBackend> {
    x: Kept,
    weight: Kept,
    bias: Option<Kept>,
    /// Of the logits, `[rows, 1]`.
    log_sum_exp: FloatTensor<B>,
    loss: Loss<B>,
}

impl<B: MemBackend> Blocks<B> {
    fn gradient(self, dloss: FloatTensor<B>, checkpointer: &mut Checkpointer) -> FloatTensor<B> {
        let Self { x, weight, bias, log_sum_exp, loss } = self;
        let x = zero_rows::<B>(x.get::<B>(checkpointer), &loss.padding);
        let weight = weight.get::<B>(checkpointer);
        let head = Head::<B> { weight, bias: bias.map(|bias| bias.get::<B>(checkpointer)) };
        let dloss = B::float_mul(loss.factors, B::float_reshape(widen::<B>(dloss), Shape::new([1, 1])));
        let dloss = B::float_cast(dloss, log_sum_exp.dtype().into());
        let gradient = loss.labels.gradient(log_sum_exp, dloss, head.classes());
        let [rows, d_input] = x.shape().dims();
        let mut dweight = zeros::<B>(head.weight.shape(), &head.weight);
        let column = rows * x.dtype().size();
        for block in chunks(head.classes(), column, loss.chunk_bytes.max(FEWEST_COLUMNS * column)) {
            let dlogits = gradient.columns(&block).of(head.columns(&block).logits(x.clone()));
            let product = B::float_matmul(B::float_transpose(x.clone()), dlogits);
            dweight = B::float_slice_assign(dweight, &[Slice::from(0..d_input), Slice::from(block)], product);
        }
        dweight
    }
}

impl<B: MemBackend, const N: usize> Backward<B, N> for Step {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Saved<B>, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dloss = grads.consume::<B>(&ops.node);
        let mut parents = ops.parents.into_iter();
        let nodes: [_; 3] = core::array::from_fn(|_| parents.next().flatten());
        let Saved { scale, gradients } = ops.state;
        let dtype = dloss.dtype();
        let factor = match scale {
            None => dloss.clone(),
            Some(scale) => B::float_div(widen::<B>(dloss.clone()), scale),
        };
        let narrow = |gradient: FloatTensor<B>| B::float_cast(gradient, dtype.into());
        let gradients = match gradients {
            Kind::Made(made, blocks) => [
                made.x.map(|dx| B::scale(dx, factor.clone())),
                match blocks {
                    None => made.weight.map(|dweight| B::scale(dweight, factor.clone())),
                    Some(blocks) => Some(blocks.gradient(dloss, checkpointer)),
                },
                made.bias.map(|dbias| narrow(B::scale(dbias, factor))),
            ],
            Kind::OfLogits(OfLogits { dlogits, padding, x, weight }) => {
                let dlogits = B::scale(dlogits, factor);
                let x = zero_rows::<B>(x.get::<B>(checkpointer), &padding);
                let weight = weight.map(|weight| weight.get::<B>(checkpointer));
                [
                    weight.map(|weight| B::float_matmul(dlogits.clone(), B::float_transpose(weight))),
                    Some(B::float_matmul(B::float_transpose(x), dlogits.clone())),
                    nodes[2].is_some().then(|| narrow(sum_of_rows::<B>(dlogits))),
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
