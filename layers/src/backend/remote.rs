//! Devices of compute servers, which may answer late or never.
use burn::backend::{Backend, DeviceId, tensor::Device as BackendDevice};
use burn::tensor::{Device, ExecutionError, StreamId, Tensor};
use core::time::Duration;
use std::panic::resume_unwind;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Instant;

/// The id of a device of a server. `None` of a device of this machine.
#[allow(clippy::match_single_binding)] // without remote devices
pub fn remote_id(device: &Device) -> Option<DeviceId> {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "remote")]
        burn::backend::DispatchDevice::Remote(device) => Some(burn::backend::Device::to_id(device)),
        _ => None,
    }
}

/// A device of a backend as one of any backend, if it is of a server.
pub fn remote_device<B: Backend>(device: &BackendDevice<B>) -> Option<Device> {
    #[cfg(feature = "remote")]
    if let Some(device) =
        (device as &dyn core::any::Any).downcast_ref::<BackendDevice<burn::backend::Remote>>()
    {
        return Some(Device::new(device.clone()));
    }
    let _ = device;
    None
}

/// Has servers send a number each to a device that waits for them.
///
/// A server of Burn 0.22.1 that is asked for a tensor at the moment at which the tensor becomes ready can miss it, and looks again only
/// when it has another one to send (`get_exposed_tensor_bytes` in `external_comm.rs` of burn-communication makes its `notified` after it
/// has let go of the lock).
pub fn wake<'a>(from: impl IntoIterator<Item = &'a Device>, to: &Device) {
    let plain = |device: &Device| device.clone().without_autodiff();
    let to = plain(to);
    for device in from.into_iter().map(plain).filter(|device| remote_id(device).is_some() && *device != to) {
        drop(Tensor::<1>::zeros([1], &device).to_device(&to));
    }
}

/// Waits until a device of a server has done what it was given.
///
/// `sync` holds the thread that sends to the server until it has answered. If it never does, even dropping a tensor of the device would
/// wait for ever, once the queue of that thread is full. Reading a number holds nothing, and shows that the server answers.
///
/// # Errors
///
/// Returns an error if the device failed, or its server is gone.
pub fn answered(device: &Device) -> Result<(), ExecutionError> {
    Tensor::<1>::zeros([1], device).try_into_data()?;
    device.sync()
}

/// How long to wait before servers are woken: each time twice as long as before.
pub struct Pauses {
    deadline: Option<Instant>,
    next: Duration,
}

impl Pauses {
    /// Until the time-out.
    pub fn until(timeout: Option<Duration>) -> Self {
        let first = Duration::from_secs(5);
        let next = timeout.map_or(first, |timeout| first.min(timeout / 4));
        Self { deadline: timeout.and_then(|timeout| Instant::now().checked_add(timeout)), next }
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return None;
        }
        let pause = left.map_or(self.next, |left| left.min(self.next));
        self.next = self.next.saturating_mul(2);
        Some(pause)
    }
}

/// What a task that waits for a server will return. The task runs on a thread of its own, which is left alone if it takes too long.
pub struct Answer<T>(mpsc::Receiver<T>);

/// Why there is no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Unanswered {
    /// It did not come in time.
    Late,
    /// The thread could not be started, or the task panicked.
    Failed,
}

impl<T: Send + 'static> Answer<T> {
    /// Starts a task, on the stream of this thread.
    pub fn of(task: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, receiver) = mpsc::channel();
        // Nobody may wait for the answer any more. Without a thread there is no sender.
        elsewhere(move || drop(sender.send(task())));
        Self(receiver)
    }

    /// Waits for the answer, for ever without a time-out. Calls `wake` after pauses.
    pub fn within(self, timeout: Option<Duration>, wake: impl Fn()) -> Result<T, Unanswered> {
        for pause in Pauses::until(timeout) {
            match self.0.recv_timeout(pause) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) => wake(),
                Err(RecvTimeoutError::Disconnected) => return Err(Unanswered::Failed),
            }
        }
        Err(Unanswered::Late)
    }
}

/// Runs a task on a thread of its own, on the stream of this thread, if a thread can be started.
pub fn elsewhere(task: impl FnOnce() + Send + 'static) {
    let stream = StreamId::current();
    drop(thread::Builder::new().name("answer".into()).spawn(move || stream.executes(task)));
}

/// What a thread unwinds with if a device did not answer in time.
#[derive(Debug)]
pub struct Late {
    /// The device.
    pub device: Device,
    /// How long the thread waited.
    pub after: Duration,
}

impl Late {
    /// Unwinds, without the hook that prints panics: whoever set the time-out catches it.
    pub fn unwind(self) -> ! {
        resume_unwind(Box::new(self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn answers_come_late_or_not_at_all() {
        let (long, woken) = (Some(Duration::from_secs(600)), Cell::new(0));
        let (end, wait) = mpsc::channel::<()>();
        let late = Answer::of(move || wait.recv().is_ok());
        let result = late.within(Some(Duration::from_millis(40)), || woken.set(woken.get() + 1));
        assert_eq!(result, Err(Unanswered::Late));
        assert!((1..=3).contains(&woken.get()), "{woken:?}");
        drop(end);
        let failed = Answer::<u8>::of(|| resume_unwind(Box::new("of a task")));
        assert_eq!(failed.within(long, || ()), Err(Unanswered::Failed));
        let stream = StreamId::current();
        assert_eq!(Answer::of(StreamId::current).within(long, || ()), Ok(stream));
    }

    #[test]
    fn pauses_double() {
        let pauses: Vec<u64> = Pauses::until(None).take(3).map(|pause| pause.as_secs()).collect();
        assert_eq!(pauses, [5, 10, 20]);
        assert!(Pauses::until(Some(Duration::ZERO)).next().is_none());
    }
}
