// What only a model of burn-memsave's layers can do: text, one token after the other.
use crate::cache::{KeyValueCache, bytes_of};
use crate::generate::Generate;
use burn::tensor::DType;

/// A [`Whisper`] that has heard sounds, and writes what it heard in each of them: [`generate`](crate::generate()) takes it. There is a prompt for each
/// sound, with the tokens of the start, the language and the task.
///
/// Tokens that `generation_config.json` suppresses are not suppressed. Among its `begin_suppress_tokens` is the
/// token of the end, so a text may be empty here where it is not in Python.
#[derive(Debug)]
pub struct Listener<'a> {
    model: &'a Whisper,
    /// For each block of the decoder, keys and values of the sounds.
    states: Vec<[Tensor<4>; 2]>,
    sounds: usize,
}

impl Whisper {
    /// Hears sounds, log-mel spectrograms `[batch, mels, frames]` as Python's `WhisperFeatureExtractor` makes them. Their keys and values stay in
    /// memory, in the dtype of the model.
    ///
    /// # Errors
    ///
    /// Those of [`features`](crate::features()), except for numbers that are too large.
    pub fn listener(&self, sounds: Tensor<3>) -> Result<Listener<'_>, FeatureError> {
        let memory = self.hidden_states(&sounds, None)?.states;
        let states = self.blocks.iter().map(|block| block.cross.keys_and_values(memory.clone()));
        Ok(Listener { model: self, states: states.collect(), sounds: memory.dims()[0] })
    }
}

impl Listener<'_> {
    /// The bytes of keys and values of the sounds.
    pub fn bytes(&self) -> u64 {
        self.states.iter().map(bytes_of).sum()
    }
}

impl Generate for Listener<'_> {
    fn vocabulary(&self) -> usize {
        self.model.words.weight.lazy_shape()[0]
    }

    fn length(&self) -> usize {
        self.model.token_positions.weight.lazy_shape()[0]
    }

    fn device(&self) -> Device {
        FeatureEncoder::device(self.model)
    }

    fn cache(&self, stored: Option<DType>) -> KeyValueCache {
        KeyValueCache::new(self.model.blocks.len(), stored)
    }

    /// # Panics
    ///
    /// Also if there is not one prompt for each sound.
    fn next_logits(&self, tokens: Tensor<2, Int>, at_once: usize, cache: &mut KeyValueCache) -> Tensor<2> {
        let [prompts, length] = tokens.dims();
        assert_eq!(prompts, self.sounds, "a prompt for each sound");
        let places = cache.places(length, &tokens.device());
        let blocks: Vec<_> = self.model.blocks.iter().zip(&self.states).collect();
        let x = self.model.embedded(tokens, places);
        let x = cache.pass(
            &blocks,
            x,
            at_once,
            |_| None,
            |(block, states), x, part| block.forward(x, (*states).clone(), part),
        );
        let x = self.model.norm.forward(x.narrow(1, length - 1, 1));
        self.model.words.logits(x).squeeze_dim(1)
    }
}
