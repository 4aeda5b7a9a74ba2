// The loss of a language model, written once. The module that includes this file chooses `nn` and `functional`.
use burn::tensor::{Int, Tensor, activation::log_softmax};
use functional::linear;
use nn::loss::CrossEntropyLossConfig;
use nn::{Embedding, Linear};

/// The mean cross entropy of the outputs of a head, or of a table that is the head; with a softcap of the logits. With `counts`, the mean of
/// those tokens for which it is 1, not 0.
pub fn next_token_loss(
    x: Tensor<3>,
    words: &Embedding,
    head: Option<&Linear>,
    softcap: Option<f64>,
    next: Tensor<2, Int>,
    counts: Option<Tensor<2>>,
) -> Tensor<1> {
    let logits = match head {
        Some(head) => head.forward(x),
        None => linear(x, words.weight.val().transpose(), None),
    };
    let logits = match softcap {
        Some(cap) => (logits / cap).tanh() * cap,
        None => logits,
    };
    let (logits, next) = (logits.flatten::<2>(0, 1), next.flatten::<1>(0, 1));
    let Some(counts) = counts else {
        return CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, next);
    };
    let counts = counts.flatten::<1>(0, 1);
    let chosen = log_softmax(logits, 1).gather(1, next.unsqueeze_dim(1)).squeeze_dim::<1>(1);
    -(chosen * counts.clone()).sum() / counts.sum()
}
