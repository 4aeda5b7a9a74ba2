//! [`Explanation`]: what [`explain`](super::explain()) finds, and its forms: tables, CSV and JSON.
use super::burns_own::FoundPattern;
use crate::measure::{LedgerRow, bytes_or_unknown, csv_of, human_bytes, json_of, note, number, table};
use comfy_table::Cell;
use serde::{Serialize, Serializer};
use std::fmt;
use std::time::Duration;

/// How many modules to freeze come before all others, and how many patterns and modules to swap are named.
pub(super) const BEST: usize = 10;

/// What would remove bytes that are kept.
///
/// ```
/// use burn_memsave::measure::Remedy;
///
/// assert_eq!(Remedy::Freeze.to_string(), "freeze");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Remedy {
    /// [`Module::freeze`](burn::module::Module::freeze) of the module, which is then not trained. A frozen batch norm normalizes with its
    /// running statistics.
    Freeze,
    /// The [block](crate::plan::block) is recomputed in the backward pass, as by [`checkpoint`](crate::checkpoint::checkpoint).
    Checkpoint,
    /// [`linear_cross_entropy`](crate::functional::linear_cross_entropy), or `FusedLinearCrossEntropy`, replaces the dense layer that
    /// computes logits and their cross entropy, so that the logits never exist. It is suggested if at most one operation, such as a
    /// reshape, is between the two. Check that this operation changes no value.
    LinearCrossEntropy,
    /// [`SwiGlu`](crate::nn::activation::SwiGlu) replaces two dense layers, the SiLU of the first one's output, and the product of that
    /// with the second one's output. The operation that reads the product then keeps nothing. It is suggested if one operation of Burn
    /// computes one tensor from those two. Check that this is a product and not a sum. (With Burn's gradient checkpointing `SwiGlu` saves
    /// nothing, since Burn recomputes products.)
    SwiGlu,
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Freeze => "freeze",
            Self::Checkpoint => "checkpoint",
            Self::LinearCrossEntropy => "linear_cross_entropy for",
            Self::SwiGlu => "SwiGlu for",
        })
    }
}

/// A remedy for a module, and what it gives. Shown as `freeze conv1: -12.25 MiB`, or `checkpoint layer3: -88.00 MiB, +4.000 ms`.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::explain, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
/// assert_eq!(explanation.suggestions[0].to_string(), "freeze 0: -64 B");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Suggestion {
    /// What to do.
    pub remedy: Remedy,
    /// Path of the module.
    pub module: String,
    /// How many bytes fewer are kept after the forward pass.
    ///
    /// - `Freeze`: as [measured](Self::measured) where bytes are counted, otherwise by the ledgers of both forward passes, which know
    ///   nothing of operations of Burn. Gradients do not count.
    /// - `Checkpoint`: as measured.
    /// - `LinearCrossEntropy`: by the ledger of a fused loss of the same shapes. The peak falls by more, since the gradient of the logits
    ///   does not exist either.
    /// - `SwiGlu`: the bytes of the product.
    pub bytes: u64,
    /// For `Freeze`: how many bytes fewer a forward pass kept, as measured, with the graph's own records; `None` where bytes are not
    /// counted.
    pub measured: Option<i64>,
    /// How much longer a step takes, as measured. `None` if it takes no longer, and for `LinearCrossEntropy` and `SwiGlu`, which are not
    /// timed.
    #[serde(rename = "extra_seconds", serialize_with = "maybe_seconds")]
    pub extra_time: Option<Duration>,
    /// The numbers of the rows of the ledger that it would remove.
    #[serde(skip)]
    pub(super) rows: Vec<usize>,
}

fn maybe_seconds<S: Serializer>(time: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serializer.serialize_some(&time.as_secs_f64()),
        None => serializer.serialize_none(),
    }
}

impl Suggestion {
    /// Bytes per millisecond of extra time; infinite without extra time.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::explain, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
    /// assert_eq!(explanation.suggestions[0].bytes_per_ms(), f64::INFINITY); // freezing takes no time
    /// ```
    pub fn bytes_per_ms(&self) -> f64 {
        let time = self.extra_time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
        self.bytes as f64 / time
    }
}

impl fmt::Display for Suggestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: -{}", self.remedy, self.module, human_bytes(self.bytes))?;
        match self.extra_time {
            Some(time) => write!(f, ", +{:.3} ms", time.as_secs_f64() * 1e3),
            None => Ok(()),
        }
    }
}

/// A tensor that an operation keeps, and what would remove it.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::explain, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
/// assert_eq!(explanation.rows[0].suggestion.as_deref(), Some("freeze 0: -64 B"));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExplainedRow {
    /// As in a [ledger](LedgerRow::module).
    pub module: String,
    /// The operation.
    pub operation: &'static str,
    /// What is kept.
    pub tensor: &'static str,
    /// Its bytes, as in a [ledger](LedgerRow::bytes).
    pub bytes: Option<u64>,
    /// Why it is kept.
    pub reason: &'static str,
    /// Whether an earlier row of the forward pass keeps the same tensor.
    pub shared: bool,
    /// Whether it is a parameter.
    pub parameter: bool,
    /// The first suggestion that would remove this row. The tensor stays in memory if other rows keep it, too.
    pub suggestion: Option<String>,
}

impl ExplainedRow {
    pub(super) fn new(row: LedgerRow, suggestion: Option<&Suggestion>) -> Self {
        let LedgerRow { module, operation, tensor, bytes, reason, shared, parameter } = row;
        let suggestion = suggestion.map(Suggestion::to_string);
        Self { module, operation, tensor, bytes, reason, shared, parameter, suggestion }
    }
}

/// What a step keeps, why, and what would remove it. Made by [`explain`](super::explain()), shown as tables.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::explain, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
/// assert_eq!((explanation.total, explanation.suggestions.len()), (64, 1));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Explanation {
    /// What is kept, largest first. Rows that take no memory come last.
    pub rows: Vec<ExplainedRow>,
    /// Bytes kept: the sum of the rows. Where bytes are counted, this is what was measured, or what is listed, if that is more.
    pub total: u64,
    /// What would remove bytes, in three groups: what takes no time and changes nothing, most bytes first; modules to freeze; and the rest
    /// by [bytes per millisecond](Suggestion::bytes_per_ms). Of the modules to freeze, the ten that save most come before all others, and
    /// both are grouped by the field of the model, most bytes first. Each suggestion is meant alone: two together may save more or less
    /// than the sum.
    pub suggestions: Vec<Suggestion>,
    /// Operations of Burn that compute together what one operation of this library computes.
    pub patterns: Vec<FoundPattern>,
    /// What was not looked at, and why.
    pub notes: Vec<String>,
}

impl Explanation {
    /// The rows as CSV with a header.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::explain, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(explanation.to_csv().contains("0,linear,x,64,weight is tracked,false,false,freeze 0: -64 B"));
    /// ```
    pub fn to_csv(&self) -> String {
        csv_of(&self.rows)
    }

    /// The suggestions as CSV with a header.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::explain, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(explanation.suggestions_to_csv().contains("freeze,0,64,"));
    /// ```
    pub fn suggestions_to_csv(&self) -> String {
        csv_of(&self.suggestions)
    }

    /// Everything as JSON: `{"rows": [...], "total": ..., "suggestions": [...], "notes": [...]}`.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::explain, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let explanation = explain(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(explanation.to_json().contains(r#""total": 64"#));
    /// ```
    pub fn to_json(&self) -> String {
        json_of(self)
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut kept = table(["module", "operation", "keeps", "bytes", "because", "", "would go with"]);
        for row in &self.rows {
            let bytes = number(bytes_or_unknown(row.bytes));
            let note = note(row.bytes, row.parameter, row.shared);
            let [module, operation, tensor] = [&row.module, row.operation, row.tensor].map(Cell::new);
            let suggestion = row.suggestion.as_deref().unwrap_or("");
            let [reason, note, suggestion] = [row.reason, note, suggestion].map(Cell::new);
            kept.add_row([module, operation, tensor, bytes, reason, note, suggestion]);
        }
        let mut total: Vec<Cell> = ["total", "", "", "", "", "", ""].map(Cell::new).into();
        total[3] = number(human_bytes(self.total));
        kept.add_row(total);
        writeln!(f, "{kept}")?;
        let mut remedies = table(["what would remove bytes", "bytes", "measured", "extra time"]);
        let mut to_freeze = 0;
        for suggestion in &self.suggestions {
            to_freeze += usize::from(suggestion.remedy == Remedy::Freeze);
            if suggestion.remedy == Remedy::Freeze && to_freeze > BEST {
                continue;
            }
            let what = format!("{} {}", suggestion.remedy, suggestion.module);
            let measured = suggestion.measured.map_or_else(String::new, |bytes| {
                let sign = if bytes > 0 { "-" } else { "+" };
                format!("{sign}{}", human_bytes(bytes.unsigned_abs()))
            });
            let time = suggestion
                .extra_time
                .map_or_else(String::new, |time| format!("+{:.3} ms", time.as_secs_f64() * 1e3));
            let [bytes, measured, time] =
                [format!("-{}", human_bytes(suggestion.bytes)), measured, time].map(number);
            remedies.add_row([Cell::new(what), bytes, measured, time]);
        }
        write!(f, "{remedies}")?;
        if to_freeze > BEST {
            write!(
                f,
                "\nModules that give less when they are frozen, in `suggestions`: {}.",
                to_freeze - BEST
            )?;
        }
        for found in self.patterns.iter().take(BEST) {
            write!(f, "\nBy hand in {found}.")?;
        }
        if self.patterns.len() > BEST {
            write!(f, "\nBy hand in more places, in `patterns`: {}.", self.patterns.len() - BEST)?;
        }
        self.notes.iter().try_for_each(|note| write!(f, "\n{note}"))
    }
}
