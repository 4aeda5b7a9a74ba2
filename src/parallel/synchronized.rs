//! Steps in which replicas compute at the same time, on threads of their own, so that a batch norm can have the statistics of the whole
//! batch: each thread waits in a batch norm until all have come to it.
use super::gradients::{Collected, OfReplica};
use super::{Given, ParallelError, Replicas, forward_entered, passes};
use crate::gradient_steps::{Enter, leave};
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn_memsave_layers::backend::remote::{TIMEOUT, data};
use burn_memsave_layers::graph::{Exchange, ExchangeError, Member, Updates, is_thread_of_pool};
use burn_memsave_layers::{follow_path, visit::VisitPath};
use std::collections::{BTreeMap, HashSet};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;

/// The replica of a part, the part, and its share of the loss.
type Part<T> = (usize, T, f64);

impl<M: Module> Replicas<M> {
    /// The loss and the gradients, as [`backward`](Self::backward) gives them. `running` are the running statistics in training.
    pub(super) fn backward_at_once<T: Send>(
        &self,
        running: &HashSet<ParamId>,
        parts: Vec<Part<T>>,
        loss: impl Fn(&M, T) -> Tensor<1> + Sync,
    ) -> Result<(Tensor<1>, GradientsParams), ParallelError> {
        if is_thread_of_pool() {
            return Err(ParallelError::ThreadOfPool);
        }
        let replicas: Vec<usize> = parts.iter().map(|(index, ..)| *index).collect();
        let exchange = Exchange::new(parts.len(), self.timeout.unwrap_or(TIMEOUT));
        let members: Vec<Member> = (0..parts.len()).map(|index| exchange.member(index)).collect();
        let collected = self.owners.as_ref().map(|owners| {
            Collected::new(owners.clone(), &self.devices, parts.len(), self.gradients_sent.clone())
        });
        let given = self.on_threads(&exchange, &members, parts, collected.as_ref(), &loss);
        let given = self.succeeded(given, &replicas, &exchange)?;
        self.all_are_synchronized(running, &members, &replicas)?;
        let (losses, parts): (Vec<_>, Vec<_>) = given.into_iter().unzip();
        let loss = self.sum_of_losses(losses);
        let gradients = match collected {
            Some(collected) => collected.sums(),
            None => self.sum_on_first(parts),
        };
        // A step that fails changes nothing.
        if self.has_servers() {
            self.sync()?;
        }
        members.iter().for_each(Member::update);
        self.copy_running_statistics(running, &replicas);
        Ok((loss, gradients))
    }

    /// Runs every part on a thread of its own. `None` for those that failed.
    fn on_threads<T: Send>(
        &self,
        exchange: &Exchange,
        members: &[Member],
        parts: Vec<Part<T>>,
        collected: Option<&Arc<Collected>>,
        loss: &(impl Fn(&M, T) -> Tensor<1> + Sync),
    ) -> Vec<Option<Given>> {
        thread::scope(|scope| {
            let start = |(number, (index, part, share)): (usize, Part<T>)| {
                let (module, device) = (self.modules[index].clone(), self.devices[index].clone());
                let collected = collected.map(|collected| collected.of_replica(index));
                let member = members[number].clone();
                let run = move || {
                    member.run(|| match collected {
                        None => passes(&module, part, share, loss),
                        Some(collected) => {
                            let loss = |module: &M| loss(module, part).mul_scalar(share);
                            passes_to_owners(module, &device, loss, collected)
                        }
                    })
                };
                let thread = thread::Builder::new().name(format!("replica {index}")).spawn_scoped(scope, run);
                if let Err(error) = &thread {
                    let message = format!("its thread could not be started: {error}");
                    exchange.fail(ExchangeError::Panicked { member: number, message });
                }
                thread.ok()
            };
            let threads: Vec<_> = parts.into_iter().enumerate().map(start).collect();
            threads.into_iter().map(|thread| thread?.join().ok().flatten()).collect()
        })
    }

    /// What all replicas gave, or why one of them failed.
    fn succeeded(
        &self,
        given: Vec<Option<Given>>,
        replicas: &[usize],
        exchange: &Exchange,
    ) -> Result<Vec<(Tensor<1>, GradientsParams)>, ParallelError> {
        // The others may have waited for the one whose loss was refused.
        let mut all = Vec::with_capacity(given.len());
        for (given, &part) in given.into_iter().zip(replicas) {
            // Without one, it failed, as the exchange says.
            if let Some(given) = given {
                all.push(given.map_err(|error| ParallelError::Loss { part, error })?);
            }
        }
        let of = |members: &[usize]| members.iter().map(|&member| replicas[member]).collect::<Vec<_>>();
        match exchange.failure() {
            None => Ok(all),
            Some(ExchangeError::NoAnswer(device)) => resume_unwind(device), // `naming_servers` catches it
            Some(ExchangeError::Panicked { member, message }) => {
                let index = replicas[member];
                let device = Box::new(self.devices[index].clone());
                Err(ParallelError::Replica { index, device, message })
            }
            Some(ExchangeError::Differ { member, others }) => {
                Err(ParallelError::Differ { index: replicas[member], others: of(&others) })
            }
            Some(ExchangeError::TimedOut { members, after }) => {
                let named = |index: usize| (index, self.devices[index].clone());
                Err(ParallelError::TimedOut { devices: of(&members).into_iter().map(named).collect(), after })
            }
        }
    }

    /// Gives the replicas that had no part the running statistics of one that had.
    fn copy_running_statistics(&self, running: &HashSet<ParamId>, replicas: &[usize]) {
        let idle = || (0..self.modules.len()).filter(|index| !replicas.contains(index));
        if running.is_empty() || idle().next().is_none() {
            return;
        }
        let values = values(&self.modules[replicas[0]], running);
        for index in idle() {
            // A module shares its running statistics with its clones.
            drop(self.modules[index].clone().map(&mut Give { path: VisitPath::default(), values: &values }));
        }
    }

    /// Checks that no running statistics changed but those of batch norms that were synchronized.
    fn all_are_synchronized(
        &self,
        running: &HashSet<ParamId>,
        members: &[Member],
        replicas: &[usize],
    ) -> Result<(), ParallelError> {
        let updated: Vec<Vec<ParamId>> = members.iter().map(Member::to_be_updated).collect();
        // Different batch norms of as many channels have exchanged their numbers as if they were one.
        if let Some(other) = updated.iter().position(|of| *of != updated[0]) {
            return Err(ParallelError::Differ { index: replicas[other], others: vec![replicas[0]] });
        }
        let unused: HashSet<ParamId> =
            running.iter().filter(|id| !updated[0].contains(id)).copied().collect();
        if unused.is_empty() {
            return Ok(());
        }
        for &index in replicas {
            let module = &self.modules[index];
            let before = values(module, &unused);
            // Makes pending updates visible, in the module, too.
            let after = values(&module.valid(), &unused);
            let numbers = |value: &Tensor<1>| {
                let value = value.clone();
                data(&value.device(), move || value.try_into_data())
            };
            let is_changed =
                |(path, value): &(&String, &Tensor<1>)| after.get(*path).map(numbers) != Some(numbers(value));
            if let Some((path, _)) = before.iter().find(is_changed) {
                let path = path.rsplit_once('.').map_or("", |(part, _)| part).to_owned();
                return Err(ParallelError::NotSynchronized { path });
            }
        }
        Ok(())
    }
}

/// Gives running statistics these values.
struct Give<'a> {
    path: VisitPath,
    values: &'a Values,
}

impl ModuleMapper for Give<'_> {
    follow_path!();
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.get(&self.path.joined()) {
            Some(value) => param.map(|old| value.clone().to_device(&old.device()).reshape(old.shape())),
            None => param,
        }
    }
}

/// [`passes`], with gradients that go to their owners as soon as they are complete.
fn passes_to_owners<M: Module>(
    module: M,
    device: &Device,
    loss: impl FnOnce(&M) -> Tensor<1>,
    collected: Arc<OfReplica>,
) -> Given {
    let updates = Updates::default();
    let (module, enter, loss) = forward_entered(module, Enter::new(updates.clone(), 0), device, loss)?;
    let value = loss.clone().inner();
    let (_, loss) = leave(module, enter, loss, collected);
    drop(updates.during(|| loss.backward()));
    Ok((value, GradientsParams::new()))
}

/// Running statistics, flat, by their paths. A student and its teacher may have those of the same ids.
type Values = BTreeMap<String, Tensor<1>>;

/// The values of these running statistics.
fn values(module: &impl Module, of: &HashSet<ParamId>) -> Values {
    struct Read<'a> {
        path: VisitPath,
        of: &'a HashSet<ParamId>,
        values: Values,
    }
    impl ModuleVisitor for Read<'_> {
        follow_path!();
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if self.of.contains(&param.id) {
                self.values.insert(self.path.joined(), param.base().flatten(0, D - 1));
            }
        }
    }
    let mut read = Read { path: VisitPath::default(), of, values: Values::new() };
    module.visit(&mut read);
    read.values
}
