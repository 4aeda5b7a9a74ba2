use burn::tensor::{DType, Device, FloatDType};

/// Why a module cannot be computed in half precision.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MixedError {
    /// The device does not compute in the type: Burn's `Device::supports_dtype` says so.
    #[error(
        "{device:?} does not compute in {dtype:?}: it has no arithmetic in that type, or cannot store it. Take the other type of \
         half precision, f32, or another device"
    )]
    Unsupported {
        /// The device.
        device: Box<Device>,
        /// What it lacks.
        dtype: FloatDType,
    },
    /// A trainable parameter is in half precision itself: small updates of it would be lost.
    #[error(
        "{path} is trainable and of {dtype:?}: cast it to f32 (an adapter: `Lora::set_dtype`), or freeze it"
    )]
    NarrowMaster {
        /// Path of the parameter in the module.
        path: String,
        /// Its type.
        dtype: DType,
    },
    /// A lazy weight of another type, which is in a file, and is read in the type that it has there.
    #[error("{path} is lazy, and of {found:?} in its file: write one of {expected:?} with `lazy::prepare`")]
    Lazy {
        /// Path of the weight in the module.
        path: String,
        /// Its type.
        found: DType,
        /// The type of the step.
        expected: FloatDType,
    },
    /// A module on a device without autodiff, where nothing says which parameters are frozen.
    #[error(
        "{path} is on a device without autodiff, where frozen and trainable parameters are the same: `Module::train` first"
    )]
    NotAutodiff {
        /// Path of the first parameter.
        path: String,
    },
}
