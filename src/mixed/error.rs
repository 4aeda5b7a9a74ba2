//! [`MixedError`]: why a module cannot be computed in half precision.
use burn::tensor::{DType, Device, FloatDType};

/// Why a module cannot be computed in half precision.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MixedError {
    /// The device does not compute in this dtype, according to Burn's `Device::supports_dtype`.
    #[error(
        "{device:?} does not compute in {dtype:?}: it has no arithmetic in that type, or cannot store it. Take the other type of \
         half precision, f32, or another device"
    )]
    Unsupported {
        /// The device.
        device: Box<Device>,
        /// The dtype that it lacks.
        dtype: FloatDType,
    },
    /// A trainable parameter is in half precision itself: small updates of it would be lost.
    #[error(
        "{path} is trainable and of {dtype:?}: cast it to f32 (an adapter: `Lora::set_dtype`), or freeze it"
    )]
    NarrowMaster {
        /// Path of the parameter in the module.
        path: String,
        /// Its dtype.
        dtype: DType,
    },
    /// A lazy weight has another dtype: it is read in the dtype that it has in its file.
    #[error("{path} is lazy, and of {found:?} in its file: write one of {expected:?} with `lazy::prepare`")]
    Lazy {
        /// Path of the weight in the module.
        path: String,
        /// Its dtype.
        found: DType,
        /// The dtype of the step.
        expected: FloatDType,
    },
    /// The module is on a device without autodiff, where nothing says which parameters are frozen.
    #[error(
        "{path} is on a device without autodiff, where frozen and trainable parameters are the same: `Module::train` first"
    )]
    NotAutodiff {
        /// Path of the first parameter.
        path: String,
    },
}
