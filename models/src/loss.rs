// The loss of a language model, written once. The module that includes this file chooses `nn` and `functional`.
use burn::tensor::{Int, Tensor};
use functional::linear;
use nn::loss::CrossEntropyLossConfig;

/// The mean cross entropy of the outputs of a head.
pub fn next_token_loss(
    x: Tensor<3>,
    head: Tensor<2>,
    bias: Option<Tensor<1>>,
    next: Tensor<2, Int>,
) -> Tensor<1> {
    let logits = linear(x, head, bias).flatten(0, 1);
    CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, next.flatten(0, 1))
}
