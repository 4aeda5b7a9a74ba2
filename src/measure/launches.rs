//! The launches of kernels on a device, and the memory of tensors in use at each.
//!
//! A pool says how much is in use now, and how much it has reserved; neither is the most that was in use at one time. CubeCL
//! calls an observer before every launch, when the tensors that the kernel reads and writes exist, and that is where the memory
//! is read.
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

/// Bytes in use of the tensors on a device that kernels are launched on.
pub(super) fn tensor_bytes(device: &Device) -> Option<u64> {
    Some(in_use(&client(device)?))
}

/// Without what CubeCL keeps for itself: read buffers, and the sizes, strides and scalars of the 512 launches last seen, which
/// differ from one run to another.
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

/// While it lives, kernels are compiled and not launched, in the whole process, and pools count memory that they do not take.
pub(crate) struct NoLaunches {
    device: Device,
    _dry_run: DryRun,
}

impl NoLaunches {
    /// Begins, if kernels are launched on such a device, when those are launched that wait; or says what is wrong with the device.
    pub(crate) fn begin(device: &Device) -> Option<Result<Self, String>> {
        client(device)?;
        let begin = |()| Self { device: device.clone(), _dry_run: DryRun::new() };
        Some(device.sync().map(begin).map_err(|error| error.to_string()))
    }
}

/// Whether kernels are launched nowhere.
pub(crate) fn is_dry() -> bool {
    dry_run()
}

impl Drop for NoLaunches {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // What waits is dropped, too. There is nobody to tell what a device has to say that is broken.
            let _ = self.device.sync();
            self.device.memory_cleanup();
        }
    }
}

/// Watches the launches of the whole process while it lives.
pub(super) struct Launches {
    watched: Arc<Watched>,
    _observation: LaunchObservation,
}

impl Launches {
    /// Starts to watch, if kernels are launched on such a device.
    pub(super) fn watch(device: &Device) -> Option<Self> {
        let watched = Arc::new(Watched::new(client(device)?));
        Some(Self { watched: watched.clone(), _observation: LaunchObservation::new(watched) })
    }

    /// How many there were.
    pub(super) fn count(&self) -> u64 {
        self.watched.count.load(Relaxed)
    }

    /// The most bytes in use on the device at one of them, or now.
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
