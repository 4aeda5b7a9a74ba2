//! [`ReplicaOptions`]: what is divided among the devices of replicas; [`FrozenOptions`]: which frozen weights, and how they are read.
use burn::module::ParamGroup;
use burn::tensor::Device;

/// What is divided among the devices of [`Replicas`](super::Replicas), besides the batch. By default nothing is: every device holds all
/// parameters, and the first one all gradients and the state of the optimizer.
///
/// ```
/// use burn_memsave::parallel::{FrozenOptions, ReplicaOptions};
///
/// let options = ReplicaOptions::new()
///     .with_sharded_optimizer()
///     .with_sharded_frozen(FrozenOptions::new().with_budget(64 << 20)); // 64 MiB of copies stay on each device
/// ```
#[derive(Clone, Debug, Default)]
pub struct ReplicaOptions {
    pub(super) optimizer: bool,
    pub(super) frozen: Option<FrozenOptions>,
}

impl ReplicaOptions {
    /// Divides nothing but the batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// Divides gradients and the state of the optimizer (ZeRO-2). Each trained parameter has an owner, by [`divide`](super::divide). Its
    /// gradients are sent to the owner in the backward pass, as soon as they are complete, and dropped where they were computed. The owner
    /// sums and updates, and sends the new value to the others.
    ///
    /// All forward passes run before the backward pass, which is one for all replicas.
    pub fn with_sharded_optimizer(mut self) -> Self {
        self.optimizer = true;
        self
    }

    /// Divides frozen weights, see [`shard_frozen`](super::shard_frozen). Weights with an adapter must be divided before the adapter is
    /// attached, by that function.
    pub fn with_sharded_frozen(mut self, frozen: FrozenOptions) -> Self {
        self.frozen = Some(frozen);
        self
    }
}

/// Which frozen weights are divided among devices, and how devices read those of others.
#[derive(Clone, Debug)]
pub struct FrozenOptions {
    pub(super) budget: u64,
    pub(super) read_ahead: Option<u64>,
    pub(super) min_bytes: u64,
    pub(super) group: ParamGroup,
    pub(super) owners: Option<Vec<Device>>,
}

impl Default for FrozenOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl FrozenOptions {
    /// All frozen weights of two to five axes and at least 64 KiB are divided, and no copies stay on a device.
    pub fn new() -> Self {
        Self { budget: 0, read_ahead: None, min_bytes: 1 << 16, group: ParamGroup::all(), owners: None }
    }

    /// The most bytes of copies that stay on each device after their use. The weights that are used first stay. If a model does not fit and
    /// is used again and again from the first layer to the last, no other choice finds more weights on the device.
    pub fn with_budget(mut self, bytes: u64) -> Self {
        self.budget = bytes;
        self
    }

    /// The most bytes of weights that are on their way to a device of a compute server, or one weight. By default, there is no bound.
    ///
    /// The program is ahead of the servers, and a server keeps what it sends until it is fetched. So before it sends more, the program waits
    /// for the device. Then the devices run their forward passes one after the other.
    ///
    /// **Burn 0.22.1's servers may wait forever then.** A server that is asked for a tensor at the moment at which the tensor becomes ready may
    /// miss it, and looks again only when it has another one to send (`external_comm.rs` of burn-communication). Without a bound there nearly
    /// always is another one; if the program waits, there is none.
    pub fn with_read_ahead(mut self, bytes: u64) -> Self {
        self.read_ahead = Some(bytes);
        self
    }

    /// Weights of fewer bytes stay on every device.
    pub fn with_min_bytes(mut self, bytes: u64) -> Self {
        self.min_bytes = bytes;
        self
    }

    /// Weights outside of this group stay on every device.
    pub fn with_group(mut self, group: ParamGroup) -> Self {
        self.group = group;
        self
    }

    /// The devices that own the weights, instead of those of the replicas.
    ///
    /// Burn 0.22.1's compute servers work through what a device is given in order. So a server sends a weight of its device only after the
    /// steps that the device was given before. If each server also has a second device for weights
    /// (`RemoteServer::new([Device::flex(), Device::flex()])`), it sends them at once, and the devices of the replicas do not wait for each
    /// other. Within one server weights are not copied.
    pub fn with_owners(mut self, devices: impl IntoIterator<Item = Device>) -> Self {
        self.owners = Some(devices.into_iter().collect());
        self
    }
}
