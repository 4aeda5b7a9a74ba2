//! A plan, and a table of it.
use super::PlanError;
use super::block::{Running, Treatment, with};
use super::profile::{Profile, ProfileOptions, profile, seconds};
use crate::measure::{Measurement, StepInput, human_bytes, measure_step};
use burn::module::Module;
use burn::tensor::Tensor;
use comfy_table::{Cell, CellAlignment, Table, presets};
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// What is done with each [block](super::block) of a model. Made by [`Profile::plan`](super::Profile::plan) and [`auto_checkpoint`].
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Paths, types and treatments of the blocks, in the order in which they run.
    pub(super) blocks: Vec<(String, &'static str, Treatment)>,
    /// The most bytes of a step beyond parameters and input, by the profile.
    pub predicted: u64,
    /// How much longer a step takes, by the profile, than one in which all blocks are kept as they are.
    #[serde(rename = "extra_seconds", serialize_with = "seconds")]
    pub extra_time: Duration,
    /// The most bytes of a step, if one was [measured](Plan::measured).
    pub measured: Option<u64>,
}

impl Plan {
    /// Runs one forward pass, whose blocks are treated as planned. It may run them without a gradient, too. A scope is of a thread:
    /// several threads may each have one of the same plan, but blocks that the pass runs on other threads are not treated.
    ///
    /// # Panics
    ///
    /// If its blocks are others than those that were profiled: of a second pass in the same scope, too, or on other threads.
    pub fn scope<R>(&self, forward: impl FnOnce() -> R) -> R {
        let treatments = self.blocks.iter().map(|(_, name, treatment)| (*name, treatment.clone())).collect();
        let (result, running) = with(Running::Planned { treatments, next: 0 }, forward);
        if let Running::Planned { next, .. } = running {
            assert!(
                next == self.blocks.len(),
                "plan: made for {} blocks, of which {next} ran",
                self.blocks.len()
            );
        }
        result
    }

    /// What is done with the blocks, and their paths in the model.
    pub fn blocks(&self) -> impl Iterator<Item = (&str, &Treatment)> {
        self.blocks.iter().map(|(module, _, treatment)| (module.as_str(), treatment))
    }

    /// Measures a step with this plan, as [`measure_step`] does, and notes its peak.
    pub fn measure<M: Module, I: StepInput>(
        &mut self,
        model: &M,
        input: I,
        loss: impl Fn(&M, I) -> Tensor<1>,
    ) -> Measurement {
        let measurement = measure_step(model, input, |model, input| self.scope(|| loss(model, input)));
        self.measured = measurement.peak;
        measurement
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_preset(presets::ASCII_MARKDOWN).set_header(["block", "plan"]);
        for (module, treatment) in self.blocks() {
            table.add_row([module.to_string(), treatment.to_string()]);
        }
        let number = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
        table.add_row([Cell::new("peak, predicted"), number(human_bytes(self.predicted))]);
        if let Some(measured) = self.measured {
            table.add_row([Cell::new("peak, measured"), number(human_bytes(measured))]);
        }
        let time = format!("{:.3} ms", self.extra_time.as_secs_f64() * 1e3);
        table.add_row([Cell::new("time beyond that without a plan, predicted"), number(time)]);
        write!(f, "{table}")
    }
}

/// How many plans for a budget are measured.
const ATTEMPTS: usize = 6;
/// A plan that needs this part of the budget, or more, is not improved.
const CLOSE: f64 = 0.99;
/// What a plan must be predicted to need less than one that did not fit.
const LESS: f64 = 0.999;

impl Profile {
    /// A [plan](Self::plan) for a budget of which a step was measured. If that needs more than predicted, or much less, other plans are
    /// made and measured, up to six.
    ///
    /// # Errors
    ///
    /// If no plan needs as little, or bytes are not counted.
    pub fn measured_plan<M: Module, I: StepInput>(
        &self,
        model: &M,
        input: I,
        budget: u64,
        loss: impl Fn(&M, I) -> Tensor<1>,
    ) -> Result<Plan, PlanError> {
        let (mut best, mut least): (Option<Plan>, u64) = (None, self.least());
        // By the profile, what the largest plan that fits needs, and the smallest one that does not.
        let (mut fits, mut fails): (Option<u64>, Option<u64>) = (None, None);
        // `scale`: how far the last prediction was off.
        let (mut next, mut scale) = (budget, 1.0);
        for _ in 0..ATTEMPTS {
            let Ok(mut plan) = self.plan(next) else { break };
            let predicted = plan.predicted;
            if Some(predicted) == fits {
                break; // nothing lies between
            }
            plan.predicted = (predicted as f64 * scale) as u64;
            let peak = plan.measure(model, input.copy(), &loss).peak.ok_or(PlanError::NotCounted)?;
            scale = peak as f64 / predicted.max(1) as f64;
            let corrected = (budget as f64 / scale) as u64;
            if peak > budget {
                least = least.max(peak);
                fails = Some(predicted);
            } else {
                fits = Some(predicted);
                let is_done = peak as f64 >= CLOSE * budget as f64 || plan.extra_time.is_zero();
                best = Some(plan);
                if is_done {
                    break;
                }
            }
            next = match (fits, fails) {
                (Some(fits), Some(fails)) => fits.midpoint(fails),
                (_, Some(_)) => (corrected as f64 * LESS) as u64,
                _ => corrected,
            };
        }
        best.ok_or(PlanError::Budget { budget, least })
    }
}

/// The fastest plan whose step needs at most `budget` bytes beyond parameters and input, gradients included: [profiles](profile) the model,
/// plans, and measures a step of the plan ([`Profile::measured_plan`]).
///
/// # Errors
///
/// As of [`profile`], and if no plan needs as little.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::TrackingAllocator;
/// use burn_memsave::nn::{Linear, LinearConfig, activation::Gelu};
/// use burn_memsave::plan::{ProfileOptions, auto_checkpoint, block};
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// fn loss(model: &Vec<Linear>, x: Tensor<2>) -> Tensor<1> {
///     let x = model.iter().fold(x, |x, linear| block(linear, x, |linear, x: Tensor<2>| Gelu::new().forward(linear.forward(x))));
///     x.mean()
/// }
///
/// let device = Device::flex().autodiff();
/// let model: Vec<Linear> = (0..8).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
/// let x = Tensor::ones([512, 64], &device);
/// let plan = auto_checkpoint(&model, x.clone(), 2 << 20, &ProfileOptions::new(), loss)?;
/// assert!(plan.measured <= Some(2 << 20));
/// println!("{plan}");
/// let gradients = plan.scope(|| loss(&model, x)).backward();
/// # assert!(model[0].weight.grad(&gradients).is_some());
/// # Ok::<(), burn_memsave::plan::PlanError>(())
/// ```
pub fn auto_checkpoint<M: Module, I: StepInput>(
    model: &M,
    input: I,
    budget: u64,
    options: &ProfileOptions,
    loss: impl Fn(&M, I) -> Tensor<1>,
) -> Result<Plan, PlanError> {
    let options = options.clone().with_limit(budget);
    let profile = profile(model, input.copy(), &options, &loss)?;
    profile.measured_plan(model, input, budget, loss)
}
