//! [`PeftConfig`]: reads and writes `adapter_config.json`, and refuses what is not supported.
use super::PeftError;
use burn::module::Lora;
use regex::Regex;
use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;
use std::sync::OnceLock;

/// What `adapter_config.json` says of adapters. [`load`](super::load) returns it and [`save`](super::save) takes it, so that what was
/// trained on goes back as it came. A [`Lora`] becomes one, too.
///
/// ```
/// use burn::module::Lora;
/// use burn_memsave::peft::PeftConfig;
///
/// let config = PeftConfig::from(&Lora::new(8, 16.0))
///     .with_base_model("meta-llama/Llama-3.2-1B")
///     .with_task_type("CAUSAL_LM");
/// assert_eq!((config.rank(), config.alpha(), config.task_type()), (8, 16.0, Some("CAUSAL_LM")));
/// ```
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeftConfig {
    peft_type: String,
    base_model_name_or_path: Option<String>,
    #[serde(default)]
    task_type: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    inference_mode: bool,
    r: usize,
    lora_alpha: f64,
    #[serde(default, deserialize_with = "or_default")]
    lora_dropout: f64,
    /// Names that a module's name may end with, or one regular expression for the whole name.
    #[serde(default)]
    target_modules: Value,
    #[serde(default, deserialize_with = "or_default")]
    bias: PeftBias,
    #[serde(default, deserialize_with = "or_default")]
    fan_in_fan_out: bool,
    #[serde(default, deserialize_with = "or_default")]
    use_rslora: bool,
    #[serde(default, deserialize_with = "or_default")]
    use_dora: bool,
    #[serde(default)]
    modules_to_save: Option<Vec<String>>,
    #[serde(default, deserialize_with = "or_default")]
    rank_pattern: Patterns<usize>,
    #[serde(default, deserialize_with = "or_default")]
    alpha_pattern: Patterns<f64>,
    #[serde(default)]
    init_lora_weights: Value,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Which biases are trained, and so are in the file of adapters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PeftBias {
    /// None.
    #[default]
    None,
    /// Those of all layers.
    All,
    /// Those of layers with an adapter.
    LoraOnly,
}

/// Fields that do not change what an adapter computes: where it came from, how it began, where it was put. Any other that is set is refused,
/// since what it means is not known here.
const HARMLESS: [&str; 14] = [
    "auto_mapping",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

/// The heads that `peft` trains for a task, also where `modules_to_save` does not name them.
const HEADS: [(&str, &[&str]); 3] = [
    ("SEQ_CLS", &["classifier", "score"]),
    ("TOKEN_CLS", &["classifier", "score"]),
    ("QUESTION_ANS", &["qa_outputs"]),
];

/// Prefixes of initializations that change the base, too.
const CHANGE_THE_BASE: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];

impl PeftConfig {
    /// LoRA with this rank, whose product of factors is multiplied by `alpha / rank`.
    pub fn new(rank: usize, alpha: f64) -> Self {
        Self {
            peft_type: "LORA".into(),
            base_model_name_or_path: None,
            task_type: None,
            inference_mode: true,
            r: rank,
            lora_alpha: alpha,
            lora_dropout: 0.0,
            target_modules: Value::Null,
            bias: PeftBias::None,
            fan_in_fan_out: false,
            use_rslora: false,
            use_dora: false,
            modules_to_save: None,
            rank_pattern: Patterns::default(),
            alpha_pattern: Patterns::default(),
            init_lora_weights: true.into(),
            others: BTreeMap::new(),
        }
    }

    /// Names the model that the adapters belong to, by its directory or its name on the hub. `AutoPeftModel` of `peft` loads this model.
    pub fn with_base_model(self, name: impl Into<String>) -> Self {
        Self { base_model_name_or_path: Some(name.into()), ..self }
    }

    /// Names the task, such as `CAUSAL_LM` or `SEQ_CLS`, by which `AutoPeftModel` of `peft` chooses a class.
    pub fn with_task_type(self, task: impl Into<String>) -> Self {
        Self { task_type: Some(task.into()), ..self }
    }

    /// Whether factors are multiplied by `alpha / sqrt(rank)`, as [`lora::rank_stabilized`](crate::lora::rank_stabilized) does, instead of
    /// `alpha / rank`. For a `Lora` of that function, give the alpha that went into it.
    pub fn with_rank_stabilized(self, use_rslora: bool) -> Self {
        Self { use_rslora, ..self }
    }

    /// Another rank and alpha for modules whose paths in Python end with `modules`, a regular expression. The first that matches counts.
    pub fn with_lora(mut self, modules: &str, lora: &Lora) -> Self {
        self.rank_pattern.add(modules, lora.rank);
        self.alpha_pattern.add(modules, lora.alpha);
        self
    }

    /// Modules that were trained as a whole, such as a new head: the ends of their paths in Python. (An entry `norm` means every module whose
    /// name ends so, `input_layernorm`, too.) For the tasks `SEQ_CLS` and `TOKEN_CLS`, modules that end with `classifier` or `score` are
    /// among them, and for `QUESTION_ANS` those that end with `qa_outputs`.
    pub fn with_modules_to_save(self, modules: impl IntoIterator<Item = impl Into<String>>) -> Self {
        Self { modules_to_save: Some(modules.into_iter().map(Into::into).collect()), ..self }
    }

    /// Which biases were trained.
    pub fn with_bias(self, bias: PeftBias) -> Self {
        Self { bias, ..self }
    }

    /// The rank of adapters for which no pattern says another one.
    pub fn rank(&self) -> usize {
        self.r
    }

    /// The alpha of adapters for which no pattern says another one.
    pub fn alpha(&self) -> f64 {
        self.lora_alpha
    }

    /// The model that the adapters belong to, by its directory or its name on the hub.
    pub fn base_model(&self) -> Option<&str> {
        self.base_model_name_or_path.as_deref()
    }

    /// The task, such as `CAUSAL_LM`.
    pub fn task_type(&self) -> Option<&str> {
        self.task_type.as_deref()
    }

    /// The probability with which `peft` drops inputs of adapters in training. Burn's adapters have no dropout: if this is not 0, training
    /// here goes on without it. Outputs in inference are the same.
    pub fn dropout(&self) -> f64 {
        self.lora_dropout
    }

    /// Modules that were trained as a whole: the ends of their paths in Python.
    pub fn modules_to_save(&self) -> &[String] {
        self.modules_to_save.as_deref().unwrap_or_default()
    }

    /// Reads a configuration.
    pub(super) fn read(file: &Path, bytes: &[u8]) -> Result<Self, PeftError> {
        #[derive(Deserialize)]
        struct Kind {
            peft_type: Option<String>,
        }
        let error = |reason: String| PeftError::Config { file: file.into(), reason };
        let parsed = |reason: serde_json::Error| error(reason.to_string());
        // Other kinds have other fields.
        let kind = serde_json::from_slice::<Kind>(bytes).map_err(parsed)?.peft_type;
        if let Some(kind) = kind.filter(|kind| kind != "LORA") {
            return Err(error(format!("peft_type {kind} is not supported: only LORA is")));
        }
        let config: Self = serde_json::from_slice(bytes).map_err(parsed)?;
        match config.unsupported() {
            Some(what) => Err(error(format!("{what} is not supported"))),
            None => Ok(config),
        }
    }

    fn unsupported(&self) -> Option<String> {
        let initial = self.init_lora_weights.as_str().unwrap_or_default().to_lowercase();
        if CHANGE_THE_BASE.iter().any(|kind| initial.starts_with(kind)) {
            return Some(format!("init_lora_weights {initial}, which changes the base,"));
        }
        let is_set = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::Array(array) => !array.is_empty(),
            Value::Object(fields) => !fields.is_empty(),
            _ => true,
        };
        let unknown =
            self.others.iter().find(|(name, value)| !HARMLESS.contains(&&name[..]) && is_set(value));
        unknown.map(|(name, _)| name.clone())
    }

    /// The configuration of adapters on these modules.
    pub(super) fn of_targets(mut self, targets: &BTreeSet<String>, use_dora: bool) -> Self {
        let targets: Vec<_> = targets.iter().map(|name| escaped(name)).collect();
        self.target_modules = format!("({})", targets.join("|")).into();
        // The regular expression is of whole paths, which it names already.
        for choice in ["exclude_modules", "layers_pattern", "layers_to_transform"] {
            self.others.remove(choice);
        }
        Self { use_dora, inference_mode: true, ..self }
    }

    /// Whether adapters have magnitudes.
    pub(super) fn use_dora(&self) -> bool {
        self.use_dora
    }

    /// Whether the biases of modules that have an adapter, or have none, were trained.
    pub(super) fn trains_bias(&self, has_adapter: bool) -> bool {
        match self.bias {
            PeftBias::None => false,
            PeftBias::All => true,
            PeftBias::LoraOnly => has_adapter,
        }
    }

    /// Whether the module with this name is, or is in, one that was trained as a whole: one whose path ends with an entry of
    /// `modules_to_save` (not only after a dot), or a head of the task.
    pub(super) fn saves(&self, name: &str) -> bool {
        let heads =
            HEADS.iter().filter(|(task, _)| self.task_type() == Some(task)).flat_map(|(_, heads)| *heads);
        let ends: Vec<&str> =
            self.modules_to_save().iter().map(String::as_str).chain(heads.copied()).collect();
        let ends_of_modules = name.match_indices('.').map(|(dot, _)| dot).chain([name.len()]);
        ends_of_modules.map(|end| &name[..end]).any(|module| ends.iter().any(|end| module.ends_with(end)))
    }

    /// Adds a module to those that were trained as a whole.
    pub(super) fn save_too(&mut self, name: &str) {
        if !self.saves(name) {
            self.modules_to_save.get_or_insert_default().push(name.into());
        }
    }

    /// Whether the weight of a module is stored as here, with the inputs first: that of a `Conv1D` of `transformers`, which is told by its
    /// name. (`fan_in_fan_out` says that there are such modules; `peft` sets it for the layer that it adapted last.)
    pub(super) fn has_inputs_first(&self, name: &str) -> bool {
        let last = name.rsplit('.').next().unwrap_or(name);
        self.fan_in_fan_out && ["c_attn", "c_fc", "c_proj", "q_attn"].contains(&last)
    }

    /// The scale of an adapter, by which the product of its factors is multiplied.
    pub(super) fn scale(&self, name: &str, rank: usize) -> Result<f64, String> {
        let expected = self.rank_pattern.of(name)?.unwrap_or(self.r);
        if rank != expected || rank == 0 {
            return Err(format!("it has the rank {rank}, but its configuration says {expected}"));
        }
        let alpha = self.alpha_pattern.of(name)?.unwrap_or(self.lora_alpha);
        let rank = rank as f64;
        Ok(alpha / if self.use_rslora { rank.sqrt() } else { rank })
    }
}

impl From<&Lora> for PeftConfig {
    fn from(lora: &Lora) -> Self {
        Self::new(lora.rank, lora.alpha)
    }
}

impl From<&PeftConfig> for PeftConfig {
    fn from(config: &PeftConfig) -> Self {
        config.clone()
    }
}

/// Null is as if the field were not there.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(value: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(value)?.unwrap_or_default())
}

/// Values for the modules that patterns match, in the order of the file: the first counts.
#[derive(Clone, Debug)]
struct Patterns<T> {
    values: Vec<(String, T)>,
    compiled: OnceLock<Result<Vec<Regex>, String>>,
}

impl<T> Default for Patterns<T> {
    fn default() -> Self {
        Self { values: vec![], compiled: OnceLock::new() }
    }
}

impl<T: Copy> Patterns<T> {
    fn add(&mut self, pattern: &str, value: T) {
        self.values.push((pattern.into(), value));
        self.compiled.take();
    }

    /// The value of the first pattern that matches the module: a regular expression for the end of its path, after a dot, or for all of it.
    fn of(&self, name: &str) -> Result<Option<T>, String> {
        let compiled = self.compiled.get_or_init(|| {
            let compiled = |pattern: &String| {
                let whole = Regex::new(&format!(r"^(.*\.)?({pattern})$"));
                whole.map_err(|error| format!("the pattern {pattern}: {error}"))
            };
            self.values.iter().map(|(pattern, _)| compiled(pattern)).collect()
        });
        let mut matches = compiled.as_ref().map_err(String::clone)?.iter().zip(&self.values);
        Ok(matches.find(|(pattern, _)| pattern.is_match(name)).map(|(_, (_, value))| *value))
    }
}

impl<T: Serialize> Serialize for Patterns<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.values.iter().map(|(pattern, value)| (pattern, value)))
    }
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Patterns<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct InOrder<T>(PhantomData<T>);

        impl<'de, T: DeserializeOwned> Visitor<'de> for InOrder<T> {
            type Value = Patterns<T>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("patterns with their values")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut patterns = vec![];
                while let Some(entry) = map.next_entry()? {
                    patterns.push(entry);
                }
                Ok(Patterns { values: patterns, compiled: OnceLock::new() })
            }
        }
        deserializer.deserialize_map(InOrder(PhantomData))
    }
}

/// A regular expression that matches this name.
fn escaped(name: &str) -> String {
    name.chars().fold(String::new(), |mut escaped, c| {
        if !c.is_alphanumeric() && c != '_' {
            escaped.push('\\');
        }
        escaped.push(c);
        escaped
    })
}
