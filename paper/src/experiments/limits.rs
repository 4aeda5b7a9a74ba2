//! Models several times larger than the memory that the process may have: language models that run, and one that is fine-tuned with LoRA.
//!
//! The limit is that of the address space (`ulimit -v`), which includes everything in the process, such as its program and its stacks.
use super::child::{Task, peak_above, process};
use super::{Failure, Measured, Output, Part, Settings, Table, mib, ratio};
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamConfig, GradientsParams};
use burn::store::ModuleRecord;
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::measure::{ResidentMemory, TrackingAllocator};
use burn_memsave_paper::provenance;
use burn_memsave_paper::text::llama::{LanguageModel, Size, memsave::Llama};
use burn_memsave_paper::text::{Decoder, Gpt2Size, fused::gpt2::Gpt2};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

pub struct Limits;

/// A model and a limit.
#[derive(Serialize, Deserialize)]
pub struct Row {
    model: String,
    /// What is repeated, such as a training step.
    pass: String,
    file_bytes: u64,
    /// `None`: no limit.
    limit_bytes: Option<u64>,
    heap_bytes: u64,
    resident_bytes: u64,
    seconds_per_pass: f64,
    /// The loss of the last pass.
    loss: f32,
}

/// What a child process does.
#[derive(Clone, Serialize, Deserialize)]
pub struct Run {
    settings: Settings,
    /// The index of a [`Scenario`].
    scenario: usize,
    /// Whether weights stay in the file.
    is_lazy: bool,
}

/// What it reports, in bytes above those of the idle process.
#[derive(Serialize, Deserialize)]
pub struct Outcome {
    heap: u64,
    resident: u64,
    seconds: f64,
    loss: f32,
}

/// A model that does not fit into the limit.
struct Scenario {
    name: &'static str,
    model: Model,
    /// Tokens of the sequence.
    length: usize,
    passes: usize,
    /// The budget of weights in memory, in MiB.
    budget: u64,
    /// The limit of the address space, in MiB.
    limit: u64,
}

enum Model {
    /// Inference with weights that are zeros. Their file is sparse and takes no room, but is read like any other.
    Gpt2(Gpt2Size),
    /// Training of low-rank adapters on all projections, with random weights.
    Llama(Size),
}

fn scenarios(settings: &Settings) -> Vec<Scenario> {
    if matches!(settings.size, super::Size::Quick) {
        let size = Size { vocabulary: 100, width: 64, heads: 4, hidden: 128, blocks: 2, length: 16 };
        let of = |name, model| Scenario { name, model, length: 8, passes: 2, budget: 1, limit: 600 };
        return vec![
            of("GPT-2, tiny", Model::Gpt2(Gpt2Size::TINY)),
            of("Llama-style, tiny", Model::Llama(size)),
        ];
    }
    let llama = Size { vocabulary: 8000, width: 2048, heads: 16, hidden: 5632, blocks: 15, length: 64 };
    let gpt2 = |name, size, budget, limit| Scenario {
        name,
        model: Model::Gpt2(size),
        length: 16,
        passes: 2,
        budget,
        limit,
    };
    let lora = Scenario {
        name: "Llama-style, 15 blocks of 2048",
        model: Model::Llama(llama),
        length: 64,
        passes: 3,
        budget: 132,
        limit: 600,
    };
    vec![
        gpt2("of the size of GPT-2 XL", Gpt2Size::XL, 128, 1024),
        gpt2("of the size of GPT-J", Gpt2Size::AS_GPT_J, 640, 2048),
        lora,
    ]
}

impl Scenario {
    fn pass(&self) -> &'static str {
        match self.model {
            Model::Gpt2(_) => "inference",
            Model::Llama(_) => "step of LoRA",
        }
    }

    fn weights(&self) -> PathBuf {
        let name = self.name.replace(' ', "-");
        let kind = match self.model {
            Model::Gpt2(_) => "safetensors",
            Model::Llama(_) => "bpk",
        };
        Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../target/paper-limits-{name}.{kind}"))
    }

    /// The file of the adapters that the run with all weights in memory begins with.
    fn adapters(&self) -> PathBuf {
        self.weights().with_extension("adapters.bpk")
    }

    fn write_weights(&self) -> Result<(), Failure> {
        let device = Device::flex();
        match &self.model {
            Model::Gpt2(size) => write_zeros(&Gpt2::new(size, &device), &self.weights()),
            Model::Llama(size) => process::write_random_weights(&Llama::new(size, &device), &self.weights()),
        }
    }

    fn options(&self, is_lazy: bool) -> LazyOptions {
        match is_lazy {
            true => LazyOptions::new().with_budget(self.budget << 20).with_prefetch(2),
            false => LazyOptions::new().exclude("*"),
        }
    }

    /// Tokens of a pass, and those that follow them.
    fn tokens(&self, pass: usize, device: &Device) -> [Tensor<2, Int>; 2] {
        let token = |index: usize| ((pass * 31 + index * 17) % 47) as i64;
        let tokens: Vec<i64> = (0..=self.length).map(token).collect();
        [0, 1].map(|begin| {
            Tensor::<1, Int>::from_ints(&tokens[begin..begin + self.length], device).unsqueeze::<2>()
        })
    }

    /// The loss of the last pass, and the seconds of every one.
    fn run(&self, is_lazy: bool) -> Result<(f32, Vec<f64>), Failure> {
        let file = WeightFile::open(self.weights())?;
        let (mut last, mut seconds) = (f32::NAN, vec![]);
        let mut begin = Instant::now();
        let mut end_pass = |loss: f32| {
            last = loss;
            seconds.push(begin.elapsed().as_secs_f64());
            begin = Instant::now();
        };
        match &self.model {
            Model::Gpt2(size) => {
                let device = Device::flex();
                let (model, _) = Gpt2::new(size, &device).lazy_load(&file, &self.options(is_lazy))?;
                for pass in 0..self.passes {
                    let [tokens, next] = self.tokens(pass, &device);
                    end_pass(model.loss(tokens, next).into_scalar());
                }
            }
            Model::Llama(size) => {
                let device = Device::flex().autodiff();
                let (model, _) = Llama::new(size, &device).lazy_load(&file, &self.options(is_lazy))?;
                let projections = ParamGroup::from_predicate("blocks");
                let mut model = model.apply_lora(Lora::new(8, 16.0).set_param_group(projections));
                // Both runs begin with the same adapters.
                let (adapters, file) = (ParamGroup::from_predicate(".lora."), self.adapters());
                if !is_lazy {
                    model.clone().into_record_group(adapters).save(&file)?;
                } else if file.exists() {
                    model = model.load_record(ModuleRecord::load(&file)?.allow_partial(true));
                }
                let mut optimizer = AdamConfig::new().init();
                for pass in 0..self.passes {
                    let [tokens, next] = self.tokens(pass, &device);
                    let loss = model.loss(tokens, next);
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(1e-4, model, gradients);
                    end_pass(loss.into_scalar());
                }
            }
        }
        Ok((last, seconds))
    }
}

/// Writes a file of zeros as weights of a module that was just initialized. Neither the weights nor the file take any room.
fn write_zeros(module: &impl Module, path: &Path) -> Result<(), Failure> {
    #[derive(Default)]
    struct Tensors {
        path: Vec<String>,
        header: serde_json::Map<String, serde_json::Value>,
        bytes: usize,
    }
    impl ModuleVisitor for Tensors {
        fn enter_module(&mut self, name: &str, _container_type: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container_type: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let shape = param.lazy_shape();
            let end = self.bytes + size_of::<f32>() * shape.num_elements();
            let tensor = serde_json::json!({
                "dtype": "F32", "shape": shape.as_slice(), "data_offsets": [self.bytes, end]
            });
            self.header.insert(self.path.join("."), tensor);
            self.bytes = end;
        }
    }
    let mut tensors = Tensors::default();
    module.visit(&mut tensors);
    let mut header = serde_json::to_vec(&tensors.header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory)?;
    }
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    file.set_len((8 + header.len() + tensors.bytes) as u64)?;
    Ok(())
}

impl Run {
    pub fn measure(&self) -> Result<Outcome, Failure> {
        let scenarios = scenarios(&self.settings);
        let scenario = scenarios.get(self.scenario).ok_or("no such scenario")?;
        let (idle, idle_heap) = (ResidentMemory::of_process(), TrackingAllocator::live());
        let (loss, seconds) = scenario.run(self.is_lazy)?;
        Ok(Outcome {
            heap: TrackingAllocator::peak() - idle_heap,
            resident: peak_above(idle)?,
            // The first pass also initializes, and is not counted.
            seconds: super::step::median(seconds.into_iter().skip(1).collect()),
            loss,
        })
    }
}

fn measure(settings: &Settings, scenario: usize) -> Result<Vec<Row>, Failure> {
    let at = &scenarios(settings)[scenario];
    at.write_weights()?;
    let file_bytes = std::fs::metadata(at.weights())?.len();
    let row = |is_lazy: bool| -> Result<Row, Failure> {
        let limit_bytes = is_lazy.then_some(at.limit << 20);
        let run = Run { settings: settings.clone(), scenario, is_lazy };
        let outcome: Outcome = Task::Limits(run).in_process(limit_bytes)?;
        Ok(Row {
            model: at.name.into(),
            pass: at.pass().into(),
            file_bytes,
            limit_bytes,
            heap_bytes: outcome.heap,
            resident_bytes: outcome.resident,
            seconds_per_pass: outcome.seconds,
            loss: outcome.loss,
        })
    };
    // Only if there is room for twice the weights.
    let in_memory = (2 * file_bytes < provenance::available_bytes()).then(|| row(false));
    let rows: Result<Vec<Row>, Failure> = in_memory.into_iter().chain([row(true)]).collect();
    std::fs::remove_file(at.weights())?;
    if at.adapters().exists() {
        std::fs::remove_file(at.adapters())?;
    }
    let rows = rows?;
    if rows.iter().any(|row| !row.loss.is_finite() || row.loss != rows[0].loss) {
        return Err("another loss than with all weights in memory".into());
    }
    Ok(rows)
}

impl Measured for Limits {
    type Row = Row;
    const NAME: &'static str = "limits";
    const IS_ON_CPU: bool = true;
    const ABOUT: &'static str = "models of several times the memory that they may have";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        let part = |(place, scenario): (usize, Scenario)| {
            let settings = settings.clone();
            Part::new(scenario.name, move || measure(&settings, place))
        };
        scenarios(settings).into_iter().enumerate().map(part).collect()
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        let header = [
            "model",
            "pass",
            "weights",
            "file (MiB)",
            "limit (MiB)",
            "file / limit",
            "heap peak (MiB)",
            "resident peak (MiB)",
            "seconds of a pass",
        ];
        let mut table = Table::new(&header, 3);
        for row in rows {
            table.add([
                row.model.clone(),
                row.pass.clone(),
                if row.limit_bytes.is_some() { "lazy" } else { "in memory" }.into(),
                mib(row.file_bytes),
                row.limit_bytes.map_or_else(|| "-".into(), mib),
                row.limit_bytes
                    .map_or_else(|| "-".into(), |limit| ratio(row.file_bytes as f64, limit as f64)),
                mib(row.heap_bytes),
                mib(row.resident_bytes),
                format!("{:.2}", row.seconds_per_pass),
            ]);
        }
        vec![table.output("limits-table")]
    }
}
