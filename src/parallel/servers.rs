//! Steps on compute servers: what goes wrong because a server is gone or does not answer is an error that names its devices.
use super::wait::{Faults, wait_for, with_reason};
use super::{ParallelError, Replicas};
use burn::module::Module;
use burn::tensor::Device;
use burn_memsave_layers::backend::remote::{NoAnswer, Step, TIMEOUT, remote_id};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

impl<M: Module> Replicas<M> {
    /// Waits for every device.
    ///
    /// What servers compute fails late: [`backward`](Self::backward) and [`update`](Self::update) only give them the work. So call this
    /// between the two, and again after the update:
    ///
    /// - An error between them leaves every parameter and the optimizer as they were, on devices that still answer.
    /// - After an error that follows an update, some devices may have new values or states and others not: make new replicas from the last
    ///   checkpoint, on as many devices as there are. A checkpoint that was written after a `sync` without an error is whole.
    ///
    /// # Errors
    ///
    /// Returns the devices that failed, or whose server is gone, or those of servers that did not answer in
    /// [time](super::ReplicaOptions::with_timeout), ten minutes after another failed by default. Nothing says whether these are slow or gone.
    pub fn sync(&self) -> Result<(), ParallelError> {
        wait_for(&self.all_devices(), self.timeout).error(self.timeout.unwrap_or(TIMEOUT))
    }

    /// Runs a step. If it fails and devices do not answer, returns an error that names these: whoever reads from a server that is gone
    /// panics, and one that waits for another server is late itself. A panic for which no device is to blame passes.
    pub(super) fn naming_servers<R>(
        &self,
        step: impl FnOnce() -> Result<R, ParallelError>,
    ) -> Result<R, ParallelError> {
        if !self.has_servers() {
            return step();
        }
        let devices = self.all_devices();
        let position = |of: &Device| devices.iter().position(|device| *device == of);
        // Replicas wait for what others read.
        let timeout = self.timeout.or(self.synchronized.is_some().then_some(TIMEOUT));
        // A step changes nothing in the replicas before it has succeeded.
        let ended = catch_unwind(AssertUnwindSafe(|| Step::new(devices.iter().copied(), timeout).run(step)));
        let mut faults = Faults::default();
        match &ended {
            Ok(Err(ParallelError::Replica { .. })) => (),
            // Those that were late before may answer by now.
            Ok(Err(ParallelError::TimedOut { devices: late, .. })) => {
                late.iter().for_each(|(index, device)| faults.add(*index, device, None));
            }
            Ok(_) => return ended.unwrap_or_else(|panic| resume_unwind(panic)),
            Err(panic) => {
                if let Some(NoAnswer { device, error }) = panic.downcast_ref() {
                    let index = position(device).unwrap_or(devices.len());
                    faults.add(index, device, error.clone().map(with_reason));
                }
            }
        }
        let after = self.timeout.unwrap_or(TIMEOUT);
        faults.extend(wait_for(&devices, Some(after)));
        faults.error(after).and_then(|()| ended.unwrap_or_else(|panic| resume_unwind(panic)))
    }

    pub(super) fn has_servers(&self) -> bool {
        self.all_devices().into_iter().any(|device| remote_id(device).is_some())
    }

    /// The devices of the replicas, then those that only own frozen weights.
    fn all_devices(&self) -> Vec<&Device> {
        let mut devices: Vec<&Device> = self.devices.iter().collect();
        for weight in self.frozen.iter().filter_map(|weight| weight.on_device()) {
            if !devices.contains(&weight.device()) {
                devices.push(weight.device());
            }
        }
        devices
    }
}
