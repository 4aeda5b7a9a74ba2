//! Batches that are split into parts, and the largest batch that fits.
use super::PlanError;
use super::parts::{ItemWeights, PartWeight, PartsError, checked_weight, may_be_taken_in_parts};
use crate::measure::{Measurement, StepInput, measure_step};
use crate::parameters::{EachOnce, each_once};
use crate::widened::widened;
use burn::module::{Module, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, FloatDType, Tensor};
use std::ops::Range;

/// Computes the mean loss of a batch and its gradients from one part of the batch after the other. Up to rounding, they are those of the
/// whole batch. This takes the memory of one part, and of two gradients of every parameter.
///
/// `parts`: the parts of the batch, each of which is made when its turn comes, with their [weights](PartWeight). The weight is the number
/// of items or tokens over which `loss` takes the mean, or the sum of their class weights. Sums are computed in f32 at least, and rounded
/// once.
///
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use burn_memsave::nn::{LinearConfig, loss::CrossEntropyLossConfig};
/// use burn_memsave::plan::micro_batched;
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(8, 4).init(&device);
/// // Class 0 is padding: of four tokens one counts, and of four others three.
/// let tokens = [[0, 0, 0, 1], [3, 1, 2, 0]];
/// let parts = tokens.map(|tokens| {
///     let count = tokens.iter().filter(|&&token| token != 0).count();
///     let targets = Tensor::<1, Int>::from_data(tokens, &device);
///     ((Tensor::<2>::ones([4, 8], &device), targets), count as f64)
/// });
/// let loss = CrossEntropyLossConfig::new().with_pad_tokens(Some(vec![0])).init(&device);
/// let (mean, gradients) = micro_batched(&model, parts, |model, (x, targets)| loss.forward(model.forward(x), targets))?;
/// assert_eq!((mean.dims(), gradients.len()), ([1], 2));
/// # Ok::<(), burn_memsave::plan::PlanError>(())
/// ```
///
/// # Errors
///
/// If the module has a batch norm, or another part with running statistics, in training mode; if a tied parameter has different values in
/// its places; if a weight is negative or not finite; if there are no items, or all have the weight 0.
pub fn micro_batched<M: Module, T, W: PartWeight>(
    module: &M,
    parts: impl IntoIterator<Item = (T, W)>,
    loss: impl Fn(&M, T) -> Tensor<1>,
) -> Result<(Tensor<1>, GradientsParams), PlanError> {
    may_be_taken_in_parts(module)?;
    let (mut sums, mut mean, mut total) = (GradientsParams::new(), None, 0.0);
    for (part, weight) in parts {
        let weight = checked_weight(weight)?;
        if weight == 0.0 {
            continue; // its mean loss is not a number
        }
        let loss = loss(module, part);
        let found = GradientsParams::from_grads(loss.clone().backward(), module);
        let weighted = widened(loss.inner()).mul_scalar(weight);
        mean = Some(match mean {
            Some(sum) => sum + weighted,
            None => weighted,
        });
        total += weight;
        each_once(module, &mut Add { found, sums: &mut sums, factor: weight });
    }
    let mean: Tensor<1> = mean.ok_or(PartsError::NoItems)?;
    let factor = total.recip();
    each_once(module, &mut Scale { sums: &mut sums, factor });
    Ok((mean.mul_scalar(factor), sums))
}

/// [`micro_batched`] with the largest parts whose step fits into `budget` bytes. Returns the number of items in a part, the mean loss and
/// the gradients.
///
/// `part` returns the items of a range of the batch. `items` is their number, or a slice of their [weights](ItemWeights). The last part may
/// be smaller.
///
/// Bytes count as in [`Measurement::peak`], beyond parameters and the input, and the sums of gradients count. [`largest_batch`] finds the
/// size by [`measure_step`] with the first items of the batch, so each size that is tried runs several steps. Look for the size once, and
/// give later batches to [`micro_batched`] in parts of that size. Side effects of a step (random numbers) happen each time. Nothing else
/// should run meanwhile, since memory is counted for the whole program or device.
///
/// ```
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_memsave::measure::TrackingAllocator;
/// use burn_memsave::nn::{Linear, LinearConfig};
/// use burn_memsave::plan::micro_batched_within;
///
/// #[global_allocator]
/// static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();
///
/// let device = Device::flex().autodiff();
/// let layers: Vec<Linear> = (0..4).map(|_| LinearConfig::new(64, 64).init(&device)).collect();
/// let (x, targets) = (Tensor::<2>::random([9000, 64], Distribution::Default, &device), Tensor::<2>::zeros([9000, 64], &device));
/// let part = |items: std::ops::Range<usize>| (x.clone().slice(items.clone()), targets.clone().slice(items));
/// let loss = |layers: &Vec<Linear>, (x, targets): (Tensor<2>, Tensor<2>)| {
///     let y = layers.iter().fold(x, |x, layer| layer.forward(x).tanh());
///     (y - targets).powf_scalar(2.0).mean()
/// };
/// let (items, mean, gradients) = micro_batched_within(&layers, part, 9000, 6 << 20, loss)?;
/// assert!(items < 9000); // the whole batch keeps more than 9 MiB
/// assert_eq!((mean.dims(), gradients.len()), ([1], 8));
/// # Ok::<(), burn_memsave::plan::PlanError>(())
/// ```
///
/// # Errors
///
/// [`PlanError::Budget`] if a step of one item needs more than the budget. [`PlanError::NotCounted`] if bytes are not counted: on CPU
/// devices, install the [`TrackingAllocator`](crate::measure::TrackingAllocator). Also the errors of [`micro_batched`].
pub fn micro_batched_within<M: Module, I: StepInput>(
    module: &M,
    part: impl Fn(Range<usize>) -> I,
    items: impl ItemWeights,
    budget: u64,
    loss: impl Fn(&M, I) -> Tensor<1>,
) -> Result<(usize, Tensor<1>, GradientsParams), PlanError> {
    // Before a measured step changes its statistics.
    may_be_taken_in_parts(module)?;
    let (weights, items) = (&items, items.items());
    if items == 0 {
        return Err(PartsError::NoItems.into());
    }
    let needs = |of_part: usize| {
        let Measurement { peak, gradients, .. } = measure_step(module, part(0..of_part), &loss);
        Some(Sums::of(module).peak(peak?, gradients, of_part == items))
    };
    let least = needs(1).ok_or(PlanError::NotCounted)?;
    let peak = |of_part| if of_part == 1 { least } else { needs(of_part).unwrap_or(u64::MAX) };
    let of_part = largest_batch(budget, items, peak).ok_or(PlanError::Budget { budget, least })?;
    let parts = (0..items).step_by(of_part).map(|start| start..items.min(start + of_part));
    let weighted = |range: Range<usize>| (part(range.clone()), weights.weight(range));
    let (mean, gradients) = micro_batched(module, parts.map(weighted), loss)?;
    Ok((of_part, mean, gradients))
}

/// The most bytes that a sum takes beside its numbers: its shape, and its place in the table of gradients.
const RECORD: u64 = 1 << 10;

/// Bytes of the sums of gradients, as if every trained parameter had one.
#[derive(Default)]
struct Sums {
    all: u64,
    largest: u64,
}

impl Sums {
    fn of<M: Module>(module: &M) -> Self {
        let mut sums = Self::default();
        each_once(module, &mut sums);
        sums
    }

    /// The peak of [`micro_batched`], given the peak of a step and the bytes of its gradients.
    fn peak(&self, of_step: u64, gradients: u64, is_whole: bool) -> u64 {
        // While a gradient is added, it exists as a cast one, as a scaled one and in the sum, if the backend does nothing in place.
        let adding = 2 * self.largest;
        match is_whole {
            true => of_step.max(gradients.max(self.all) + adding), // gradients become sums one by one
            false => self.all + of_step.max(gradients + adding),
        }
    }
}

impl EachOnce for Sums {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
        // A parameter that does not exist yet took no part in a step.
        if param.is_initialized() && param.is_require_grad() {
            let value = param.base();
            let bytes = (value.shape().num_elements() * value.dtype().size().max(DType::F32.size())) as u64;
            self.all += bytes + RECORD;
            self.largest = self.largest.max(bytes);
        }
    }
}

/// Adds gradients, times a factor, to sums.
struct Add<'a> {
    found: GradientsParams,
    sums: &'a mut GradientsParams,
    factor: f64,
}

impl EachOnce for Add<'_> {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
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

impl EachOnce for Scale<'_> {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
        if !param.is_require_grad() {
            return;
        }
        if let Some(sum) = self.sums.remove::<D>(param.id) {
            let dtype = FloatDType::from(param.base().dtype());
            self.sums.register(param.id, sum.mul_scalar(self.factor).cast(dtype));
        }
    }
}

/// The largest number of items in a batch, up to `limit`, whose step needs at most `budget` bytes; `None` if one item needs more.
///
/// `peak` runs a step of a number of items and returns the bytes that it needed, for example
/// [`measure_step(..).peak`](crate::measure::Measurement::peak). It is called for one item, for two, and then for sizes at which the line
/// through the last two sizes that fit meets the budget. Each is at most twice the one before.
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
                let more = more.unwrap_or(usize::MAX); // a step of any size needs the same
                fits.0.saturating_add(more).min(fits.0.saturating_mul(MOST_GROWTH))
            }
        };
        // If the line was wrong, halfway to the size that did not fit.
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
