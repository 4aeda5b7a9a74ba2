//! [`RunMemory`]: the memory over a whole training run.
use super::bytes::{bytes_or_unknown, csv_of, seconds};
use super::device::{Laps, reserved};
use super::svg::Chart;
use super::table::table;
use burn::tensor::Device;
use serde::Serialize;
use std::fmt;
use std::time::Duration;
use web_time::Instant;

/// The memory of a device over one step of a run. `None` where bytes are not counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RunStep {
    /// Since the run began.
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub time: Duration,
    /// Bytes in use when the step ended.
    pub after: Option<u64>,
    /// The most bytes in use at one time during the step; on a device, at the launch of a kernel.
    pub most: Option<u64>,
    /// Bytes that the memory pool of a device had reserved when the step ended.
    pub reserved: Option<u64>,
}

/// Follows the memory of a training run step by step, which shows what grows from one step to the next. Displayed as a short table, written
/// as CSV and as a plot.
///
/// Bytes are those of everything on the device. On CPU devices they are those of the whole program, if the
/// [`TrackingAllocator`](super::TrackingAllocator) is installed; there, a [`Scope`](super::Scope) of your own must not last beyond the end
/// of a step. The run is slower: each step waits for the device, and on a device every launch is watched.
///
/// ```
/// use burn::module::Module;
/// use burn::optim::{GradientsParams, SgdConfig};
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::{RunMemory, TrackingAllocator};
/// use burn_memsave::nn::LinearConfig;
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// let device = Device::flex().autodiff();
/// let mut model = LinearConfig::new(64, 32).init(&device);
/// let mut optimizer = SgdConfig::new().init();
/// let mut memory = RunMemory::start(&device);
/// for _ in 0..3 {
///     let loss = model.forward(Tensor::<2>::ones([128, 64], &device)).powf_scalar(2.0).mean();
///     let gradients = GradientsParams::from_grads(loss.backward(), &model);
///     model = optimizer.step(0.01, model, gradients);
///     memory.step();
/// }
/// println!("{memory}");
/// let last = memory.steps()[2];
/// assert!(last.most.unwrap() >= last.after.unwrap() + 128 * 64 * 4); // the input, which the weight's gradient needs
/// assert!(memory.to_csv().starts_with("seconds,after,most,reserved"));
/// assert!(memory.to_svg().starts_with("<svg"));
/// ```
pub struct RunMemory {
    device: Device,
    laps: Option<Laps>,
    start: Instant,
    steps: Vec<RunStep>,
}

impl RunMemory {
    /// Begins to follow a run.
    pub fn start(device: &Device) -> Self {
        Self { device: device.clone(), laps: Laps::start(device), start: Instant::now(), steps: vec![] }
    }

    /// Ends a step.
    pub fn step(&mut self) {
        let lap = self.laps.as_mut().map(Laps::lap);
        let bytes = |bytes: i64| u64::try_from(bytes).unwrap_or(0);
        self.steps.push(RunStep {
            time: self.start.elapsed(),
            after: lap.map(|lap| bytes(lap.live)),
            most: lap.map(|lap| bytes(lap.most)),
            reserved: reserved(&self.device),
        });
    }

    /// All steps so far.
    pub fn steps(&self) -> &[RunStep] {
        &self.steps
    }

    /// The steps as CSV with a header. Without steps, it is empty.
    pub fn to_csv(&self) -> String {
        csv_of(&self.steps)
    }

    /// A plot as SVG: the most bytes in use in each step, those in use after it, and those that the pool of a device had reserved.
    pub fn to_svg(&self) -> String {
        type Line = (&'static str, &'static str, fn(&RunStep) -> Option<u64>);
        const LINES: [Line; 3] = [
            ("reserved", "grey", |step| step.reserved),
            ("most in a step", "red", |step| step.most),
            ("after a step", "mediumblue", |step| step.after),
        ];
        /// Into how many parts the axis of steps is divided.
        const MARKS: usize = 4;
        let most = self.steps.iter().flat_map(|step| [step.after, step.most, step.reserved]).flatten().max();
        let mut chart = Chart::new(self.steps.len(), most.unwrap_or(0));
        let mut place = 0;
        for (name, color, bytes) in LINES {
            let points = self.steps.iter().enumerate();
            let mut points = points.filter_map(|(index, step)| Some((index as f64, bytes(step)?))).peekable();
            if points.peek().is_some() {
                chart.line(points, color, name);
                chart.legend(place, color, name);
                place += 1;
            }
        }
        let last = self.steps.len().saturating_sub(1);
        let mut marks: Vec<usize> = (0..=MARKS).map(|mark| last * mark / MARKS).collect();
        marks.dedup();
        for index in marks {
            if let Some(step) = self.steps.get(index) {
                chart.mark(index, &format!("step {}, {:.1} s", index + 1, step.time.as_secs_f64()));
            }
        }
        chart.finish()
    }
}

impl fmt::Debug for RunMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunMemory").field("steps", &self.steps).finish_non_exhaustive()
    }
}

impl fmt::Display for RunMemory {
    /// The first step, the last, and the one that needed most.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = table(["step", "in use after it", "most in it", "reserved by the pool"]);
        let highest =
            self.steps.iter().enumerate().max_by_key(|(index, step)| (step.most, usize::MAX - index));
        let mut shown: Vec<usize> = highest.map(|(index, _)| index).into_iter().collect();
        shown.extend(self.steps.len().checked_sub(1).into_iter().flat_map(|last| [0, last]));
        shown.sort_unstable();
        shown.dedup();
        for index in shown {
            let RunStep { after, most, reserved, .. } = self.steps[index];
            let [after, most, reserved] = [after, most, reserved].map(bytes_or_unknown);
            table.add_row([(index + 1).to_string(), after, most, reserved]);
        }
        write!(f, "{table}")
    }
}
