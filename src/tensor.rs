//! [`burn::tensor`], with this library's versions of the functions in [`activation`] and [`module`]: the same signatures and results.
//!
//! Models call functions as well as modules, so a model is swapped by two lines (this one, and that for `nn`), or by
//! `s/burn::tensor/burn_memsave::tensor/`:
//!
//! ```
//! // use burn::tensor::{Device, Tensor, activation::silu};
//! use burn_memsave::tensor::{Device, Tensor, activation::silu};
//!
//! let device = Device::flex().autodiff();
//! let x = Tensor::<2>::from_floats([[0.0, 1.0]], &device).require_grad();
//! let gradients = silu(x.clone()).sum().backward(); // kept: `x`, where Burn keeps two tensors
//! assert!(x.grad(&gradients).is_some());
//! ```
pub use burn::tensor::*;

/// [`burn::tensor::activation`]. Everything except the constants is this library's.
pub mod activation {
    pub use burn::tensor::activation::*;

    pub use burn_memsave_layers::functional::{
        celu, elu, gelu, gelu_approximate, glu, hard_shrink, hard_sigmoid, hard_swish, hardtanh, leaky_relu,
        log_sigmoid, log_softmax, mish, prelu, quiet_softmax, relu, relu6, selu, shrink, sigmoid, silu,
        soft_shrink, softmax, softmin, softplus, softplus_with_threshold, softsign, tanh, tanhshrink,
        threshold, thresholded_relu,
    };
}

/// [`burn::tensor::module`]. Pools that return their indices, `unfold4d`, `fold4d`, `ctc_loss` and the gradients of single operations are
/// Burn's; the rest is this library's.
pub mod module {
    pub use burn::tensor::module::*;

    pub use burn_memsave_layers::functional::{
        adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d, attention, avg_pool1d, avg_pool2d,
        batch_norm, batch_norm_train, conv_transpose1d, conv_transpose2d, conv_transpose3d, conv1d, conv2d,
        conv3d, deform_conv2d, embedding, interpolate, layer_norm, linear, max_pool1d, max_pool2d,
    };
}
