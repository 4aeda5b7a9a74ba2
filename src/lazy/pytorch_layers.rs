//! The parameters of PyTorch's layers that Burn's layers have under other names, and in parts.
use super::parts::{split_equally, taken};
use super::tensors::Tensors;
use super::{LazyError, WeightFile};
use std::collections::{BTreeMap, BTreeSet};

/// The names of all that is changed: after the path of a layer.
const NAMES: &str = r"^(|.*\.)((weight|bias)_(ih|hh)_l\d+(_reverse)?|in_proj_(weight|bias)|[qkv]_proj_weight|out_proj\.(weight|bias))$";

impl WeightFile {
    /// Gives the weights of PyTorch's recurrent layers and attention the names and parts that they have in Burn's:
    ///
    /// - `LSTM`, `GRU` and `RNN`: `weight_ih_l0` and its siblings are split into the gates of [`Lstm`](crate::nn::Lstm),
    ///   [`Gru`](crate::nn::Gru) (with `reset_after`) and [`Rnn`](crate::nn::Rnn), or of their bidirectional twins if the file has reverse
    ///   directions. Of several layers, the `k`-th is at `k.`, as in a field that is a vector of layers.
    /// - `MultiheadAttention`: `in_proj_weight` is split into `query`, `key` and `value` of
    ///   [`MultiHeadAttention`](crate::nn::attention::MultiHeadAttention), and `out_proj` becomes `output`.
    ///
    /// Other tensors stay as they are. Weights are still transposed: call [`with_pytorch_adapter`](Self::with_pytorch_adapter), too.
    ///
    /// # Errors
    ///
    /// Returns an error if the file has none of these layers; if the gates cannot be told from a shape, as in an LSTM with projections; or if
    /// an attention has biases that are keys and values (`add_bias_kv`), which Burn's does not have.
    pub fn with_pytorch_layers(self) -> Result<Self, LazyError> {
        let (file, layers) = (self.clone(), Layers::of(self.contents())?);
        if layers.recurrent.is_empty() && layers.attention.is_empty() {
            let reason = "it has no LSTM, GRU, RNN or MultiheadAttention of PyTorch".into();
            return Err(LazyError::Malformed { file: self.path().to_path_buf(), reason });
        }
        self.with_derived(NAMES, |name, tensors| match layers.names_of(name) {
            Some(names) => split_equally(&taken(&file, tensors, name)?, names),
            None => Ok(vec![]),
        })
    }
}

/// The layers of a file, by what comes before the names of their parameters.
#[derive(Default)]
struct Layers {
    recurrent: BTreeMap<String, Recurrent>,
    attention: BTreeSet<String>,
}

struct Recurrent {
    gates: &'static [&'static str],
    /// Whether there are several, one after the other.
    is_deep: bool,
    is_bidirectional: bool,
}

impl Layers {
    fn of(tensors: &Tensors) -> Result<Self, LazyError> {
        let mut layers = Self::default();
        for (name, entry) in &tensors.entries {
            let before =
                |end: &str| name.strip_suffix(end).filter(|path| path.is_empty() || path.ends_with('.'));
            if let Some(path) = before("in_proj_weight").or_else(|| before("q_proj_weight")) {
                layers.attention.insert(path.into());
            }
            let is_of_attention = |path: &str| {
                let has = |end| tensors.entries.contains_key(&format!("{path}{end}"));
                has("in_proj_weight") || has("q_proj_weight")
            };
            if before("bias_k").is_some_and(is_of_attention) {
                return Err(entry.error("Burn's attention has no biases that are keys and values"));
            }
            let Some(path) = before("weight_hh_l0") else { continue };
            let shape = &entry.tensor.shape;
            let gates_of = |rows: usize, columns: usize| {
                rows.checked_div(columns).filter(|gates| gates * columns == rows)
            };
            let count = if let [rows, columns] = shape[..] { gates_of(rows, columns) } else { None };
            let gates: &[&str] = match count {
                Some(4) => &["input_gate", "forget_gate", "cell_gate", "output_gate"],
                Some(3) => &["reset_gate", "update_gate", "new_gate"],
                Some(1) => &["gate"],
                _ => {
                    return Err(
                        entry.error(format!("its shape {:?} is that of no LSTM, GRU or RNN", &shape[..]))
                    );
                }
            };
            let has = |end: &str| tensors.entries.contains_key(&format!("{path}{end}"));
            let (is_deep, is_bidirectional) = (has("weight_hh_l1"), has("weight_hh_l0_reverse"));
            layers.recurrent.insert(path.into(), Recurrent { gates, is_deep, is_bidirectional });
        }
        Ok(layers)
    }

    /// The names in Burn of the equal parts of a tensor; `None` if it is of none of these layers.
    fn names_of(&self, name: &str) -> Option<Vec<String>> {
        let end = match name.strip_suffix(".weight").or_else(|| name.strip_suffix(".bias")) {
            Some(module) => module,
            None => name,
        };
        let at = end.rfind('.').map_or(0, |dot| dot + 1);
        let (path, parameter) = name.split_at(at);
        if self.attention.contains(path) {
            let (of, kind) = parameter.rsplit_once(['_', '.'])?;
            let parts: &[&str] = match of {
                "in_proj" => &["query", "key", "value"],
                "q_proj" => &["query"],
                "k_proj" => &["key"],
                "v_proj" => &["value"],
                "out_proj" => &["output"],
                _ => return None,
            };
            return Some(parts.iter().map(|part| format!("{path}{part}.{kind}")).collect());
        }
        let Recurrent { gates, is_deep, is_bidirectional } = self.recurrent.get(path)?;
        let [kind, transform, layer, direction @ ..] = &parameter.split('_').collect::<Vec<_>>()[..] else {
            return None;
        };
        let transform = if *transform == "ih" { "input_transform" } else { "hidden_transform" };
        let layer = if *is_deep { format!("{}.", layer.strip_prefix('l')?) } else { String::new() };
        let direction = match (is_bidirectional, direction) {
            (false, _) => "",
            (true, []) => "forward.",
            (true, _) => "reverse.",
        };
        Some(gates.iter().map(|gate| format!("{path}{layer}{direction}{gate}.{transform}.{kind}")).collect())
    }
}
