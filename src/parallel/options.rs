//! [`ReplicaOptions`]: what is divided among the devices of replicas, and how they wait for each other; [`FrozenOptions`]: which frozen
//! weights, and how they are read.
use burn::module::ParamGroup;
use burn::tensor::Device;
use std::time::Duration;

/// What is divided among the devices of [`Replicas`](super::Replicas), besides the batch, and how they wait for each other. By default
/// nothing is divided: every device holds all parameters, and the first one all gradients and the state of the optimizer.
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
    pub(super) synchronized: bool,
    pub(super) timeout: Option<Duration>,
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

    /// Has every [`BatchNorm`](crate::nn::BatchNorm) in training mode, and
    /// [`functional::batch_norm_train`](crate::functional::batch_norm_train), normalize with the statistics of the whole batch, over all
    /// replicas. Up to rounding, gradients and running statistics are those of one device with the whole batch. Without this option, such a
    /// module is refused.
    ///
    /// Each replica then runs its forward and backward pass on a thread of its own. In a batch norm, it waits until all replicas have come
    /// to it: in the forward pass they exchange a count, means and variances, in the backward pass two sums per channel. The program reads
    /// these numbers from each device, `16 * channels + 8` bytes and `16 * channels` bytes as f64, and every replica computes the same from
    /// them. [`Traffic`](super::Traffic) does not count them. Beyond what it keeps anyway, a batch norm in half precision keeps its mean and
    /// variance, in f32.
    ///
    /// - Every replica must run the same batch norms in the same order, on the thread on which `loss` is called. A part of weight 0 does not
    ///   run, and does not count.
    /// - [Checkpointed](crate::checkpoint) segments exchange again when they are recomputed. Divided optimizers and frozen weights go with it.
    /// - Running statistics are updated when all replicas have succeeded, and all servers have answered.
    /// - Burn's own `BatchNorm` cannot be synchronized: the first step that changes its running statistics is an error.
    /// - A [policy](crate::saved) of the calling thread applies to the replicas. A [ledger](crate::measure::ledger) does not see them.
    /// - If several replicas are on one device, their graphs exist at once. Random draws of replicas on CPUs, or of one backend, come in any
    ///   order.
    /// - `loss` may read tracked tensors of its replica and its part only. Burn holds a lock of graphs that share a tracked tensor through
    ///   their backward passes, so that replicas would wait for each other until the [time-out](Self::with_timeout).
    /// - The input of a batch norm may not be empty.
    pub fn with_synchronized_batch_norm(mut self) -> Self {
        self.synchronized = true;
        self
    }

    /// How long [`sync`](super::Replicas::sync) waits for devices, and replicas for each other in a
    /// [synchronized](Self::with_synchronized_batch_norm) batch norm. Then an error names the devices that did not answer. By default,
    /// replicas wait ten minutes for each other, and `sync` waits until each device answers or its server is gone.
    ///
    /// When a device has failed, the others are waited for ten minutes at most. A step that failed waits once more for all devices, to name
    /// those that do not answer, ten minutes by default.
    ///
    /// The time must be enough for everything that the devices were given to do. Within [`backward`](super::Replicas::backward), layers wait
    /// no longer for divided frozen weights, nor recomputed segments for what they compare. Not bounded are what `loss` itself reads from a
    /// device, tensors that a [policy](crate::saved) keeps elsewhere, and the sending of work to a server that takes none, once the buffers
    /// on the way to it are full. Outside of `backward` and `sync`, nothing is bounded.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
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
    /// A server of Burn 0.22.1 that is asked for a tensor at the moment at which the tensor becomes ready may miss it, and looks again only
    /// when it has another one to send (`external_comm.rs` of burn-communication). Without a bound there nearly always is another one; if the
    /// program waits, there is none. So within a step and in [`sync`](super::Replicas::sync), the servers that answer then send numbers to
    /// the device, after a second or a quarter of the [time-out](ReplicaOptions::with_timeout), until they arrive. A device that only
    /// [owns weights](Self::with_owners) always answers. Nothing does so in inference.
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
