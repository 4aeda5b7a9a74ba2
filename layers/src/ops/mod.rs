//! One room per operation, a folder or a file: what it computes, what it keeps, its backward pass.
//!
//! Each operation is a method of an extension trait of Burn's backends. On a plain backend it runs the kernels, whose default
//! bodies compose Burn's operations; on `Autodiff` it also records a step with a hand-written backward pass. What is kept is
//! decided in the forward pass, tensor by tensor, from which of the others are tracked, that is, part of an autodiff graph. "(a
//! handle)" in the tables means no copy.

mod add_rms_norm;
mod approx;
mod attention;
mod avg_pool;
mod batch_norm;
mod bilinear;
mod conv;
mod conv_lora;
mod conv_norm_relu;
mod conv_transpose;
#[cfg(all(test, any(feature = "flex", feature = "ndarray")))]
mod counting;
mod cross_entropy;
mod deform_conv;
mod dropout;
mod element_loss;
mod embedding;
mod fixed_linear;
mod gate;
mod head_loss;
mod interpolate;
mod known_gradient;
mod linear;
mod linear_cross_entropy;
mod linear_divergence;
mod linear_log_prob;
mod local_response;
mod lora;
mod max_pool;
mod optimizer;
mod piecewise_linear;
mod prelu;
mod recurrent;
mod rotary;
mod row_norm;
mod rrelu;
mod smooth;
mod softmax;

pub use add_rms_norm::AddRmsNormOps;
pub use approx::{Approx, ApproxKernels, ApproxOps};
pub use attention::{
    Attended, Attention, AttentionKernels, AttentionOps, ScoreGrads, ScoreRows, Scores, WeightDropout,
};
pub use avg_pool::AvgPoolOps;
pub use batch_norm::{ActivatedBatchNormOps, BatchNormOps, ElementActivation, SynchronizedBatchNormOps};
pub use bilinear::Weight;
pub use conv::ConvOps;
pub use conv_lora::ConvLoraOps;
pub use conv_norm_relu::{ConvNormReluOps, GivenNorm};
pub use conv_transpose::ConvTransposeOps;
pub use cross_entropy::CrossEntropyOps;
pub use deform_conv::DeformConvOps;
pub use dropout::DropoutOps;
pub use element_loss::{ElementLoss, ElementLossOps};
pub use embedding::EmbeddingOps;
pub use gate::GateOps;
pub use interpolate::InterpolateOps;
pub use known_gradient::KnownGradientOps;
pub use linear::{LinearKernels, LinearOps};
pub use linear_cross_entropy::{LinearCrossEntropy, LinearCrossEntropyOps};
pub use linear_divergence::{Divergence, HardLabels, LinearDivergence, LinearDivergenceOps, TeacherHead};
pub use linear_log_prob::LinearLogProbOps;
pub use local_response::{LocalResponse, LocalResponseOps};
pub use lora::{LoraFactors, LoraOps};
pub use max_pool::MaxPoolOps;
pub use optimizer::{
    AdamW8bitTensors, AdamWStep, AdamWTensors, BLOCK, CODES_OF_WORD, Descent, MomentumStep, MomentumTensors,
    OptimizerKernels, OptimizerOps, is_rounded,
};
pub use piecewise_linear::{PiecewiseLinear, PiecewiseLinearKernels, PiecewiseLinearOps};
pub use prelu::PReluOps;
pub use recurrent::{
    Cell, Recurrence, RecurrentKernels, RecurrentOps, RecurrentOutput, RecurrentState, RecurrentStep, Stage,
};
pub use rotary::{Pairing, RotaryKernels, RotaryOps};
pub use row_norm::{RowNorm, RowNormOps};
pub use rrelu::RReluOps;
pub use smooth::{Smooth, SmoothKernels, SmoothOps};
pub use softmax::{Softmax, SoftmaxOps};
