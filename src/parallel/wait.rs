//! Waits for devices, with a time-out for those of servers.
use super::{DeviceFailure, ParallelError};
use burn::tensor::{Device, ExecutionError};
use burn_memsave_layers::backend::remote::{
    Late, PANICKED, Patience, TIMEOUT, answered, elsewhere, remote_id, wake, without_thread,
};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

type Answered = Result<(), ExecutionError>;

/// What is wrong with devices, by their positions. There is no error if a device did not answer in time.
#[derive(Debug, Default)]
pub(super) struct Faults(BTreeMap<usize, (Device, Option<ExecutionError>)>);

impl Faults {
    /// Adds a fault. That a device failed says more than that it did not answer.
    pub fn add(&mut self, index: usize, device: &Device, error: Option<ExecutionError>) {
        let (_, known) = self.0.entry(index).or_insert_with(|| (device.clone(), None));
        *known = known.take().or(error);
    }

    pub fn extend(&mut self, others: Self) {
        others.0.into_iter().for_each(|(index, (device, error))| self.add(index, &device, error));
    }

    /// The error that names all these devices. `after`: how long they were waited for.
    pub fn error(self, after: Duration) -> Result<(), ParallelError> {
        if self.0.values().all(|(_, error)| error.is_none()) {
            let devices: Vec<(usize, Device)> =
                self.0.into_iter().map(|(index, (device, _))| (index, device)).collect();
            return if devices.is_empty() { Ok(()) } else { Err(ParallelError::TimedOut { devices, after }) };
        }
        let failure = |(index, (device, error)): (usize, (Device, Option<ExecutionError>))| {
            let late = || with_reason(format!("no answer within {after:?}"));
            DeviceFailure { index, device, error: error.unwrap_or_else(late) }
        };
        Err(ParallelError::Devices { failed: self.0.into_iter().map(failure).collect() })
    }
}

pub(super) fn with_reason(reason: String) -> ExecutionError {
    ExecutionError::WithContext { reason }
}

/// Waits for devices: those of this machine without a time-out, since they can neither be gone nor be waited for on another thread. When
/// one has failed, the others are waited for [`TIMEOUT`] at most, as they may wait for what it will never send.
pub(super) fn wait_for(devices: &[&Device], timeout: Option<Duration>) -> Faults {
    let mut waiting = Waiting {
        devices,
        late: BTreeMap::new(),
        faults: Faults::default(),
        patience: Patience::new(timeout),
    };
    let is_remote = |index: &usize| remote_id(devices[*index]).is_some();
    let (remote, here): (Vec<usize>, Vec<usize>) = (0..devices.len()).partition(is_remote);
    let (sender, receiver) = mpsc::channel();
    waiting.late.extend(remote.iter().map(|&index| (index, Arc::default())));
    for index in remote {
        let (sender, device) = (sender.clone(), devices[index].clone().without_autodiff());
        // The receiver may be gone when the device answers.
        let hand_over = move |result| drop(sender.send((index, answer_of(result))));
        if let Err(error) = elsewhere(move || answered(&device), hand_over) {
            waiting.answers(index, Err(with_reason(without_thread(&error))));
        }
    }
    drop(sender);
    here.into_iter().for_each(|index| waiting.answers(index, devices[index].sync()));
    waiting.for_answers(&receiver);
    waiting.faults
}

/// The answer that a thread waited for, or that it panicked.
fn answer_of(result: Option<Answered>) -> Answered {
    result.unwrap_or_else(|| Err(with_reason(PANICKED.into())))
}

/// Devices that are waited for.
struct Waiting<'a> {
    devices: &'a [&'a Device],
    /// Those of servers that have not answered yet.
    late: BTreeMap<usize, Arc<Late>>,
    faults: Faults,
    patience: Patience,
}

impl Waiting<'_> {
    fn answers(&mut self, index: usize, result: Answered) {
        self.late.remove(&index);
        if let Err(error) = result {
            self.faults.add(index, self.devices[index], Some(error));
            self.patience.end_after(TIMEOUT);
        }
    }

    fn for_answers(&mut self, receiver: &Receiver<(usize, Answered)>) {
        while !self.late.is_empty() {
            let devices = || self.devices.iter().copied();
            let wake =
                || self.late.iter().for_each(|(&index, late)| wake(devices(), self.devices[index], late));
            match self.patience.receive(receiver, wake) {
                Some((index, result)) => self.answers(index, result),
                None => {
                    for index in std::mem::take(&mut self.late).into_keys() {
                        self.faults.add(index, self.devices[index], None);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_devices_that_fail_or_do_not_answer_are_named() {
        let device = Device::default();
        let devices = [&device; 3];
        let waiting = |late: &[usize], millis| {
            let patience = Patience::new(Some(Duration::from_millis(millis)));
            let late = late.iter().map(|&index| (index, Arc::default())).collect();
            Waiting { devices: &devices, late, faults: Faults::default(), patience }
        };
        let after = Duration::from_secs(1);
        let (sender, receiver) = mpsc::channel();
        sender.send((1, Ok(()))).expect("a receiver");
        sender.send((2, Err(with_reason("gone".into())))).expect("a receiver");
        let mut late = waiting(&[0, 1, 2], 40);
        late.for_answers(&receiver);
        let Err(ParallelError::Devices { failed }) = late.faults.error(after) else { panic!("two devices") };
        let named: Vec<_> = failed.iter().map(|failure| (failure.index, failure.error.to_string())).collect();
        assert!(
            matches!(&named[..], [(0, late), (2, _)] if late.contains("no answer within 1s")),
            "{named:?}"
        );

        let mut late = waiting(&[1, 2], 0);
        late.for_answers(&receiver);
        let Err(ParallelError::TimedOut { devices: named, .. }) = late.faults.error(after) else {
            panic!("a time-out")
        };
        assert_eq!(named, [(1, device.clone()), (2, device.clone())]);

        sender.send((1, answer_of(None))).expect("a receiver"); // a thread that panicked
        let mut failed = waiting(&[1], 600_000);
        failed.for_answers(&receiver);
        assert!(matches!(failed.faults.error(after), Err(ParallelError::Devices { .. })));
        assert!(wait_for(&devices, Some(after)).error(after).is_ok());
    }
}
