//! The cross entropy of a dense layer whose frozen weight is not in memory, but comes in blocks of columns, each of which is read once.
//!
//! As in [flash attention](https://arxiv.org/abs/2205.14135), sums of exponentials relative to the largest logit so far are scaled when a larger
//! one comes. So are their products with the weight, of which the gradient of `x` is made. So the weight is not read again for it.
use super::linear::linear;
use super::loss::{LinearCrossEntropyOptions, check_options, targets_that_count};
use crate::backend::wide;
use crate::frozen::{is_host, like};
use crate::ops::KnownGradientOps;
use burn::backend::Dispatch;
use burn::tensor::{DType, Int, Tensor, assert_shape};

/// Whether [`cross_entropy_by_blocks`] can compute this loss as exactly as one with the whole weight.
pub(crate) fn fits_blocks(
    x: &Tensor<2>,
    bias: &Option<Tensor<1>>,
    options: &LinearCrossEntropyOptions,
) -> bool {
    // In f16, small gradients would be lost before the backward pass multiplies them.
    let is_exact = [DType::F64, DType::F32, DType::BF16].contains(&x.dtype());
    let is_frozen = bias.as_ref().is_none_or(|bias| !bias.is_tracked());
    is_exact && is_frozen && options.smoothing.is_none() && options.class_weights.is_none()
}

/// [`linear_cross_entropy`](super::linear_cross_entropy) with a frozen weight of `classes` columns, `[d_input, some]` in each block.
pub(crate) fn cross_entropy_by_blocks(
    x: Tensor<2>,
    blocks: impl Iterator<Item = Tensor<2>>,
    classes: usize,
    bias: Option<Tensor<1>>,
    targets: Tensor<1, Int>,
    options: LinearCrossEntropyOptions,
) -> Tensor<1> {
    let [rows, _] = x.dims();
    assert_shape!(targets, [rows]);
    assert!(rows > 0 && classes > 0, "cross_entropy: {rows} rows of {classes} classes have no loss");
    check_options("cross_entropy", &options, &x);
    let targets = targets_that_count(targets, &options.factors).reshape([rows, 1]).without_autodiff();
    check_targets(&targets, classes);
    let (dtype, sums) = (x.dtype(), wide(x.dtype()));
    let factors = match options.factors {
        Some(factors) => factors.without_autodiff().cast(sums).reshape([rows, 1]),
        None => Tensor::full([rows, 1], (rows as f64).recip(), (&targets.device(), sums)),
    };
    let padding = factors.clone().equal_scalar(0);
    let plain = x.clone().without_autodiff().cast(sums);
    let plain = plain.clone().mask_fill(padding.clone().expand(plain.shape()), 0);
    let head = Head {
        x: plain,
        targets,
        bias: bias.map(|bias| bias.without_autodiff().cast(sums)),
        softcap: options.softcap,
        wants_gradient: x.is_tracked(),
    };
    // Logits, their exponentials, and those times slopes.
    let of_class = 3 * rows * sums.size();
    let at_once = (options.chunk_bytes.unwrap_or(CHUNK_BYTES) / of_class).max(1);
    let (mut state, mut first) = (None, 0);
    for block in blocks {
        let block = block.without_autodiff();
        assert_eq!(block.dtype(), dtype, "cross_entropy: the weight must have the dtype of x");
        let [_, count] = block.dims();
        for start in (0..count).step_by(at_once) {
            let columns = block.clone().narrow(1, start, at_once.min(count - start)).cast(sums);
            state = Some(head.add(state, columns, first + start));
        }
        first += count;
    }
    let state: Sums = state.expect("there are classes");
    let losses = state.largest + state.sum.clone().log() - state.of_target;
    let losses = (losses * factors.clone()).mask_fill(padding.clone(), 0);
    let loss = like(&x.device(), losses.sum().cast(dtype));
    match state.gradients {
        None => loss,
        Some([of_sum, of_target]) => {
            let dx = (of_sum / state.sum - of_target) * factors;
            let dx = dx.clone().mask_fill(padding.expand(dx.shape()), 0).cast(dtype);
            let dx = like(&x.device(), dx).into_dispatch();
            let (x, loss) = (x.into_dispatch(), loss.into_dispatch());
            Tensor::from_dispatch(Dispatch::memsave_known_gradient(x, loss, dx))
        }
    }
}

/// The bytes of logits, and of what is computed from them, at a time.
const CHUNK_BYTES: usize = 16 << 20;

/// What all blocks have in common.
struct Head {
    /// `[rows, d_input]`
    x: Tensor<2>,
    /// `[rows, 1]`
    targets: Tensor<2, Int>,
    /// `[classes]`
    bias: Option<Tensor<1>>,
    softcap: Option<f64>,
    wants_gradient: bool,
}

/// Sums over the classes so far, `[rows, 1]`.
struct Sums {
    /// The largest logit.
    largest: Tensor<2>,
    /// The sum of `exp(logit - largest)`.
    sum: Tensor<2>,
    /// The logit of the target; NaN, if it has not come yet.
    of_target: Tensor<2>,
    /// The gradients of `exp(largest) sum` by `x`, times `exp(-largest)`, and of the logit of the target; `[rows, d_input]`.
    gradients: Option<[Tensor<2>; 2]>,
}

impl Head {
    /// Adds some classes, beginning with `first`: these columns of the weight.
    fn add(&self, before: Option<Sums>, columns: Tensor<2>, first: usize) -> Sums {
        let [_, count] = columns.dims();
        let mut logits = linear(self.x.clone(), columns.clone(), None);
        if let Some(bias) = &self.bias {
            logits = logits + bias.clone().narrow(0, first, count).unsqueeze::<2>();
        }
        // With a softcap, and its slope `1 - tanh^2`.
        let tanh = self.softcap.map(|cap| (logits.clone() / cap).tanh());
        let logits = match (&tanh, self.softcap) {
            (Some(tanh), Some(cap)) => tanh.clone() * cap,
            _ => logits,
        };
        let slope = tanh.filter(|_| self.wants_gradient).map(|tanh| -tanh.powi_scalar(2) + 1.0);

        // Which rows have their targets here, and where.
        let end = (first + count) as i64;
        let is_here = self.targets.clone().greater_equal_scalar(first as i64);
        let is_here = is_here.bool_and(self.targets.clone().lower_scalar(end));
        let place = (self.targets.clone() - first as i64).clamp(0, count as i64 - 1);
        let here = logits.clone().gather(1, place.clone());

        let mut largest = logits.clone().max_dim(1);
        if let Some(before) = &before {
            largest = largest.max_pair(before.largest.clone());
        }
        let exponentials = (logits - largest.clone()).exp();
        let mut sum = exponentials.clone().sum_dim(1);
        let of_target = match &before {
            Some(before) => before.of_target.clone().mask_where(is_here.clone(), here),
            None => here.mask_fill(is_here.clone().bool_not(), f64::NAN),
        };
        let mut gradients = self.wants_gradient.then(|| {
            let of_logits = match &slope {
                Some(slope) => exponentials.clone() * slope.clone(),
                None => exponentials.clone(),
            };
            let rows = columns.transpose();
            let of_sum = linear(of_logits, rows.clone(), None);
            let mut of_target = rows.select(0, place.clone().squeeze_dim(1));
            if let Some(slope) = slope {
                of_target = of_target * slope.gather(1, place);
            }
            [of_sum, of_target]
        });
        drop(exponentials);
        if let Some([_, of_target]) = &mut gradients {
            let elsewhere = is_here.clone().bool_not().expand(of_target.shape());
            *of_target = of_target.clone().mask_fill(elsewhere, 0);
        }
        if let Some(before) = before {
            let scale = (before.largest - largest.clone()).exp();
            sum = sum + before.sum * scale.clone();
            if let (Some([of_sum, of_target]), Some([sum_before, target_before])) =
                (&mut gradients, before.gradients)
            {
                *of_sum = of_sum.clone() + sum_before * scale;
                *of_target = of_target.clone() + target_before;
            }
        }
        Sums { largest, sum, of_target, gradients }
    }
}

/// # Panics
///
/// On a CPU, panics for a target that is not a class. On other devices, the loss is NaN.
fn check_targets(targets: &Tensor<2, Int>, classes: usize) {
    if !is_host(&targets.device()) {
        return;
    }
    let wrong = targets.to_data().iter::<i64>().find(|&target| !(0..classes as i64).contains(&target));
    if let Some(target) = wrong {
        panic!("cross_entropy: the target {target} is none of the {classes} classes");
    }
}
