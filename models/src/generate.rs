//! [`generate`]: tokens one after the other, for several prompts at once.
use crate::cache::KeyValueCache;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// A model that predicts the next token of a text.
pub trait Generate {
    /// The number of different tokens.
    fn vocabulary(&self) -> usize;

    /// The longest text, in tokens.
    fn length(&self) -> usize;

    /// Where its weights are, or will be.
    fn device(&self) -> Device;

    /// An empty cache. It stores keys and values in this dtype, or in that of the model.
    fn cache(&self, stored: Option<DType>) -> KeyValueCache;

    /// Logits `[batch, vocabulary]` of what follows `tokens`, `[batch, length]`, which follow those in the cache and go there, too. No layer
    /// computes more than `at_once` tokens of each text at a time.
    ///
    /// # Panics
    ///
    /// If there are no tokens, or more than the [`length`](Self::length) in all, if `at_once` is 0, if another model made the cache, or if its
    /// padding is that of another number of texts.
    fn next_logits(&self, tokens: Tensor<2, Int>, at_once: usize, cache: &mut KeyValueCache) -> Tensor<2>;
}

/// How tokens are chosen, and how many.
///
/// ```
/// use burn::tensor::DType;
/// use burn_memsave_models::{GenerateOptions, Sampling};
///
/// let sampling = Sampling { temperature: 0.7, top_p: Some(0.9), ..Sampling::default() };
/// let options = GenerateOptions::new(200)
///     .with_ends([2])
///     .with_sampling(sampling)
///     .with_cache_dtype(DType::F16);
/// ```
#[derive(Clone, Debug)]
pub struct GenerateOptions {
    most: usize,
    ends: Vec<u32>,
    sampling: Option<Sampling>,
    at_once: usize,
    stored: Option<DType>,
}

impl GenerateOptions {
    /// At most so many tokens, each the most probable one. A prompt is computed 512 tokens at a time, and the cache has the dtype of the model.
    pub fn new(most: usize) -> Self {
        Self { most, ends: vec![], sampling: None, at_once: 512, stored: None }
    }

    /// A text ends with the first of these tokens.
    pub fn with_ends(self, ends: impl Into<Vec<u32>>) -> Self {
        Self { ends: ends.into(), ..self }
    }

    /// Tokens are drawn.
    pub fn with_sampling(self, sampling: Sampling) -> Self {
        Self { sampling: Some(sampling), ..self }
    }

    /// So many tokens of a prompt are computed at a time; 1 if it is 0. The largest tensors of a layer grow with this number. Those that grow
    /// with the prompt are its features, three times, and the keys and values of one layer.
    pub fn with_tokens_at_once(self, tokens: usize) -> Self {
        Self { at_once: tokens.max(1), ..self }
    }

    /// The cache stores keys and values in this dtype, rounded: a dtype of floats, or `I8`. Integers of eight bits are multiplied with a scale for
    /// each token and head, the largest magnitude of its features by 127, so that they are off by at most a 254th of that.
    pub fn with_cache_dtype(self, dtype: DType) -> Self {
        Self { stored: Some(dtype), ..self }
    }
}

/// How tokens are drawn: from the `top_k` most probable ones, and of these from the fewest that have `top_p` of the probability together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// What logits are divided by.
    pub temperature: f64,
    /// All tokens, if `None`.
    pub top_k: Option<usize>,
    /// All of the probability, if `None`.
    pub top_p: Option<f64>,
    /// The same seed draws the same tokens from the same logits.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 1.0, top_k: None, top_p: None, seed: 0 }
    }
}

/// What was generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// For each prompt the tokens after it; the last one is that which ended the text, if one did.
    pub texts: Vec<Vec<u32>>,
    /// The bytes of keys and values at the end.
    pub cache_bytes: u64,
}

/// Why nothing can be generated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A prompt without tokens.
    #[error("prompt {prompt} has no tokens")]
    NoTokens {
        /// Its number, from 0.
        prompt: usize,
    },
    /// A prompt with a token that the model does not have.
    #[error("prompt {prompt} has the token {token}, and the model has {vocabulary} tokens")]
    UnknownToken {
        /// Its number, from 0.
        prompt: usize,
        /// The token.
        token: u32,
        /// The model's number of tokens.
        vocabulary: usize,
    },
    /// A cache in a dtype that is neither one of floats nor `I8`, or that the device does not have.
    #[error("keys and values cannot be stored in {0:?}")]
    CacheDtype(DType),
    /// Texts would be longer than the model's longest.
    #[error(
        "a prompt of {prompt} tokens and {more} more are too long for a model of at most {length} tokens"
    )]
    TooLong {
        /// Tokens of the longest prompt.
        prompt: usize,
        /// Tokens that were asked for.
        more: usize,
        /// The model's longest text.
        length: usize,
    },
    /// Every token would keep what a backward pass reads.
    #[error(
        "the model is on a device that tracks gradients; load it on one that does not, or generate with `model.valid()`"
    )]
    Tracked,
    /// The logits after a prompt are not finite: numbers became too large, as those of Gemmas do in f16.
    #[error("the logits after prompt {prompt} and {tokens} more tokens are not numbers; try bf16 or f32")]
    NotFinite {
        /// Its number, from 0.
        prompt: usize,
        /// The tokens that had been generated.
        tokens: usize,
    },
    /// A number of [`Sampling`] that cannot be meant.
    #[error("sampling with {name} {value}")]
    Sampling {
        /// The field.
        name: &'static str,
        /// Its value.
        value: f64,
    },
}

/// Generates tokens after each of the prompts, all of them at once, so that a weight that is read from a file serves all of them.
/// `on_token` is called with the number of the prompt and each token as it comes.
///
/// # Errors
///
/// If a prompt is empty, too long together with the tokens that are asked for, or has a token that the model does not have; if the options make
/// no sense; if the model is on a device that tracks gradients; or if its numbers became too large for their dtype.
pub fn generate(
    model: &(impl Generate + ?Sized),
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
    mut on_token: impl FnMut(usize, u32),
) -> Result<Generated, GenerateError> {
    check(model, prompts, options)?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let padding: Vec<usize> = prompts.iter().map(|prompt| longest - prompt.len()).collect();
    // With tokens of the prompt, since the features of other tokens may be too large for half precision.
    let padded = prompts.iter().zip(&padding).flat_map(|(prompt, &padding)| {
        core::iter::repeat_n(prompt[0], padding).chain(prompt.iter().copied())
    });
    let mut next: Vec<u32> = padded.collect();
    let mut texts = vec![vec![]; prompts.len()];
    let mut cache = model.cache(options.stored).with_padding(padding);
    let mut rng = options.sampling.map(|sampling| StdRng::seed_from_u64(sampling.seed));
    let has_ended = |text: &Vec<u32>| {
        text.len() == options.most || text.last().is_some_and(|last| options.ends.contains(last))
    };
    while !texts.iter().all(has_ended) {
        let data = TensorData::new(
            next.iter().map(|&token| i64::from(token)).collect::<Vec<_>>(),
            [texts.len(), next.len() / texts.len()],
        );
        let tokens = Tensor::<2, Int>::from_data(data, &model.device());
        let logits = model.next_logits(tokens, options.at_once, &mut cache);
        let [_, vocabulary] = logits.dims();
        let logits: Vec<f32> = logits.into_data().iter::<f32>().collect();
        if let Some(at) = logits.iter().position(|logit| logit.is_nan()) {
            let prompt = at / vocabulary;
            return Err(GenerateError::NotFinite { prompt, tokens: texts[prompt].len() });
        }
        next = logits
            .chunks_exact(vocabulary)
            .map(|logits| match (&options.sampling, &mut rng) {
                (Some(sampling), Some(rng)) => drawn(logits, sampling, rng.random()),
                _ => most_probable(logits),
            })
            .collect();
        for (prompt, (text, &token)) in texts.iter_mut().zip(&next).enumerate() {
            if !has_ended(text) {
                text.push(token);
                on_token(prompt, token);
            }
        }
    }
    Ok(Generated { texts, cache_bytes: cache.bytes() })
}

fn check(
    model: &(impl Generate + ?Sized),
    prompts: &[Vec<u32>],
    options: &GenerateOptions,
) -> Result<(), GenerateError> {
    if let Some(prompt) = prompts.iter().position(Vec::is_empty) {
        return Err(GenerateError::NoTokens { prompt });
    }
    let (prompt, more) = (prompts.iter().map(Vec::len).max().unwrap_or(0), options.most);
    let length = model.length();
    // The last token is not computed on.
    if prompt.saturating_add(more).saturating_sub(1) > length {
        return Err(GenerateError::TooLong { prompt, more, length });
    }
    let vocabulary = model.vocabulary();
    for (prompt, tokens) in prompts.iter().enumerate() {
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(GenerateError::UnknownToken { prompt, token, vocabulary });
        }
    }
    let is_stored =
        |dtype: DType| (dtype.is_float() || dtype == DType::I8) && model.device().supports_dtype(dtype);
    if let Some(dtype) = options.stored.filter(|&dtype| !is_stored(dtype)) {
        return Err(GenerateError::CacheDtype(dtype));
    }
    if model.device().is_autodiff() {
        return Err(GenerateError::Tracked);
    }
    let Some(Sampling { temperature, top_k, top_p, .. }) = options.sampling else { return Ok(()) };
    let wrong = |name, value| Err(GenerateError::Sampling { name, value });
    match (top_k, top_p) {
        _ if !(temperature > 0.0 && temperature.is_finite()) => wrong("temperature", temperature),
        (Some(0), _) => wrong("top_k", 0.0),
        (_, Some(p)) if !(p > 0.0 && p <= 1.0) => wrong("top_p", p),
        _ => Ok(()),
    }
}

/// The first of the largest logits.
fn most_probable(logits: &[f32]) -> u32 {
    let larger = |best: usize, at: usize| if logits[at] > logits[best] { at } else { best };
    (0..logits.len()).reduce(larger).unwrap_or(0) as u32
}

/// The token at `place`, from 0 to 1, of the tokens that may be drawn, in order of their probability.
fn drawn(logits: &[f32], sampling: &Sampling, place: f64) -> u32 {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    let falling = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    if let Some(k) = sampling.top_k.filter(|&k| k < order.len()) {
        order.select_nth_unstable_by(k - 1, falling);
        order.truncate(k);
    }
    order.sort_unstable_by(falling);
    let most = order.first().map_or(0.0, |&first| f64::from(logits[first as usize]));
    let weight = |token: &u32| ((f64::from(logits[*token as usize]) - most) / sampling.temperature).exp();
    let mut weights: Vec<f64> = order.iter().map(weight).collect();
    let all: f64 = weights.iter().sum();
    if let Some(p) = sampling.top_p {
        let mut sum = 0.0;
        let reaches = |weight: &f64| {
            sum += weight;
            sum >= p * all
        };
        let count = weights.iter().position(reaches).map_or(weights.len(), |at| at + 1);
        weights.truncate(count);
    }
    let mut rest = place * weights.iter().sum::<f64>();
    let passes = |weight: &f64| {
        rest -= weight;
        rest < 0.0
    };
    let at = weights.iter().position(passes).unwrap_or(weights.len().saturating_sub(1));
    order.get(at).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_drawn_as_often_as_they_are_probable() {
        let logits = [1.0f32, 3.0, -1.0, 2.0].map(|x| x * 0.5);
        let count = |sampling: Sampling| {
            let mut counts = [0; 4];
            // Places that are spread evenly.
            for place in 0..1000 {
                counts[drawn(&logits, &sampling, (place as f64 + 0.5) / 1000.0) as usize] += 1;
            }
            counts
        };
        let share = |of: &[usize], temperature: f64| {
            let weight = |at: &usize| (f64::from(logits[*at]) / temperature).exp();
            let all: f64 = of.iter().map(weight).sum();
            let mut counts = [0; 4];
            of.iter().for_each(|at| counts[*at] = (1000.0 * weight(at) / all).round() as i32);
            counts
        };
        let near = |counts: [i32; 4], expected: [i32; 4]| {
            assert!(counts.iter().zip(expected).all(|(a, b)| (a - b).abs() <= 1), "{counts:?}, {expected:?}");
        };
        let all = Sampling::default();
        near(count(all), share(&[0, 1, 2, 3], 1.0));
        near(count(Sampling { temperature: 0.3, ..all }), share(&[0, 1, 2, 3], 0.3));
        near(count(Sampling { top_k: Some(2), ..all }), share(&[1, 3], 1.0));
        near(count(Sampling { top_k: Some(9), ..all }), share(&[0, 1, 2, 3], 1.0));
        // The two most probable ones have 0.76, the first alone 0.47.
        near(count(Sampling { top_p: Some(0.7), ..all }), share(&[1, 3], 1.0));
        near(count(Sampling { top_p: Some(0.4), ..all }), share(&[1], 1.0));
        near(count(Sampling { top_p: Some(1.0), ..all }), share(&[0, 1, 2, 3], 1.0));
        assert_eq!(most_probable(&logits), 1);
        assert_eq!(most_probable(&[0.5, 0.5]), 0);
    }
}
