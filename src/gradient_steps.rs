//! Gives the gradient of each parameter to a function as soon as it is complete, in the backward pass.
//!
//! [`Enter`] puts a step of the graph on top of every parameter, and [`Leave`] moves the parameters from the module into the graph.
//! `layers/src/graph/update.rs` finds out when a gradient is complete.
use crate::strategy::token;
use burn::backend::Dispatch;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn_memsave_layers::graph::{SegmentOps, Slots, UpdateOnce, UpdateOps, Updates};
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What is done with a gradient.
pub(crate) trait OnGradient: Send + Sync + 'static {
    /// Takes the parameter and its gradient, if it has one, out of slots. `path` and `device` are those of the parameter.
    fn complete<const D: usize>(&self, path: VisitPath, id: ParamId, device: &Device, slots: &Slots);
}

/// Puts a step that waits for the gradient on top of every parameter that requires one.
pub(crate) struct Enter {
    updates: Updates,
    /// The number of the first parameter.
    first: usize,
    pub(crate) places: Places,
}

/// By parameter a `[Tensor<D>; 2]`: the parameter, and the tensor that the module has in its place.
pub(crate) type Places = HashMap<ParamId, Box<dyn Any>>;

impl Enter {
    pub(crate) fn new(updates: Updates, first: usize) -> Self {
        Self { updates, first, places: HashMap::new() }
    }
}

impl ModuleMapper for Enter {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A lazy weight is offered a second time, for an adapter.
        if !param.is_require_grad() {
            return param;
        }
        let (id, value, mapper) = param.consume();
        let number = self.first + self.places.len();
        let place = self.places.entry(id).or_insert_with(|| {
            let dispatch = value.clone().into_dispatch();
            let entered = Dispatch::memsave_update_enter(dispatch, self.updates.clone(), number);
            Box::new([value, Tensor::<D>::from_dispatch(entered)])
        });
        let [_, entered] = of_rank::<D>(&**place);
        Param::from_mapped_value(id, entered.clone(), mapper)
    }
}

fn of_rank<const D: usize>(place: &dyn Any) -> &[Tensor<D>; 2] {
    place.downcast_ref().expect("parameters with one id have one rank")
}

/// Undoes [`Enter`].
pub(crate) struct Restore {
    pub(crate) places: Places,
}

impl ModuleMapper for Restore {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A frozen parameter with the same id did not enter.
        let place = self.places.get(&param.id).filter(|_| param.base().is_tracked());
        let Some(place) = place else { return param };
        let [before, _] = of_rank::<D>(&**place);
        let (id, _, mapper) = param.consume();
        Param::from_mapped_value(id, before.clone(), mapper)
    }
}

/// Moves the parameters that entered from the module into the graph of the loss, with what is done with their gradients. Returns the module
/// without them, and the loss, whose backward pass must run in [`Updates::during`].
pub(crate) fn leave<M: Module>(
    module: M,
    enter: Enter,
    loss: Tensor<1>,
    on_gradient: Arc<impl OnGradient>,
) -> (M, Tensor<1>) {
    let Enter { updates, first, places } = enter;
    let entered: HashSet<ParamId> = places.into_keys().collect();
    let token = token(&loss.device()).require_grad().into_dispatch();
    let watched = Dispatch::memsave_update_watch(loss.into_dispatch(), token, updates.clone());
    let mut leave = Leave {
        path: VisitPath::default(),
        entered,
        first,
        left: HashSet::new(),
        loss: Some(Tensor::from_dispatch(watched)),
        updates,
        on_gradient,
    };
    let module = module.map(&mut leave);
    let loss = leave.loss.take().expect("put back by every parameter");
    (module, loss)
}

/// Takes the parameters out of the module, so that only the graph holds them.
struct Leave<G> {
    path: VisitPath,
    entered: HashSet<ParamId>,
    /// The number of the first parameter.
    first: usize,
    /// The parameters that were taken, in the order of their numbers.
    left: HashSet<ParamId>,
    loss: Option<Tensor<1>>,
    updates: Updates,
    on_gradient: Arc<G>,
}

impl<G: OnGradient> ModuleMapper for Leave<G> {
    follow_path!();
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        // A frozen parameter with the same id did not enter.
        if !self.entered.contains(&param.id) || !param.base().is_tracked() {
            return param;
        }
        let (id, value, mapper) = param.consume();
        let device = value.device();
        let plain = device.clone().without_autodiff();
        let number = self.first + self.left.len();
        if self.left.insert(id) {
            let (on_gradient, path) = (self.on_gradient.clone(), self.path.clone());
            let update = UpdateOnce::new(move |slots| on_gradient.complete::<D>(path, id, &device, &slots));
            let loss = self.loss.take().expect("put back by the parameter before").into_dispatch();
            let value = value.into_dispatch();
            let loss = Dispatch::memsave_update_enroll(loss, value, self.updates.clone(), number, update);
            self.loss = Some(Tensor::from_dispatch(loss));
        }
        Param::from_mapped_value(id, Tensor::zeros([1; D], &plain), mapper)
    }
}

/// Takes a tensor without autodiff out of a slot. `device` is its device.
pub(crate) fn taken<const D: usize>(slots: &Slots, slot: usize, device: &Device) -> Tensor<D> {
    let like = Tensor::<1>::zeros([1], &device.clone().without_autodiff()).into_dispatch();
    Tensor::from_dispatch(Dispatch::memsave_segment_take(like, slots.clone(), slot))
}
