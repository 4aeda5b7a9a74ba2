//! Texts as tokens, and their parts of a batch.
use crate::text::{ChatTemplate, Message, ends, tokenizer};
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde::Deserialize;
use std::error::Error;
use std::fs;
use std::path::Path;
use tokenizers::Tokenizer;

/// Tokens `[batch, length]`, those that follow, and 1 for each of these that is learned, 0 for any other.
pub type Part = (Tensor<2, Int>, (Tensor<2, Int>, Tensor<2>));

/// A line of the data.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected {\"text\"}, {\"prompt\", \"completion\"} or {\"messages\"}")]
enum Line {
    Completion { prompt: String, completion: String },
    Conversation { messages: Vec<Message> },
    Text { text: String },
}

/// A text of at least two tokens.
struct Text {
    tokens: Vec<u32>,
    /// The first token that is learned, at least 1.
    from: usize,
}

impl Text {
    fn learned(&self) -> usize {
        self.tokens.len() - self.from
    }
}

pub struct Texts(Vec<Text>);

/// Reads texts as tokens.
struct Reader {
    tokenizer: Tokenizer,
    template: Result<ChatTemplate, Box<dyn Error>>,
    end: Option<u32>,
    /// The number of tokens that the model has.
    vocabulary: usize,
    /// The most tokens that are predicted.
    length: usize,
}

impl Reader {
    /// A line; `None` if nothing of it is left to learn.
    fn read(&self, line: &str) -> Result<Option<Text>, Box<dyn Error>> {
        // The text, and how many of its bytes are only read. A template has the special tokens itself.
        let (text, read, is_template) = match serde_json::from_str(line)? {
            Line::Text { text } => (text, 0, false),
            Line::Completion { prompt, completion } => (prompt.clone() + &completion, prompt.len(), false),
            Line::Conversation { messages } => {
                let template = self.template.as_ref().map_err(|error| error.to_string())?;
                let text = template.apply(&messages, false)?;
                let before = messages.split_last().map_or(&[][..], |(_, before)| before);
                let prompt = template.apply(before, true).unwrap_or_default();
                let read = if text.starts_with(&prompt) { prompt.len() } else { 0 };
                (text, read, true)
            }
        };
        let encoding = self.tokenizer.encode(text, !is_template).map_err(|error| error.to_string())?;
        let mut tokens = encoding.get_ids().to_vec();
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= self.vocabulary) {
            return Err(format!("it has the token {token}, and the model has {}", self.vocabulary).into());
        }
        let is_learned = |&(_, end): &(usize, usize)| end > read;
        let from = encoding.get_offsets().iter().position(is_learned).unwrap_or(tokens.len()).max(1);
        if !is_template && tokens.last().copied() != self.end {
            tokens.extend(self.end);
        }
        tokens.truncate(self.length + 1);
        Ok((tokens.len() > from).then_some(Text { tokens, from }))
    }
}

impl Texts {
    /// The texts in a file, each cut after `length` predicted tokens, and the number of those of which nothing is left to learn.
    pub fn read(
        model: &Path,
        data: &Path,
        vocabulary: usize,
        length: usize,
    ) -> Result<(Self, usize), Box<dyn Error>> {
        let (tokenizer, template) = (tokenizer(model)?, ChatTemplate::read(model));
        let reader = Reader { tokenizer, template, end: ends(model)?.first().copied(), vocabulary, length };
        if reader.end.is_none() {
            println!("no token ends a text, so the model does not learn to end one");
        }
        let file = fs::read_to_string(data).map_err(|error| format!("{}: {error}", data.display()))?;
        let (mut texts, mut dropped) = (vec![], 0);
        for (number, line) in file.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let text = reader.read(line);
            match text.map_err(|error| format!("{}, line {}: {error}", data.display(), number + 1))? {
                Some(text) => texts.push(text),
                None => dropped += 1,
            }
        }
        match texts.is_empty() {
            true => Err(format!("{}: there is nothing to learn", data.display()).into()),
            false => Ok((Self(texts), dropped)),
        }
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Tokens to learn.
    pub fn learned(&self) -> usize {
        self.0.iter().map(Text::learned).sum()
    }

    /// The length of the longest text, without its last token.
    pub fn longest(&self) -> usize {
        self.0.iter().map(|text| text.tokens.len() - 1).max().unwrap_or(0)
    }

    /// The parts of the batch of a step, each with its number of tokens to learn. Every pass over the texts has another order.
    pub fn parts(
        &self,
        step: usize,
        batch_size: usize,
        at_once: usize,
        seed: u64,
        device: &Device,
    ) -> impl Iterator<Item = (Part, f64)> {
        let of_pass = self.0.len().div_ceil(batch_size);
        let mut order: Vec<usize> = (0..self.0.len()).collect();
        order.shuffle(&mut StdRng::seed_from_u64(seed ^ (step / of_pass) as u64));
        let first = step % of_pass * batch_size;
        order.truncate(first + batch_size);
        let batch: Vec<&Text> = order[first..].iter().map(|&text| &self.0[text]).collect();
        let parts: Vec<Vec<&Text>> = batch.chunks(at_once).map(<[_]>::to_vec).collect();
        parts.into_iter().map(|texts| {
            let learned: usize = texts.iter().map(|text| text.learned()).sum();
            (part(&texts, device), learned as f64)
        })
    }

    /// A part of so many texts, all of them the longest.
    pub fn longest_part(&self, at_once: usize, device: &Device) -> Part {
        let longest = self.0.iter().max_by_key(|text| text.tokens.len());
        part(&vec![longest.expect("there is a text"); at_once], device)
    }
}

/// The texts next to each other, with padding after shorter ones, which no other token sees.
fn part(texts: &[&Text], device: &Device) -> Part {
    let length = texts.iter().map(|text| text.tokens.len() - 1).max().unwrap_or(0);
    let padded = |first: usize| {
        let tokens = texts.iter().flat_map(|text| {
            (first..first + length).map(|at| text.tokens.get(at).map_or(0, |&token| i64::from(token)))
        });
        let data = TensorData::new(tokens.collect::<Vec<_>>(), [texts.len(), length]);
        Tensor::from_data(data, device)
    };
    let learned = texts.iter().flat_map(|text| {
        (1..=length).map(|at| if (text.from..text.tokens.len()).contains(&at) { 1.0f32 } else { 0.0 })
    });
    let learned = TensorData::new(learned.collect::<Vec<_>>(), [texts.len(), length]);
    (padded(0), (padded(1), Tensor::from_data(learned, device)))
}
