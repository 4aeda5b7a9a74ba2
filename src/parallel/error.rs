//! [`ParallelError`]: why a module cannot have replicas, and which devices failed.
use crate::optim::InBackwardError;
use crate::plan::PartsError;
use burn::tensor::{Device, ExecutionError};
use std::fmt;
use std::time::Duration;

/// What can be wrong with the replicas of a module, or happen to them.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParallelError {
    /// There is no device to put a replica on.
    #[error("replicas need at least one device")]
    NoDevices,
    /// A device records no gradients, so nothing can be trained on it.
    #[error("device {index} records no gradients: call `Device::autodiff` on it")]
    NotAutodiff {
        /// Its position among the devices.
        index: usize,
    },
    /// If the optimizer is divided, one backward pass runs through the graphs of all replicas.
    #[error(
        "device {index} has another strategy of gradient checkpointing than device 0, which a divided optimizer does not support"
    )]
    Strategy {
        /// Its position among the devices.
        index: usize,
    },
    /// The module cannot be trained on parts of a batch, or the weights of the parts are invalid.
    #[error(transparent)]
    Parts(#[from] PartsError),
    /// The module has a lazy weight and is on another backend than a device, where the weight would be in memory as a whole.
    #[error(
        "{path} is lazy, and cannot be lazy on device {index}: load the module on a device of the same backend"
    )]
    Lazy {
        /// Path of the weight in the module.
        path: String,
        /// The position of the device.
        index: usize,
    },
    /// A frozen weight has an adapter or another reparameterization already, so it cannot become one that is on another device.
    #[error(
        "{path} has an adapter already: divide the frozen weights first, with `parallel::shard_frozen`, and attach adapters afterwards"
    )]
    Adapted {
        /// Path of the weight in the module.
        path: String,
    },
    /// A frozen weight is quantized, and Burn's quantized tensors cannot be read from another device when a layer runs.
    #[error(
        "{path} is quantized, and can only be on every device: leave it out of the group of `FrozenOptions::with_group`"
    )]
    Quantized {
        /// Path of the weight in the module.
        path: String,
    },
    /// The loss of a part gives no gradients that could be sent in the backward pass.
    #[error("the loss of part {part}: {error}")]
    Loss {
        /// The position of the part.
        part: usize,
        /// What is wrong with it.
        error: InBackwardError,
    },
    /// A batch was cut into more parts than there are replicas, or into none.
    #[error("a batch of {parts} parts for {replicas} replicas")]
    PartCount {
        /// The number of parts of the batch.
        parts: usize,
        /// The number of replicas.
        replicas: usize,
    },
    /// A replica panicked while others waited for it. Parameters and running statistics are as they were before the step.
    #[error("replica {index} ({device:?}) failed: {message}")]
    Replica {
        /// Its position.
        index: usize,
        /// Its device.
        device: Box<Device>,
        /// What it panicked with.
        message: String,
    },
    /// A replica waits in a batch norm that others do not come to: they are done, or wait in another one.
    #[error(
        "replica {index} waits in a synchronized batch norm that replicas {others:?} do not run: all must run the same ones in the same order"
    )]
    Differ {
        /// The replica that waits.
        index: usize,
        /// The others.
        others: Vec<usize>,
    },
    /// Devices did not answer in [time](super::ReplicaOptions::with_timeout), or replicas did not come to a batch norm.
    #[error("no answer within {after:?} from {}", late(devices))]
    TimedOut {
        /// Their positions, and the devices. Devices that only own frozen weights come after those of the replicas.
        devices: Vec<(usize, Device)>,
        /// How long the others waited.
        after: Duration,
    },
    /// A part of the module changed its running statistics without those of the other replicas: a batch norm of Burn's, or one that ran on
    /// another thread than that of its replica.
    #[error(
        "{path} has running statistics and is not synchronized: use `burn_memsave::nn::BatchNorm`, on the thread on which the loss is called"
    )]
    NotSynchronized {
        /// Its path in the module.
        path: String,
    },
    /// Replicas that wait for each other were run on a thread of rayon's, which their own computations may need.
    #[error(
        "replicas with synchronized batch norms cannot run on a thread of a rayon pool: call `backward` on another thread"
    )]
    ThreadOfPool,
    /// An update panicked, and the replicas are lost. The state of the optimizer may be changed for some parameters and not for others.
    #[error(
        "the replicas were lost when an update panicked: make new ones, and load the parameters and the optimizer from a checkpoint"
    )]
    Lost,
    /// Devices failed, or their servers can no longer be reached. What was computed on them is lost. A device also fails if another one
    /// that sends to it is gone. Those that did not answer in time are named, too.
    #[error("{}", list(failed))]
    Devices {
        /// Each of them.
        failed: Vec<DeviceFailure>,
    },
}

/// What is wrong with a device.
#[derive(Debug)]
pub struct DeviceFailure {
    /// Its position among the devices. Devices that only own frozen weights come after those of the replicas, and then one of another module
    /// that the loss uses.
    pub index: usize,
    /// The device.
    pub device: Device,
    /// Burn's error.
    pub error: ExecutionError,
}

impl fmt::Display for DeviceFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} ({:?}) failed: {}", self.index, self.device, self.error)
    }
}

fn late(devices: &[(usize, Device)]) -> String {
    let named = devices.iter().map(|(index, device)| format!("device {index} ({device:?})"));
    named.collect::<Vec<_>>().join(", ")
}

fn list(failed: &[DeviceFailure]) -> String {
    failed.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}
