//! Memory of any device behind one interface.
use super::launches::{Launches, tensor_bytes};
use super::{Scope, TrackingAllocator};
use burn::tensor::Device;

/// Bytes in use on a device.
///
/// - CPU devices (Flex, NdArray): live bytes of the [`TrackingAllocator`], which are those of the whole program; `None` if it
///   is not installed.
/// - Device backends (CUDA, WebGPU, ...): bytes in use of the device's memory pools, without padding and without the buffers
///   that CubeCL keeps beside them for launches and reads. Burn queues work: [`Device::sync`] first.
/// - Others (remote ones): `None`.
///
/// ```
/// use burn::tensor::Device;
/// use burn_memsave::measure::{TrackingAllocator, bytes_in_use};
///
/// assert_eq!(bytes_in_use(&Device::flex()).is_some(), TrackingAllocator::is_installed());
/// ```
pub fn bytes_in_use(device: &Device) -> Option<u64> {
    match device.memory_pool_usage() {
        Some(pool) => Some(tensor_bytes(device).unwrap_or(pool.bytes_in_use)),
        None => is_counted(device).then(TrackingAllocator::live),
    }
}

/// The most bytes that were in use on a device at one time.
///
/// - CPU devices: [`TrackingAllocator::peak`], which a [`Scope`] lowers at its start; `None` if it is not installed.
/// - Device backends: the bytes that the pool has reserved. It reserves as it grows and keeps what it has, so this is never
///   below the true peak, and above it by free pages: call [`Device::memory_cleanup`] before what you measure.
/// - Others: `None`.
///
/// ```
/// use burn::tensor::Device;
/// use burn_memsave::measure::{bytes_in_use, peak_bytes};
///
/// let device = Device::flex();
/// assert!(peak_bytes(&device) >= bytes_in_use(&device));
/// ```
pub fn peak_bytes(device: &Device) -> Option<u64> {
    match device.memory_pool_usage() {
        Some(pool) => Some(pool.bytes_reserved),
        None => is_counted(device).then(TrackingAllocator::peak),
    }
}

/// Whether the tensors of a device are counted by the allocator.
fn is_counted(device: &Device) -> bool {
    is_host(device) && TrackingAllocator::is_installed()
}

/// Whether tensors of a device live in this process's own memory.
#[allow(clippy::match_single_binding)] // without a backend
pub(crate) fn is_host(device: &Device) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => true,
        #[cfg(feature = "ndarray")]
        burn::backend::DispatchDevice::NdArray(_) => true,
        #[allow(unreachable_patterns)] // without any other backend
        _ => false,
    }
}

/// What is watched on a device, whose launches are slower for it.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Watch {
    /// The number of launches, and the memory at each.
    Launches,
    Nothing,
}

/// Watches one device during a step whose input was just made.
///
/// Bytes are relative to those before the input was made, so that an input counts exactly while somebody keeps it.
pub(super) struct Meter {
    device: Device,
    base: Option<u64>,
    /// Lowers the allocator's peak to what is live after the input was made, so that making it does not count.
    _scope: Scope,
    launches: Option<Launches>,
}

impl Meter {
    /// `live_before` is the allocator's count before the input was made. A device's pool is known only once there is a
    /// tensor on it, and counts no more than the bytes of its tensors: there, the input's are subtracted.
    pub(super) fn start(watch: Watch, device: Device, input_bytes: u64, live_before: u64) -> Self {
        settle(&device);
        device.memory_cleanup();
        let base = match is_host(&device) {
            true => is_counted(&device).then_some(live_before),
            false => bytes_in_use(&device).map(|bytes| bytes.saturating_sub(input_bytes)),
        };
        let launches = match watch {
            Watch::Launches => Launches::watch(&device),
            Watch::Nothing => None,
        };
        Self { device, base, _scope: Scope::start(), launches }
    }

    /// Waits for the device, so that clocks and counts see finished work.
    pub(super) fn settle(&self) {
        settle(&self.device);
    }

    /// Live bytes beyond those before the input; 0 if there are fewer.
    pub(super) fn live(&self) -> Option<u64> {
        Some(bytes_in_use(&self.device)?.saturating_sub(self.base?))
    }

    /// The highest [`live`](Self::live) so far; on a device, at the launches of its kernels and now.
    pub(super) fn peak(&self) -> Option<u64> {
        let peak = match &self.launches {
            Some(launches) => launches.most_bytes(),
            None => peak_bytes(&self.device)?,
        };
        Some(peak.saturating_sub(self.base?))
    }

    /// The bytes that the pool of a device has reserved.
    pub(super) fn reserved(&self) -> Option<u64> {
        reserved(&self.device)
    }

    /// The kernels launched so far, on a device.
    pub(super) fn launches(&self) -> Option<u64> {
        Some(self.launches.as_ref()?.count())
    }
}

/// The bytes that the pool of a device has reserved.
pub(super) fn reserved(device: &Device) -> Option<u64> {
    Some(device.memory_pool_usage()?.bytes_reserved)
}

/// The memory of one device from one point of a step to the next.
pub(crate) struct Laps {
    device: Device,
    /// Since the last point: lowers the allocator's peak, or watches launches.
    since: (Option<Scope>, Option<Launches>),
}

/// What was alive at its end, and the most since its start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lap {
    pub(crate) live: i64,
    pub(crate) most: i64,
}

impl Laps {
    /// `None` where bytes are not counted.
    pub(crate) fn start(device: &Device) -> Option<Self> {
        settle(device);
        device.memory_cleanup();
        bytes_in_use(device)?;
        let mut laps = Self { device: device.clone(), since: (None, None) };
        laps.lap();
        Some(laps)
    }

    /// Ends a lap, and starts the next.
    pub(crate) fn lap(&mut self) -> Lap {
        settle(&self.device);
        let most = match &self.since.1 {
            Some(launches) => Some(launches.most_bytes()),
            None => peak_bytes(&self.device),
        };
        let [live, most] = [bytes_in_use(&self.device), most].map(|bytes| bytes.unwrap_or(0) as i64);
        // Scopes end before others start.
        self.since = (None, None);
        self.since = (Some(Scope::start()), Launches::watch(&self.device));
        Lap { live, most: most.max(live) }
    }
}

fn settle(device: &Device) {
    // A failure of the device shows in the next operation, with its own message.
    let _ = device.sync();
}
