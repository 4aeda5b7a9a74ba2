//! Batches that are taken in parts, one after the other or one per device.
use crate::parameters::{running_in_training, untied};
use burn::module::Module;
use std::ops::Range;

/// Why the gradients of parts would not be those of the batch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PartsError {
    /// A batch norm, or another part with running statistics, that would see the statistics of a part of the batch; replicas would each
    /// be left with their own.
    #[error(
        "{path} has running statistics and is in training mode, as a batch norm: they would be those of a part of the batch. Freeze it \
         (`Module::freeze`), or take a norm that does not depend on the batch"
    )]
    Running {
        /// Its path in the module.
        path: String,
    },
    /// A parameter that is in two places of the module and requires gradients has another value in each. Burn's optimizers change it in
    /// the first one only.
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
    /// A batch without items has no mean loss.
    #[error("the parts of the batch have no items")]
    NoItems,
}

/// Whether parts of a batch have the gradients of their sum.
pub(crate) fn may_be_taken_in_parts(module: &impl Module) -> Result<(), PartsError> {
    if let Some(path) = running_in_training(module) {
        return Err(PartsError::Running { path });
    }
    match untied(module) {
        Some((first, second)) => Err(PartsError::Untied { first, second }),
        None => Ok(()),
    }
}

/// The weight of a part.
pub(crate) fn checked_weight(weight: impl PartWeight) -> Result<f64, PartsError> {
    let weight = weight.weight();
    match weight.is_finite() && weight >= 0.0 {
        true => Ok(weight),
        false => Err(PartsError::Weight { weight }),
    }
}

/// How much a part of a batch counts: the number of what its loss is the mean of.
///
/// Of most losses these are the items, a `usize`. A loss that leaves something out, or weighs it, is a mean of something else: with
/// padding ([`pad_tokens`](crate::nn::loss::CrossEntropyLossConfig::pad_tokens)) of the tokens that are none, with class weights of their
/// sum, an `f64`. The mean of the means of parts is then not the mean of the batch: where one part has 10 tokens and another 1000, each
/// token of the first would count a hundred times as much. (That was [a fault of many
/// trainers](https://huggingface.co/blog/gradient_accumulation) until 2024.)
pub trait PartWeight: Copy {
    /// The weight: not negative, and finite. A part of weight 0 is left out.
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

/// The items of a batch: how many, of weight 1 each; or the [weight](PartWeight) of every one.
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
