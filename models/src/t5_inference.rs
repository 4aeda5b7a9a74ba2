// What only a model of burn-memsave's layers can do: answers, one token after the other.
use crate::cache::{KeyValueCache, Part, bytes_of};
use crate::features::padding;
use crate::generate::Generate;
use burn::tensor::DType;

/// A [`T5`] that has read texts, and answers each of them: [`generate`](crate::generate()) takes it. There is a prompt for each text; it begins with the
/// token with which all answers begin, `decoder_start_token_id` in `config.json`, 0 as a rule.
#[derive(Debug)]
pub struct Reader<'a> {
    model: &'a T5,
    /// For each block of the decoder, keys and values of the texts.
    states: Vec<[Tensor<4>; 2]>,
    /// Their padding.
    unseen: Option<Tensor<4, Bool>>,
    texts: usize,
}

impl T5 {
    /// Reads texts, each a list of tokens that ends with the token of the end (1 as a rule). Their keys and values stay in memory, in the dtype of
    /// the model.
    ///
    /// # Errors
    ///
    /// Those of [`features`](crate::features()), except for numbers that are too large.
    pub fn reader(&self, texts: &[Vec<u32>]) -> Result<Reader<'_>, FeatureError> {
        let batch = texts.to_vec();
        let HiddenStates { states: memory, lengths } = self.hidden_states(&batch, None)?;
        let [texts, longest, _] = memory.dims();
        let crosses = self.decoder.blocks.iter().filter_map(|block| block.cross.as_ref());
        let states = crosses.map(|cross| cross.attention.keys_and_values(memory.clone())).collect();
        let unseen = unseen(padding([texts, longest], &lengths, &memory.device()));
        Ok(Reader { model: self, states, unseen, texts })
    }
}

impl Reader<'_> {
    /// The bytes of keys and values of the texts.
    pub fn bytes(&self) -> u64 {
        self.states.iter().map(bytes_of).sum()
    }
}

impl Generate for Reader<'_> {
    fn vocabulary(&self) -> usize {
        self.model.words.weight.lazy_shape()[0]
    }

    /// Positions are distances, of which the longest share a class.
    fn length(&self) -> usize {
        usize::MAX
    }

    fn device(&self) -> Device {
        FeatureEncoder::device(self.model)
    }

    fn cache(&self, stored: Option<DType>) -> KeyValueCache {
        KeyValueCache::new(self.model.decoder.blocks.len(), stored)
    }

    /// # Panics
    ///
    /// Also if there is not one prompt for each text.
    fn next_logits(&self, tokens: Tensor<2, Int>, at_once: usize, cache: &mut KeyValueCache) -> Tensor<2> {
        let ([prompts, length], decoder) = (tokens.dims(), &self.model.decoder);
        assert_eq!(prompts, self.texts, "a prompt for each text");
        assert!(at_once > 0, "some tokens at once");
        let (begin, device) = (cache.tokens(), tokens.device());
        let biases = (0..length).step_by(at_once).map(|first| {
            let end = length.min(first + at_once);
            decoder.bias(begin + first..begin + end, false, &device)
        });
        let biases: Vec<_> = biases.collect();
        let blocks: Vec<_> = decoder.blocks.iter().zip(&self.states).collect();
        let x = self.model.words.forward(tokens);
        let x = cache.pass(
            &blocks,
            x,
            at_once,
            |_| None,
            |(block, states), x, part| {
                let bias = biases[(part.start - begin) / at_once].clone();
                block.decoded(x, bias, part, (*states).clone(), self.unseen.clone())
            },
        );
        let x = self.model.scaled(decoder.normalized(x.narrow(1, length - 1, 1)));
        let logits = match &self.model.head {
            Some(head) => head.forward(x),
            None => self.model.words.logits(x),
        };
        logits.squeeze_dim(1)
    }
}

impl Block {
    /// The next tokens of answers to texts with these keys and values, and this padding.
    fn decoded(
        &self,
        x: Tensor<3>,
        bias: Tensor<4>,
        part: Part<'_>,
        texts: [Tensor<4>; 2],
        padding: Option<Tensor<4, Bool>>,
    ) -> Tensor<3> {
        let y = self.attention_norm.forward(x.clone());
        let states = self.attention.keys_and_values(y.clone());
        let states = match part.before {
            Some(before) => before.extend(states),
            None => states,
        };
        let seen = Seen { bias: Some(bias), is_causal: part.unseen.is_none(), unseen: part.unseen };
        let mut x = x + self.attention.forward(y, states, seen);
        if let Some(cross) = &self.cross {
            x = self.crossed(cross, x, texts, padding);
        }
        self.fed_forward(x)
    }
}
