//! One room per operation, a folder or a file: what it computes, what it keeps, its backward pass.
//!
//! Each operation is a method of an extension trait of Burn's backends. On a plain backend it runs the kernels, whose default
//! bodies compose Burn's operations; on `Autodiff` it also records a step with a hand-written backward pass. What is kept is
//! decided in the forward pass, tensor by tensor, from which of the others are tracked, that is, part of an autodiff graph. "(a
//! handle)" in the tables means no copy.
use burn::backend::{Backend, ExtensionType, tensor::FloatTensor};

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
mod cross_entropy;
mod deform_conv;
mod dropout;
mod element_loss;
mod embedding;
mod extension;
mod fixed_linear;
mod gate;
mod head_loss;
pub(crate) mod held;
mod interpolate;
mod kept;
mod linear;
mod linear_cross_entropy;
mod linear_divergence;
mod linear_log_prob;
mod local_response;
mod lora;
mod max_pool;
mod node;
mod optimizer;
pub(crate) mod packing;
mod piecewise_linear;
mod prelu;
mod recompute;
mod recurrent;
pub mod replay;
mod rotary;
mod row_norm;
mod rrelu;
mod segment;
mod smooth;
mod softmax;
mod step;
mod survey;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod testing;
pub(crate) mod update;

pub use add_rms_norm::AddRmsNormOps;
pub use approx::{Approx, ApproxKernels, ApproxOps};
pub use attention::{
    Attended, Attention, AttentionKernels, AttentionOps, MaybeMask, ScoreGrads, ScoreRows, Scores,
    WeightDropout,
};
pub use avg_pool::AvgPoolOps;
pub use batch_norm::BatchNormOps;
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
pub use linear::{LinearKernels, LinearOps};
pub use linear_cross_entropy::{LinearCrossEntropy, LinearCrossEntropyOps};
pub use linear_divergence::{Divergence, HardLabels, LinearDivergence, LinearDivergenceOps, TeacherHead};
pub use linear_log_prob::LinearLogProbOps;
pub use local_response::{LocalResponse, LocalResponseOps};
pub use lora::{LoraFactors, LoraOps};
pub use max_pool::MaxPoolOps;
pub use node::{NodeOps, node_id};
pub use optimizer::{
    AdamW8bitTensors, AdamWStep, AdamWTensors, BLOCK, CODES_OF_WORD, Descent, MomentumStep, MomentumTensors,
    OptimizerKernels, OptimizerOps, is_rounded,
};
pub use packing::{Format, PackingKernels};
pub use piecewise_linear::{PiecewiseLinear, PiecewiseLinearKernels, PiecewiseLinearOps};
pub use prelu::PReluOps;
pub use recurrent::{
    Cell, OptionalTensors, Recurrence, RecurrentKernels, RecurrentOps, RecurrentOutput, RecurrentState,
    RecurrentStep, Stage,
};
pub use rotary::{RotaryKernels, RotaryOps};
pub use row_norm::{RowNorm, RowNormOps};
pub use rrelu::RReluOps;
pub use segment::{Replay, SegmentOps, Slots};
pub use smooth::{Smooth, SmoothKernels, SmoothOps};
pub use softmax::{Softmax, SoftmaxOps};
pub use survey::{Graph, Survey, SurveyOps};
pub use update::{GRADIENT, PARAMETER, UpdateOnce, UpdateOps, Updates, is_entered};

/// An optional tensor of an operation, such as a bias.
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub enum MaybeTensor<B: Backend> {
    /// It is there.
    Some(FloatTensor<B>),
    /// It is not.
    None,
}

impl<B: Backend> From<Option<FloatTensor<B>>> for MaybeTensor<B> {
    fn from(tensor: Option<FloatTensor<B>>) -> Self {
        tensor.map_or(Self::None, Self::Some)
    }
}

impl<B: Backend> MaybeTensor<B> {
    /// As an option.
    pub fn into_option(self) -> Option<FloatTensor<B>> {
        match self {
            Self::Some(tensor) => Some(tensor),
            Self::None => None,
        }
    }
}

/// Up to four tensors of an operation on devices, such as those of gates.
#[cfg(any(feature = "wgpu", feature = "cuda"))]
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct UpToFour<B: Backend> {
    #[extension_type]
    first: MaybeTensor<B>,
    #[extension_type]
    second: MaybeTensor<B>,
    #[extension_type]
    third: MaybeTensor<B>,
    #[extension_type]
    fourth: MaybeTensor<B>,
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
impl<B: Backend> UpToFour<B> {
    fn new(tensors: impl IntoIterator<Item = Option<FloatTensor<B>>>) -> Self {
        let mut tensors = tensors.into_iter();
        let mut next = || tensors.next().flatten().into();
        Self { first: next(), second: next(), third: next(), fourth: next() }
    }

    fn into_options(self) -> [Option<FloatTensor<B>>; 4] {
        [self.first, self.second, self.third, self.fourth].map(MaybeTensor::into_option)
    }
}
