//! [`Inputs`] of an encoder, and their batches.
use std::cmp::Reverse;
use std::error::Error;

/// Inputs of an encoder.
pub trait Inputs {
    type Batch;

    /// The number of tokens of each.
    fn tokens(&self) -> &[usize];

    /// Some of them.
    fn batch(&self, numbers: &[usize]) -> Result<Self::Batch, Box<dyn Error>>;

    /// What some of them are called in messages.
    fn names(&self, numbers: &[usize]) -> String;
}

/// The numbers of inputs of these lengths, for batches of at most so many tokens with padding, or of one input. The longest come first: if they
/// are too many for memory, that shows at once.
pub fn batches(lengths: &[usize], at_once: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&input| Reverse(lengths[input]));
    let mut batches: Vec<Vec<usize>> = vec![];
    for input in order {
        match batches.last_mut() {
            Some(batch) if (batch.len() + 1).saturating_mul(lengths[batch[0]]) <= at_once => {
                batch.push(input);
            }
            _ => batches.push(vec![input]),
        }
    }
    batches
}
