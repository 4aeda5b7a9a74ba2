//! Batches in parts, and as large as fit.
use super::PlanError;
use crate::parallel::batch_norm_in_training;
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};

/// The mean loss of a batch and its gradients, computed from one part of the batch after the other: those of the whole batch, to
/// rounding, with the memory of one part, and of two gradients of every parameter.
///
/// `parts`: parts of the batch, each made when its turn comes, and the number of items in it, over which `loss` takes the mean.
/// Sums are made in f32 at least, and rounded once.
///
/// # Errors
///
/// If the module has a batch norm in training mode, or if there are no items.
pub fn micro_batched<M: Module, T>(
    module: &M,
    parts: impl IntoIterator<Item = (T, usize)>,
    loss: impl Fn(&M, T) -> Tensor<1>,
) -> Result<(Tensor<1>, GradientsParams), PlanError> {
    if let Some(path) = batch_norm_in_training(module) {
        return Err(PlanError::BatchNorm { path });
    }
    let (mut sums, mut mean, mut items) = (GradientsParams::new(), None, 0);
    for (part, of_part) in parts {
        if of_part == 0 {
            continue; // its mean loss is not a number
        }
        let loss = loss(module, part);
        let found = GradientsParams::from_grads(loss.clone().backward(), module);
        let factor = of_part as f64;
        let weighted = widened(loss.inner()).mul_scalar(factor);
        mean = Some(match mean {
            Some(sum) => sum + weighted,
            None => weighted,
        });
        items += of_part;
        module.visit(&mut Add { found, sums: &mut sums, factor });
    }
    let mean: Tensor<1> = mean.ok_or(PlanError::NoItems)?;
    let factor = (items as f64).recip();
    module.visit(&mut Scale { sums: &mut sums, factor });
    Ok((mean.mul_scalar(factor), sums))
}

/// In the type that sums are made in.
fn widened<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F16 | DType::BF16 => tensor.cast(FloatDType::F32),
        _ => tensor,
    }
}

/// Adds gradients, times a factor, to sums.
struct Add<'a> {
    found: GradientsParams,
    sums: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(gradient) = self.found.remove::<D>(param.id) else { return };
        let gradient = widened(gradient).mul_scalar(self.factor);
        let sum = match self.sums.remove::<D>(param.id) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        self.sums.register(param.id, sum);
    }
}

/// Scales sums, and gives them the types of their parameters.
struct Scale<'a> {
    sums: &'a mut GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if !param.is_require_grad() {
            return;
        }
        if let Some(sum) = self.sums.remove::<D>(param.id) {
            let dtype = FloatDType::from(param.base().dtype());
            self.sums.register(param.id, sum.mul_scalar(self.factor).cast(dtype));
        }
    }
}

/// The most items in a batch, up to `limit`, whose step needs at most `budget` bytes; `None` if one item needs more.
///
/// `peak` runs a step of so many items and says what it needed, for example
/// [`measure_step(..).peak`](crate::measure::Measurement::peak). It is asked for one item, for two, and then for sizes where the line
/// through the last two that fit meets the budget, each at most twice the one before.
///
/// ```
/// use burn_memsave::plan::largest_batch;
///
/// let peak = |items: usize| 1000 + 300 * items as u64;
/// assert_eq!(largest_batch(10_000, 1024, peak), Some(30));
/// assert_eq!(largest_batch(1_200, 1024, peak), None);
/// ```
pub fn largest_batch(budget: u64, limit: usize, mut peak: impl FnMut(usize) -> u64) -> Option<usize> {
    const MOST_GROWTH: usize = 2;
    let first = peak(1);
    if limit == 0 || first > budget {
        return None;
    }
    // Sizes that fit, and their peaks; a size that does not fit.
    let (mut before, mut fits): (Option<(usize, u64)>, (usize, u64)) = (None, (1, first));
    let mut fails: Option<usize> = None;
    loop {
        let predicted = match before {
            None => 2,
            Some((items, needed)) => {
                let slope = fits.1.saturating_sub(needed).div_ceil((fits.0 - items) as u64);
                let more = (budget - fits.1).checked_div(slope).and_then(|more| usize::try_from(more).ok());
                let more = more.unwrap_or(usize::MAX); // of a step that needs a constant
                fits.0.saturating_add(more).min(fits.0.saturating_mul(MOST_GROWTH))
            }
        };
        // Where the line was wrong, halfway to what did not fit.
        let next = predicted.min(fails.map_or(limit, |fails| fits.0.midpoint(fails)));
        if next <= fits.0 {
            return Some(fits.0);
        }
        match peak(next) {
            needed if needed <= budget => (before, fits) = (Some(fits), (next, needed)),
            _ => fails = Some(next),
        }
    }
}
