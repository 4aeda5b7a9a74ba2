//! Weights that stay on a device between their uses.
use burn::tensor::{Device, Tensor};
use core::any::Any;
use core::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How many bytes of weights may stay on a device. If there are several devices, it holds for each.
///
/// The weights that are used first stay, and none makes room for another. If a model does not fit and is used again and again from the
/// first layer to the last, no other policy finds more weights on the device.
#[derive(Debug)]
pub struct DeviceBudget {
    bytes: u64,
    used: Mutex<Vec<(Device, u64)>>,
}

impl DeviceBudget {
    /// For this many bytes.
    pub fn new(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes, used: Mutex::default() })
    }

    /// The most bytes that may stay on a device.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The bytes that stay now, on all devices.
    pub fn used(&self) -> u64 {
        lock(&self.used).iter().map(|(_, bytes)| bytes).sum()
    }

    /// Takes these bytes if there is room for them; returns whether there is.
    fn take(&self, device: &Device, bytes: u64) -> bool {
        let mut used = lock(&self.used);
        let at = used.iter().position(|(of, _)| of == device).unwrap_or_else(|| {
            used.push((device.clone(), 0));
            used.len() - 1
        });
        let used = &mut used[at].1;
        let fits = used.checked_add(bytes).is_some_and(|sum| sum <= self.bytes);
        *used += if fits { bytes } else { 0 };
        fits
    }

    fn give_back(&self, device: &Device, bytes: u64) {
        let mut used = lock(&self.used);
        if let Some((_, used)) = used.iter_mut().find(|(of, _)| of == device) {
            *used = used.saturating_sub(bytes);
        }
    }
}

/// The tensors of one weight, one per device that it stays on.
///
/// Nothing stays on CPU devices, which use a weight where it was read, unless it is [on another device](Self::on_any_device).
pub struct Resident {
    budget: Arc<DeviceBudget>,
    bytes: u64,
    /// Whether it also stays on CPU devices.
    on_host: bool,
    /// A `Tensor<D>` without autodiff per device.
    tensors: Mutex<Vec<(Device, Box<dyn Any + Send + Sync>)>>,
}

impl Resident {
    /// For a weight of this many bytes.
    pub fn new(budget: Arc<DeviceBudget>, bytes: u64) -> Self {
        Self { budget, bytes, on_host: false, tensors: Mutex::default() }
    }

    /// The same for a weight that CPU devices also have to copy.
    pub fn on_any_device(budget: Arc<DeviceBudget>, bytes: u64) -> Self {
        Self { budget, bytes, on_host: true, tensors: Mutex::default() }
    }

    /// Drops all tensors.
    pub fn clear(&self) {
        for (device, _) in lock(&self.tensors).drain(..) {
            self.budget.give_back(&device, self.bytes);
        }
    }

    /// The weight, if it is on the device.
    pub(super) fn get<const D: usize>(&self, device: &Device) -> Option<Tensor<D>> {
        let plain = device.clone().without_autodiff();
        let tensors = lock(&self.tensors);
        let (_, tensor) = tensors.iter().find(|(of, _)| *of == plain)?;
        Some(like(device, tensor.downcast_ref::<Tensor<D>>()?.clone()))
    }

    /// Keeps the weight on its device, if there is room; returns whether it does.
    pub(super) fn keep<const D: usize>(&self, tensor: &Tensor<D>) -> bool {
        let device = tensor.device().without_autodiff();
        let mut tensors = lock(&self.tensors);
        if tensors.iter().any(|(of, _)| *of == device) {
            return false; // another thread was first
        }
        let keeps = (self.on_host || !is_host(&device)) && self.budget.take(&device, self.bytes);
        if keeps {
            tensors.push((device, Box::new(tensor.clone().without_autodiff())));
        }
        keeps
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.clear();
    }
}

impl fmt::Debug for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resident").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

/// A tensor without autodiff, under autodiff if the device is.
pub(crate) fn like<const D: usize>(device: &Device, tensor: Tensor<D>) -> Tensor<D> {
    match device.gradient_checkpointing_strategy() {
        Some(strategy) => tensor.autodiff().with_gradient_checkpointing_strategy(strategy),
        None => tensor,
    }
}

/// A poisoned lock is not an error: the data behind it changes as a whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether tensors of the device are in the memory of the program.
#[allow(clippy::match_single_binding)] // without a CPU backend
pub(crate) fn is_host(device: &Device) -> bool {
    match device.as_dispatch() {
        #[cfg(feature = "flex")]
        burn::backend::DispatchDevice::Flex(_) => true,
        #[cfg(feature = "ndarray")]
        burn::backend::DispatchDevice::NdArray(_) => true,
        #[allow(unreachable_patterns)] // without any other backend
        _ => false,
    }
}
