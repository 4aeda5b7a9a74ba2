//! [`dry_run`](dry_run()): memory is counted, and not allocated.
use super::PlanError;
use crate::measure::NoLaunches;
use burn::tensor::Device;

/// Runs `f` without launching a kernel on the device, and returns its result. Memory of the device is counted but not allocated, so you
/// know the memory of a step before you have a device with that much. Make the model in `f`, too.
///
/// ```no_run
/// # // Needs a device of wgpu or CUDA.
/// use burn::module::Module;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::measure::measure_step;
/// use burn_memsave::nn::{Linear, LinearConfig};
/// use burn_memsave::plan::{dry_run, largest_batch};
///
/// # let device = Device::default();
/// let device = device.autodiff();
/// let peak = |items| {
///     let step = || {
///         let layers: Vec<Linear> = (0..100).map(|_| LinearConfig::new(8192, 8192).init(&device)).collect(); // 25 GiB
///         let x = Tensor::<2>::zeros([items, 8192], &device);
///         let parameters = 4 * layers.num_params() as u64;
///         let step =
///             measure_step(&layers, x, |layers, x| layers.iter().fold(x, |x, layer| layer.forward(x)).mean());
///         parameters + step.peak.expect("bytes are counted there") // with 25 GiB of gradients
///     };
///     dry_run(&device, step).expect("a device of wgpu or CUDA")
/// };
/// let largest = largest_batch(80 << 30, 1 << 16, peak);
/// # let _ = largest;
/// ```
///
/// The bytes of tensors are counted, as [`measure_step`](crate::measure::measure_step) does for a step that runs. Some memory is allocated
/// all the same: for data from the host, for tensors that are read (`measure_step` reads its input), each with its whole page, and for the
/// inputs and outputs of operations that Burn tunes. Where CubeCL has a page for every tensor, everything is allocated.
///
/// **All values in `f` are undefined**, including those that are read. Nothing may depend on them: no loss scaling, no
/// [`step_in_backward`](crate::optim::step_in_backward) with tied parameters. Do not use tensors from `f` afterwards. If a module from
/// outside has parameters that are not initialized yet, they would be initialized in `f` and would be useless after it, and so would
/// running statistics.
///
/// No kernel is launched in the whole process while `f` runs. Let nothing else use a device at that time, and synchronize other threads and
/// devices before. Pools may keep pages as large as the largest tensor that was counted, so train in another process.
///
/// # Errors
///
/// [`PlanError::NoDryRun`] on all devices except those of wgpu and CUDA. Also if the device has failed before.
pub fn dry_run<R>(device: &Device, f: impl FnOnce() -> R) -> Result<R, PlanError> {
    let begun = NoLaunches::begin(device).ok_or(PlanError::NoDryRun)?;
    let _no_launches = begun.map_err(PlanError::Device)?;
    Ok(f())
}
