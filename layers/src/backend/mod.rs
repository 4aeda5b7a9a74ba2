//! What the kernels of operations share; it knows no operation.
//!
//! A kernel is a method of a trait in the room of its operation, in [`crate::ops`]. Its default body composes Burn's operations,
//! and runs on any backend. The CPU backends, whose tensors are slices in memory ([`cpu`]), have fused loops instead.
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};

/// Implements an operation trait for every plain backend: by its default bodies, or by those given.
macro_rules! plain_backends {
    ($ops:ident) => {
        plain_backends!($ops {});
    };
    ($ops:ident $bodies:tt) => {
        #[cfg(feature = "flex")]
        impl $ops for burn::backend::Flex $bodies
        #[cfg(feature = "ndarray")]
        impl $ops for burn::backend::NdArray $bodies
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        impl $ops for burn::backend::Cube $bodies
        #[cfg(feature = "remote")]
        impl $ops for burn::backend::Remote $bodies
    };
}

/// Implements kernels for every backend but those of the CPU: by their default bodies, which compose Burn's operations, or by
/// those given. In tests also for [`Composed`](crate::backend::testing::Composed), to compare the default bodies with the kernels of
/// the CPU.
macro_rules! device_backends {
    ($kernels:ident) => {
        device_backends!($kernels {});
    };
    ($kernels:ident $bodies:tt) => {
        #[cfg(any(feature = "wgpu", feature = "cuda"))]
        impl $kernels for burn::backend::Cube $bodies
        #[cfg(feature = "remote")]
        impl $kernels for burn::backend::Remote $bodies
        #[cfg(all(test, feature = "flex"))]
        impl $kernels for crate::backend::testing::Composed $bodies
    };
}
pub(crate) use {device_backends, plain_backends};

/// Implements kernels for the backends that have neither loops nor kernels of ours, by their default bodies or by those given.
macro_rules! composing_backends {
    ($kernels:ident) => {
        $crate::backend::composing_backends!($kernels {});
    };
    ($kernels:ident $bodies:tt) => {
        #[cfg(feature = "remote")]
        impl $kernels for burn::backend::Remote $bodies
        #[cfg(all(test, feature = "flex"))]
        impl $kernels for crate::backend::testing::Composed $bodies
    };
}
pub(crate) use composing_backends;

/// [`composing_backends`], and devices where operations are fused: there, Burn makes one kernel of a composition of elementwise
/// operations, and of those around it.
macro_rules! fusing_backends {
    ($kernels:ident) => {
        $crate::backend::composing_backends!($kernels);
        #[cfg(all(any(feature = "wgpu", feature = "cuda"), feature = "fusion"))]
        impl $kernels for burn::backend::Cube {}
    };
}
pub(crate) use fusing_backends;

#[cfg(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda"))]
pub mod axis_map;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
pub mod cube;
#[cfg(any(feature = "remote", all(test, feature = "flex")))]
mod device_mask;
#[cfg(feature = "flex")]
mod flex;
mod mask;
#[cfg(feature = "ndarray")]
mod ndarray;
pub mod optional;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod testing;

#[cfg(any(feature = "remote", all(test, feature = "flex")))]
pub use device_mask::DeviceMask;
pub use mask::Masks;

/// Something kept from the forward pass for the backward pass that is no tensor of the graph.
pub trait Saved: Clone + Send + core::fmt::Debug + 'static {
    /// The bytes it keeps alive.
    fn bytes(&self) -> usize;
}

impl<S: Saved> Saved for Vec<S> {
    fn bytes(&self) -> usize {
        self.iter().map(Saved::bytes).sum()
    }
}

/// Sums over all axes but the channels.
pub trait ChannelSums: Backend {
    /// `[batch, channels, ...]` to `[channels]`.
    fn sum_to_channels(x: FloatTensor<Self>) -> FloatTensor<Self> {
        let [channels, len] = [x.shape()[1], x.shape().num_elements()];
        let sums = if wide(x.dtype()) == x.dtype() {
            let axes: Vec<usize> = (0..x.rank()).filter(|&axis| axis != 1).collect();
            Self::float_sum_dims(x, &axes)
        } else {
            // Along one axis, so that it is rounded once: sums along several are made one after the other.
            let rows = Shape::new([channels, len / channels.max(1)]);
            Self::float_sum_dim(Self::float_reshape(Self::float_swap_dims(x, 0, 1), rows), 1)
        };
        Self::float_reshape(sums, Shape::new([channels]))
    }
}
composing_backends!(ChannelSums);

/// Placeholders of tensors.
pub trait Placeholders: Backend {
    /// A tensor for operations that read the shape, dtype and device of an argument but never its elements: nothing is
    /// written, and where the backend has views of stride zero nothing of that size exists.
    fn shape_only(shape: Shape, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::float_empty(shape, device, dtype.into())
    }

    /// A tensor of which every element is written before it is read.
    fn unwritten(shape: Shape, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::float_empty(shape, device, dtype.into())
    }
}
device_backends!(Placeholders);

/// Products with one factor.
pub trait Scaling: Backend {
    /// `x * factor * by`, `factor` a tensor of one element, of any dtype; rounded once to the dtype of `x`. In place if `x` is the
    /// only handle.
    fn scale(x: FloatTensor<Self>, factor: FloatTensor<Self>, by: f64) -> FloatTensor<Self> {
        let dtype = x.dtype();
        let common = if factor.dtype().size() > dtype.size() { factor.dtype() } else { dtype };
        let factor = Self::float_reshape(factor, Shape::from(vec![1; x.rank()]));
        let [x, factor] = [x, factor].map(|x| Self::float_cast(x, wide(common).into()));
        let factor = if by == 1.0 { factor } else { Self::float_mul_scalar(factor, by.into()) };
        Self::float_cast(Self::float_mul(x, factor), dtype.into())
    }
}
composing_backends!(Scaling);

/// What a device has. `None` where nothing is known, and on CPUs.
pub trait Capacity: Backend {
    /// How many multiprocessors work on one matrix product, each on a tile of its result.
    fn multiprocessors(_device: &Self::Device) -> Option<usize> {
        None
    }

    /// Tiles of a matrix product, of 128 rows and columns, that it takes to keep every multiprocessor busy. Only where
    /// one product with few of them was measured to be slower than Burn's many with a part of the terms each, which are added up.
    fn busy_tiles(_device: &Self::Device) -> Option<usize> {
        None
    }

    /// The bytes of its memory.
    fn memory(_device: &Self::Device) -> Option<u64> {
        None
    }

    /// The bytes of the largest tensor that there can be.
    fn largest(_device: &Self::Device) -> usize {
        usize::MAX
    }

    /// As many bytes as every multiprocessor has something to do with, if each takes so many: at least `least`, beyond that no more than
    /// a 64th of the memory, and than one tensor can have.
    fn busy_bytes(device: &Self::Device, least: usize, of_each: usize) -> usize {
        let (multiprocessors, memory) = (Self::multiprocessors(device), Self::memory(device));
        busy_bytes(multiprocessors, memory, Self::largest(device), least, of_each)
    }
}
composing_backends!(Capacity);

fn busy_bytes(
    multiprocessors: Option<usize>,
    memory: Option<u64>,
    largest: usize,
    least: usize,
    of_each: usize,
) -> usize {
    let share = memory.map(|bytes| usize::try_from(bytes / 64).unwrap_or(usize::MAX));
    let most = share.unwrap_or(usize::MAX).min(largest);
    multiprocessors.map_or(least, |count| least.max(count.saturating_mul(of_each).min(most)))
}

/// The type that sums are made in: f32 for the half precisions.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

/// A tensor in the type that sums are made in.
pub(crate) fn widen<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    match wide(x.dtype()) {
        dtype if dtype == x.dtype() => x,
        dtype => B::float_cast(x, dtype.into()),
    }
}

/// Zeros of the dtype and device of another tensor: `float_zeros` of Flex 0.22.1 takes twice the memory for a moment.
pub(crate) fn zeros<B: Backend>(shape: Shape, like: &FloatTensor<B>) -> FloatTensor<B> {
    B::float_full(shape, 0.0.into(), &like.device(), like.dtype().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_keep_a_device_busy_within_its_memory() {
        let bytes = |multiprocessors, memory| busy_bytes(multiprocessors, memory, usize::MAX, 1000, 50);
        assert_eq!(bytes(None, Some(1 << 30)), 1000);
        assert_eq!(bytes(Some(10), None), 1000);
        assert_eq!(bytes(Some(100), Some(1 << 30)), 5000);
        assert_eq!(bytes(Some(100), Some(64 * 3000)), 3000);
        assert_eq!(bytes(Some(100), Some(64)), 1000);
        assert_eq!(busy_bytes(Some(100), Some(1 << 30), 2000, 1000, 50), 2000);
    }
}
