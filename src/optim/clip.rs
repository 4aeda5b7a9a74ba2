//! [`clip_grad_norm`]: clips gradients by the norm of all of them together.
use crate::parameters::{EachOnce, each_once};
use crate::widened::widened;
use burn::module::{Module, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType, Tensor};
use std::collections::HashSet;

/// Scales the gradients of a module so that the norm of all of them together is at most `max_norm`: by `min(1, max_norm / (norm + 1e-6))`,
/// where `norm` is the square root of the sum of all squares, as PyTorch's `clip_grad_norm_`. Returns them, and the norm before, a tensor.
///
/// Gradients may be on several devices, as those of [`Replicas`](crate::parallel::Replicas) with a
/// [divided optimizer](crate::parallel::ReplicaOptions::with_sharded_optimizer) are: each device sends one number, and gets the factor. The
/// norm is on the device of the first gradient. Squares are summed in f32 at least, and nobody waits for a device.
///
/// Burn's [`with_grad_clipping`](burn::optim::ModuleOptimizer::with_grad_clipping) clips each gradient by its own norm.
///
/// ```
/// use burn::optim::GradientsParams;
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::nn::LinearConfig;
/// use burn_memsave::optim::clip_grad_norm;
///
/// let device = Device::flex().autodiff();
/// let linear = LinearConfig::new(2, 2).with_bias(false).init(&device);
/// let loss = linear.forward(Tensor::<2>::from_data([[3.0, 4.0]], &device)).sum();
/// let gradients = GradientsParams::from_grads(loss.backward(), &linear); // [[3, 3], [4, 4]]
/// let (clipped, norm) = clip_grad_norm(&linear, gradients, 1.0);
/// assert!((norm.unwrap().into_scalar::<f32>() - 50f32.sqrt()).abs() < 1e-5);
/// let first: f32 = clipped.get::<2>(linear.weight.id).unwrap().into_data().iter().next().unwrap();
/// assert!((first - 3.0 / 50f32.sqrt()).abs() < 1e-5);
/// ```
///
/// The norm is `None` if there are no gradients. An infinite or undefined norm makes gradients zero or undefined, as in PyTorch.
///
/// # Panics
///
/// Panics if `max_norm` is negative or not a number, or if a gradient belongs to a parameter that the module does not have.
pub fn clip_grad_norm<M: Module>(
    module: &M,
    gradients: GradientsParams,
    max_norm: f64,
) -> (GradientsParams, Option<Tensor<1>>) {
    assert!(max_norm >= 0.0, "a norm of {max_norm}");
    let mut squares = Squares { gradients: &gradients, found: HashSet::new(), by_device: vec![] };
    each_once(module, &mut squares);
    let Squares { found, by_device, .. } = squares;
    assert_eq!(found.len(), gradients.len(), "gradients of parameters that the module has");
    let Some((first, _)) = by_device.first() else { return (gradients, None) };
    let first = first.clone();
    let devices: Vec<Device> = by_device.iter().map(|(device, _)| device.clone()).collect();
    let sum = by_device.into_iter().map(|(_, sum)| on(sum, &first)).reduce(plus).expect("a device");
    let norm = sum.sqrt();
    let factor = (norm.clone() + 1e-6).recip().mul_scalar(max_norm).clamp_max(1.0);
    let by_device = devices.into_iter().map(|device| (on(factor.clone(), &device), device)).collect();
    let mut scale = Scale { gradients, by_device, scaled: GradientsParams::new() };
    each_once(module, &mut scale);
    (scale.scaled, Some(norm))
}

fn on(tensor: Tensor<1>, device: &Device) -> Tensor<1> {
    if tensor.device() == *device { tensor } else { tensor.to_device(device) }
}

/// The sum, in the dtype of the first.
fn plus(a: Tensor<1>, b: Tensor<1>) -> Tensor<1> {
    let dtype = FloatDType::from(a.dtype());
    a + b.cast(dtype)
}

/// Sums squares, by device.
struct Squares<'a> {
    gradients: &'a GradientsParams,
    found: HashSet<ParamId>,
    by_device: Vec<(Device, Tensor<1>)>,
}

impl EachOnce for Squares<'_> {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
        let Some(gradient) = self.gradients.get::<D>(param.id) else { return };
        if !self.found.insert(param.id) {
            return; // frozen in another place
        }
        let (device, squares) = (gradient.device(), widened(gradient).square().sum());
        match self.by_device.iter_mut().find(|(of, _)| *of == device) {
            Some((_, sum)) => *sum = plus(sum.clone(), squares),
            None => self.by_device.push((device, squares)),
        }
    }
}

/// Multiplies gradients by a factor, which is on every device that has some.
struct Scale {
    gradients: GradientsParams,
    by_device: Vec<(Tensor<1>, Device)>,
    scaled: GradientsParams,
}

impl EachOnce for Scale {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        let (device, dtype) = (gradient.device(), FloatDType::from(gradient.dtype()));
        let (factor, _) = self.by_device.iter().find(|(_, of)| *of == device).expect("of every device");
        let gradient = widened(gradient);
        let factor = factor.clone().cast(FloatDType::from(gradient.dtype())).reshape([1; D]);
        self.scaled.register(param.id, (gradient * factor).cast(dtype));
    }
}
