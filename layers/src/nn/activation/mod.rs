//! Activations.
pub use burn::nn::activation::*;

mod activation_wrapper;
mod hard_shrink;
mod hard_sigmoid;
mod hardtanh;
mod leaky_relu;
mod prelu;
mod relu;
mod relu6;
mod rrelu;
mod shrink;
mod soft_shrink;
mod threshold;
mod thresholded_relu;

pub use activation_wrapper::{ActivationConfig, MemSaveActivation, MemSaveActivation as Activation};
pub use hard_shrink::{HardShrinkConfig, MemSaveHardShrink, MemSaveHardShrink as HardShrink};
pub use hard_sigmoid::{HardSigmoidConfig, MemSaveHardSigmoid, MemSaveHardSigmoid as HardSigmoid};
pub use hardtanh::{HardtanhConfig, MemSaveHardtanh, MemSaveHardtanh as Hardtanh};
pub use leaky_relu::{LeakyReluConfig, MemSaveLeakyRelu, MemSaveLeakyRelu as LeakyRelu};
pub use prelu::{MemSavePRelu, MemSavePRelu as PRelu, PReluConfig};
pub use relu::{MemSaveRelu, MemSaveRelu as Relu};
pub use relu6::{MemSaveRelu6, MemSaveRelu6 as Relu6};
pub use rrelu::{MemSaveRRelu, MemSaveRRelu as RRelu, RReluConfig};
pub use shrink::{MemSaveShrink, MemSaveShrink as Shrink, ShrinkConfig};
pub use soft_shrink::{MemSaveSoftShrink, MemSaveSoftShrink as SoftShrink, SoftShrinkConfig};
pub use threshold::{MemSaveThreshold, MemSaveThreshold as Threshold, ThresholdConfig};
pub use thresholded_relu::{
    MemSaveThresholdedRelu, MemSaveThresholdedRelu as ThresholdedRelu, ThresholdedReluConfig,
};
