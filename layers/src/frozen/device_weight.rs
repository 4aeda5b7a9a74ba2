//! [`DeviceWeight`]: a weight that is on one device, from which layers on other devices read it.
use super::resident::{DeviceBudget, Resident, like};
use crate::backend::plain_backends;
use crate::backend::remote::{answer, answered, data, remote_device, remote_id};
use crate::burn_next::routed;
use burn::backend::{
    Backend, DeviceId, Dispatch, DispatchTensor, TensorMetadata,
    tensor::{Device as BackendDevice, FloatTensor},
};
use burn::tensor::{DType, Device, Int, Shape, Tensor, TensorData};
use core::any::Any;
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A weight that is on one device, its owner. A layer on another device copies it when it runs, in the forward pass and again in the
/// backward pass, and drops the copy, unless the [budget](DeviceBudget) of its device has room for it. An embedding copies only the rows
/// that its indices name.
///
/// Copies go from device to device. Only if these are of different backends do the bytes pass through the memory of the program.
pub struct DeviceWeight {
    /// Without autodiff.
    tensor: DispatchTensor,
    device: Device,
    shape: Shape,
    dtype: DType,
    resident: Option<Resident>,
    sharing: Arc<Sharing>,
}

/// What weights on devices share.
#[derive(Debug)]
pub struct Sharing {
    budget: Arc<DeviceBudget>,
    read_ahead: u64,
    /// The bytes that left their owners.
    sent: AtomicU64,
    /// By remote device, the bytes that were sent to it since it was last waited for.
    on_way: Mutex<HashMap<DeviceId, u64>>,
}

impl Sharing {
    /// `budget`: for copies that stay on a device. `read_ahead`: the most bytes that are on their way to a remote device before the program
    /// waits for it, or one weight. The program is ahead of remote devices, and a server keeps what it sends until it is fetched.
    pub fn new(budget: u64, read_ahead: u64) -> Arc<Self> {
        let budget = DeviceBudget::new(budget);
        Arc::new(Self { budget, read_ahead, sent: AtomicU64::new(0), on_way: Mutex::default() })
    }

    /// The bytes of copies that may stay on each device.
    pub fn budget(&self) -> u64 {
        self.budget.bytes()
    }

    /// The bytes that were sent from device to device.
    pub fn sent(&self) -> u64 {
        self.sent.load(Ordering::Relaxed)
    }

    /// Counts bytes that are sent to a remote device, and returns whether to wait for it before.
    fn is_full(&self, device: DeviceId, bytes: u64) -> bool {
        let mut on_way = self.on_way.lock().unwrap_or_else(PoisonError::into_inner); // numbers
        let on_way = on_way.entry(device).or_default();
        let is_full = *on_way > 0 && on_way.saturating_add(bytes) > self.read_ahead;
        *on_way = if is_full { bytes } else { *on_way + bytes };
        is_full
    }
}

impl DeviceWeight {
    /// A weight that is this tensor, on its device.
    ///
    /// # Panics
    ///
    /// Panics if the tensor has one axis or more than five, or is quantized.
    pub fn new<const D: usize>(tensor: Tensor<D>, sharing: Arc<Sharing>) -> Self {
        assert!((2..=5).contains(&D), "a weight of {D} axes cannot be read from another device");
        assert!(
            tensor.dtype().is_float(),
            "a weight of {:?} cannot be read from another device",
            tensor.dtype()
        );
        let mut weight = Self::of(tensor, sharing);
        weight.resident = Some(Resident::on_any_device(weight.sharing.budget.clone(), weight.bytes()));
        weight
    }

    fn of<const D: usize>(tensor: Tensor<D>, sharing: Arc<Sharing>) -> Self {
        let tensor = tensor.without_autodiff();
        let (device, shape, dtype) = (tensor.device(), tensor.shape(), tensor.dtype());
        Self { tensor: tensor.into_dispatch(), device, shape, dtype, resident: None, sharing }
    }

    /// The owner.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What it shares with other weights.
    pub fn sharing(&self) -> &Arc<Sharing> {
        &self.sharing
    }

    /// The bytes of the weight.
    pub fn bytes(&self) -> u64 {
        (self.shape.num_elements() * self.dtype.size()) as u64
    }

    /// The tensor on its owner, without autodiff.
    fn tensor<const D: usize>(&self) -> Tensor<D> {
        Tensor::from_dispatch(self.tensor.clone())
    }

    fn count(&self, bytes: u64) {
        self.sharing.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts bytes that are sent to a device. Waits for a remote device to which too many are on their way.
    fn send(&self, bytes: u64, to: &Device) {
        self.count(bytes);
        if remote_id(to).is_some_and(|id| self.sharing.is_full(id, bytes)) {
            let device = to.clone();
            let _ = answer(to, move || answered(&device)); // a failure of the device shows in the next operation
        }
    }

    /// The tensor on a device, and whether the device is the owner, so that holding the tensor takes no further memory.
    pub(super) fn on<const D: usize>(&self, device: &Device) -> (Tensor<D>, bool) {
        let (tensor, plain) = (self.tensor::<D>(), device.clone().without_autodiff());
        let is_owner = plain == self.device;
        let tensor = match is_owner {
            true => tensor,
            false => {
                self.send(self.bytes(), &plain);
                tensor.to_device(&plain)
            }
        };
        (like(device, tensor), is_owner)
    }

    /// The rows with these indices `[count]`, on a device: chosen on the owner, so that no others are sent.
    ///
    /// The program reads the indices and gives them to the owner. When the owner fetched them, a test with two servers of Burn's did not end.
    /// The reason may be that each has one connection to every other server, or that a wake-up was lost between them.
    pub(super) fn rows(&self, indices: Tensor<1, Int>, device: &Device) -> Tensor<2> {
        let plain = device.clone().without_autodiff();
        let indices = indices.without_autodiff();
        let here = self.resident.as_ref().and_then(|resident| resident.get::<2>(&plain));
        let rows = match here {
            Some(table) => table.select(0, indices),
            None if plain == self.device => self.tensor::<2>().select(0, indices),
            None => {
                let dtype = indices.dtype();
                let read = data(&plain, move || indices.try_into_data());
                let indices = Tensor::from_data(read, (&self.device, dtype));
                let rows = self.tensor::<2>().select(0, indices);
                self.send((rows.shape().num_elements() * self.dtype.size()) as u64, &plain);
                rows.to_device(&plain)
            }
        };
        like(device, rows)
    }

    /// Consecutive rows of a matrix, on the same device.
    pub(super) fn row_range(&self, rows: Range<usize>) -> Self {
        Self::of(self.tensor::<2>().slice(rows), self.sharing.clone())
    }

    /// The tensor on a device of the backend.
    pub(super) fn read_on<B: Backend>(&self, device: &BackendDevice<B>) -> FloatTensor<B> {
        let handed = Handed::default();
        let _ = Dispatch::memsave_hand_over(self.tensor.clone(), handed.clone());
        let tensor = match handed.take::<B>() {
            Some(tensor) if tensor.device() == *device => return tensor,
            tensor => tensor,
        };
        match remote_device::<B>(device) {
            Some(device) => self.send(self.bytes(), &device),
            None => self.count(self.bytes()),
        }
        match tensor {
            Some(tensor) => B::float_to_device(tensor, device),
            None => B::float_from_data(self.data(), device),
        }
    }

    /// The copies on other devices.
    pub(super) fn resident(&self) -> Option<&Resident> {
        self.resident.as_ref()
    }

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(super) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn data(&self) -> TensorData {
        match self.shape.num_dims() {
            2 => self.data_of::<2>(),
            3 => self.data_of::<3>(),
            4 => self.data_of::<4>(),
            _ => self.data_of::<5>(),
        }
    }

    fn data_of<const D: usize>(&self) -> TensorData {
        let tensor = self.tensor::<D>();
        data(&self.device, move || tensor.try_into_data())
    }
}

impl fmt::Debug for DeviceWeight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, shape, dtype, .. } = self;
        f.debug_struct("DeviceWeight")
            .field("device", device)
            .field("shape", shape)
            .field("dtype", dtype)
            .finish_non_exhaustive()
    }
}

/// A place for the tensor of a backend, for who knows the backend.
#[derive(Clone, Default)]
pub struct Handed(Arc<Mutex<Option<Box<dyn Any + Send>>>>);

impl Handed {
    fn put<B: Backend>(&self, tensor: FloatTensor<B>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(tensor)); // replaced as a whole
    }

    /// The tensor, if it is of this backend.
    fn take<B: Backend>(&self) -> Option<FloatTensor<B>> {
        let tensor = self.0.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        Some(*tensor.downcast().ok()?)
    }
}

impl fmt::Debug for Handed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Handed")
    }
}

routed! {
    []
    /// Hands the tensor of a backend over.
    pub trait HandOver: Backend {
        /// Puts the tensor into a place.
        fn memsave_hand_over(tensor: FloatTensor<Self>, to: Handed) -> bool;
    }
}
plain_backends!(HandOver {
    fn memsave_hand_over(tensor: FloatTensor<Self>, to: Handed) -> bool {
        to.put::<Self>(tensor);
        true
    }
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_waits_when_more_would_be_on_its_way() {
        let (sharing, id) = (Sharing::new(0, 100), |index| DeviceId::new(0, index));
        let sent = [60, 40, 1, 99, 200, 1].map(|bytes| sharing.is_full(id(0), bytes));
        assert_eq!(sent, [false, false, true, false, true, true]);
        assert!(!sharing.is_full(id(1), 200), "one weight, however large");
    }
}
