//! Texts as tokens, and their parts of a batch.
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde::Deserialize;
use serde_json::Value;
use std::error::Error;
use std::fs;
use std::path::Path;
use tokenizers::Tokenizer;

/// Tokens `[batch, length]`, those that follow, and 1 for each of these that is learned, 0 for any other.
pub type Part = (Tensor<2, Int>, (Tensor<2, Int>, Tensor<2>));

/// A line of the data.
#[derive(Deserialize)]
#[serde(untagged)]
enum Line {
    Text { text: String },
    Completion { prompt: String, completion: String },
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

impl Texts {
    /// The texts in a file, each cut after `length` predicted tokens.
    pub fn read(model: &Path, data: &Path, length: usize) -> Result<Self, Box<dyn Error>> {
        let tokenizer =
            Tokenizer::from_file(model.join("tokenizer.json")).map_err(|error| error.to_string())?;
        let end = end(model)?;
        let tokens = |text: &str, special: bool| -> Result<Vec<u32>, String> {
            let encoding = tokenizer.encode(text, special).map_err(|error| error.to_string())?;
            Ok(encoding.get_ids().to_vec())
        };
        let mut texts = vec![];
        let file = fs::read_to_string(data).map_err(|error| format!("{}: {error}", data.display()))?;
        for (number, line) in file.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let line: Line = serde_json::from_str(line)
                .map_err(|error| format!("{}, line {}: {error}", data.display(), number + 1))?;
            let (mut tokens, from) = match line {
                Line::Text { text } => (tokens(&text, true)?, 1),
                Line::Completion { prompt, completion } => {
                    let prompt = tokens(&prompt, true)?;
                    let from = prompt.len().max(1);
                    ([prompt, tokens(&completion, false)?].concat(), from)
                }
            };
            tokens.extend(end);
            tokens.truncate(length + 1);
            // Of a long prompt nothing may be left to learn.
            if tokens.len() > from {
                texts.push(Text { tokens, from });
            }
        }
        match texts.is_empty() {
            true => Err(format!("{}: there is nothing to learn", data.display()).into()),
            false => Ok(Self(texts)),
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

/// The token that ends a text, if there is one.
fn end(model: &Path) -> Result<Option<u32>, Box<dyn Error>> {
    let config: Value = serde_json::from_str(&fs::read_to_string(model.join("config.json"))?)?;
    let end = match &config["eos_token_id"] {
        Value::Array(ends) => ends.first().and_then(Value::as_u64),
        end => end.as_u64(),
    };
    Ok(end.and_then(|end| u32::try_from(end).ok()))
}
