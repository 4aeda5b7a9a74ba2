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

/// How often a plan for a budget is measured.
const ATTEMPTS: usize = 4;
/// How far a prediction may be off before another plan is tried.
const CLOSE: f64 = 0.01;

impl Profile {
    /// A [plan](Self::plan) for a budget of which a step was measured. If that needs more than predicted, or much less, another plan is
    /// made and measured, of which as much more or less is predicted.
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
        let (mut best, mut least, mut scale): (Option<Plan>, u64, f64) = (None, self.least(), 1.0);
        for _ in 0..ATTEMPTS {
            let Ok(mut plan) = self.plan((budget as f64 / scale) as u64) else { break };
            let unscaled = plan.predicted as f64;
            plan.predicted = (unscaled * scale) as u64;
            let peak = plan.measure(model, input.copy(), &loss).peak.ok_or(PlanError::NotCounted)?;
            let is_close = peak as f64 >= plan.predicted as f64 * (1.0 - CLOSE);
            scale = peak as f64 / unscaled;
            if peak > budget {
                least = least.max(peak);
                scale *= 1.0 + CLOSE / 10.0;
            } else if best.as_ref().is_none_or(|best| plan.extra_time <= best.extra_time) {
                best = Some(plan);
                if is_close {
                    break;
                }
            }
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
