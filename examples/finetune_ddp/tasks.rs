//! What the example trains: a language model with adapters, or a residual network with batch norms.
use super::{
    Args,
    checkpoint::{ADAPTERS, Saved},
};
use burn::module::{Lora, Module, ParamGroup};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::nn::loss::CrossEntropyLossConfig;
use digits::Digit;
use llama::{LanguageModel, Size, memsave::Llama};
use std::error::Error;
use std::ops::Range;
use text::{FINETUNE, Passages, Vocabulary};

#[path = "../finetune/digits.rs"]
mod digits;
#[path = "../finetune_lm/llama.rs"]
#[allow(dead_code, reason = "the other example generates text, and has the model of Burn's layers, too")]
mod llama;
mod net {
    use burn_memsave::nn;
    include!("../finetune/model.rs");
}
#[path = "../finetune_lm/text.rs"]
#[allow(dead_code, reason = "the other example generates text, too")]
mod text;

/// An image classifier.
trait Classifier: Module {
    fn new(device: &Device) -> Self;
    /// Logits `[batch, 10]` of images `[batch, 1, 8, 8]`.
    fn forward(&self, images: Tensor<4>) -> Tensor<2>;
}

/// A model and its data.
pub trait Task: Sized {
    type Model: Module;
    type Batch: Clone + Send;
    /// What checkpoints save.
    const SAVED: Saved;
    /// Whether the gradient jumps: a rounding error can change the sign of the input of a ReLU. In a few steps, gradients then differ by
    /// more than rounding errors, so that the median of all steps is judged.
    const HAS_JUMPS: bool;

    fn new(args: &Args) -> Result<Self, Box<dyn Error>>;
    /// The settings that determine the frozen weights and the batches of a run.
    fn settings(args: &Args) -> String;
    /// The model, whose frozen weights may be divided afterwards.
    fn model(&self, device: &Device) -> Self::Model;
    /// The model with what is attached to frozen weights.
    fn adapted(&self, model: Self::Model) -> Self::Model {
        model
    }
    /// The next batch.
    fn next(&mut self, device: &Device) -> Self::Batch;
    /// Rows of a batch, on a device.
    fn part(batch: &Self::Batch, rows: Range<usize>, device: &Device) -> Self::Batch;
    fn loss(model: &Self::Model, batch: Self::Batch) -> Tensor<1>;
}

/// Predicts the next character of a text, with adapters of a frozen language model.
pub struct Language {
    size: Size,
    lora: Lora,
    passages: Passages,
}

pub const HEADS: usize = 4;

impl Task for Language {
    type Model = Llama;
    type Batch = text::Batch;
    const SAVED: Saved = ADAPTERS;
    const HAS_JUMPS: bool = false;

    fn new(args: &Args) -> Result<Self, Box<dyn Error>> {
        let vocabulary = Vocabulary::new();
        let size = Size {
            vocabulary: vocabulary.len(),
            width: args.width,
            heads: HEADS,
            hidden: (args.width * 8 / 3).next_multiple_of(32),
            blocks: args.blocks,
            length: args.length,
        };
        let group = ParamGroup::from_regex(r"^blocks\..*\.weight$").map_err(|error| format!("{error:?}"))?;
        let lora = Lora::new(args.rank, 16.0).set_param_group(group);
        let shape = [args.batch_size, args.length];
        Ok(Self { size, lora, passages: Passages::new(vocabulary.tokens(FINETUNE), shape, args.seed)? })
    }

    fn settings(args: &Args) -> String {
        let Args { seed, width, blocks, length, rank, batch_size, learning_rate, .. } = args;
        format!(
            "seed {seed}, width {width}, {blocks} blocks, length {length}, rank {rank}, batch size {batch_size}, rate {learning_rate}"
        )
    }

    fn model(&self, device: &Device) -> Llama {
        Llama::new(&self.size, device).freeze()
    }

    fn adapted(&self, model: Llama) -> Llama {
        model.apply_lora(self.lora.clone())
    }

    fn next(&mut self, device: &Device) -> text::Batch {
        self.passages.next(device)
    }

    fn part((tokens, next): &text::Batch, rows: Range<usize>, device: &Device) -> text::Batch {
        let of = |tensor: &Tensor<2, Int>| tensor.clone().slice(rows.clone()).to_device(device);
        (of(tokens), of(next))
    }

    fn loss(model: &Llama, (tokens, next): text::Batch) -> Tensor<1> {
        model.loss(tokens, next)
    }
}

/// Classifies images of digits with a residual network, of which everything is trained.
pub struct Digits {
    train: Vec<Digit>,
    batch_size: usize,
    done: usize,
}

impl Task for Digits {
    type Model = net::Net;
    type Batch = digits::Batch;
    const SAVED: Saved = Saved { paths: ".", file: "model.bpk" };
    const HAS_JUMPS: bool = true;

    fn new(args: &Args) -> Result<Self, Box<dyn Error>> {
        let (train, _) = digits::load()?;
        Ok(Self { train: digits::shuffled(&train, args.seed), batch_size: args.batch_size, done: 0 })
    }

    fn settings(args: &Args) -> String {
        let Args { seed, batch_size, learning_rate, .. } = args;
        format!("digits, seed {seed}, batch size {batch_size}, rate {learning_rate}")
    }

    fn model(&self, device: &Device) -> net::Net {
        Classifier::new(device)
    }

    fn next(&mut self, device: &Device) -> digits::Batch {
        let start = self.done * self.batch_size;
        let next = (start..start + self.batch_size).map(|at| self.train[at % self.train.len()].clone());
        self.done += 1;
        digits::batch(&next.collect::<Vec<_>>(), device)
    }

    fn part((images, labels): &digits::Batch, rows: Range<usize>, device: &Device) -> digits::Batch {
        (images.clone().slice(rows.clone()).to_device(device), labels.clone().slice(rows).to_device(device))
    }

    fn loss(model: &net::Net, (images, labels): digits::Batch) -> Tensor<1> {
        let logits = model.forward(images);
        CrossEntropyLossConfig::new().init(&logits.device()).forward(logits, labels)
    }
}
