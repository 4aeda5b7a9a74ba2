//! The inputs of an operation, some of which may be optional.
use burn::backend::tensor::FloatTensor;

/// The inputs of an operation that gradients may flow to. `None`: an optional input that is not given.
pub type Inputs<B, const N: usize> = [Option<FloatTensor<B>>; N];

/// Unwraps an input that is always given.
pub fn given<T>(input: Option<T>) -> T {
    input.expect("an input that is not optional")
}
