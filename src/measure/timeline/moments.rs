//! [`Timeline`]: the moments of a step, and their forms: a table, CSV, JSON, a trace and a plot.
use crate::measure::bytes::{bytes_or_unknown, csv_of, human_bytes, json_of, seconds};
use crate::measure::svg::Chart;
use crate::measure::table::table;
use serde::Serialize;
use serde_json::json;
use std::fmt;
use std::time::Duration;

/// What is alive after an operation of a step, in bytes by PyTorch's categories.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::timeline, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
/// let forward = &timeline.moments[1];
/// assert_eq!((forward.module.as_str(), forward.operation, forward.input), ("0", "linear", 64));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Moment {
    /// The time since the step began, with the time that measuring takes.
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub time: Duration,
    /// `start`, `forward` (the operation has computed its output), `turn` (the loss is computed), `backward` (the operation has computed
    /// its gradients) or `end`.
    pub phase: &'static str,
    /// Path of the operation's module, as in a [ledger](crate::measure::LedgerRow::module).
    pub module: String,
    /// The operation. Empty at the start, turn and end.
    pub operation: &'static str,
    /// Parameters.
    pub parameter: u64,
    /// The state of the optimizer, if it was [given](Timeline::with_optimizer_state).
    pub optimizer_state: u64,
    /// The part of the step's input that steps of the graph keep; at the start, all of it.
    pub input: u64,
    /// What else steps of the graph keep, except parameters.
    pub activation: u64,
    /// Gradients of parameters.
    pub gradient: u64,
    /// What else is alive: tensors between operations, what operations of Burn keep, and records of the graph. `None` if bytes are not
    /// counted.
    pub temporary: Option<u64>,
    /// The most bytes alive at one time since the moment before, all categories together.
    pub most: Option<u64>,
}

impl Moment {
    /// All categories together.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::timeline, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
    /// assert_eq!(timeline.moments[0].total(), 4 * (8 * 4 + 4) + 4 * 2 * 8); // parameters and the input
    /// ```
    pub fn total(&self) -> u64 {
        self.categories().into_iter().sum()
    }

    /// In the order of [`CATEGORIES`].
    fn categories(&self) -> [u64; 6] {
        let temporary = self.temporary.unwrap_or(0);
        [self.parameter, self.optimizer_state, self.input, self.activation, self.gradient, temporary]
    }
}

/// The names of the categories, and their colors in PyTorch's memory timeline.
const CATEGORIES: [(&str, &str); 6] = [
    ("parameter", "darkgreen"),
    ("optimizer state", "goldenrod"),
    ("input", "black"),
    ("activation", "red"),
    ("gradient", "mediumblue"),
    ("temporary", "mediumpurple"),
];

/// The memory over one training step. Made by [`timeline`](super::timeline()), displayed as a short table, written as CSV, JSON, a trace
/// and a plot.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::{measure::timeline, nn::LinearConfig};
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(8, 4).init(&device)];
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
/// println!("{timeline}");
/// assert_eq!(timeline.moments.len(), 5); // start, forward, turn, backward, end
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Timeline {
    /// The moments, in their order.
    pub moments: Vec<Moment>,
}

impl Timeline {
    /// Adds the bytes of an optimizer's state, which is alive all the time.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::timeline, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
    /// let timeline = timeline.with_optimizer_state(2 * 4 * (8 * 4 + 4)); // of AdamW
    /// assert_eq!(timeline.moments[0].optimizer_state, 288);
    /// ```
    #[must_use]
    pub fn with_optimizer_state(mut self, bytes: u64) -> Self {
        for moment in &mut self.moments {
            let before = std::mem::replace(&mut moment.optimizer_state, bytes);
            moment.most = moment.most.map(|most| most - before + bytes);
        }
        self
    }

    /// The most bytes alive at one time; `None` if bytes are not counted.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::timeline, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
    /// assert_eq!(timeline.peak(), None); // no `TrackingAllocator` is installed here
    /// ```
    pub fn peak(&self) -> Option<u64> {
        self.moments.iter().filter_map(|moment| moment.most).max()
    }

    /// The moments as CSV with a header.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::timeline, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(timeline.to_csv().starts_with("seconds,phase,module,operation,parameter"));
    /// ```
    pub fn to_csv(&self) -> String {
        csv_of(&self.moments)
    }

    /// The moments as JSON: `{"moments": [{"seconds": ..., "phase": ..., ...}, ...]}`.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::timeline, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(timeline.to_json().contains(r#""phase": "turn""#));
    /// ```
    pub fn to_json(&self) -> String {
        json_of(self)
    }

    /// The moments in Chrome's [trace event
    /// format](https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), for `chrome://tracing` and
    /// [Perfetto](https://ui.perfetto.dev): a counter of bytes by category, a counter of the most bytes, and an event for each operation,
    /// which lasts from the moment before to its own.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::timeline, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(timeline.to_chrome_trace().contains("traceEvents"));
    /// ```
    pub fn to_chrome_trace(&self) -> String {
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        let mut events = vec![];
        let mut before = Duration::ZERO;
        for moment in &self.moments {
            let bytes: serde_json::Map<_, _> = CATEGORIES
                .iter()
                .zip(moment.categories())
                .map(|((name, _), bytes)| ((*name).into(), bytes.into()))
                .collect();
            events.push(
                json!({"name": "memory", "ph": "C", "ts": micros(moment.time), "pid": 1, "args": bytes}),
            );
            if let Some(most) = moment.most {
                let args = json!({"bytes": most});
                events.push(json!({"name": "peak", "ph": "C", "ts": micros(before), "pid": 1, "args": args}));
            }
            if !moment.operation.is_empty() {
                events.push(json!({
                    "name": moment.operation, "cat": moment.phase, "ph": "X", "pid": 1, "tid": 1,
                    "ts": micros(before), "dur": micros(moment.time - before),
                    "args": {"module": moment.module, "phase": moment.phase},
                }));
            }
            before = moment.time;
        }
        json!({"traceEvents": events, "displayTimeUnit": "ms"}).to_string()
    }

    /// A plot as SVG: the categories stacked over the moments of the step, in the colors of PyTorch's memory timeline, and the peaks
    /// between moments as a line.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::timeline, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(timeline.to_svg().starts_with("<svg"));
    /// ```
    pub fn to_svg(&self) -> String {
        let most = self.moments.iter().map(|moment| moment.total().max(moment.most.unwrap_or(0))).max();
        let mut chart = Chart::new(self.moments.len(), most.unwrap_or(0));
        let mut below = vec![0u64; self.moments.len()];
        for (category, (name, color)) in CATEGORIES.iter().enumerate() {
            let above: Vec<u64> = self
                .moments
                .iter()
                .zip(&below)
                .map(|(moment, below)| below + moment.categories()[category])
                .collect();
            if above != below {
                chart.area(&above, &below, color, name);
            }
            below = above;
            chart.legend(category, color, name);
        }
        let peaks = self.moments.iter().enumerate().skip(1);
        let peaks = peaks.filter_map(|(index, moment)| Some((index as f64 - 0.5, moment.most?)));
        chart.line(peaks, "grey", "peak");
        for (index, moment) in self.moments.iter().enumerate() {
            if ["start", "turn", "end"].contains(&moment.phase) {
                let time = moment.time.as_secs_f64() * 1e3;
                chart.mark(index, &format!("{}, {time:.2} ms", moment.phase));
            }
        }
        chart.finish()
    }
}

impl fmt::Display for Timeline {
    /// The start, the turn, the end, and the moment of the peak.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = CATEGORIES.iter().map(|(name, _)| *name);
        let header: Vec<&str> = ["at"].into_iter().chain(names).chain(["peak since before"]).collect();
        let mut table = table(header);
        let peak = self.peak();
        let is_shown =
            |moment: &&Moment| moment.operation.is_empty() || peak.is_some() && moment.most == peak;
        for moment in self.moments.iter().filter(is_shown) {
            let at = [moment.phase, &moment.module, moment.operation].join(" ");
            let mut bytes = moment.categories().map(human_bytes);
            bytes[CATEGORIES.len() - 1] = bytes_or_unknown(moment.temporary);
            let most = bytes_or_unknown(moment.most);
            table.add_row([at.trim().to_string()].into_iter().chain(bytes).chain([most]));
        }
        write!(f, "{table}")
    }
}
