//! [`DeviceWeight`]: a weight that is on one device, from which layers on other devices read it.
use super::resident::{DeviceBudget, Resident, like};
use crate::backend::plain_backends;
use crate::burn_next::routed;
use burn::backend::{
    Backend, Dispatch, DispatchTensor, TensorMetadata,
    tensor::{Device as BackendDevice, FloatTensor},
};
use burn::tensor::{DType, Device, Int, Shape, Tensor, TensorData};
use core::any::Any;
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicU64, Ordering};
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
    /// The bytes that left the owner.
    sent: Arc<AtomicU64>,
}

impl DeviceWeight {
    /// A weight that is this tensor, on its device. What is sent from there is added to `sent`, in bytes.
    ///
    /// # Panics
    ///
    /// Panics if the tensor has one axis or more than five, or is quantized.
    pub fn new<const D: usize>(tensor: Tensor<D>, budget: Arc<DeviceBudget>, sent: Arc<AtomicU64>) -> Self {
        assert!((2..=5).contains(&D), "a weight of {D} axes cannot be read from another device");
        assert!(
            tensor.dtype().is_float(),
            "a weight of {:?} cannot be read from another device",
            tensor.dtype()
        );
        let bytes = (tensor.shape().num_elements() * tensor.dtype().size()) as u64;
        Self { resident: Some(Resident::on_any_device(budget, bytes)), ..Self::of(tensor, sent) }
    }

    fn of<const D: usize>(tensor: Tensor<D>, sent: Arc<AtomicU64>) -> Self {
        let tensor = tensor.without_autodiff();
        let (device, shape, dtype) = (tensor.device(), tensor.shape(), tensor.dtype());
        Self { tensor: tensor.into_dispatch(), device, shape, dtype, resident: None, sent }
    }

    /// The owner.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Counts the bytes that are sent from the owner.
    pub fn sent(&self) -> &Arc<AtomicU64> {
        &self.sent
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
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The tensor on a device, and whether the device is the owner, so that holding the tensor takes no further memory.
    pub(super) fn on<const D: usize>(&self, device: &Device) -> (Tensor<D>, bool) {
        let (tensor, plain) = (self.tensor::<D>(), device.clone().without_autodiff());
        let is_owner = plain == self.device;
        let tensor = match is_owner {
            true => tensor,
            false => {
                self.count(self.bytes());
                tensor.to_device(&plain)
            }
        };
        (like(device, tensor), is_owner)
    }

    /// The rows with these indices `[count]`, on a device: chosen on the owner, so that no others are sent.
    pub(super) fn rows(&self, indices: Tensor<1, Int>, device: &Device) -> Tensor<2> {
        let plain = device.clone().without_autodiff();
        let indices = indices.without_autodiff();
        let here = self.resident.as_ref().and_then(|resident| resident.get::<2>(&plain));
        let rows = match here {
            Some(table) => table.select(0, indices),
            None if plain == self.device => self.tensor::<2>().select(0, indices),
            None => {
                let rows = self.tensor::<2>().select(0, indices.to_device(&self.device));
                self.count((rows.shape().num_elements() * self.dtype.size()) as u64);
                rows.to_device(&plain)
            }
        };
        like(device, rows)
    }

    /// Consecutive rows of a matrix, on the same device.
    pub(super) fn row_range(&self, rows: Range<usize>) -> Self {
        Self::of(self.tensor::<2>().slice(rows), self.sent.clone())
    }

    /// The tensor on a device of the backend.
    pub(super) fn read_on<B: Backend>(&self, device: &BackendDevice<B>) -> FloatTensor<B> {
        let handed = Handed::default();
        let _ = Dispatch::memsave_hand_over(self.tensor.clone(), handed.clone());
        match handed.take::<B>() {
            Some(tensor) if tensor.device() == *device => tensor,
            Some(tensor) => {
                self.count(self.bytes());
                B::float_to_device(tensor, device)
            }
            None => {
                self.count(self.bytes());
                B::float_from_data(self.data(), device)
            }
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
            2 => self.tensor::<2>().into_data(),
            3 => self.tensor::<3>().into_data(),
            4 => self.tensor::<4>().into_data(),
            _ => self.tensor::<5>().into_data(),
        }
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
