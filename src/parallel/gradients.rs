//! Sums of the gradients of replicas: after the backward passes, on one device, or in them, each on the device that owns it.
use super::owners::Owners;
use super::traffic::Sent;
use crate::gradient_steps::OnGradient;
use crate::parameters::EachOnce;
use crate::widened::widened;
use burn::module::{Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_memsave_layers::graph::{GRADIENT, Slots};
use burn_memsave_layers::visit::VisitPath;
use std::any::Any;
use std::collections::HashMap;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The sum of tensors on any devices, in f32 at least and rounded once; `None` of none.
pub(super) fn sum<const D: usize>(parts: Vec<Tensor<D>>, device: &Device, sent: &Sent) -> Option<Tensor<D>> {
    let dtype = parts.first()?.dtype();
    let is_one = parts.len() == 1;
    let wide = |part: Tensor<D>| if is_one { part } else { widened(part) };
    let sum = parts.into_iter().map(|part| wide(sent.moved(part, device))).reduce(|a, b| a + b)?;
    Some(if sum.dtype() == dtype { sum } else { sum.cast(dtype) })
}

/// Sums the gradients of every parameter that it visits.
pub(super) struct Sums<'a> {
    pub parts: Vec<GradientsParams>,
    pub device: Device,
    pub sent: &'a Sent,
    pub sums: GradientsParams,
}

impl EachOnce for Sums<'_> {
    fn visit<const D: usize>(&mut self, param: &Param<Tensor<D>>, _: &[String]) {
        let parts = self.parts.iter_mut().filter_map(|part| part.remove::<D>(param.id)).collect();
        // Frozen and unused parameters have no gradient.
        if let Some(sum) = sum(parts, &self.device, self.sent) {
            self.sums.register(param.id, sum);
        }
    }
}

/// Gradients that go to the devices that own them as soon as they are complete.
pub(super) struct Collected {
    owners: Owners,
    /// Without autodiff.
    devices: Vec<Device>,
    /// How many replicas give gradients.
    replicas: usize,
    sent: Sent,
    /// By parameter an `Arrived<D>`, until every replica has given its gradient.
    waiting: Mutex<HashMap<ParamId, Box<dyn Any + Send>>>,
    sums: Mutex<GradientsParams>,
}

/// By replica, the gradients of a parameter that are on the device of their owner already. `None` if the replica did not use the parameter.
type Arrived<const D: usize> = Vec<(usize, Option<Tensor<D>>)>;

/// Data behind these locks is replaced as a whole, so a panic leaves it consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Collected {
    pub fn new(owners: Owners, devices: &[Device], replicas: usize, sent: Sent) -> Arc<Self> {
        let devices = devices.iter().map(|device| device.clone().without_autodiff()).collect();
        let (waiting, sums) = (Mutex::default(), Mutex::default());
        Arc::new(Self { owners, devices, replicas, sent, waiting, sums })
    }

    /// What is done with the gradients of a replica.
    pub fn of_replica(self: &Arc<Self>, replica: usize) -> Arc<OfReplica> {
        Arc::new(OfReplica { replica, all: self.clone() })
    }

    /// The sums, after the backward pass.
    pub fn sums(&self) -> GradientsParams {
        assert!(lock(&self.waiting).is_empty(), "every replica gave every gradient");
        mem::take(&mut *lock(&self.sums))
    }

    /// Takes a gradient. When those of all replicas are there, they are summed in the order of the replicas, so that the sum does not depend
    /// on which one came first.
    fn take<const D: usize>(&self, replica: usize, id: ParamId, gradient: Option<Tensor<D>>) {
        let owner = &self.devices[self.owners.of(id)];
        let gradient = gradient.map(|gradient| self.sent.moved(gradient, owner));
        let mut waiting = lock(&self.waiting);
        let arrived = waiting.entry(id).or_insert_with(|| Box::new(Arrived::<D>::new()));
        let arrived = arrived.downcast_mut::<Arrived<D>>().expect("parameters with one id have one rank");
        arrived.push((replica, gradient));
        if arrived.len() < self.replicas {
            return;
        }
        let mut parts = mem::take(arrived);
        waiting.remove(&id);
        drop(waiting);
        parts.sort_by_key(|(replica, _)| *replica);
        let parts = parts.into_iter().filter_map(|(_, gradient)| gradient).collect();
        if let Some(sum) = sum(parts, owner, &self.sent) {
            lock(&self.sums).register(id, sum);
        }
    }
}

/// Sends the gradients of a replica to their owners.
pub(super) struct OfReplica {
    replica: usize,
    all: Arc<Collected>,
}

impl OnGradient for OfReplica {
    fn complete<const D: usize>(&self, _: VisitPath, id: ParamId, device: &Device, slots: &Slots) {
        let gradient = slots.has(GRADIENT).then(|| crate::gradient_steps::taken(slots, GRADIENT, device));
        self.all.take::<D>(self.replica, id, gradient);
    }
}
