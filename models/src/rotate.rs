//! Rotations of heads by their positions, for both kinds of layers.
use burn::tensor::Tensor;

/// Rotates `[batch, heads, tokens, width]`, the first token of which is at `start`: pairs of features from both halves, or neighbors.
pub(crate) fn rotate(
    encoding: &burn_memsave::nn::RotaryEncoding,
    x: Tensor<4>,
    start: usize,
    halves: bool,
) -> Tensor<4> {
    if halves { encoding.apply_halves(x, start) } else { encoding.apply(x, start) }
}

/// The same by Burn's layer, which rotates neighbors.
#[cfg(feature = "stock")]
pub(crate) fn rotate_by_burn(
    encoding: &burn::nn::RotaryEncoding,
    x: Tensor<4>,
    start: usize,
    halves: bool,
) -> Tensor<4> {
    assert!(!halves, "only models with burn-memsave's layers are made with halves");
    encoding.apply(x, start)
}
