//! [`Texts`]: the lines of a file.
use crate::inputs::Inputs;
use crate::text::tokenizer;
use serde::Deserialize;
use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;
use tokenizers::{PostProcessor, TruncationParams};

/// Texts as tokens.
pub struct Texts {
    texts: Vec<Vec<u32>>,
    lengths: Vec<usize>,
}

/// A line of JSON.
#[derive(Deserialize)]
struct Line {
    text: String,
}

impl Texts {
    /// The texts in a file, in lines. None may have more than `most` tokens; longer ones are cut if `cut` is given.
    pub fn read(
        model: &Path,
        data: &Path,
        most: Option<usize>,
        cut: Option<usize>,
    ) -> Result<Self, Box<dyn Error>> {
        let mut tokenizer = tokenizer(model)?;
        if let Some(cut) = cut {
            let max_length = most.map_or(cut, |most| cut.min(most));
            let special = tokenizer.get_post_processor().map_or(0, |processor| processor.added_tokens(false));
            if max_length <= special {
                let what =
                    format!("{max_length} tokens of a text, of which {special} are special, are too few");
                return Err(format!("--truncate: {what}").into());
            }
            let truncation = TruncationParams { max_length, ..TruncationParams::default() };
            tokenizer.with_truncation(Some(truncation)).map_err(|error| error.to_string())?;
        }
        let is_json = data.extension().is_some_and(|end| end == "jsonl");
        let tokens = |line: &str| -> Result<Vec<u32>, Box<dyn Error>> {
            let text = if is_json { serde_json::from_str::<Line>(line)?.text } else { line.into() };
            let encoding = tokenizer.encode(text, true).map_err(|error| error.to_string())?;
            match (encoding.len(), most) {
                (0, _) => Err("it has no tokens".into()),
                (tokens, Some(most)) if tokens > most => {
                    let help = "`--truncate` cuts texts";
                    Err(format!("it has {tokens} tokens, and the longest text has {most}; {help}").into())
                }
                _ => Ok(encoding.get_ids().to_vec()),
            }
        };
        let file = File::open(data).map_err(|error| format!("{}: {error}", data.display()))?;
        let texts = BufReader::new(file).lines().enumerate().map(|(number, line)| {
            let line = line.map_err(Box::<dyn Error>::from);
            let text = line.and_then(|line| tokens(&line));
            text.map_err(|error| format!("{}, line {}: {error}", data.display(), number + 1))
        });
        let texts = texts.collect::<Result<Vec<_>, _>>()?;
        match texts.is_empty() {
            true => Err(format!("{}: there are no texts", data.display()).into()),
            false => Ok(Self { lengths: texts.iter().map(Vec::len).collect(), texts }),
        }
    }
}

impl Inputs for Texts {
    type Batch = Vec<Vec<u32>>;

    fn tokens(&self) -> &[usize] {
        &self.lengths
    }

    fn batch(&self, numbers: &[usize]) -> Result<Self::Batch, Box<dyn Error>> {
        Ok(numbers.iter().map(|&text| self.texts[text].clone()).collect())
    }

    fn names(&self, numbers: &[usize]) -> String {
        let lines: Vec<String> = numbers.iter().map(|text| (text + 1).to_string()).collect();
        format!("the lines {}", lines.join(", "))
    }
}
