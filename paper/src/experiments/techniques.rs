//! Techniques, each alone and then together, on one language model: the bytes and the time of a whole step of training.
use super::language::{Tuning, lora, projections, with_lora};
use super::models::{parameter_bytes, tokens_of, with_next};
use super::step::{NOT_COUNTED, in_use, median};
use super::{Failure, Measured, Output, Part, Settings, Table, mib, ratio};
use burn::module::{QLora, Quantizer};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::measure::{Scope, measure_step, peak_bytes};
use burn_memsave::optim::{AdamW8bitConfig, step_in_backward};
use burn_memsave::plan::micro_batched;
use burn_memsave::saved::SavedPolicy;
use burn_memsave_paper::text::llama::{LanguageModel, checkpointed, memsave, swapped, written_out};
use burn_memsave_paper::{Case, Tracked};
use serde::{Deserialize, Serialize};
use std::time::Instant;

pub struct Techniques;

/// What a technique needs.
#[derive(Serialize, Deserialize)]
pub struct Row {
    technique: String,
    parameter_bytes: u64,
    /// What the optimizer keeps between steps.
    state_bytes: u64,
    kept_bytes: Option<u64>,
    /// The most bytes at one time in a training step, including parameters, state and gradients.
    most_bytes: u64,
    seconds: f64,
    /// The time of plain Burn in the same run.
    burn_seconds: f64,
}

/// What is trained.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Trained {
    All,
    LastQuarter,
    Lora,
    /// LoRA on a base of 8 bits.
    QLora,
}

/// How a model is trained.
#[derive(Clone)]
struct Training {
    trained: Trained,
    policy: SavedPolicy,
    is_8bit: bool,
    in_backward: bool,
    /// How many parts a batch has. Their gradients are computed one after the other.
    parts: usize,
}

const PLAIN: Training = Training {
    trained: Trained::All,
    policy: SavedPolicy::Keep,
    is_8bit: false,
    in_backward: false,
    parts: 1,
};

/// Tokens, and those that follow.
type Batch = (Tensor<2, Int>, Tensor<2, Int>);

/// The loss of a model.
type Loss<M> = fn(&M, Tensor<2, Int>, Tensor<2, Int>) -> Tensor<1>;

/// A model that is trained one step at a time.
struct Trainer<M> {
    /// `None` only during a step.
    model: Option<M>,
    optimizer: ModuleOptimizer,
    training: Training,
    loss: Loss<M>,
    batch: Batch,
}

trait Train {
    fn step(&mut self) -> Result<(), Failure>;
    fn parameter_bytes(&self) -> u64;
    /// The bytes that a batch, or a part of it, keeps.
    fn kept_bytes(&self) -> Option<u64>;
}

impl<M: LanguageModel> Trainer<M> {
    fn new(tuning: &Tuning, training: Training, loss: Loss<M>, device: &Device) -> Self {
        let model = M::new(&tuning.size, device);
        let model = match training.trained {
            Trained::All => model,
            Trained::LastQuarter => Case::batch(Tracked::LastQuarter).prepare(model),
            Trained::Lora => with_lora(model, tuning.rank),
            Trained::QLora => {
                let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
                let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
                quantizer.set_param_group(projections());
                model.apply_qlora(QLora::new(lora(tuning.rank), quantizer))
            }
        };
        let optimizer = match training.is_8bit {
            true => AdamW8bitConfig::new().init_for(&model),
            false => AdamWConfig::new().init(),
        };
        let tokens = tokens_of([tuning.batch, tuning.size.length], tuning.size.vocabulary, device);
        let batch = with_next(tokens, tuning.size.vocabulary);
        Self { model: Some(model), optimizer, training, loss, batch }
    }

    /// The function that computes the loss of a batch, or of a part of it.
    fn loss(&self) -> impl Fn(&M, Batch) -> Tensor<1> + use<M> {
        let (loss, policy) = (self.loss, self.training.policy.clone());
        move |model, (tokens, next)| policy.scope(|| loss(model, tokens, next))
    }

    /// The parts of the batch.
    fn parts(&self) -> Vec<Batch> {
        let (tokens, next) = self.batch.clone();
        let size = tokens.dims()[0].div_ceil(self.training.parts);
        tokens.split(size, 0).into_iter().zip(next.split(size, 0)).collect()
    }
}

/// What the model learns does not matter here.
const LEARNING_RATE: f64 = 1e-5;

impl<M: LanguageModel> Train for Trainer<M> {
    fn step(&mut self) -> Result<(), Failure> {
        let (batch, loss) = (self.batch.clone(), self.loss());
        let model = self.model.take().ok_or("the step before failed")?;
        self.model = Some(match &self.training {
            Training { in_backward: true, .. } => {
                step_in_backward(model, &mut self.optimizer, LEARNING_RATE, |model| loss(model, batch))
                    .map_err(|refused| refused.error)?
                    .0
            }
            Training { parts: 1, .. } => {
                let gradients = GradientsParams::from_grads(loss(&model, batch).backward(), &model);
                self.optimizer.step(LEARNING_RATE, model, gradients)
            }
            _ => {
                drop(batch);
                let parts = self.parts().into_iter().map(|part| (part.clone(), part.0.dims()[0]));
                let (_, gradients) = micro_batched(&model, parts, loss)?;
                self.optimizer.step(LEARNING_RATE, model, gradients)
            }
        });
        Ok(())
    }

    fn parameter_bytes(&self) -> u64 {
        self.model.as_ref().map_or(0, parameter_bytes)
    }

    fn kept_bytes(&self) -> Option<u64> {
        measure_step(self.model.as_ref()?, self.parts().swap_remove(0), self.loss()).kept
    }
}

type Made = Result<Box<dyn Train>, Failure>;

type Make = fn(&Tuning, &Device) -> Made;

fn trainer<M: LanguageModel + 'static>(tuning: &Tuning, training: Training, device: &Device) -> Made {
    Ok(Box::new(Trainer::<M>::new(tuning, training, M::loss, device)))
}

fn burn(tuning: &Tuning, device: &Device) -> Made {
    trainer::<written_out::Llama>(tuning, PLAIN, device)
}

/// The techniques. "+" means: together with the swap, `SwiGlu`, and the fused head and loss.
const TECHNIQUES: [(&str, Make); 19] = [
    ("Burn, AdamW, all parameters", burn),
    ("the swap", |tuning, device| trainer::<swapped::Llama>(tuning, PLAIN, device)),
    ("the swap, head and loss in one", |tuning, device| {
        let loss = swapped::Llama::head_and_loss;
        Ok(Box::new(Trainer::new(tuning, PLAIN, loss, device)))
    }),
    ("the swap, SwiGlu, head and loss in one", |tuning, device| {
        trainer::<memsave::Llama>(tuning, PLAIN, device)
    }),
    ("Burn, all but the last quarter frozen", |tuning, device| {
        trainer::<written_out::Llama>(tuning, Training { trained: Trained::LastQuarter, ..PLAIN }, device)
    }),
    ("+ all but the last quarter frozen", |tuning, device| {
        trainer::<memsave::Llama>(tuning, Training { trained: Trained::LastQuarter, ..PLAIN }, device)
    }),
    ("Burn, LoRA of rank 16", |tuning, device| {
        trainer::<written_out::Llama>(tuning, Training { trained: Trained::Lora, ..PLAIN }, device)
    }),
    ("+ LoRA of rank 16", |tuning, device| {
        trainer::<memsave::Llama>(tuning, Training { trained: Trained::Lora, ..PLAIN }, device)
    }),
    ("+ QLoRA of rank 16, in 8 bits", |tuning, device| {
        trainer::<memsave::Llama>(tuning, Training { trained: Trained::QLora, ..PLAIN }, device)
    }),
    ("+ the batch in two parts", |tuning, device| {
        trainer::<memsave::Llama>(tuning, Training { parts: 2, ..PLAIN }, device)
    }),
    ("+ every block checkpointed", |tuning, device| trainer::<checkpointed::Llama>(tuning, PLAIN, device)),
    ("+ saved tensors in half as many bits", |tuning, device| {
        trainer::<memsave::Llama>(tuning, Training { policy: SavedPolicy::Half, ..PLAIN }, device)
    }),
    ("+ saved tensors in 8 bits", |tuning, device| {
        trainer::<memsave::Llama>(tuning, Training { policy: SavedPolicy::Int8, ..PLAIN }, device)
    }),
    ("+ saved tensors on disk", |tuning, device| {
        let policy = SavedPolicy::disk(std::env::temp_dir())?;
        trainer::<memsave::Llama>(tuning, Training { policy, ..PLAIN }, device)
    }),
    ("+ AdamW8bit", |tuning, device| {
        trainer::<memsave::Llama>(tuning, Training { is_8bit: true, ..PLAIN }, device)
    }),
    ("+ updates in the backward pass", |tuning, device| {
        trainer::<memsave::Llama>(tuning, Training { in_backward: true, ..PLAIN }, device)
    }),
    ("+ all of it, all parameters: checkpointed, AdamW8bit, in the backward pass", |tuning, device| {
        trainer::<checkpointed::Llama>(tuning, Training { is_8bit: true, in_backward: true, ..PLAIN }, device)
    }),
    ("+ LoRA, checkpointed", |tuning, device| {
        trainer::<checkpointed::Llama>(tuning, Training { trained: Trained::Lora, ..PLAIN }, device)
    }),
    ("+ LoRA, checkpointed, 8 bits", |tuning, device| {
        let training = Training { trained: Trained::Lora, policy: SavedPolicy::Int8, ..PLAIN };
        trainer::<checkpointed::Llama>(tuning, training, device)
    }),
];

/// Measures one technique, timed in turns with Burn.
fn measure(name: &str, make: Make, settings: &Settings) -> Result<Vec<Row>, Failure> {
    let (device, tuning) = (settings.autodiff(), Tuning::of(settings));
    // Nothing else is alive while memory is counted.
    let mut trainer = make(&tuning, &device)?;
    let kept_bytes = trainer.kept_bytes();
    let before = in_use(&device)?;
    trainer.step()?;
    device.memory_cleanup(); // the peak of a device is what its pool reserved
    let between = in_use(&device)?;
    let state_bytes = between.saturating_sub(before);
    let parameter_bytes = trainer.parameter_bytes();
    let scope = Scope::start();
    trainer.step()?;
    device.sync()?;
    let peak = peak_bytes(&device).ok_or(NOT_COUNTED)?;
    let most_bytes = parameter_bytes + state_bytes + peak.saturating_sub(between);
    drop(scope);
    let mut burn = burn(&tuning, &device)?;
    burn.step()?;
    let mut times = [vec![], vec![]];
    for _ in 0..settings.turns() {
        for (trainer, times) in [&mut burn, &mut trainer].into_iter().zip(&mut times) {
            device.sync()?;
            let start = Instant::now();
            trainer.step()?;
            device.sync()?;
            times.push(start.elapsed().as_secs_f64());
        }
    }
    let [burn_seconds, seconds] = times.map(median);
    Ok(vec![Row {
        technique: name.into(),
        parameter_bytes,
        state_bytes,
        kept_bytes,
        most_bytes,
        seconds,
        burn_seconds,
    }])
}

impl Measured for Techniques {
    type Row = Row;
    const NAME: &'static str = "techniques";
    const ABOUT: &'static str =
        "each technique alone and together, on one language model, for a whole step of training";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        let part = |(name, make): (&'static str, Make)| {
            let settings = settings.clone();
            Part::new(name, move || measure(name, make, &settings))
        };
        TECHNIQUES.into_iter().map(part).collect()
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        let header = [
            "technique",
            "parameters (MiB)",
            "optimizer (MiB)",
            "kept (MiB)",
            "most at one time (MiB)",
            "of Burn",
            "step (s)",
            "of Burn",
        ];
        let mut table = Table::new(&header, 1);
        for row in rows {
            table.add([
                row.technique.clone(),
                mib(row.parameter_bytes),
                mib(row.state_bytes),
                row.kept_bytes.map_or_else(|| "unknown".into(), mib),
                mib(row.most_bytes),
                ratio(row.most_bytes as f64, rows[0].most_bytes as f64),
                format!("{:.3}", row.seconds),
                ratio(row.seconds, row.burn_seconds),
            ]);
        }
        vec![table.output("techniques-table")]
    }
}
