//! Memory that is counted, and not taken.
use super::PlanError;
use crate::measure::NoLaunches;
use burn::tensor::Device;

/// Runs `f` without launching a kernel on the device, and returns what it returns. What `f` allocates there is counted and not taken, so
/// that the memory of a step is known before you have a device with that much: make the model in `f`, too.
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
/// Counted are the bytes of tensors, as by [`measure_step`](crate::measure::measure_step) of a step that runs. Memory is taken all the
/// same by data from the host, by what is read (`measure_step` reads its input), with the whole page that it lies on, and by the inputs
/// and outputs of an operation that Burn tunes. Where CubeCL has a page for every tensor, everything takes memory.
///
/// **All values in `f` are undefined**, also what is read. Nothing may depend on them: no loss scaling, no
/// [`step_in_backward`](crate::optim::step_in_backward) with tied parameters. No tensor made in it is of use afterwards: parameters of a
/// module from outside that are not initialized yet would be initialized in `f` and lost with it, and so would running statistics.
///
/// No kernel is launched in the whole process while `f` runs. Let nothing else use a device at that time, and synchronize other threads
/// and devices before. Pools may keep pages as large as the largest tensor that was counted: to train afterwards, start another process.
///
/// # Errors
///
/// On all devices but those of wgpu and CUDA: [`PlanError::NoDryRun`]; and if the device has failed before.
pub fn dry_run<R>(device: &Device, f: impl FnOnce() -> R) -> Result<R, PlanError> {
    let begun = NoLaunches::begin(device).ok_or(PlanError::NoDryRun)?;
    let _no_launches = begun.map_err(PlanError::Device)?;
    Ok(f())
}
