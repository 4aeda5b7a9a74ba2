//! Memory that is counted, and not taken.
use super::PlanError;
use crate::measure::NoLaunches;
use burn::tensor::Device;

/// What `f` returns, which runs with no kernel launched on the device: what it allocates there is counted and not taken. So the memory of
/// a step is known before there is a device that has it: make the model in `f`, too.
///
/// ```no_run
/// # // Needs a device of wgpu or CUDA.
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
///         measure_step(&layers, x, |layers, x| layers.iter().fold(x, |x, layer| layer.forward(x)).mean()).peak
///     };
///     dry_run(&device, step).expect("a device of wgpu or CUDA").expect("bytes are counted there")
/// };
/// let largest = largest_batch(40 << 30, 1 << 16, peak);
/// # let _ = largest;
/// ```
///
/// Counted are the bytes of tensors, as by [`measure_step`](crate::measure::measure_step) of a step that runs. Kernels are compiled, and
/// where Burn tunes an operation, it does so with tensors that are there. Data from the host is copied, and so takes memory.
///
/// All values in `f` are undefined, also what is read: nothing may depend on them, and no tensor made in it is of use afterwards. No kernel
/// is launched in the whole process while `f` runs: let nothing else use a device at that time. Burn's pools of exclusive pages take what
/// they count.
///
/// # Errors
///
/// On all devices but those of wgpu and CUDA: [`PlanError::NoDryRun`].
pub fn dry_run<R>(device: &Device, f: impl FnOnce() -> R) -> Result<R, PlanError> {
    let _no_launches = NoLaunches::begin(device).ok_or(PlanError::NoDryRun)?;
    Ok(f())
}
