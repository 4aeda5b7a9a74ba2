//! The memory over one step, by categories.
use super::bytes::{csv_of, human_bytes};
use super::device::{Laps, bytes_in_use};
use super::graphs::sweep;
use super::ledger::{ModulePaths, Path, paths, shown};
use super::step::{StepInput, gradient_bytes, seconds};
use super::svg::Chart;
use crate::parameters::{EachOnce, each_once};
use burn::backend::autodiff::NodeId;
use burn::module::{Module, Param};
use burn::tensor::Tensor;
use burn_memsave_layers::graph::watch::{Happened, LiveStep, Phase, Watch};
use serde::Serialize;
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use std::{fmt, io};
use web_time::Instant;

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
    /// Since the step began, with the time that it takes to look.
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub time: Duration,
    /// `start`, `forward` (the operation computed its output), `turn` (the loss is there), `backward` (it gave its gradients), or
    /// `end`.
    pub phase: &'static str,
    /// Path of the operation's module, as in a [ledger](super::LedgerRow::module).
    pub module: String,
    /// The operation; empty at the start, turn and end.
    pub operation: &'static str,
    /// Parameters.
    pub parameter: u64,
    /// The state of the optimizer, as it was [given](Timeline::with_optimizer_state).
    pub optimizer_state: u64,
    /// Of the step's input, what steps of the graph keep; at the start, all of it.
    pub input: u64,
    /// What else steps of the graph keep, without parameters.
    pub activation: u64,
    /// Gradients of parameters.
    pub gradient: u64,
    /// What else is alive: tensors between operations, what operations of Burn keep, and records of the graph. `None` where bytes
    /// are not counted.
    pub temporary: Option<u64>,
    /// The most bytes alive since the moment before, of all categories together.
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

/// Names, and the colours that PyTorch's memory timeline has for them.
const CATEGORIES: [(&str, &str); 6] = [
    ("parameter", "darkgreen"),
    ("optimizer state", "goldenrod"),
    ("input", "black"),
    ("activation", "red"),
    ("gradient", "mediumblue"),
    ("temporary", "mediumpurple"),
];

/// The memory over one training step. Made by [`timeline`], shown as a short table, written as CSV, JSON, a trace and a plot.
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
    /// In their order.
    pub moments: Vec<Moment>,
}

/// Follows one training step: what is alive after each operation of this library, forward and backward.
///
/// `loss` runs the forward pass and returns the loss; the backward pass follows if it is tracked. The step runs on a copy of the
/// input, twice, and the second time is followed. Bytes are counted on CPU devices if the
/// [`TrackingAllocator`](super::TrackingAllocator) is installed, and on devices with a memory pool; elsewhere only what is known
/// without counting is there. Nothing else should run meanwhile.
///
/// At each [moment](Moment) the sum is what is counted, exactly, and [`most`](Moment::most) is the peak since the moment before:
/// so no peak is missed. What belongs to which category is exact for operations of this library; what others keep is `temporary`.
/// Gradients of parameters that operations of Burn, or [segments](crate::checkpoint) give, are `temporary` until the end. An
/// [update in the backward pass](crate::optim) frees gradients of which this does not know.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::{TrackingAllocator, timeline};
/// use burn_memsave::nn::LinearConfig;
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// let device = Device::flex().autodiff();
/// let model = vec![LinearConfig::new(64, 64).init(&device), LinearConfig::new(64, 4).init(&device)];
/// let x = Tensor::<2>::ones([32, 64], &device);
/// let timeline = timeline(&model, x, |model, x| model[1].forward(model[0].forward(x)).mean());
/// let operations: Vec<_> = timeline.moments.iter().map(|moment| (moment.phase, moment.module.as_str())).collect();
/// assert_eq!(
///     operations,
///     [("start", ""), ("forward", "0"), ("forward", "1"), ("turn", ""), ("backward", "1"), ("backward", "0"), ("end", "")]
/// );
/// assert_eq!(timeline.moments[3].input + timeline.moments[3].activation, 2 * 32 * 64 * 4);
/// assert!(timeline.to_svg().starts_with("<svg"));
/// ```
pub fn timeline<M: Module, I: StepInput>(model: &M, input: I, loss: impl Fn(&M, I) -> Tensor<1>) -> Timeline {
    let warm_up = follow(model, &input, &loss, 0);
    follow(model, &input, &loss, warm_up.moments.len())
}

/// `moments`: how many are expected, for which there is room before memory is counted.
fn follow<M: Module, I: StepInput>(
    model: &M,
    input: &I,
    loss: impl Fn(&M, I) -> Tensor<1>,
    moments: usize,
) -> Timeline {
    let device = input.device();
    sweep(&device);
    let modules = ModulePaths::of(model).modules;
    let mut log = Log {
        laps: None,
        base: 0,
        start: Instant::now(),
        parameters: modules.keys().copied().collect(),
        parameter_bytes: parameter_bytes(model),
        inputs: HashSet::new(),
        gradients: HashMap::with_capacity(modules.len()),
        moments: Vec::with_capacity(moments),
    };
    log.base = bytes_in_use(&device).unwrap_or(0) as i64;
    let copy = input.copy();
    log.inputs.extend(copy.nodes());
    log.laps = Laps::start(&device);
    log.start = Instant::now();
    let log = Arc::new(Mutex::new(log));
    lock(&log).record(At { phase: "start", operation: "", weight: None }, &mut std::iter::empty());
    if let Some(start) = lock(&log).moments.last_mut() {
        start.0.input = input.bytes();
        start.0.temporary = start.0.temporary.map(|bytes| bytes.saturating_sub(input.bytes()));
    }

    let told = log.clone();
    let watch = Watch::telling(Box::new(move |happened, steps| lock(&told).tell(happened, steps)));
    let result = watch.during(|| loss(model, copy));
    lock(&log).record(At { phase: "turn", operation: "", weight: None }, &mut watch.alive().iter());
    if result.is_tracked() {
        let gradients = watch.during(|| result.backward());
        let mut log = lock(&log);
        log.gradients.clear();
        log.record(At { phase: "end", operation: "", weight: None }, &mut watch.alive().iter());
        let bytes = gradient_bytes(model, &gradients);
        if let Some((end, _)) = log.moments.last_mut() {
            end.gradient = bytes;
            end.temporary = end.temporary.map(|temporary| temporary.saturating_sub(bytes));
        }
    }

    let moments = std::mem::take(&mut lock(&log).moments);
    let paths = paths(moments.iter().map(|(_, weight)| *weight), &modules);
    let named = moments.into_iter().zip(paths).map(|((moment, _), path): (_, Path)| {
        let module = if moment.operation.is_empty() { String::new() } else { shown(&path, moment.operation) };
        Moment { module, ..moment }
    });
    Timeline { moments: named.collect() }
}

/// What is seen of a step.
struct Log {
    laps: Option<Laps>,
    /// Bytes alive before the step, parameters included.
    base: i64,
    start: Instant,
    parameters: HashSet<NodeId>,
    parameter_bytes: u64,
    inputs: HashSet<NodeId>,
    /// Those of parameters, so far.
    gradients: HashMap<NodeId, u64>,
    /// With the node of the operation's weight.
    moments: Vec<(Moment, Option<NodeId>)>,
}

fn lock(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
}

/// Where a moment is.
struct At {
    phase: &'static str,
    operation: &'static str,
    weight: Option<NodeId>,
}

impl Log {
    fn tell(&mut self, happened: Happened, steps: &mut dyn Iterator<Item = &LiveStep>) {
        let Happened { operation, weight, phase } = happened;
        let phase = match phase {
            Phase::Forward => "forward",
            Phase::Backward(gradients) => {
                for (node, bytes) in gradients {
                    if self.parameters.contains(&node) {
                        self.gradients.insert(node, bytes as u64);
                    }
                }
                "backward"
            }
        };
        self.record(At { phase, operation, weight }, steps);
    }

    fn record(&mut self, at: At, steps: &mut dyn Iterator<Item = &LiveStep>) {
        let lap = self.laps.as_mut().map(Laps::lap);
        let time = self.start.elapsed();
        // A tensor that several steps keep counts once; where one of them has it computed again, another may keep it.
        let (mut tensors, mut input, mut activation) = (HashMap::<NodeId, u64>::new(), 0, 0);
        for entry in steps.flat_map(|step| &step.entries) {
            let bytes = entry.bytes.unwrap_or(0) as u64;
            match entry.node {
                None => activation += bytes,
                Some(node) if self.parameters.contains(&node) => {}
                Some(node) => {
                    let most = tensors.entry(node).or_default();
                    *most = bytes.max(*most);
                }
            }
        }
        for (node, bytes) in tensors {
            if self.inputs.contains(&node) { input += bytes } else { activation += bytes }
        }
        let gradient = self.gradients.values().sum::<u64>();
        let known = (input + activation + gradient) as i64;
        let (parameter, base) = (self.parameter_bytes, self.base);
        let beyond = |bytes: i64| (bytes - base).max(0);
        let moment = Moment {
            time,
            phase: at.phase,
            module: String::new(),
            operation: at.operation,
            parameter,
            optimizer_state: 0,
            input,
            activation,
            gradient,
            temporary: lap.map(|lap| (beyond(lap.live) - known).max(0) as u64),
            most: lap.map(|lap| parameter + beyond(lap.most) as u64),
        };
        self.moments.push((moment, at.weight));
    }
}

/// Bytes of the parameters of a model; one that is tied counts once.
fn parameter_bytes<M: Module>(model: &M) -> u64 {
    struct Bytes(u64);
    impl EachOnce for Bytes {
        fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
            // A parameter that is still lazy takes none.
            if param.is_initialized() {
                let base = param.base();
                self.0 += (base.shape().num_elements() * base.dtype().size()) as u64;
            }
        }
    }
    let mut bytes = Bytes(0);
    each_once(model, &mut bytes);
    bytes.0
}

impl Timeline {
    /// With so many bytes of the state of an optimizer, which is alive all the time.
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

    /// The most bytes alive at one time; `None` where bytes are not counted.
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
    /// assert!(timeline.to_csv()?.starts_with("seconds,phase,module,operation,parameter"));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// None are known: the rows are plain text and numbers in memory.
    pub fn to_csv(&self) -> io::Result<String> {
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
    /// assert!(timeline.to_json()?.contains(r#""phase": "turn""#));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// None are known: the rows are plain text and numbers in memory.
    pub fn to_json(&self) -> io::Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    /// The moments in Chrome's [trace event
    /// format](https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), for `chrome://tracing` and
    /// [Perfetto](https://ui.perfetto.dev): a counter of bytes by category, one of the most bytes, and an event for each
    /// operation, from the moment before to its own.
    ///
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use burn_memsave::{measure::timeline, nn::LinearConfig};
    ///
    /// let device = Device::flex().autodiff();
    /// let model = vec![LinearConfig::new(8, 4).init(&device)];
    /// let x = Tensor::<2>::ones([2, 8], &device);
    /// let timeline = timeline(&model, x, |model, x| model[0].forward(x).mean());
    /// assert!(timeline.to_chrome_trace()?.contains("traceEvents"));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// None are known: the rows are plain text and numbers in memory.
    pub fn to_chrome_trace(&self) -> io::Result<String> {
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
        Ok(serde_json::to_string(&json!({"traceEvents": events, "displayTimeUnit": "ms"}))?)
    }

    /// A plot as SVG: the categories above each other over the moments of the step, in the colours of PyTorch's memory timeline,
    /// and the peaks between moments as a line.
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
        for (category, (name, colour)) in CATEGORIES.iter().enumerate() {
            let above: Vec<u64> = self
                .moments
                .iter()
                .zip(&below)
                .map(|(moment, below)| below + moment.categories()[category])
                .collect();
            if above != below {
                chart.area(&above, &below, colour, name);
            }
            below = above;
            chart.legend(category, colour, name);
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
        let mut table = comfy_table::Table::new();
        table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        let names = CATEGORIES.iter().map(|(name, _)| *name);
        table.set_header(["at"].into_iter().chain(names).chain(["peak since before"]));
        let peak = self.peak();
        let is_shown =
            |moment: &&Moment| moment.operation.is_empty() || peak.is_some() && moment.most == peak;
        for moment in self.moments.iter().filter(is_shown) {
            let at = [moment.phase, &moment.module, moment.operation].join(" ");
            let unknown = || "unknown".to_string();
            let mut bytes: Vec<String> = moment.categories().into_iter().map(human_bytes).collect();
            if moment.temporary.is_none() {
                bytes[CATEGORIES.len() - 1] = unknown();
            }
            let most = moment.most.map_or_else(unknown, human_bytes);
            table.add_row([at.trim().to_string()].into_iter().chain(bytes).chain([most]));
        }
        write!(f, "{table}")
    }
}
