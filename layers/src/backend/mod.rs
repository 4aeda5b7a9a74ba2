//! Building blocks that the kernels of several operations share. Nothing here knows an operation.
//!
//! A kernel is a method of a trait in the folder of its operation, in [`crate::ops`]. Its default body composes Burn's operations and
//! runs on any backend. The CPU backends, whose tensors are slices in memory, have fused loops instead ([`cpu`]), and devices may have
//! kernels of their own.
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape};

/// Implements an operation trait for every backend without autodiff, with its default bodies or with those given.
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

/// Implements kernels for every backend except those of the CPU, with their default bodies, which compose Burn's operations, or with
/// those given. Tests also implement them for [`Composed`](crate::backend::testing::Composed), to compare the default bodies with the
/// CPU's kernels.
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

/// Implements kernels for the backends that have neither loops nor kernels of this crate, with their default bodies or with those given.
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

/// [`composing_backends`], and also for devices with fusion: there, Burn makes one kernel of the composed elementwise operations and
/// those around them.
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
pub mod remote;
#[cfg(all(test, feature = "flex"))]
pub(crate) mod testing;

#[cfg(any(feature = "remote", all(test, feature = "flex")))]
pub use device_mask::DeviceMask;
pub use mask::Masks;

/// Something that is kept from the forward pass for the backward pass and is not a tensor of the graph.
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
            // Burn sums several axes one after the other, and would round after each of them. Along one axis, it rounds once.
            let rows = Shape::new([channels, len / channels.max(1)]);
            Self::float_sum_dim(Self::float_reshape(Self::float_swap_dims(x, 0, 1), rows), 1)
        };
        Self::float_reshape(sums, Shape::new([channels]))
    }
}
composing_backends!(ChannelSums);

/// Placeholders of tensors.
pub trait Placeholders: Backend {
    /// A tensor for operations that read the shape, dtype and device of an argument but never its elements. Nothing is written to it,
    /// and where the backend has views of stride zero, it takes the memory of one element.
    fn shape_only(shape: Shape, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::float_empty(shape, device, dtype.into())
    }

    /// A tensor whose elements are all written before they are read.
    fn unwritten(shape: Shape, dtype: DType, device: &Self::Device) -> FloatTensor<Self> {
        Self::float_empty(shape, device, dtype.into())
    }
}
device_backends!(Placeholders);

/// Products of a tensor and a number.
pub trait Scaling: Backend {
    /// `x * factor * by`, rounded once to the dtype of `x`; `factor` has one element, of any dtype. In place if `x` is the only handle of
    /// its tensor.
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

/// The size of a device; `None` on CPUs, and where it is not known.
pub trait Capacity: Backend {
    /// The number of multiprocessors, each of which computes some tiles of a matrix product.
    fn multiprocessors(_device: &Self::Device) -> Option<usize> {
        None
    }

    /// The number of tiles of a matrix product, each of 128 rows and columns, that keep every multiprocessor busy. Known only where
    /// measurements show that a product with fewer tiles is slower than several products, each with a part of the terms, and their sum.
    fn busy_tiles(_device: &Self::Device) -> Option<usize> {
        None
    }

    /// The bytes of its memory.
    fn memory(_device: &Self::Device) -> Option<u64> {
        None
    }

    /// The bytes of the largest tensor that can exist.
    fn largest(_device: &Self::Device) -> usize {
        usize::MAX
    }

    /// Bytes of a chunk that keeps every multiprocessor busy, if each takes `of_each` bytes. The result is at least `least`; above that, it
    /// is at most a 64th of the memory, and at most one tensor.
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

/// The dtype that sums are made in: f32 for half precision, else the dtype itself.
pub(crate) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        dtype => dtype,
    }
}

/// `x` in the dtype that sums are made in.
pub(crate) fn widen<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    match wide(x.dtype()) {
        dtype if dtype == x.dtype() => x,
        dtype => B::float_cast(x, dtype.into()),
    }
}

/// Zeros with the dtype and device of another tensor. (`float_zeros` of Flex 0.22.1 takes twice the memory for a moment.)
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
