//! Steps on compute servers: what goes wrong because a server is gone or does not answer is an error that names its devices.
use super::wait::wait_for;
use super::{ParallelError, Replicas, TIMEOUT};
use burn::module::Module;
use burn::tensor::Device;
use burn_memsave_layers::backend::remote::{Late, remote_id};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

impl<M: Module> Replicas<M> {
    /// Runs a step. If it fails and devices do not answer, returns an error that names these: whoever reads from a server that is gone
    /// panics, and one that waits for another server is late itself. A panic for which no device is to blame passes.
    pub(super) fn naming_servers<R>(
        &self,
        step: impl FnOnce() -> Result<R, ParallelError>,
    ) -> Result<R, ParallelError> {
        if !self.devices.iter().any(|device| remote_id(device).is_some()) {
            return step();
        }
        // A step changes nothing in the replicas before it has succeeded.
        match catch_unwind(AssertUnwindSafe(step)) {
            Ok(Err(error @ (ParallelError::Replica { .. } | ParallelError::TimedOut { .. }))) => {
                Err(self.blamed(error))
            }
            Ok(result) => result,
            Err(panic) => match panic.downcast::<Late>() {
                Ok(late) => {
                    let devices = self.position(&late.device).into_iter().collect();
                    Err(self.blamed(ParallelError::TimedOut { devices, after: late.after }))
                }
                Err(panic) => {
                    self.answers(self.timeout.or(Some(TIMEOUT))).and_then(|()| resume_unwind(panic))
                }
            },
        }
    }

    /// Waits for every device.
    pub(super) fn answers(&self, timeout: Option<Duration>) -> Result<(), ParallelError> {
        wait_for(&self.all_devices(), timeout)
    }

    /// The error of a step, or what is wrong with devices, if there is something.
    fn blamed(&self, error: ParallelError) -> ParallelError {
        match (error, self.answers(self.timeout.or(Some(TIMEOUT)))) {
            (error, Ok(())) => error,
            // Those that were late before may answer by now.
            (
                ParallelError::TimedOut { devices: before, .. },
                Err(ParallelError::TimedOut { mut devices, after }),
            ) => {
                devices.extend(before);
                devices.sort_unstable();
                devices.dedup();
                ParallelError::TimedOut { devices, after }
            }
            (_, Err(of_devices)) => of_devices,
        }
    }

    /// The position of a device.
    fn position(&self, device: &Device) -> Option<usize> {
        let plain = |device: &Device| device.clone().without_autodiff();
        self.all_devices().into_iter().position(|of| plain(of) == plain(device))
    }

    /// The devices of the replicas, then those that only own frozen weights.
    pub(super) fn all_devices(&self) -> Vec<&Device> {
        let mut devices: Vec<&Device> = self.devices.iter().collect();
        for weight in self.frozen.iter().filter_map(|weight| weight.on_device()) {
            if !devices.contains(&weight.device()) {
                devices.push(weight.device());
            }
        }
        devices
    }
}
