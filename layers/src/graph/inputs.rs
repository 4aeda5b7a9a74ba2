//! The inputs of an operation.
use burn::backend::tensor::FloatTensor;

/// The inputs of an operation that gradients may flow to; `None` for an optional one that is not given.
pub type Inputs<B, const N: usize> = [Option<FloatTensor<B>>; N];

/// An input that is always given.
pub fn given<T>(input: Option<T>) -> T {
    input.expect("an input that is not optional")
}
