//! The operations of this library as functions of tensors, with the signatures of [`burn::tensor::module`] and
//! [`burn::tensor::activation`] where Burn has them.
//!
//! Each function says what it keeps for the backward pass; a kept handle is not a copy. If no argument is tracked (part of an
//! autodiff graph), nothing is kept, and Burn's own function runs unless the one here is faster in inference, too.
//!
//! Burn's function also runs if arguments do not fit (a parameter of another dtype, a quantized input, shapes that Burn
//! broadcasts or refuses), for the same result or the same panic. If an argument is tracked, an entry in the
//! [ledger](crate::ledger) then names the operation and the reason.
//!
//! ```
//! use burn::tensor::{Device, Tensor};
//! use burn_memsave_layers::functional as F;
//!
//! let device = Device::flex().autodiff();
//! let x = Tensor::<2>::from_floats([[-1.0, 2.0]], &device).require_grad();
//! let gradients = F::relu(x.clone()).sum().backward();
//! x.grad(&gradients).unwrap().to_data().assert_eq(&[[0.0f32, 1.0]].into(), true);
//! ```
mod activation;
mod attention;
mod conv;
pub(crate) mod guard;
mod head_blocks;
mod linear;
mod lora;
mod loss;
mod norm;
mod pool;
mod preference;
mod rotary;
mod softmax;

pub use crate::ops::{ElementActivation, PiecewiseLinear, Smooth};
pub(crate) use activation::activate;
pub use activation::*;
pub use attention::attention;
pub use conv::{
    conv_transpose1d, conv_transpose2d, conv_transpose3d, conv1d, conv1d_norm_relu, conv2d, conv2d_norm_relu,
    conv3d, conv3d_norm_relu, deform_conv2d,
};
pub(crate) use head_blocks::{cross_entropy_by_blocks, fits_blocks};
pub use linear::{embedding, linear};
pub use lora::{
    conv_transpose1d_lora, conv_transpose2d_lora, conv_transpose3d_lora, conv1d_lora, conv2d_lora,
    conv3d_lora, embedding_lora, linear_dora, linear_lora,
};
pub use loss::{
    DistillationOptions, HardLabels, KlDirection, LinearCrossEntropyOptions, LinearLogProbOptions, Teacher,
    cross_entropy, linear_cross_entropy, linear_jsd, linear_kl_div, linear_log_prob,
};
pub use norm::{
    GivenNorm, add_rms_norm, batch_norm, batch_norm_train, batch_norm_train_activated, group_norm,
    layer_norm, local_response_norm, rms_norm,
};
pub use pool::{
    adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d, avg_pool1d, avg_pool2d, interpolate,
    max_pool1d, max_pool2d,
};
pub use preference::{
    KtoOptions, Preferences, SequenceReduction, dpo_loss, kto_loss, kto_reference_point, orpo_loss,
    sequence_log_prob, simpo_loss,
};
pub use rotary::{rotary_encoding, rotary_encoding_halves};
pub use softmax::{log_softmax, quiet_softmax, softmax, softmin};

pub(crate) use attention::{has_few_weights, weighted, with_weights};
pub(crate) use lora::adapted_rows;
pub(crate) use loss::{class_weights, element_loss, element_loss_sum};
pub(crate) use pool::interpolate1d;
