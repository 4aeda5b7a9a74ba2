//! Texts and images, and their batches.
use crate::text::tokenizer;
use burn::tensor::{Device, Tensor};
use burn_memsave::lazy::WeightFile;
use serde::Deserialize;
use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use tokenizers::TruncationParams;

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

/// The numbers of inputs of these lengths, for batches of at most so many tokens with padding. The longest come first: if they are too many for
/// memory, that shows at once.
pub fn batches(lengths: &[usize], at_once: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&input| std::cmp::Reverse(lengths[input]));
    let mut batches: Vec<Vec<usize>> = vec![];
    for input in order {
        match batches.last_mut() {
            Some(batch) if (batch.len() + 1) * lengths[batch[0]] <= at_once => batch.push(input),
            _ => batches.push(vec![input]),
        }
    }
    batches
}

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

/// Images in a file, of which a batch is read at a time.
pub struct Images {
    file: WeightFile,
    path: PathBuf,
    tokens: Vec<usize>,
}

/// The tensor of images.
const IMAGES: &str = "images";

impl Images {
    /// The images in a file, each of which becomes so many tokens.
    pub fn open(data: &Path, tokens: usize) -> Result<Self, Box<dyn Error>> {
        let file = WeightFile::open(data)?;
        let images = file.tensors().find(|tensor| tensor.name == IMAGES).map(|tensor| tensor.shape.to_vec());
        match images.as_deref() {
            Some([0, ..]) => Err(format!("{}: there are no images", data.display()).into()),
            Some(&[count, _, _, _]) => {
                Ok(Self { file, path: data.to_path_buf(), tokens: vec![tokens; count] })
            }
            Some(shape) => {
                Err(format!("{}: {IMAGES} is {shape:?}, and images have four axes", data.display()).into())
            }
            None => Err(format!("{}: there is no tensor {IMAGES}", data.display()).into()),
        }
    }
}

impl Inputs for Images {
    type Batch = Tensor<4>;

    fn tokens(&self) -> &[usize] {
        &self.tokens
    }

    fn batch(&self, numbers: &[usize]) -> Result<Self::Batch, Box<dyn Error>> {
        const BATCH: &str = "batch";
        let rows: Vec<_> = numbers.iter().map(|&image| (BATCH, image..image + 1)).collect();
        let file = self.file.clone().with_rows(&format!("^{IMAGES}$"), &rows)?;
        Ok(Tensor::from_data(file.read(BATCH)?, &Device::flex()))
    }

    fn names(&self, numbers: &[usize]) -> String {
        format!("{} images of {}", numbers.len(), self.path.display())
    }
}
