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
use burn::tensor::{DType, Int, IntDType, Tensor, assert_shape};

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
    let [rows, d_input] = x.dims();
    assert_shape!(targets, [rows]);
    assert!(rows > 0 && classes > 0, "cross_entropy: {rows} rows of {classes} classes have no loss");
    check_options("cross_entropy", &options, &x);
    let targets = targets_that_count(targets, &options.factors).cast(IntDType::I32);
    let targets = targets.reshape([rows, 1]).without_autodiff();
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
    // Logits, their exponentials, and those times slopes; or columns that are widened.
    let bytes = options.chunk_bytes.unwrap_or(CHUNK_BYTES);
    let mut at_once = bytes / (3 * rows * sums.size());
    if sums != dtype {
        at_once = at_once.min(bytes / (d_input * sums.size()).max(1));
    }
    let (mut state, mut first) = (None, 0);
    for block in blocks {
        let block = block.without_autodiff();
        assert_eq!(block.dtype(), dtype, "cross_entropy: the weight must have the dtype of x");
        let [_, count] = block.dims();
        for start in (0..count).step_by(at_once.max(1)) {
            let columns = block.clone().narrow(1, start, at_once.clamp(1, count - start)).cast(sums);
            state = Some(head.add(state, columns, first + start));
        }
        first += count;
    }
    let state: Sums = state.expect("there are classes");
    // In this order, large logits do not swallow digits of the logarithm.
    let losses = state.sum.clone().log() - (state.of_target - state.largest);
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
        let (mut logits, slope) = self.logits(&columns, first);

        // Which rows have their targets here, and where.
        let end = (first + count) as i64;
        let is_here = self.targets.clone().greater_equal_scalar(first as i64);
        let is_here = is_here.bool_and(self.targets.clone().lower_scalar(end));
        let place = (self.targets.clone() - first as i64).clamp(0, count as i64 - 1);
        let here = logits.clone().gather(1, place.clone());

        // Finite, so that it can be subtracted from logits that are not.
        let least = if logits.dtype() == DType::F64 { f64::MIN } else { f64::from(f32::MIN) };
        let mut largest = logits.clone().max_dim(1).clamp_min(least);
        if let Some(before) = &before {
            largest = largest.max_pair(before.largest.clone());
        }
        logits = (logits - largest.clone()).exp();
        let sum = logits.clone().sum_dim(1);
        let gradients = self.wants_gradient.then(|| {
            let of_target = columns.clone().transpose().select(0, place.clone().squeeze_dim(1));
            match slope {
                None => [linear(logits, columns.transpose(), None), of_target],
                Some(slope) => {
                    let of_target = of_target * slope.clone().gather(1, place);
                    [linear(logits * slope, columns.transpose(), None), of_target]
                }
            }
        });
        let Some(before) = before else {
            let elsewhere = is_here.bool_not();
            let gradients = gradients.map(|[of_sum, of_target]| {
                let elsewhere = elsewhere.clone().expand(of_target.shape());
                [of_sum, of_target.mask_fill(elsewhere, 0)]
            });
            return Sums { largest, sum, of_target: here.mask_fill(elsewhere, f64::NAN), gradients };
        };
        let scale = (before.largest - largest.clone()).exp();
        let gradients = gradients.zip(before.gradients).map(|(here, [of_sum, of_target])| {
            let [sum_here, target_here] = here;
            let is_here = is_here.clone().expand(of_target.shape());
            [of_sum * scale.clone() + sum_here, of_target.mask_where(is_here, target_here)]
        });
        let sum = before.sum * scale + sum;
        Sums { largest, sum, of_target: before.of_target.mask_where(is_here, here), gradients }
    }

    /// The logits of some classes, and their slopes if they have a softcap and the gradient is wanted.
    fn logits(&self, columns: &Tensor<2>, first: usize) -> (Tensor<2>, Option<Tensor<2>>) {
        let [_, count] = columns.dims();
        let bias = self.bias.clone().map(|bias| bias.narrow(0, first, count));
        let logits = linear(self.x.clone(), columns.clone(), bias);
        let Some(cap) = self.softcap else { return (logits, None) };
        let tanh = (logits / cap).tanh();
        let slope = self.wants_gradient.then(|| -tanh.clone().square() + 1.0);
        (tanh * cap, slope)
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
