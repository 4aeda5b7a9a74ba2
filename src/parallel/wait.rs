//! Waits for devices, with a time-out for those of servers.
use super::{DeviceFailure, ParallelError};
use burn::tensor::{Device, ExecutionError};
use burn_memsave_layers::backend::remote::{Pauses, answered, elsewhere, remote_id, wake};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Waits for devices: those of this machine without a time-out, since they can neither be gone nor be waited for on another thread.
pub(super) fn wait_for(devices: &[&Device], timeout: Option<Duration>) -> Result<(), ParallelError> {
    let (sender, receiver) = mpsc::channel();
    let (remote, here): (Vec<usize>, Vec<usize>) =
        (0..devices.len()).partition(|&index| remote_id(devices[index]).is_some());
    for &index in &remote {
        let (device, sender) = (devices[index].clone().without_autodiff(), sender.clone());
        // The receiver may be gone when the device answers.
        elsewhere(move || drop(sender.send((index, answered(&device)))));
    }
    drop(sender);
    let results = here.into_iter().map(|index| (index, devices[index].sync()));
    let mut waiting = Waiting { devices, late: remote, failed: vec![] };
    results.for_each(|(index, result)| waiting.answers(index, result));
    waiting.for_answers(&receiver, Pauses::until(timeout));
    let Waiting { late, mut failed, .. } = waiting;
    failed.sort_by_key(|failure| failure.index);
    match (failed.is_empty(), late.is_empty(), timeout) {
        (true, false, Some(after)) => Err(ParallelError::TimedOut { devices: late, after }),
        (true, ..) => Ok(()),
        (false, ..) => Err(ParallelError::Devices { failed }),
    }
}

/// Devices that are waited for.
struct Waiting<'a> {
    devices: &'a [&'a Device],
    /// Those of servers that have not answered yet.
    late: Vec<usize>,
    failed: Vec<DeviceFailure>,
}

impl Waiting<'_> {
    fn answers(&mut self, index: usize, result: Result<(), ExecutionError>) {
        self.late.retain(|&of| of != index);
        if let Err(error) = result {
            self.failed.push(DeviceFailure { index, device: self.devices[index].clone(), error });
        }
    }

    fn for_answers(
        &mut self,
        receiver: &mpsc::Receiver<(usize, Result<(), ExecutionError>)>,
        mut pauses: Pauses,
    ) {
        let mut pause = pauses.next();
        while let (false, Some(time)) = (self.late.is_empty(), pause) {
            match receiver.recv_timeout(time) {
                Ok((index, result)) => {
                    self.answers(index, result);
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => self.wake(),
                Err(RecvTimeoutError::Disconnected) => {
                    for index in std::mem::take(&mut self.late) {
                        let reason = "the thread that waited for the device failed".into();
                        self.answers(index, Err(ExecutionError::WithContext { reason }));
                    }
                }
            }
            pause = pauses.next();
        }
    }

    /// Wakes servers for which others may wait. A server that is gone would take with it the session of one that waits for it.
    fn wake(&self) {
        let alive = || {
            let has_failed = |index: usize| self.failed.iter().any(|failure| failure.index == index);
            self.devices.iter().enumerate().filter(move |(index, _)| !has_failed(*index))
        };
        for &index in &self.late {
            wake(alive().map(|(_, device)| *device), self.devices[index]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_do_not_answer_are_late() {
        let device = Device::default();
        let devices = [&device; 3];
        let mut waiting = Waiting { devices: &devices, late: vec![0, 1, 2], failed: vec![] };
        let (sender, receiver) = mpsc::channel();
        sender.send((1, Ok(()))).expect("a receiver");
        let reason = || ExecutionError::WithContext { reason: "gone".into() };
        sender.send((2, Err(reason()))).expect("a receiver");
        waiting.for_answers(&receiver, Pauses::until(Some(Duration::from_millis(40))));
        assert_eq!((&waiting.late[..], waiting.failed[0].index), (&[0][..], 2));
        drop(sender); // as a thread that panicked
        waiting.for_answers(&receiver, Pauses::until(None));
        assert_eq!((waiting.late.len(), waiting.failed.len()), (0, 2));
        assert!(wait_for(&devices, Some(Duration::from_secs(1))).is_ok());
    }
}
