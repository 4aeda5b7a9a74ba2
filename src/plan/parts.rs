//! Parts of a batch, which run one after the other or one per device: their weights, and the errors.
use crate::parameters::{running_in_training, untied};
use burn::module::Module;
use std::ops::Range;

/// Why the gradients of parts would differ from those of the batch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartsError {
    /// A batch norm, or another part with running statistics, would see the statistics of only a part of the batch, and every replica would
    /// have its own.
    #[error(
        "{path} has running statistics and is in training mode, as a batch norm: they would be those of a part of the batch. Freeze it \
         (`Module::freeze`), take a norm that does not depend on the batch, or divide the batch among replicas that synchronize it \
         (`parallel::ReplicaOptions::with_synchronized_batch_norm`)"
    )]
    Running {
        /// Its path in the module.
        path: String,
    },
    /// A parameter that is in two places of the module and requires gradients has different values in them. Burn's optimizers change only
    /// the first place.
    #[error("{first} and {second} have one id, but different values: parameters that are tied have one")]
    Untied {
        /// Path of the first place.
        first: String,
        /// Path of another place.
        second: String,
    },
    /// The weight of a part of the batch is negative, infinite or not a number.
    #[error("a part of the batch has the weight {weight}")]
    Weight {
        /// The weight.
        weight: f64,
    },
    /// The batch has no items, and so no mean loss.
    #[error("the parts of the batch have no items")]
    NoItems,
}

/// Checks that the gradients of parts of a batch add up to those of the batch.
pub(crate) fn may_be_taken_in_parts(module: &impl Module) -> Result<(), PartsError> {
    if let Some(statistic) = running_in_training(module).into_iter().next() {
        return Err(PartsError::Running { path: statistic.path });
    }
    all_tied(module)
}

/// Checks that tied parameters have one value.
pub(crate) fn all_tied(module: &impl Module) -> Result<(), PartsError> {
    match untied(module) {
        Some((first, second)) => Err(PartsError::Untied { first, second }),
        None => Ok(()),
    }
}

/// The weight of a part, if it is valid.
pub(crate) fn checked_weight(weight: impl PartWeight) -> Result<f64, PartsError> {
    let weight = weight.weight();
    match weight.is_finite() && weight >= 0.0 {
        true => Ok(weight),
        false => Err(PartsError::Weight { weight }),
    }
}

/// How much a part of a batch counts: over how many things its loss is the mean.
///
/// For most losses, these are the items, a `usize`. A loss that ignores or weights some of them is a mean over something else: with padding
/// ([`pad_tokens`](crate::nn::loss::CrossEntropyLossConfig::pad_tokens)), the weight is the number of tokens that are not padding; with
/// class weights, it is the sum of these weights, an `f64`. For such losses, the mean of the means of parts is not the mean of the batch.
/// If one part has 10 tokens and another 1000, each token of the first would count a hundred times as much. (Many trainers [had this
/// error](https://huggingface.co/blog/gradient_accumulation) until 2024.)
pub trait PartWeight: Copy {
    /// The weight, which is finite and not negative. A part with weight 0 is left out.
    fn weight(self) -> f64;
}

impl PartWeight for usize {
    fn weight(self) -> f64 {
        self as f64
    }
}

impl PartWeight for f64 {
    fn weight(self) -> f64 {
        self
    }
}

/// The items of a batch: their number, if each has weight 1, or the [weight](PartWeight) of each.
pub trait ItemWeights {
    /// The number of items.
    fn items(&self) -> usize;
    /// The weight of some of them together.
    fn weight(&self, items: Range<usize>) -> f64;
}

impl ItemWeights for usize {
    fn items(&self) -> usize {
        *self
    }
    fn weight(&self, items: Range<usize>) -> f64 {
        items.len() as f64
    }
}

impl ItemWeights for &[f64] {
    fn items(&self) -> usize {
        self.len()
    }
    fn weight(&self, items: Range<usize>) -> f64 {
        self[items].iter().sum()
    }
}
