//! Mean squared error.
use super::Reduction;
use crate::functional::{
    element_loss, element_loss_sum,
    guard::{Misfit, NO_WEIGHT, accepts, require},
};
use crate::nn::drop_in::drop_in;
use crate::ops::ElementLoss;
use burn::module::Module;
use burn::tensor::Tensor;

drop_in! {
    /// Mean squared error, `(x - t)^2` of every element.
    ///
    /// Keeps the difference for the backward pass and computes the gradient in its place; [`burn::nn::loss::MseLoss`] keeps
    /// the same, but needs more at the peak.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave_layers::nn::loss::{MseLoss, Reduction};
    ///
    /// let device = Device::flex();
    /// let [x, t] = [[1.0, 2.0], [1.0, 4.0]].map(|x| Tensor::<1>::from_floats(x, &device));
    /// let loss = MseLoss::new().forward(x, t, Reduction::Mean);
    /// assert_eq!(loss.into_scalar::<f32>(), 2.0);
    /// ```
    #[derive(Module, Debug, Default)]
    pub struct MseLoss as MemSaveMseLoss = burn::nn::loss::MseLoss, from_nn_mse_loss, into_nn_mse_loss;
}

impl MseLoss {
    /// Computes the loss, reduced to one number; `Reduction::Auto` is the mean.
    ///
    /// # Shapes
    ///
    /// - logits: `[batch_size, num_targets]`, or any other
    /// - targets: the same
    /// - output: `[1]`
    ///
    /// # Panics
    ///
    /// Panics for `Reduction::BatchMean`.
    pub fn forward<const D: usize>(
        &self,
        logits: Tensor<D>,
        targets: Tensor<D>,
        reduction: Reduction,
    ) -> Tensor<1> {
        if !is_recorded("mse_loss", [&logits, &targets]) {
            return burn::nn::loss::MseLoss.forward(logits, targets, reduction);
        }
        let difference = logits.sub(targets);
        let scale = mean_or_sum(&difference, reduction);
        element_loss_sum(difference, None, ElementLoss::Square, scale)
    }

    /// Computes the loss of every element.
    pub fn forward_no_reduction<const D: usize>(&self, logits: Tensor<D>, targets: Tensor<D>) -> Tensor<D> {
        match is_recorded("mse_loss", [&logits, &targets]) {
            true => element_loss(logits.sub(targets), None, ElementLoss::Square),
            false => burn::nn::loss::MseLoss.forward_no_reduction(logits, targets),
        }
    }
}

/// Whether a step is recorded for the operands: one is tracked, and they have elements.
pub(super) fn is_recorded<const D: usize, const N: usize>(
    operation: &'static str,
    operands: [&Tensor<D>; N],
) -> bool {
    let elements = operands.iter().all(|x| x.shape().num_elements() > 0);
    let tracked = operands.iter().any(|x| x.is_tracked());
    tracked && accepts(operation, require(elements, Misfit::Empty), tracked, NO_WEIGHT)
}

/// The factor of the sum of all losses: 1, or for a mean 1 / their number.
///
/// # Panics
///
/// Panics, as the stock losses do, for `Reduction::BatchMean`.
pub(super) fn mean_or_sum<const D: usize>(losses: &Tensor<D>, reduction: Reduction) -> f64 {
    match reduction {
        Reduction::Mean | Reduction::Auto => (losses.shape().num_elements() as f64).recip(),
        Reduction::Sum => 1.0,
        other => panic!("{other:?} reduction is not supported"),
    }
}
