use burn::tensor::{Device, ExecutionError};
use std::fmt;

/// What can be wrong with the replicas of a module, or happen to them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// There is no device to put a replica on.
    #[error("replicas need at least one device")]
    NoDevices,
    /// Nothing can be trained on such a device.
    #[error("device {index} records no gradients: call `Device::autodiff` on it")]
    NotAutodiff {
        /// Its position among the devices.
        index: usize,
    },
    /// A batch norm, or another part with running statistics, that would see the statistics of a part of the batch, and leave each
    /// replica with its own.
    #[error(
        "{path} has running statistics and is in training mode, as a batch norm: they would be those of a part of the batch. Freeze it \
         (`Module::freeze`), or take a norm that does not depend on the batch"
    )]
    Running {
        /// Its path in the module.
        path: String,
    },
    /// A parameter that is in two places of the module and requires gradients has another value in each. Burn's optimizers change it in
    /// the first one only.
    #[error("{first} and {second} have one id, but different values: parameters that are tied have one")]
    Untied {
        /// Path of the first place.
        first: String,
        /// Path of another place.
        second: String,
    },
    /// The weight of a part of the batch is negative, infinite or not a number.
    #[error("a part of the batch has the weight {weight}")]
    Weight {
        /// The weight.
        weight: f64,
    },
    /// A lazy weight, of a module that is on another backend than a device, where it would be in memory as a whole.
    #[error(
        "{path} is lazy, and cannot be lazy on device {index}: load the module on a device of the same backend"
    )]
    Lazy {
        /// Path of the weight in the module.
        path: String,
        /// The position of the device.
        index: usize,
    },
    /// A batch was cut into more parts than there are replicas, or into none.
    #[error("a batch of {parts} parts for {replicas} replicas")]
    Parts {
        /// Of the batch.
        parts: usize,
        /// Of the module.
        replicas: usize,
    },
    /// A batch without items has no mean loss.
    #[error("the parts of the batch have no items")]
    NoItems,
    /// Devices failed, or their servers cannot be reached any more. What was computed on them is lost. A device fails, too, when
    /// one is gone that sends to it.
    #[error("{}", list(failed))]
    Devices {
        /// Each of them.
        failed: Vec<DeviceFailure>,
    },
}

/// What is wrong with a device.
#[derive(Debug)]
pub struct DeviceFailure {
    /// Its position among the devices.
    pub index: usize,
    /// The device.
    pub device: Device,
    /// What Burn says.
    pub error: ExecutionError,
}

impl fmt::Display for DeviceFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} ({:?}) failed: {}", self.index, self.device, self.error)
    }
}

fn list(failed: &[DeviceFailure]) -> String {
    failed.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
