//! The texts of this repository as tokens, one for each character.
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use std::collections::BTreeSet;

/// What the model learns first: the documents of this repository.
pub const PRETRAIN: &str = concat!(
    include_str!("../../README.md"),
    include_str!("../../CONTRIBUTING.md"),
    include_str!("../../CHANGELOG.md")
);

/// What it is fine-tuned to: legal prose.
pub const FINETUNE: &str = include_str!("../../LICENSE-APACHE");

/// A batch of tokens `[batch, length]`, and of the tokens that follow them.
pub type Batch = (Tensor<2, Int>, Tensor<2, Int>);

/// All characters of both texts, in order.
pub struct Vocabulary(Vec<char>);

impl Vocabulary {
    pub fn new() -> Self {
        let characters: BTreeSet<char> = PRETRAIN.chars().chain(FINETUNE.chars()).collect();
        Self(characters.into_iter().collect())
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The tokens of a text. Characters that are not in the vocabulary are left out.
    pub fn tokens(&self, text: &str) -> Vec<i64> {
        text.chars().filter_map(|c| self.0.binary_search(&c).ok()).map(|token| token as i64).collect()
    }

    pub fn text(&self, tokens: &[i64]) -> String {
        tokens.iter().filter_map(|&token| self.0.get(token as usize)).collect()
    }
}

/// Random passages of a text, which depend on the seed only.
pub struct Passages {
    tokens: Vec<i64>,
    shape: [usize; 2],
    rng: StdRng,
}

impl Passages {
    /// `shape` is that of a batch, `[batch, length]`.
    pub fn new(tokens: Vec<i64>, shape: [usize; 2], seed: u64) -> Result<Self, String> {
        let [_, length] = shape;
        if tokens.len() <= length {
            return Err(format!("a text of {} characters has no passage of {length}", tokens.len()));
        }
        Ok(Self { tokens, shape, rng: StdRng::seed_from_u64(seed) })
    }

    pub fn next(&mut self, device: &Device) -> Batch {
        let [batch, length] = self.shape;
        let last = self.tokens.len() - length;
        let starts: Vec<usize> = (0..batch).map(|_| self.rng.random_range(0..last)).collect();
        let of = |shift: usize| {
            let passage = |&start: &usize| self.tokens[start + shift..start + shift + length].iter().copied();
            let tokens: Vec<i64> = starts.iter().flat_map(passage).collect();
            Tensor::from_data(TensorData::new(tokens, self.shape), device)
        };
        (of(0), of(1))
    }
}

/// The next token, drawn from logits.
pub fn draw(logits: &[f32], temperature: f32, rng: &mut StdRng) -> usize {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weights: Vec<f32> = logits.iter().map(|logit| ((logit - largest) / temperature).exp()).collect();
    let mut left = rng.random_range(0.0..1.0) * weights.iter().sum::<f32>();
    let chosen = weights.iter().position(|weight| {
        left -= weight;
        left < 0.0
    });
    chosen.unwrap_or(logits.len() - 1)
}
