//! Reads and writes `adapter_config.json`, and refuses what is not supported.
use super::PeftError;
use burn::module::{ParamGroup, ParamId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The part of a `peft` configuration that is read or written here.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Config {
    peft_type: String,
    base_model_name_or_path: Option<String>,
    #[serde(default)]
    task_type: Value,
    #[serde(default)]
    inference_mode: bool,
    r: usize,
    lora_alpha: f64,
    #[serde(default)]
    lora_dropout: f64,
    /// Names that a module's name may end with, or one regular expression for the whole name.
    #[serde(default)]
    target_modules: Value,
    #[serde(default)]
    bias: Option<String>,
    #[serde(default)]
    fan_in_fan_out: bool,
    #[serde(default)]
    use_rslora: bool,
    #[serde(default)]
    use_dora: bool,
    #[serde(default)]
    modules_to_save: Option<Value>,
    #[serde(default)]
    rank_pattern: BTreeMap<String, usize>,
    #[serde(default)]
    alpha_pattern: BTreeMap<String, f64>,
    #[serde(default)]
    init_lora_weights: Value,
    #[serde(flatten)]
    others: BTreeMap<String, Value>,
}

/// Other fields that change what an adapter computes, unless they are null, false or empty.
const OTHERS: [&str; 10] = [
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "monteclora_config",
    "target_parameters",
    "use_bdlora",
    "use_qalora",
    "velora_config",
];

/// Prefixes of initializations that change the base, too.
const CHANGE_THE_BASE: [&str; 4] = ["pissa", "olora", "corda", "loftq"];

impl Config {
    pub(super) fn new(rank: usize, alpha: f64, targets: BTreeSet<String>, use_dora: bool) -> Self {
        Self {
            peft_type: "LORA".into(),
            base_model_name_or_path: None,
            task_type: Value::Null,
            inference_mode: true,
            r: rank,
            lora_alpha: alpha,
            lora_dropout: 0.0,
            target_modules: format!(
                "({})",
                targets.iter().map(|name| escaped(name)).collect::<Vec<_>>().join("|")
            )
            .into(),
            bias: Some("none".into()),
            fan_in_fan_out: false,
            use_rslora: false,
            use_dora,
            modules_to_save: None,
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
            init_lora_weights: true.into(),
            others: BTreeMap::new(),
        }
    }

    pub(super) fn read(file: &Path, bytes: &[u8]) -> Result<Self, PeftError> {
        let error = |reason: String| PeftError::Config { file: file.into(), reason };
        let config: Self = serde_json::from_slice(bytes).map_err(|reason| error(reason.to_string()))?;
        let unsupported = [
            (config.peft_type != "LORA", format!("peft_type {}", config.peft_type)),
            (config.bias.as_deref().is_some_and(|bias| bias != "none"), "a trained bias".into()),
            (config.fan_in_fan_out, "fan_in_fan_out".into()),
            (config.modules_to_save.as_ref().is_some_and(|saved| !saved.is_null()), "modules_to_save".into()),
            (!config.lora_alpha.is_finite(), "lora_alpha".into()),
        ];
        let initial = config.init_lora_weights.as_str().unwrap_or_default().to_lowercase();
        let changes_the_base = CHANGE_THE_BASE.iter().any(|kind| initial.starts_with(kind));
        let is_set = |name: &&&str| {
            let value = config.others.get(**name).unwrap_or(&Value::Null);
            !matches!(value, Value::Null | Value::Bool(false))
                && value.as_array().is_none_or(|array| !array.is_empty())
        };
        let other = OTHERS.iter().find(is_set).map(|name| (true, (*name).into()));
        let initial = changes_the_base.then(|| (true, format!("init_lora_weights {initial}")));
        match unsupported.into_iter().chain(other).chain(initial).find(|(is_there, _)| *is_there) {
            Some((_, what)) => Err(error(format!("{what} is not supported"))),
            None => Ok(config),
        }
    }

    /// Whether adapters have magnitudes.
    pub(super) fn use_dora(&self) -> bool {
        self.use_dora
    }

    /// The scale of an adapter, by which the product of its factors is multiplied.
    pub(super) fn scale(&self, name: &str, rank: usize) -> Result<f64, String> {
        let expected = of_pattern(&self.rank_pattern, name)?.unwrap_or(self.r);
        if rank != expected || rank == 0 {
            return Err(format!(
                "the adapter of {name} has the rank {rank}, its configuration says {expected}"
            ));
        }
        let alpha = of_pattern(&self.alpha_pattern, name)?.unwrap_or(self.lora_alpha);
        let rank = rank as f64;
        Ok(alpha / if self.use_rslora { rank.sqrt() } else { rank })
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

/// The value of the first pattern that matches the module.
fn of_pattern<T: Copy>(patterns: &BTreeMap<String, T>, name: &str) -> Result<Option<T>, String> {
    for (pattern, &value) in patterns {
        if means(pattern, name)? {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Whether a pattern of `peft` matches a module. It is a regular expression for the end of its path, after a dot, or
/// for all of it.
fn means(pattern: &str, name: &str) -> Result<bool, String> {
    let group = ParamGroup::from_regex(format!(r"^(.*\.)?({pattern})$"))
        .map_err(|error| format!("the pattern {pattern}: {error:?}"))?;
    Ok(group.matches(&ParamId::new(), Some(name)))
}
