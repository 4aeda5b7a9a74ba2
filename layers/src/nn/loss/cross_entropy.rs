//! Cross entropy of logits or probabilities, with class weights, label smoothing and padding.
use crate::functional::{
    self, class_weights, element_loss,
    guard::{Misfit, NO_WEIGHT, accepts, is_tracked, require, require_floats},
};
use crate::nn::drop_in::{config_twin, drop_in};
use crate::ops::ElementLoss;
use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Bool, DType, Device, Int, Tensor};
use core::ops::RangeInclusive;

/// The value -100 for [`pad_tokens`](CrossEntropyLossConfig::pad_tokens), which marks targets that do not count in data sets
/// made for PyTorch and Hugging Face. Such targets are signed integers.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor, Tolerance};
/// use burn_memsave_layers::nn::loss::{CrossEntropyLossConfig, IGNORE_INDEX};
///
/// let device = Device::flex();
/// let loss = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![IGNORE_INDEX])).init(&device);
/// let logits = Tensor::<2>::from_floats([[0.0, 1.0], [0.0, 1.0]], &device);
/// let loss = loss.forward(logits, Tensor::<1, Int>::from_ints([-100, 1], &device));
/// loss.to_data().assert_approx_eq::<f32>(&[0.3132617f32].into(), Tolerance::default());
/// ```
pub const IGNORE_INDEX: usize = -100_isize as usize;

config_twin! {
    #[derive(Config, Debug)]
    pub struct CrossEntropyLossConfig = burn::nn::loss::CrossEntropyLossConfig {
        /// Targets that do not count. They need not be classes: [`IGNORE_INDEX`] is -100. If no target of a batch counts, its
        /// loss is NaN, the mean of nothing.
        pub pad_tokens: Option<Vec<usize>>,
        /// A weight for each class, in the order of the classes.
        pub weights: Option<Vec<f32>>,

        /// Label smoothing: labels `y` of 0 and 1 become `y (1 - a) + a / nr_classes`.
        pub smoothing: Option<f32>,

        /// Whether the inputs are logits; if not, they are probabilities.
        #[config(default = true)]
        pub logits: bool,
    }
    pub fn init(&self, device: &Device) -> CrossEntropyLoss, or panics;
}

drop_in! {
    /// Cross entropy, the mean of `-sum(q w log p)` over the rows, where `p` is the softmax of the logits, `q` is 1 at the
    /// target and 0 elsewhere (unless smoothed), and `w` are the class weights. With weights or padding it is a weighted mean:
    /// every row has the weight of its target, and a padded row has weight 0.
    ///
    /// For the backward pass it keeps the logits (no copy), and one number and the target per row; the gradient is computed in
    /// place if nothing else holds the logits. For probabilities instead of logits, it keeps one number per row or, with
    /// smoothing, the probabilities. [`burn::nn::loss::CrossEntropyLoss`] keeps a tensor of the size of the logits, and needs
    /// two at the peak.
    ///
    /// ```
    /// use burn::tensor::{Device, Int, Tensor, Tolerance};
    /// use burn_memsave_layers::nn::loss::CrossEntropyLossConfig;
    ///
    /// let device = Device::flex();
    /// let loss = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).init(&device);
    /// let logits = Tensor::<2>::from_floats([[0.0, 1.0], [0.0, 1.0]], &device);
    /// let loss = loss.forward(logits, Tensor::<1, Int>::from_ints([0, 1], &device));
    /// loss.to_data().assert_approx_eq::<f32>(&[0.3132617f32].into(), Tolerance::default());
    /// ```
    #[derive(Module, Debug)]
    pub struct CrossEntropyLoss as MemSaveCrossEntropyLoss = burn::nn::loss::CrossEntropyLoss,
        from_nn_cross_entropy_loss, into_nn_cross_entropy_loss {
        /// Pad tokens to ignore in the loss calculation.
        pub pad_tokens: Option<Vec<usize>>,
        /// Weights for cross-entropy.
        pub weights: Option<Tensor<1>>,
        /// Label smoothing factor.
        pub smoothing: Option<f32>,
        /// Use logits as input.
        pub logits: bool,
    }
}

impl CrossEntropyLoss {
    /// Creates the loss with at most one pad token, for backward compatibility.
    pub fn new(pad_index: Option<usize>, device: &Device) -> Self {
        burn::nn::loss::CrossEntropyLoss::new(pad_index, device).into()
    }

    /// Computes the mean loss.
    ///
    /// # Shapes
    ///
    /// - logits: `[batch_size, num_targets]`
    /// - targets: `[batch_size]`
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// Panics if the shapes are not these. A target that is neither a class nor padding panics on CPU backends, and makes the
    /// loss NaN on others (on wgpu and CUDA, if the logits are tracked).
    pub fn forward(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        // With a smoothing of 0, Burn multiplies 0 by the logarithms of the other classes, one of which may be infinite.
        let smoothing = self.smoothing.filter(|&smoothing| smoothing != 0.0);
        let [batch_size, classes] = logits.dims();
        let weights_tracked = is_tracked(&self.weights);
        let tracked = logits.is_tracked() || weights_tracked;
        let shapes = targets.dims() == [batch_size]
            && self.weights.as_ref().is_none_or(|weights| weights.dims() == [classes]);
        let fit = require_floats(&logits)
            .and(require(shapes, Misfit::Shapes))
            .and(require(!weights_tracked, Misfit::TrackedClassWeights));
        // Burn's loss computes in f32 only, and only for targets that are classes.
        let is_burns = !tracked && logits.dtype() == DType::F32 && !pads_outside(&self.pad_tokens, classes);
        if is_burns || !accepts("cross_entropy", fit, tracked, NO_WEIGHT) {
            let loss = Self { smoothing, ..self.clone() };
            return loss.into_nn_cross_entropy_loss().forward(logits, targets);
        }
        let padding = padding(&self.pad_tokens, &targets);
        let targets = match &padding {
            Some(mask) if pads_outside(&self.pad_tokens, classes) => targets.mask_fill(mask.clone(), 0),
            _ => targets,
        };
        let weights = class_weights(self.weights.clone(), classes, &logits);
        let of_targets = weights.clone().map(|weights| weights_of(weights, &targets));
        let losses = match self.logits {
            true => functional::cross_entropy(logits, targets, weights, smoothing),
            false => {
                let of_targets = of_targets.clone();
                cross_entropy_of_probabilities(logits, targets, weights, of_targets, smoothing)
            }
        };
        mean(losses, of_targets, padding)
    }
}

/// [`functional::cross_entropy`] for probabilities, given the weights of the classes and those of the targets.
fn cross_entropy_of_probabilities(
    probabilities: Tensor<2>,
    targets: Tensor<1, Int>,
    weights: Option<Tensor<1>>,
    of_targets: Option<Tensor<1>>,
    smoothing: Option<f32>,
) -> Tensor<1> {
    let [batch_size, classes] = probabilities.dims();
    let min = probabilities.dtype().finfo().map_or(0.0, |info| info.min_positive.sqrt());
    let f = ElementLoss::LogAbove { min };
    // The third axis keeps Burn's fusion from joining the gather with other operations on the tensor, as in
    // `ops::cross_entropy`.
    let indices = targets.reshape([batch_size, 1, 1]);
    let pick = |of: Tensor<2>| of.unsqueeze_dim::<3>(1).gather(2, indices).reshape([batch_size]);
    let weighted = |logs: Tensor<1>| match of_targets {
        Some(weights) => logs * weights,
        None => logs,
    };
    let Some(alpha) = smoothing else {
        // Only the picked probabilities get a logarithm, so that nothing of the size of all probabilities is kept.
        return weighted(element_loss(pick(probabilities), None, f)).neg();
    };
    let logs = element_loss(probabilities, None, f);
    let picked = weighted(pick(logs.clone()));
    let logs = match weights {
        Some(weights) => logs * weights.unsqueeze::<2>(),
        None => logs,
    };
    let all = logs.sum_dim(1).reshape([batch_size]);
    picked * (alpha - 1.0) - all * (alpha / classes as f32)
}

/// The class weights of the targets. Targets that are not classes get some weight, too: other code refuses them or makes the
/// loss NaN.
pub(super) fn weights_of(weights: Tensor<1>, targets: &Tensor<1, Int>) -> Tensor<1> {
    let last = weights.dims()[0].saturating_sub(1) as i64;
    let last = last.min(*numbers_of(targets.dtype()).end());
    weights.gather(0, targets.clone().clamp(0, last))
}

/// Whether a pad token is not a class.
fn pads_outside(pad_tokens: &Option<Vec<usize>>, classes: usize) -> bool {
    pad_tokens.iter().flatten().any(|&token| token >= classes)
}

/// The rows whose target is padding.
pub(super) fn padding(pad_tokens: &Option<Vec<usize>>, targets: &Tensor<1, Int>) -> Option<Tensor<1, Bool>> {
    let numbers = numbers_of(targets.dtype());
    // The largest tokens stand for negative numbers, like `IGNORE_INDEX`.
    let tokens = pad_tokens.iter().flatten().map(|&token| token as isize as i64);
    let tokens = tokens.filter(|token| numbers.contains(token));
    tokens.map(|token| targets.clone().equal_scalar(token)).reduce(|mask, other| mask.bool_or(other))
}

/// The range of an integer dtype, as far as `i64` covers it.
fn numbers_of(dtype: DType) -> RangeInclusive<i64> {
    match dtype {
        DType::I8 => i8::MIN.into()..=i8::MAX.into(),
        DType::I16 => i16::MIN.into()..=i16::MAX.into(),
        DType::I32 => i32::MIN.into()..=i32::MAX.into(),
        DType::U8 => 0..=u8::MAX.into(),
        DType::U16 => 0..=u16::MAX.into(),
        DType::U32 => 0..=u32::MAX.into(),
        DType::U64 => 0..=i64::MAX,
        _ => i64::MIN..=i64::MAX,
    }
}

/// The weighted mean over the rows that are not padding. The losses are already multiplied by the `weights`.
fn mean(losses: Tensor<1>, weights: Option<Tensor<1>>, padding: Option<Tensor<1, Bool>>) -> Tensor<1> {
    if weights.is_none() && padding.is_none() {
        return losses.mean();
    }
    let dtype = losses.dtype();
    let weights = weights.unwrap_or_else(|| losses.ones_like());
    let [sum, count] =
        [losses, weights].map(|values| zero_where_padded(values, &padding).cast(sum_type(dtype)).sum());
    (sum / count).cast(dtype)
}

/// The dtype of sums over rows: at least f32, because half precision has no large numbers.
pub(super) fn sum_type(dtype: DType) -> DType {
    if dtype == DType::F64 { dtype } else { DType::F32 }
}

/// The values, with 0 in padded rows.
pub(super) fn zero_where_padded(values: Tensor<1>, padding: &Option<Tensor<1, Bool>>) -> Tensor<1> {
    match padding {
        Some(padding) => values.mask_fill(padding.clone(), 0),
        None => values,
    }
}
