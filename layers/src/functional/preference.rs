//! Preference losses: functions of the log probabilities of whole sequences. These are one number per sequence, so that no
//! tensor is large here.
use super::{log_sigmoid, sigmoid};
use burn::tensor::{Bool, FloatDType, Tensor, assert_shape};

/// How the log probabilities of a sequence become one number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SequenceReduction {
    /// The sum: the log probability of the sequence, as in [`dpo_loss`] and [`kto_loss`].
    Sum,
    /// The mean over the tokens that count, as in [`orpo_loss`] and [`simpo_loss`]; NaN if none does.
    Mean,
}

/// The log probability of every sequence, from the log probabilities of its tokens, such as
/// [`linear_log_prob`](super::linear_log_prob) gives. The sum and the result are in f32 at least.
///
/// # Shapes
///
/// - log_probs: `[batch, length]`
/// - mask: `[batch, length]`, which tokens count: those of the answer, not of the prompt or of padding
/// - output: `[batch]`
///
/// # Panics
///
/// Panics if `mask` does not have the shape of `log_probs`.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::functional::{SequenceReduction, sequence_log_prob};
///
/// let device = Device::flex();
/// let log_probs = Tensor::<2>::from_floats([[-9.0, -1.0, -3.0], [-9.0, -2.0, -9.0]], &device);
/// let mask = Tensor::from_bool([[false, true, true], [false, true, false]], &device);
/// let sums = sequence_log_prob(log_probs.clone(), mask.clone(), SequenceReduction::Sum);
/// sums.into_data().assert_eq(&[-4.0f32, -2.0].into(), true);
/// let means = sequence_log_prob(log_probs, mask, SequenceReduction::Mean);
/// means.into_data().assert_eq(&[-2.0f32, -2.0].into(), true);
/// ```
pub fn sequence_log_prob(
    log_probs: Tensor<2>,
    mask: Tensor<2, Bool>,
    reduction: SequenceReduction,
) -> Tensor<1> {
    let [batch, length] = log_probs.dims();
    assert_shape!(mask, [batch, length]);
    let log_probs = if log_probs.dtype().size() < 4 { log_probs.cast(FloatDType::F32) } else { log_probs };
    let count = |dtype| mask.clone().float().cast(dtype).sum_dim(1).reshape([batch]);
    let dtype = log_probs.dtype();
    let sum = log_probs.mask_fill(mask.clone().bool_not(), 0).sum_dim(1).reshape([batch]);
    match reduction {
        SequenceReduction::Sum => sum,
        SequenceReduction::Mean => sum / count(dtype),
    }
}

/// The log probabilities that a model gives to pairs of answers, each `[pairs]`.
#[derive(Clone, Debug)]
pub struct Preferences {
    /// The log probabilities of the answers that were preferred.
    pub chosen: Tensor<1>,
    /// The log probabilities of the other answers.
    pub rejected: Tensor<1>,
}

impl Preferences {
    /// `chosen - rejected`, `[pairs]`.
    ///
    /// # Panics
    ///
    /// Panics if the numbers of chosen and rejected answers differ.
    pub fn margin(self) -> Tensor<1> {
        let [pairs] = self.chosen.dims();
        assert_shape!(self.rejected, [pairs]);
        self.chosen - self.rejected
    }
}

/// [Direct preference optimization](https://arxiv.org/abs/2305.18290): for every pair
/// `-(1 - smoothing) log(sigmoid(h)) - smoothing log(sigmoid(-h))`, where
/// `h = beta ((chosen - rejected) - (chosen - rejected of the reference))`.
///
/// `policy` and `reference` hold the [sums](SequenceReduction::Sum) of the tokens' log probabilities. The reference, such as
/// the model [without its adapters](crate::lora::without_adapters), is detached. `smoothing`, at least 0 and below 0.5, is the
/// probability that a pair is the wrong way round; the paper has 0.
///
/// # Shapes
///
/// - output: `[pairs]`
///
/// # Panics
///
/// Panics if the numbers of pairs differ, or if `smoothing` is not in that range.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional::{Preferences, dpo_loss};
///
/// let device = Device::flex();
/// let pairs = |chosen, rejected| Preferences {
///     chosen: Tensor::<1>::from_floats([chosen], &device),
///     rejected: Tensor::<1>::from_floats([rejected], &device),
/// };
/// let loss = dpo_loss(pairs(-10.0, -14.0), pairs(-11.0, -12.0), 0.1, 0.0); // h = 0.1 (4 - 1)
/// loss.to_data().assert_approx_eq::<f32>(&[0.5543552f32].into(), Tolerance::default());
/// ```
pub fn dpo_loss(policy: Preferences, reference: Preferences, beta: f64, smoothing: f64) -> Tensor<1> {
    assert!((0.0..0.5).contains(&smoothing), "dpo_loss: a smoothing of {smoothing} is not in 0..0.5");
    let (policy, reference) = (policy.margin(), reference.margin().detach());
    let [pairs] = policy.dims();
    assert_shape!(reference, [pairs]);
    let h = (policy - reference).mul_scalar(beta);
    let loss = log_sigmoid(h.clone()).mul_scalar(smoothing - 1.0);
    if smoothing == 0.0 { loss } else { loss - log_sigmoid(h.neg()).mul_scalar(smoothing) }
}

/// [Odds ratio preference optimization](https://arxiv.org/abs/2403.07691): for every pair
/// `-chosen - lambda log(sigmoid(log_odds(chosen) - log_odds(rejected)))`, where `log_odds(l) = l - log(1 - exp(l))`. It needs no
/// reference.
///
/// `policy` holds the [means](SequenceReduction::Mean) of the tokens' log probabilities: `-chosen` is the loss of supervised
/// fine-tuning. A mean above -1e-7, where the odds are infinite in f32, gets the odds of -1e-7, and no gradient flows through
/// them.
///
/// # Shapes
///
/// - output: `[pairs]`
///
/// # Panics
///
/// Panics if the numbers of chosen and rejected answers differ.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional::{Preferences, orpo_loss};
///
/// let device = Device::flex();
/// let policy = Preferences {
///     chosen: Tensor::<1>::from_floats([0.75f32.ln()], &device),   // odds of 3
///     rejected: Tensor::<1>::from_floats([0.25f32.ln()], &device), // odds of 1/3
/// };
/// let loss = orpo_loss(policy, 0.5); // -log(0.75) - 0.5 log(0.9)
/// loss.to_data().assert_approx_eq::<f32>(&[0.3403623f32].into(), Tolerance::default());
/// ```
pub fn orpo_loss(policy: Preferences, lambda: f64) -> Tensor<1> {
    let supervised = policy.chosen.clone().neg();
    let odds = Preferences { chosen: log_odds(policy.chosen), rejected: log_odds(policy.rejected) };
    supervised - log_sigmoid(odds.margin()).mul_scalar(lambda)
}

/// `l - log(1 - exp(l))`. As `1 - exp(l) = -tanh(l / 2) (1 + exp(l))`, nothing cancels.
fn log_odds(l: Tensor<1>) -> Tensor<1> {
    let l = l.clamp_max(-1e-7);
    l.clone() - l.clone().mul_scalar(-0.5).tanh().log() - l.exp().log1p()
}

/// [Simple preference optimization](https://arxiv.org/abs/2405.14734): for every pair
/// `-log(sigmoid(beta (chosen - rejected) - gamma))`. It needs no reference.
///
/// `policy` holds the [means](SequenceReduction::Mean) of the tokens' log probabilities; `gamma` is the margin by which the
/// rewards should differ.
///
/// # Shapes
///
/// - output: `[pairs]`
///
/// # Panics
///
/// Panics if the numbers of chosen and rejected answers differ.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional::{Preferences, simpo_loss};
///
/// let device = Device::flex();
/// let [chosen, rejected] = [-1.0, -1.5].map(|mean| Tensor::<1>::from_floats([mean], &device));
/// let loss = simpo_loss(Preferences { chosen, rejected }, 2.0, 0.5); // -log(sigmoid(0.5))
/// loss.to_data().assert_approx_eq::<f32>(&[0.4740770f32].into(), Tolerance::default());
/// ```
pub fn simpo_loss(policy: Preferences, beta: f64, gamma: f64) -> Tensor<1> {
    log_sigmoid(policy.margin().mul_scalar(beta).sub_scalar(gamma)).neg()
}

/// Options of [`kto_loss`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KtoOptions {
    /// How sharply values saturate.
    pub beta: f64,
    /// The weight of a desirable answer.
    pub desirable_weight: f64,
    /// The weight of an undesirable answer.
    pub undesirable_weight: f64,
}

impl Default for KtoOptions {
    /// The values of the paper: `beta` 0.1, weights 1.
    fn default() -> Self {
        Self { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.0 }
    }
}

/// [Kahneman-Tversky optimization](https://arxiv.org/abs/2402.01306), which rates single answers, not pairs. With
/// `r = policy - reference`, the loss of a desirable answer is `desirable_weight (1 - sigmoid(beta (r - z)))`, and that of
/// another is `undesirable_weight (1 - sigmoid(beta (z - r)))`.
///
/// `policy` and `reference` are the [sums](SequenceReduction::Sum) of the tokens' log probabilities; `z` is the
/// [`kto_reference_point`]. `reference` and `z` are detached.
///
/// # Shapes
///
/// - policy, reference, desirable: `[answers]`
/// - z: `[1]`
/// - output: `[answers]`
///
/// # Panics
///
/// Panics if the shapes are not these.
///
/// ```
/// use burn::tensor::{Device, Tensor, Tolerance};
/// use burn_memsave_layers::functional::{KtoOptions, kto_loss};
///
/// let device = Device::flex();
/// let [policy, reference] = [[-3.0, -3.0], [-8.0, -8.0]].map(|sums| Tensor::<1>::from_floats(sums, &device));
/// let desirable = Tensor::from_bool([true, false], &device);
/// let loss = kto_loss(policy, reference, desirable, Tensor::zeros([1], &device), KtoOptions::default());
/// loss.to_data().assert_approx_eq::<f32>(&[0.3775407f32, 0.6224593].into(), Tolerance::default());
/// ```
pub fn kto_loss(
    policy: Tensor<1>,
    reference: Tensor<1>,
    desirable: Tensor<1, Bool>,
    z: Tensor<1>,
    options: KtoOptions,
) -> Tensor<1> {
    let KtoOptions { beta, desirable_weight, undesirable_weight } = options;
    let [answers] = policy.dims();
    assert_shape!(reference, [answers]);
    assert_shape!(desirable, [answers]);
    assert_shape!(z, [1]);
    let of_desirable =
        |yes: f64, no: f64| Tensor::full_like(&policy.clone().detach(), no).mask_fill(desirable.clone(), yes);
    let (sign, weight) = (of_desirable(beta, -beta), of_desirable(desirable_weight, undesirable_weight));
    let above = policy.clone() - reference.detach() - z.detach();
    // `1 - sigmoid(h)` is `sigmoid(-h)`.
    sigmoid((above * sign).neg()) * weight
}

/// The reference point of [`kto_loss`], `max(0, mean(policy - reference))`, detached, `[1]`: how far the policy is from the
/// reference, estimated from answers that belong to other prompts of the batch.
///
/// # Shapes
///
/// - policy, reference: `[answers]`, the sums of the log probabilities of the mismatched answers
///
/// # Panics
///
/// Panics if the shapes differ.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave_layers::functional::kto_reference_point;
///
/// let device = Device::flex();
/// let [policy, reference] = [[-3.0, -4.0], [-5.0, -3.0]].map(|sums| Tensor::<1>::from_floats(sums, &device));
/// let z = kto_reference_point(policy.clone(), reference.clone());
/// z.into_data().assert_eq(&[0.5f32].into(), true);
/// kto_reference_point(reference, policy).into_data().assert_eq(&[0.0f32].into(), true);
/// ```
pub fn kto_reference_point(policy: Tensor<1>, reference: Tensor<1>) -> Tensor<1> {
    let [answers] = policy.dims();
    assert_shape!(reference, [answers]);
    (policy.detach() - reference.detach()).mean().clamp_min(0)
}
