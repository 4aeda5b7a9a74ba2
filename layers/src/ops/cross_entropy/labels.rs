//! Labels: the targets, class weights and smoothing that rows of logits are compared with.
use crate::graph::Report;
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Shape, Slice};
use core::ops::Range;

/// What rows of logits are compared with. None of it is tracked.
#[derive(Clone, Debug)]
pub struct Labels<B: Backend> {
    /// `[rows, 1]`
    pub(super) targets: IntTensor<B>,
    /// `[classes]`
    pub(super) weights: Option<FloatTensor<B>>,
    pub(super) smoothing: Option<f32>,
}

impl<B: Backend> Labels<B> {
    /// `targets` has one element per row.
    pub(crate) fn new(
        targets: IntTensor<B>,
        weights: Option<FloatTensor<B>>,
        smoothing: Option<f32>,
    ) -> Self {
        let rows = targets.shape().num_elements();
        // Without smoothing the other classes do not count, even if a logarithm is infinite.
        let smoothing = smoothing.filter(|&smoothing| smoothing != 0.0);
        Self { targets: B::int_reshape(targets, Shape::new([rows, 1])), weights, smoothing }
    }

    /// Reports all of it to the ledger, because all of it is kept.
    pub(crate) fn reported(self, report: &Report, reason: &'static str) -> Self {
        Self {
            targets: report.tensor("targets", self.targets, reason),
            weights: self.weights.map(|weights| report.tensor("weights", weights, reason)),
            ..self
        }
    }

    /// The class weights.
    pub(crate) fn weights(&self) -> Option<&FloatTensor<B>> {
        self.weights.as_ref()
    }

    /// The labels of some rows.
    pub(crate) fn rows(&self, rows: &Range<usize>) -> Self {
        Self { targets: B::int_slice(self.targets.clone(), &[Slice::from(rows.clone())]), ..self.clone() }
    }
}
