//! [`auto_checkpoint`]: a plan for a budget of memory, which is corrected by measuring a step.
use super::PlanError;
use super::planned::Plan;
use super::profile::{Profile, ProfileOptions, profile};
use crate::measure::StepInput;
use burn::module::Module;
use burn::tensor::Tensor;

/// The most plans that are measured for a budget.
const ATTEMPTS: usize = 6;
/// A plan that needs at least this fraction of the budget is not improved.
const CLOSE: f64 = 0.99;
/// By this factor, the corrected budget is reduced after a plan that did not fit.
const LESS: f64 = 0.999;

impl Profile {
    /// Makes a [plan](Self::plan) for a budget, and measures a step with it. If the step needs more than predicted, or much less, other
    /// plans are made and measured, up to six.
    ///
    /// # Errors
    ///
    /// If no plan fits, or if bytes are not counted.
    pub fn measured_plan<M: Module, I: StepInput>(
        &self,
        model: &M,
        input: I,
        budget: u64,
        loss: impl Fn(&M, I) -> Tensor<1>,
    ) -> Result<Plan, PlanError> {
        let (mut best, mut least): (Option<Plan>, u64) = (None, self.least());
        // Bytes by the profile: of the largest plan that fits, and of the smallest one that does not.
        let (mut fits, mut fails): (Option<u64>, Option<u64>) = (None, None);
        // `scale`: measured bytes over predicted ones, of the last plan.
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

/// Finds the fastest plan whose step needs at most `budget` bytes beyond parameters and input, gradients included. For this, it
/// [profiles](profile()) the model, makes a plan, and measures a step with it ([`Profile::measured_plan`]).
///
/// # Errors
///
/// The errors of [`profile`](profile()), and if no plan fits.
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
