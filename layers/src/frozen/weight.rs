//! The trait of frozen weights, and how one is read into a tensor.
use super::device_weight::DeviceWeight;
use super::packed_rows::PackedRows;
use super::resident::{Resident, like};
use burn::tensor::{Bytes, DType, Device, Shape, Tensor, TensorData};
use core::fmt::Debug;
use core::ops::Range;
use std::sync::Arc;

/// A weight that can be read any number of times, with the same result every time.
pub trait FrozenWeight: Debug + Send + Sync {
    /// The shape of the weight.
    fn shape(&self) -> Shape;

    /// The dtype in which the weight is read.
    fn dtype(&self) -> DType;

    /// Reads the weight.
    ///
    /// # Panics
    ///
    /// Panics if the weight can no longer be read, since a forward pass has no other way to fail.
    fn read(&self) -> TensorData;

    /// Reads the transposed weight, if it is stored so: a layer then uses it as a view with swapped strides, without a copy. Only a weight
    /// of two axes can be stored transposed. By default, none is.
    ///
    /// # Panics
    ///
    /// As [`read`](Self::read).
    fn read_transposed(&self) -> Option<TensorData> {
        None
    }

    /// The tensors of the weight that stay on devices between its uses. By default, none do.
    fn resident(&self) -> Option<&Resident> {
        None
    }

    /// The weight on the device that owns it, if it is on one: then layers copy it from there, and do not read its data. By default, it is on
    /// none.
    fn on_device(&self) -> Option<&DeviceWeight> {
        None
    }

    /// Reads the rows (entries of the first axis) with these indices, in the order of the indices.
    ///
    /// # Panics
    ///
    /// As [`read`](Self::read), and for an index beyond the last row.
    fn read_rows(&self, rows: &[usize]) -> TensorData {
        let (table, mut shape) = (self.read(), self.shape());
        let size = table.bytes().len() / shape[0].max(1);
        let bytes: Vec<u8> =
            rows.iter().flat_map(|row| &table.bytes()[row * size..][..size]).copied().collect();
        shape[0] = rows.len();
        TensorData::from_bytes(Bytes::from_bytes_vec(bytes), shape, self.dtype())
    }

    /// Reads consecutive rows. By default, these are [rows](Self::read_rows) as any others.
    ///
    /// # Panics
    ///
    /// As [`read_rows`](Self::read_rows).
    fn read_row_range(&self, rows: Range<usize>) -> TensorData {
        self.read_rows(&rows.collect::<Vec<_>>())
    }

    /// How many columns of a matrix `[rows, columns]` a layer should read at a time, where it can, because the whole is too large. By default
    /// it is read whole.
    fn columns_at_once(&self) -> Option<usize> {
        None
    }

    /// The rows of the weight, or of its transpose, if they are packed: products of few rows on a CPU then unpack them instead of reading the
    /// weight. By default, nothing is packed.
    fn packed_rows(&self, of_transpose: bool) -> Option<&dyn PackedRows> {
        let _ = of_transpose;
        None
    }

    /// Reads consecutive columns of a matrix that is not to be [read whole](Self::columns_at_once), transposed: `[count, rows]`.
    ///
    /// # Panics
    ///
    /// As [`read`](Self::read), and for a column beyond the last one. By default, for every weight.
    fn read_transposed_columns(&self, columns: Range<usize>) -> TensorData {
        panic!("{self:?} is read whole, and not the columns {columns:?}")
    }
}

impl FrozenWeight for DeviceWeight {
    fn shape(&self) -> Shape {
        DeviceWeight::shape(self).clone()
    }

    fn dtype(&self) -> DType {
        DeviceWeight::dtype(self)
    }

    fn read(&self) -> TensorData {
        self.data()
    }

    fn resident(&self) -> Option<&Resident> {
        DeviceWeight::resident(self)
    }

    fn on_device(&self) -> Option<&DeviceWeight> {
        Some(self)
    }
}

/// Consecutive rows of a table, or of the transpose of a matrix, as a weight of their own.
#[derive(Debug)]
pub(super) struct RowBlock {
    pub table: Arc<dyn FrozenWeight>,
    /// Whether they are columns of the matrix.
    pub of_transpose: bool,
    pub rows: Range<usize>,
    /// The rows on the device that owns the table, if it is on one.
    pub owned: Option<DeviceWeight>,
}

impl RowBlock {
    pub fn new(table: Arc<dyn FrozenWeight>, of_transpose: bool, rows: Range<usize>) -> Self {
        let owned = table.on_device().filter(|_| !of_transpose).map(|table| table.row_range(rows.clone()));
        Self { table, of_transpose, rows, owned }
    }
}

impl FrozenWeight for RowBlock {
    fn shape(&self) -> Shape {
        let mut shape = self.table.shape();
        if self.of_transpose {
            shape.swap(0, 1);
        }
        shape[0] = self.rows.len();
        shape
    }

    fn dtype(&self) -> DType {
        self.table.dtype()
    }

    fn on_device(&self) -> Option<&DeviceWeight> {
        self.owned.as_ref()
    }

    fn read(&self) -> TensorData {
        match self.of_transpose {
            true => self.table.read_transposed_columns(self.rows.clone()),
            false => self.table.read_row_range(self.rows.clone()),
        }
    }
}

/// Reads a weight into a tensor; also returns whether the tensor stays on the device.
///
/// Operations, and the bytes of the weights that they read, may wait in a queue of the device, so that many weights would be in host memory
/// at once. So what waits is sent off before the next weight is read. Nobody waits for the device itself.
///
/// If the runtime has pinned memory, the bytes are copied there first, into a buffer that is free again when the device has them. (In
/// CubeCL 0.11.3 on CUDA, the buffer is from a pool of the stream; for weights of 100 MiB or more, the driver does this, in pieces.)
///
/// Copies to a device are enqueued on the stream of this thread, as kernels are (CubeCL 0.11.3). So nobody waits here for the copy, which
/// begins when the kernels of the earlier layers, now in the queue, have run. Reading ahead on another thread would not help: on wgpu,
/// which has one queue, the copy would begin no earlier. On CUDA it could run beside the kernels, on the stream of that thread, but each
/// stream has its own memory pools, so that the weights read ahead would take memory in addition to that of the layers.
pub(super) fn read_tensor<const D: usize>(weight: &dyn FrozenWeight, device: &Device) -> (Tensor<D>, bool) {
    let resident = weight.resident();
    if let Some(tensor) = resident.and_then(|resident| resident.get(device)) {
        return (tensor, true);
    }
    if let Some(owned) = weight.on_device() {
        let (tensor, is_owner) = owned.on::<D>(device);
        let stays = is_owner || resident.is_some_and(|resident| resident.keep(&tensor));
        return (tensor, stays);
    }
    let _ = device.flush(); // a failure of the device shows in the next operation
    let tensor = match weight.read_transposed() {
        Some(transposed) => {
            let plain = device.clone().without_autodiff();
            like(device, Tensor::from_data(transposed, (&plain, weight.dtype())).transpose())
        }
        None => Tensor::from_data(weight.read(), (device, weight.dtype())),
    };
    let stays = resident.is_some_and(|resident| resident.keep(&tensor));
    (tensor, stays)
}
