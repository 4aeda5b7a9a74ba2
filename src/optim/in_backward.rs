//! [`step_in_backward`]: updates each parameter in the backward pass, as soon as its gradient is complete.
//!
//! `gradient_steps` moves the parameters from the module into the graph, so that they can change in place, and gives each gradient to a
//! [`Step`] as soon as it is complete. [`Return`] puts the new parameters back.
use super::{InBackwardError, StepRefused};
use crate::gradient_steps::{Enter, OnGradient, Restore, leave, taken};
use crate::mixed::watch_scaling;
use crate::parameters::untied;
use crate::strategy::with_strategy;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{Device, Tensor};
use burn_memsave_layers::graph::{GRADIENT, PARAMETER, Slots, Updates};
use burn_memsave_layers::node::node_id;
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Runs one training step in which gradients never coexist: each parameter is updated as soon as its gradient is complete, in the middle of
/// the backward pass, and the gradient is dropped ([LOMO, arXiv 2306.09782](https://arxiv.org/abs/2306.09782)).
///
/// Returns the module and the loss, which is not tracked. The module and the state of the optimizer are those that the following gives, on
/// CPU backends to the last bit:
///
/// ```text
/// let gradients = GradientsParams::from_grads(loss(&module).backward(), &module);
/// optimizer.step(lr, module, gradients)
/// ```
///
/// The optimizer may be any of Burn's or of this library's. Parameters that are not used stay as they are. Tied parameters, that is, those
/// with one id in several places, stay tied (Burn's optimizers update only the first place).
///
/// ```
/// use burn::tensor::{Device, Tensor};
/// use burn_memsave::nn::LinearConfig;
/// use burn_memsave::optim::{AdamW8bitConfig, step_in_backward};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(8, 4).init(&device);
/// let mut optimizer = AdamW8bitConfig::new().init();
/// let x = Tensor::<2>::ones([2, 8], &device);
/// let loss = |model: &burn_memsave::nn::Linear| model.forward(x.clone()).powf_scalar(2.0).mean();
/// let (model, first) = step_in_backward(model, &mut optimizer, 1e-3, loss)?;
/// let (_, second) = step_in_backward(model, &mut optimizer, 1e-3, loss)?;
/// assert!(second.into_scalar::<f32>() < first.into_scalar::<f32>());
/// # Ok::<(), burn_memsave::optim::InBackwardError>(())
/// ```
///
/// # Memory
///
/// One gradient exists at a time: a layer's gradient is gone before that of the layer below it is computed. With layers of this library
/// that is exact. Other layers do not check for complete gradients themselves, so those of layers side by side (the three projections of
/// attention) may exist together, as do those of a [checkpointed](crate::checkpoint) segment. A parameter is updated in place if nothing
/// else holds it: the module is taken by value, so do not keep a clone of it.
///
/// # What cannot work here
///
/// Techniques that need all gradients before the first update cannot work, since neither the arguments nor the result hold gradients:
///
/// - Accumulation, which sums gradients over several batches.
/// - Clipping by the norm of all gradients together. Clipping by the optimizer itself ([`ModuleOptimizer::with_grad_clipping`]), which
///   looks at one gradient at a time, works.
/// - Loss scaling, which has to divide gradients by the scale, and to skip the step if one is infinite. It is an error if `loss` calls
///   [`LossScaler::scale`](crate::mixed::LossScaler::scale) on the thread that it is called on. A loss that is multiplied by hand cannot be
///   recognized. bf16 needs no scale.
///
/// Nor may `loss` run a backward pass through the parameters itself, say for a gradient penalty, and use them again: Burn panics, as it
/// does for any graph. Run that backward pass before this step, with the module as it is.
///
/// # Errors
///
/// Returns a [`StepRefused`], which says why the step is impossible, and has the module as it was. The optimizer is not changed.
///
/// # Panics
///
/// Panics if `loss`, its backward pass or the optimizer panics. Some parameters and their states are then updated, and others are not.
pub fn step_in_backward<M: Module>(
    module: M,
    optimizer: &mut ModuleOptimizer,
    lr: impl Into<ModuleLearningRate>,
    loss: impl FnOnce(&M) -> Tensor<1>,
) -> Result<(M, Tensor<1>), StepRefused<M>> {
    if let Some(error) = Check::of(&module) {
        return Err(StepRefused { module, error });
    }
    let updates = Updates::default();
    let mut enter = Enter::new(updates.clone(), 0);
    let module = module.map(&mut enter);

    let (loss, is_scaled) = watch_scaling(|| loss(&module));
    if let Some(error) = refusal(&loss, is_scaled) {
        return Err(StepRefused { module: module.map(&mut Restore { places: enter.places }), error });
    }
    let value = loss.clone().inner();
    let borrowed = Borrowed::new(optimizer);
    let step =
        Arc::new(Step { optimizer: borrowed.shared.clone(), lr: lr.into(), changed: Mutex::default() });
    let (module, loss) = leave(module, enter, loss, step.clone());
    drop(updates.during(|| loss.backward()));
    drop(borrowed);
    let changed = mem::take(&mut *lock(&step.changed));
    Ok((module.map(&mut Return { changed }), value))
}

/// Why a loss cannot be used.
fn refusal(loss: &Tensor<1>, is_scaled: bool) -> Option<InBackwardError> {
    let elements = loss.shape().num_elements();
    match (is_scaled, elements, loss.is_tracked()) {
        (true, ..) => Some(InBackwardError::Scaled),
        (_, 1, true) => None,
        (_, 1, false) => Some(InBackwardError::Untracked),
        _ => Some(InBackwardError::NoScalar { elements }),
    }
}

/// Data behind these locks is replaced as a whole, so a panic leaves it consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Finds what cannot be updated in the backward pass.
#[derive(Default)]
struct Check {
    path: VisitPath,
    seen: HashSet<ParamId>,
    /// The parameter of every node.
    nodes: HashMap<u64, (ParamId, String)>,
    error: Option<InBackwardError>,
}

impl Check {
    fn of(module: &impl Module) -> Option<InBackwardError> {
        let mut check = Self::default();
        module.visit(&mut check);
        let untied = || untied(module).map(|(first, second)| InBackwardError::Untied { first, second });
        check.error.or_else(untied)
    }
}

impl ModuleVisitor for Check {
    follow_path!();
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_some() || !param.is_require_grad() {
            return;
        }
        let (path, value) = (self.path.joined(), param.base());
        if value.is_distributed() {
            self.error = Some(InBackwardError::Distributed { path });
            return;
        }
        let node = node_id(value.clone()).expect("what requires a gradient is a node").value;
        if !self.seen.insert(param.id) {
            return;
        }
        if let Some((_, first)) = self.nodes.get(&node) {
            self.error = Some(InBackwardError::OneTensor { first: first.clone(), second: path });
            return;
        }
        self.nodes.insert(node, (param.id, path));
    }
}

/// What an update needs.
struct Step {
    optimizer: Arc<Mutex<Option<ModuleOptimizer>>>,
    lr: ModuleLearningRate,
    /// New values (tensors without autodiff), and the devices of the old ones.
    changed: Mutex<Changed>,
}

/// New values by parameter.
type Changed = HashMap<ParamId, (Box<dyn Any + Send>, Device)>;

impl OnGradient for Step {
    /// Updates one parameter. The optimizer sees it at its path in the module.
    fn complete<const D: usize>(&self, path: VisitPath, id: ParamId, device: &Device, slots: &Slots) {
        let value = taken::<D>(slots, PARAMETER, device);
        let value = match slots.has(GRADIENT) {
            false => value, // it was not used
            true => {
                let mut gradients = GradientsParams::new();
                gradients.register(id, taken::<D>(slots, GRADIENT, device));
                let at = At { path, param: Param::initialized(id, with_strategy(value, device)) };
                let mut optimizer = lock(&self.optimizer);
                let optimizer = optimizer.as_mut().expect("borrowed for the whole backward pass");
                optimizer.step(self.lr.clone(), at, gradients).param.into_value().inner()
            }
        };
        lock(&self.changed).insert(id, (Box::new(value), device.clone()));
    }
}

/// Puts new values into the module.
struct Return {
    changed: Changed,
}

impl ModuleMapper for Return {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A parameter that was taken out left a tensor without autodiff.
        let changed = self.changed.get_mut(&param.id).filter(|_| !param.base().is_autodiff());
        let Some((value, device)) = changed else { return param };
        let value = value.downcast_mut::<Tensor<D>>().expect("parameters with one id have one rank");
        if !value.is_require_grad() {
            *value = with_strategy(value.clone(), device).require_grad();
        }
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, value.clone(), mapper)
    }
}

/// Lends the optimizer to steps of the graph, which own what they use.
struct Borrowed<'a> {
    place: &'a mut ModuleOptimizer,
    shared: Arc<Mutex<Option<ModuleOptimizer>>>,
}

impl<'a> Borrowed<'a> {
    fn new(place: &'a mut ModuleOptimizer) -> Self {
        let optimizer = mem::replace(place, SgdConfig::new().init());
        Self { place, shared: Arc::new(Mutex::new(Some(optimizer))) }
    }
}

impl Drop for Borrowed<'_> {
    /// Gives the optimizer back, also if the backward pass panics.
    fn drop(&mut self) {
        if let Some(optimizer) = lock(&self.shared).take() {
            *self.place = optimizer;
        }
    }
}

/// One parameter of a module, at its path.
#[derive(Clone, Debug)]
struct At<const D: usize> {
    path: VisitPath,
    param: Param<Tensor<D>>,
}

impl<const D: usize> Module for At<D> {
    fn collect_devices(&self, devices: Vec<Device>) -> Vec<Device> {
        self.param.collect_devices(devices)
    }
    fn fork(self, device: &Device) -> Self {
        Self { param: self.param.fork(device), ..self }
    }
    fn to_device(self, device: &Device) -> Self {
        Self { param: self.param.to_device(device), ..self }
    }
    fn train(self) -> Self {
        Self { param: self.param.train(), ..self }
    }
    fn valid(&self) -> Self {
        Self { path: self.path.clone(), param: self.param.valid() }
    }
    fn materialize(self) -> Self {
        self
    }
    fn visit<V: ModuleVisitor>(&self, visitor: &mut V) {
        self.path.fields().for_each(|(name, container)| visitor.enter_module(name, container));
        self.param.visit(visitor);
        self.path.fields().rev().for_each(|(name, container)| visitor.exit_module(name, container));
    }
    fn map<V: ModuleMapper>(self, mapper: &mut V) -> Self {
        let Self { path, param } = self;
        path.fields().for_each(|(name, container)| mapper.enter_module(name, container));
        let param = Module::map(param, mapper);
        path.fields().rev().for_each(|(name, container)| mapper.exit_module(name, container));
        Self { path, param }
    }
}
