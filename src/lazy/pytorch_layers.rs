//! The parameters of PyTorch's layers that Burn's layers have under other names, and in parts.
use super::format::Tensors;
use super::parts::{split_equally, taken};
use super::{LazyError, WeightFile};
use std::collections::BTreeMap;

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
    /// Returns an error if the file has none of these layers, or if the gates cannot be told from a shape, as in an LSTM with projections.
    pub fn with_pytorch_layers(self) -> Result<Self, LazyError> {
        let layers = Layers::of(self.contents())?;
        self.with_derived(NAMES, |name, tensors| {
            split_equally(&taken(tensors, name)?, layers.names_of(name).unwrap_or_else(|| vec![name.into()]))
        })
    }
}

/// The layers of a file, by what comes before the names of their parameters.
#[derive(Default)]
struct Layers {
    recurrent: BTreeMap<String, Recurrent>,
    attention: Vec<String>,
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
                layers.attention.push(path.into());
            }
            let Some(path) = before("weight_hh_l0") else { continue };
            let shape = &entry.tensor.shape;
            let gates: &[&str] = match shape[..] {
                [rows, columns] if rows == 4 * columns => {
                    &["input_gate", "forget_gate", "cell_gate", "output_gate"]
                }
                [rows, columns] if rows == 3 * columns => &["reset_gate", "update_gate", "new_gate"],
                [rows, columns] if rows == columns => &["gate"],
                _ => return Err(entry.error(format!("its shape {shape:?} is that of no LSTM, GRU or RNN"))),
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
        if self.attention.iter().any(|layer| layer == path) {
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
