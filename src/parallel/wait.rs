//! Waits for devices, with a time-out for those of servers.
use super::{DeviceFailure, ParallelError};
use burn::tensor::{Device, ExecutionError};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// Waits for devices: those of this machine without a time-out, since they can neither be gone nor be waited for on another thread.
pub(super) fn wait_for(devices: &[&Device], timeout: Option<Duration>) -> Result<(), ParallelError> {
    let waiting: Vec<Waiting> = devices.iter().map(|device| Waiting::for_device(device, timeout)).collect();
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    let (mut failed, mut late) = (vec![], vec![]);
    for (index, waiting) in waiting.into_iter().enumerate() {
        match waiting.result(devices[index], deadline) {
            Some(Ok(())) => (),
            Some(Err(error)) => failed.push(DeviceFailure { index, device: devices[index].clone(), error }),
            None => late.push(index),
        }
    }
    match (failed.is_empty(), late.is_empty(), timeout) {
        (true, false, Some(after)) => Err(ParallelError::TimedOut { devices: late, after }),
        (true, ..) => Ok(()),
        (false, ..) => Err(ParallelError::Devices { failed }),
    }
}

/// A device that is waited for.
enum Waiting {
    /// On this thread, when its turn comes.
    Here,
    /// On a thread that is left alone if it takes too long.
    Elsewhere(mpsc::Receiver<Result<(), ExecutionError>>),
}

impl Waiting {
    fn for_device(device: &Device, timeout: Option<Duration>) -> Self {
        if timeout.is_none() || !is_remote(device) {
            return Self::Here;
        }
        let (sender, receiver) = mpsc::channel();
        let of_thread = device.clone();
        let thread = thread::Builder::new().name("sync".into());
        // The receiver may be gone when it answers.
        match thread.spawn(move || drop(sender.send(of_thread.sync()))) {
            Ok(_) => Self::Elsewhere(receiver),
            Err(_) => Self::Here,
        }
    }

    /// `None` if the device does not answer in time.
    fn result(self, device: &Device, deadline: Option<Instant>) -> Option<Result<(), ExecutionError>> {
        let Self::Elsewhere(receiver) = self else { return Some(device.sync()) };
        let left =
            deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
        match receiver.recv_timeout(left) {
            Ok(result) => Some(result),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let reason = "the thread that waited for the device failed".into();
                Some(Err(ExecutionError::WithContext { reason }))
            }
        }
    }
}

/// Whether a device belongs to a server.
#[allow(clippy::match_single_binding)] // without remote devices
fn is_remote(device: &Device) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "remote")]
        burn::backend::DispatchDevice::Remote(_) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_does_not_answer_is_late() {
        let device = Device::default();
        let (sender, receiver) = mpsc::channel();
        let deadline = Instant::now().checked_add(Duration::from_millis(20));
        assert!(Waiting::Elsewhere(receiver).result(&device, deadline).is_none());
        drop(sender);
        let (sender, receiver) = mpsc::channel();
        drop(sender); // as a thread that panicked
        assert!(matches!(Waiting::Elsewhere(receiver).result(&device, deadline), Some(Err(_))));
        assert!(wait_for(&[&device, &device], Some(Duration::from_secs(1))).is_ok());
    }
}
