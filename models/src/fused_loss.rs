// The loss of `loss.rs`, with logits that are computed in chunks. The module that includes this file chooses `functional`.
use burn::tensor::{Int, Tensor};
use functional::linear_cross_entropy;

/// The mean cross entropy of the outputs of a head.
pub fn next_token_loss(
    x: Tensor<3>,
    head: Tensor<2>,
    bias: Option<Tensor<1>>,
    next: Tensor<2, Int>,
) -> Tensor<1> {
    linear_cross_entropy(x.flatten(0, 1), head, bias, next.flatten(0, 1), Default::default())
}
