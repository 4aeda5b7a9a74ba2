//! The launches of kernels on a device, and the memory that tensors use at each.
//!
//! A pool reports how much is in use now, and how much it has reserved. Neither is the most that was in use at one time. CubeCL calls an
//! observer before every launch, when the tensors that the kernel reads and writes exist. The memory is read there.
use crate::burn_next::{DryRun, dry_run};
use burn::backend::DispatchDevice;
use burn::cubecl::{
    MemoryScope,
    client::Client,
    logging::{LaunchObservation, LaunchObserver},
};
use burn::tensor::Device;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The bytes that tensors use on a device; `None` if no kernels are launched on it.
pub(super) fn bytes_of_tensors(device: &Device) -> Option<u64> {
    Some(in_use(&client(device)?))
}

/// Does not count what CubeCL keeps for itself: read buffers, and the sizes, strides and scalars of the last 512 launches, which differ
/// from one run to the next.
fn in_use(client: &Client) -> u64 {
    let report = client.memory_report(MemoryScope::Device);
    report.streams.iter().map(|stream| stream.pools.usage().bytes_in_use).sum()
}

fn client(device: &Device) -> Option<Client> {
    let device = device.clone().without_autodiff();
    #[allow(irrefutable_let_patterns)] // without any other backend
    let DispatchDevice::Cube(device) = device.as_dispatch() else { return None };
    Some(device.client())
}

/// While it lives, kernels are compiled but not launched in the whole process, and pools count memory without allocating it.
pub(crate) struct NoLaunches {
    device: Device,
    _dry_run: DryRun,
}

impl NoLaunches {
    /// Begins after all queued kernels have run. `None` if no kernels are launched on such a device; an error if the device has failed.
    pub(crate) fn begin(device: &Device) -> Option<Result<Self, String>> {
        client(device)?;
        let begin = |()| Self { device: device.clone(), _dry_run: DryRun::new() };
        Some(device.sync().map(begin).map_err(|error| error.to_string()))
    }
}

/// Whether kernels are currently not launched.
pub(crate) fn is_dry() -> bool {
    dry_run()
}

impl Drop for NoLaunches {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // Queued kernels are dropped, too. The error of a broken device cannot be reported from here.
            let _ = self.device.sync();
            self.device.memory_cleanup();
        }
    }
}

/// Observes the launches of the whole process while it lives.
pub(super) struct Launches {
    watched: Arc<Watched>,
    _observation: LaunchObservation,
}

impl Launches {
    /// Starts to observe; `None` if no kernels are launched on such a device.
    pub(super) fn watch(device: &Device) -> Option<Self> {
        let watched = Arc::new(Watched::new(client(device)?));
        Some(Self { watched: watched.clone(), _observation: LaunchObservation::new(watched) })
    }

    /// The number of launches so far.
    pub(super) fn count(&self) -> u64 {
        self.watched.count.load(Relaxed)
    }

    /// The most bytes in use on the device at a launch or now.
    pub(super) fn most_bytes(&self) -> u64 {
        self.watched.look();
        self.watched.most_bytes.load(Relaxed)
    }
}

struct Watched {
    client: Client,
    count: AtomicU64,
    most_bytes: AtomicU64,
}

impl Watched {
    fn new(client: Client) -> Self {
        Self { client, count: AtomicU64::new(0), most_bytes: AtomicU64::new(0) }
    }

    fn look(&self) {
        self.most_bytes.fetch_max(in_use(&self.client), Relaxed);
    }
}

impl LaunchObserver for Watched {
    fn launched(&self, _kernel: &'static str) {
        self.count.fetch_add(1, Relaxed);
        self.look();
    }
}
