//! [`Tensors`]: what goes into a segment and comes out of it.
use burn::tensor::{Bool, Int, Tensor};

/// A tensor, or a structure of tensors: what goes into a [checkpointed](super::checkpoint) segment and comes out of it.
///
/// This is implemented for tensors, for tuples, arrays, vectors and options of such structures, and for numbers. For a structure of your
/// own, name the fields:
///
/// ```
/// use burn::tensor::{Bool, Tensor};
/// use burn_memsave::checkpoint::{TensorMapper, Tensors};
///
/// #[derive(Clone)]
/// struct Batch {
///     tokens: Tensor<3>,
///     mask: Option<Tensor<2, Bool>>,
/// }
///
/// impl Tensors for Batch {
///     fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
///         Self { tokens: self.tokens.map_tensors(mapper), mask: self.mask.map_tensors(mapper) }
///     }
/// }
/// ```
pub trait Tensors: Clone + Send + 'static {
    /// Replaces every tensor by what the mapper returns, always in the same order.
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self;
}

/// Replaces tensors.
pub trait TensorMapper {
    /// Replaces a tensor of floats.
    fn map_float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D>;
    /// Replaces a tensor of integers.
    fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int>;
    /// Replaces a tensor of booleans.
    fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool>;
    /// Replaces the tensor of an [`EarlyStop`].
    fn map_early_stop<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        self.map_float(tensor)
    }
}

/// Only floats have gradients.
macro_rules! untouched {
    () => {
        fn map_int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
            tensor
        }
        fn map_bool<const D: usize>(&mut self, tensor: Tensor<D, Bool>) -> Tensor<D, Bool> {
            tensor
        }
    };
}
pub(super) use untouched;

impl<const D: usize> Tensors for Tensor<D> {
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
        mapper.map_float(self)
    }
}

/// An output of a [checkpointed](super::checkpoint) segment whose elements nothing in the segment reads.
///
/// If the last operation of the segment computes it, and is a dense layer of this library (with an adapter or without) or a convolution, it
/// is not recomputed in the backward pass, since no gradient reads it. The function then gets a tensor in its place whose elements mean
/// nothing: it must not compute other outputs from them, nor branch on them. The first two times with the same parameters, the output is
/// recomputed and compared; if the segment ends with something else, that happens every time.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::checkpoint::{EarlyStop, checkpoint};
/// use burn_memsave::nn::transformer::PositionWiseFeedForwardConfig;
///
/// let device = Device::flex().autodiff();
/// let block = PositionWiseFeedForwardConfig::new(8, 32).init(&device);
/// let x = Tensor::<3>::ones([2, 5, 8], &device).require_grad();
/// let EarlyStop(y) = checkpoint(&block, x.clone(), |block, x| EarlyStop(block.forward(x)));
/// let gradients = (x.clone() + y).sum().backward(); // the residual sum is outside, so that the product is the end
/// assert!(x.grad(&gradients).is_some());
/// ```
#[derive(Clone, Debug)]
pub struct EarlyStop<const D: usize>(pub Tensor<D>);

impl<const D: usize> Tensors for EarlyStop<D> {
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
        Self(mapper.map_early_stop(self.0))
    }
}

impl<const D: usize> Tensors for Tensor<D, Int> {
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
        mapper.map_int(self)
    }
}

impl<const D: usize> Tensors for Tensor<D, Bool> {
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
        mapper.map_bool(self)
    }
}

impl<T: Tensors> Tensors for Option<T> {
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
        self.map(|tensors| tensors.map_tensors(mapper))
    }
}

impl<T: Tensors> Tensors for Vec<T> {
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
        self.into_iter().map(|tensors| tensors.map_tensors(mapper)).collect()
    }
}

impl<T: Tensors, const N: usize> Tensors for [T; N] {
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
        self.map(|tensors| tensors.map_tensors(mapper))
    }
}

macro_rules! tuples {
    ($(($($name:ident),*))+) => {$(
        impl<$($name: Tensors),*> Tensors for ($($name,)*) {
            #[allow(non_snake_case, unused_variables, clippy::unused_unit)]
            fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
                let ($($name,)*) = self;
                ($($name.map_tensors(mapper),)*)
            }
        }
    )+};
}
tuples!(()(A)(A, B)(A, B, C)(A, B, C, E)(A, B, C, E, F)(A, B, C, E, F, G));

macro_rules! numbers {
    ($($number:ty),+) => {$(
        impl Tensors for $number {
            fn map_tensors(self, _: &mut impl TensorMapper) -> Self {
                self
            }
        }
    )+};
}
numbers!(bool, usize, u32, u64, i32, i64, f32, f64);
