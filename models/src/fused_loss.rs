// The loss of `loss.rs`, with logits that are computed in chunks. The module that includes this file chooses `nn` and `functional`.
use burn::tensor::{Int, Tensor};
use functional::LinearCrossEntropyOptions;
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
    let factors = counts.map(|counts| (counts.clone() / counts.sum().unsqueeze()).flatten::<1>(0, 1));
    let options = LinearCrossEntropyOptions { softcap, factors, ..Default::default() };
    let (x, next) = (x.flatten(0, 1), next.flatten(0, 1));
    match head {
        Some(head) => head.cross_entropy(x, next, options),
        None => words.cross_entropy(x, next, options),
    }
}
