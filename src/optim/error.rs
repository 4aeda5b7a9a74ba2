//! [`InBackwardError`]: why a step cannot update parameters in its backward pass; [`StepRefused`]: the same, with the module.
use core::fmt;

/// A step that [`step_in_backward`](super::step_in_backward) refused. As an error it says what [`error`](Self::error) says.
pub struct StepRefused<M> {
    /// The module, as it was before the step.
    pub module: M,
    /// Why the step is impossible.
    pub error: InBackwardError,
}

impl<M> fmt::Display for StepRefused<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<M> fmt::Debug for StepRefused<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StepRefused").field("error", &self.error).finish_non_exhaustive()
    }
}

impl<M> std::error::Error for StepRefused<M> {}

impl<M> From<StepRefused<M>> for InBackwardError {
    fn from(refused: StepRefused<M>) -> Self {
        refused.error
    }
}

/// Why a step cannot update parameters in its backward pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InBackwardError {
    /// Nothing in the loss requires a gradient.
    #[error(
        "the loss requires no gradient: no parameter that requires one was used, or the function took the backward pass itself"
    )]
    Untracked,
    /// The loss was scaled.
    #[error(
        "the loss was scaled by a `LossScaler`: an update in the backward pass cannot divide the gradients by the scale again, nor skip a \
         step that is bad. Compute in bf16 or f32, which need no scale, or take the backward pass first and the step of the optimizer \
         after `LossScaler::unscale`"
    )]
    Scaled,
    /// The loss is not a single number.
    #[error("a loss is one number, this one has {elements} elements")]
    NoScalar {
        /// The number of its elements.
        elements: usize,
    },
    /// Parameters with the same id have different values.
    #[error(
        "{first} and {second} have one id, but different values: parameters that are tied have one (Burn's optimizers change only the \
         first of them)"
    )]
    Untied {
        /// Path of a parameter.
        first: String,
        /// Path of the other one.
        second: String,
    },
    /// Two parameters with different ids are the same tensor.
    #[error(
        "{first} and {second} are one tensor, but have different ids: which of them has the gradient is not defined"
    )]
    OneTensor {
        /// Path of a parameter.
        first: String,
        /// Path of the other one.
        second: String,
    },
    /// The gradient of a parameter is reduced over devices.
    #[error(
        "{path} is trained under Burn's ExecutionStrategy::ddp, which reduces gradients after they are complete: an update in the \
         backward pass would not see the sum"
    )]
    Distributed {
        /// Path of the parameter.
        path: String,
    },
}
