//! [`retry_with_smaller_batch`]: smaller batches after a device ran out of memory.
use super::{PartsError, PlanError};
use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{FloatDType, Slice, Tensor};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Runs `step` with `items` items, and again with half as many each time the device of the module runs out of memory. Returns the number of
/// items that fit, the loss and the gradients.
///
/// `step` computes a loss and its gradients, and must change nothing else. With [`micro_batched`](super::micro_batched), they are those of
/// the whole batch, in parts with this number of items. A device reports that memory ran out only when something is read, so this reads one
/// element of every gradient. Look for the number once, and store it.
///
/// This is about the memory of wgpu and CUDA devices. A program that runs out of host memory ends, and nothing can be caught: there, call
/// [`largest_batch`](super::largest_batch) with a budget.
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::nn::LinearConfig;
/// use burn_memsave::plan::{micro_batched, retry_with_smaller_batch};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(8, 4).init(&device);
/// let batch = Tensor::<2>::ones([64, 8], &device);
/// let (items, loss, gradients) = retry_with_smaller_batch(&model, 64, |items| {
///     let parts = batch.clone().split(items, 0).into_iter().map(|part| (part.clone(), part.dims()[0]));
///     micro_batched(&model, parts, |model, x| model.forward(x).powf_scalar(2.0).mean())
/// })?;
/// assert_eq!((items, loss.dims(), gradients.len()), (64, [1], 2)); // on a CPU there is nothing to find out
/// # Ok::<(), burn_memsave::plan::PlanError>(())
/// ```
///
/// # Errors
///
/// If there are no items, if there is no memory for one, or if the device fails for another reason. Also the errors of `step`.
///
/// # Panics
///
/// If `step` panics for another reason.
pub fn retry_with_smaller_batch<M: Module>(
    module: &M,
    items: usize,
    mut step: impl FnMut(usize) -> Result<(Tensor<1>, GradientsParams), PlanError>,
) -> Result<(usize, Tensor<1>, GradientsParams), PlanError> {
    if items == 0 {
        return Err(PartsError::NoItems.into());
    }
    // Otherwise lazy parameters would be initialized in a step, and lost if memory runs out.
    module.visit(&mut Initialize);
    let mut next = items;
    while next > 0 {
        // A step may leave its own data half done, but Burn's graphs and devices can be used again.
        let run = catch_unwind(AssertUnwindSafe(|| {
            let (loss, gradients) = step(next)?;
            read_some(module, &loss, &gradients)?;
            Ok((next, loss, gradients))
        }));
        match run {
            Ok(Err(PlanError::Device(error))) if is_out_of_memory(&error) => {}
            Ok(result) => return result,
            Err(panic) if message(&*panic).is_some_and(is_out_of_memory) => {}
            Err(panic) => resume_unwind(panic),
        }
        module.devices().iter().for_each(|device| device.memory_cleanup());
        next /= 2;
    }
    Err(PlanError::OutOfMemory)
}

/// Initializes lazy parameters.
struct Initialize;

impl ModuleVisitor for Initialize {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        drop(param.val());
    }
}

/// Reads the loss, and an element of every gradient of the module.
fn read_some<M: Module>(module: &M, loss: &Tensor<1>, gradients: &GradientsParams) -> Result<(), PlanError> {
    struct Sum<'a> {
        gradients: &'a GradientsParams,
        sum: Tensor<1>,
    }
    impl ModuleVisitor for Sum<'_> {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let Some(gradient) = self.gradients.get::<D>(param.id) else { return };
            if gradient.shape().num_elements() > 0 {
                let first = gradient.slice([Slice::new(0, Some(1), 1); D]).reshape([1]).cast(FloatDType::F32);
                self.sum = self.sum.clone() + first.to_device(&self.sum.device());
            }
        }
    }
    let loss = if loss.is_autodiff() { loss.clone().inner() } else { loss.clone() };
    let mut sum = Sum { gradients, sum: loss.cast(FloatDType::F32) };
    module.visit(&mut sum);
    sum.sum.try_into_data().map(drop).map_err(|error| PlanError::Device(error.to_string()))
}

/// The message of a panic.
fn message(panic: &(dyn Any + Send)) -> Option<&str> {
    panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied())
}

/// Whether this is a message of a driver or of CubeCL 0.11.3 that memory ran out, and the device still works.
fn is_out_of_memory(message: &str) -> bool {
    const WORDS: [&str; 7] = [
        "out of memory",
        "out-of-memory",
        "out of device memory",
        "can't allocate buffer of size",
        "every page size the memory tracks still holds",
        // These come from a thread of the device.
        "the reservation behind it failed",
        "memory location was never initialized",
    ];
    let message = message.to_lowercase();
    WORDS.iter().any(|words| message.contains(words)) && !message.contains("poisoned")
}
