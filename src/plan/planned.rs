//! [`Plan`]: what is done with each block of a model.
use super::block::{Running, Treatment, with};
use crate::measure::{Measurement, StepInput, human_bytes, measure_step, number, seconds, table};
use burn::module::Module;
use burn::tensor::Tensor;
use comfy_table::Cell;
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// What is done with each [block](super::block()) of a model. Made by [`Profile::plan`](super::Profile::plan) and
/// [`auto_checkpoint`](super::auto_checkpoint).
#[derive(Clone, Debug, Serialize)]
pub struct Plan {
    /// Paths, types and treatments of the blocks, in the order in which they run.
    pub(super) blocks: Vec<(String, &'static str, Treatment)>,
    /// The most bytes of a step beyond parameters and input, by the profile.
    pub predicted: u64,
    /// How much longer a step takes, by the profile, than a step in which all blocks are kept as they are.
    #[serde(rename = "extra_seconds", serialize_with = "seconds")]
    pub extra_time: Duration,
    /// The most bytes of a step, if one was [measured](Plan::measure).
    pub measured: Option<u64>,
}

impl Plan {
    /// Runs one forward pass whose blocks are treated as planned. The pass may also run without a gradient. A scope belongs to its thread:
    /// several threads may each be in a scope of the same plan, but blocks that the pass runs on other threads are not treated.
    ///
    /// # Panics
    ///
    /// If the pass runs other blocks than those that were profiled. A second pass in the same scope counts as other blocks, and blocks that
    /// run on other threads are missing.
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

    /// The paths of the blocks in the model, and what is done with them.
    pub fn blocks(&self) -> impl Iterator<Item = (&str, &Treatment)> {
        self.blocks.iter().map(|(module, _, treatment)| (module.as_str(), treatment))
    }

    /// Measures a step with this plan as [`measure_step`] does, and stores its peak in [`measured`](Self::measured).
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
        let mut table = table(["block", "plan"]);
        for (module, treatment) in self.blocks() {
            table.add_row([module.to_string(), treatment.to_string()]);
        }
        table.add_row([Cell::new("peak, predicted"), number(human_bytes(self.predicted))]);
        if let Some(measured) = self.measured {
            table.add_row([Cell::new("peak, measured"), number(human_bytes(measured))]);
        }
        let time = format!("{:.3} ms", self.extra_time.as_secs_f64() * 1e3);
        table.add_row([Cell::new("time beyond that without a plan, predicted"), number(time)]);
        write!(f, "{table}")
    }
}
