//! The memory of any device behind one interface: now, over a step ([`Meter`]), and from one point to the next ([`Laps`]).
use super::launches::{Launches, bytes_of_tensors};
use super::{Scope, TrackingAllocator};
use burn::tensor::Device;

/// Bytes in use on a device.
///
/// - CPU devices (Flex, NdArray): the live bytes of the [`TrackingAllocator`], which are those of the whole program; `None` if it is not
///   installed.
/// - Device backends (CUDA, WebGPU, ...): the bytes in use in the device's memory pools, without padding and without the buffers that
///   CubeCL has for launches and reads. Burn queues work, so call [`Device::sync`] first.
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
        Some(pool) => Some(bytes_of_tensors(device).unwrap_or(pool.bytes_in_use)),
        None => is_counted(device).then(TrackingAllocator::live),
    }
}

/// The most bytes that were in use on a device at one time.
///
/// - CPU devices: [`TrackingAllocator::peak`], which a [`Scope`] resets at its start; `None` if the allocator is not installed.
/// - Device backends: the bytes that the pool has reserved. The pool reserves memory as it grows and keeps it, so this is never below the
///   true peak, but may be above it by free pages. Call [`Device::memory_cleanup`] before what you measure.
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

/// Makes what a process makes once, before the first bytes of a measurement are read.
pub(crate) fn warm_up() {
    #[cfg(any(feature = "flex", feature = "ndarray"))]
    if TrackingAllocator::is_installed() {
        burn_memsave_layers::backend::cpu::make_buffers();
    }
}

/// Whether the allocator counts the tensors of a device.
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

/// What a [`Meter`] watches on a device.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Metering {
    /// The number of launches, and the memory at each. This makes launches slower.
    Launches,
    Nothing,
}

/// Measures one device during a step whose input was just made.
///
/// Bytes are relative to those before the input was made, so the input counts as long as somebody holds it.
pub(super) struct Meter {
    device: Device,
    base: Option<u64>,
    /// Resets the allocator's peak after the input was made, so that making it does not count.
    _scope: Scope,
    launches: Option<Launches>,
}

impl Meter {
    /// `live_before` is the allocator's count before the input was made. A device's pool is known only once there is a tensor on it. It
    /// counts only the bytes of its tensors, so there the bytes of the input are subtracted.
    pub(super) fn start(metering: Metering, device: Device, input_bytes: u64, live_before: u64) -> Self {
        settle(&device);
        device.memory_cleanup();
        let base = match is_host(&device) {
            true => is_counted(&device).then_some(live_before),
            false => bytes_in_use(&device).map(|bytes| bytes.saturating_sub(input_bytes)),
        };
        let launches = match metering {
            Metering::Launches => Launches::watch(&device),
            Metering::Nothing => None,
        };
        Self { device, base, _scope: Scope::start(), launches }
    }

    /// Waits for the device, so that times and bytes are those of finished work.
    pub(super) fn settle(&self) {
        settle(&self.device);
    }

    /// Live bytes beyond those before the input; 0 if there are fewer.
    pub(super) fn live(&self) -> Option<u64> {
        Some(bytes_in_use(&self.device)?.saturating_sub(self.base?))
    }

    /// The highest [`live`](Self::live) so far. On a device, the memory is read at every launch of a kernel, and now.
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
    /// Since the last point: resets the allocator's peak, and watches launches.
    since: (Option<Scope>, Option<Launches>),
}

/// Bytes of one lap.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lap {
    /// Alive at its end.
    pub(crate) live: i64,
    /// The most alive at one time during the lap.
    pub(crate) most: i64,
}

impl Laps {
    /// `None` where bytes are not counted.
    pub(crate) fn start(device: &Device) -> Option<Self> {
        warm_up();
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
        // The old scope ends before the new one starts.
        self.since = (None, None);
        self.since = (Some(Scope::start()), Launches::watch(&self.device));
        Lap { live, most: most.max(live) }
    }
}

fn settle(device: &Device) {
    // A failure of the device shows in the next operation, with its own message.
    let _ = device.sync();
}
