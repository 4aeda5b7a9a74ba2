// The loss of a language model, written once. The module that includes this file chooses `nn` and `functional`.
use burn::tensor::{Int, Tensor};
use functional::linear;
use nn::loss::CrossEntropyLossConfig;
use nn::{Embedding, Linear};

/// The mean cross entropy of the outputs of a head, or of a table that is the head; with a softcap of the logits.
pub fn next_token_loss(
    x: Tensor<3>,
    words: &Embedding,
    head: Option<&Linear>,
    softcap: Option<f64>,
    next: Tensor<2, Int>,
) -> Tensor<1> {
    let logits = match head {
        Some(head) => head.forward(x),
        None => linear(x, words.weight.val().transpose(), None),
    };
    let logits = match softcap {
        Some(cap) => (logits / cap).tanh() * cap,
        None => logits,
    };
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits.flatten(0, 1), next.flatten(0, 1))
}
