//! Devices of compute servers, which may answer late or never.
use burn::backend::{Backend, DeviceId, tensor::Device as BackendDevice};
use burn::tensor::{Device, ExecutionError, StreamId, Tensor, TensorData};
use core::cell::RefCell;
use core::time::Duration;
use std::panic::resume_unwind;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::Instant;
use std::{io, thread};

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

/// A step of training on devices of servers: how long to wait for each, and the devices that may have to send to one that is waited for.
#[derive(Clone, Debug)]
pub struct Step {
    devices: Arc<[Device]>,
    timeout: Option<Duration>,
}

thread_local! {
    static STEP: RefCell<Option<Step>> = const { RefCell::new(None) };
}

impl Step {
    /// A step on devices. Without a time-out, it waits until each answers or its server is gone.
    pub fn new<'a>(devices: impl IntoIterator<Item = &'a Device>, timeout: Option<Duration>) -> Self {
        let devices = devices.into_iter().map(|device| device.clone().without_autodiff());
        Self { devices: devices.collect(), timeout }
    }

    /// The step that this thread runs.
    pub fn current() -> Option<Self> {
        STEP.with_borrow(Clone::clone)
    }

    /// Runs a task of this step on this thread.
    pub fn run<R>(&self, task: impl FnOnce() -> R) -> R {
        struct Outer(Option<Step>);
        impl Drop for Outer {
            fn drop(&mut self) {
                STEP.set(self.0.take());
            }
        }
        let _outer = Outer(STEP.replace(Some(self.clone())));
        task()
    }
}

/// What a thread unwinds with if a device gives no answer within a [`Step`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NoAnswer {
    /// The device.
    pub device: Device,
    /// Why there will be no answer. `None` if it did not come in time.
    pub error: Option<String>,
}

/// What a task returns that waits for a device.
///
/// Within a [`Step`], a task that waits for a server runs on a thread of its own, which is left alone if it takes too long. Then, or if the
/// task fails, this thread unwinds with [`NoAnswer`], without the hook that prints panics: whoever runs the step catches it.
///
/// # Errors
///
/// Returns the error of the task, if there is no step, or the device is of this machine.
pub fn answer<T: Send + 'static>(
    device: &Device,
    task: impl FnOnce() -> Result<T, ExecutionError> + Send + 'static,
) -> Result<T, ExecutionError> {
    let Some(step) = Step::current().filter(|_| remote_id(device).is_some()) else { return task() };
    let (sender, receiver) = mpsc::channel();
    let late = Arc::new(Late);
    // Nobody may wait for the answer any more.
    let answer = elsewhere(move || drop(sender.send(task()))).map(|()| {
        let wake = || wake(&*step.devices, device, &late);
        Patience::new(step.timeout).receive(&receiver, wake)
    });
    let error = match answer {
        Ok(Ok(Ok(answer))) => return Ok(answer),
        Ok(Ok(Err(error))) => Some(error.to_string()),
        Ok(Err(RecvTimeoutError::Timeout)) => None,
        Ok(Err(RecvTimeoutError::Disconnected)) => Some(PANICKED.into()),
        Err(error) => Some(without_thread(&error)),
    };
    resume_unwind(Box::new(NoAnswer { device: device.clone(), error }))
}

/// The data of a tensor, which a task reads from a device: see [`answer`].
///
/// # Panics
///
/// Panics if the device fails.
pub fn data(
    device: &Device,
    task: impl FnOnce() -> Result<TensorData, ExecutionError> + Send + 'static,
) -> TensorData {
    answer(device, task).unwrap_or_else(|error| panic!("{device:?} could not be read from: {error}"))
}

/// Waits until a device has done what this stream gave it before, and reads a number.
///
/// `Device::sync` holds the thread that sends to the server until it has answered. Meanwhile the server cannot be told to send what others
/// wait for, and if it never answers, even dropping a tensor of the device waits, once the queue of that thread is full.
///
/// # Errors
///
/// Returns an error if the device failed, or its server is gone.
pub fn answered(device: &Device) -> Result<(), ExecutionError> {
    Tensor::<1>::zeros([1], device).try_into_data().map(drop)
}

/// Has each server that answers send a number to a device, if the device is still late then. Returns at once.
///
/// A server of Burn 0.22.1 that is asked for a tensor at the moment at which the tensor becomes ready can miss it, and looks again only
/// when it has another one to send (`get_exposed_tensor_bytes` in `external_comm.rs` of burn-communication makes its `notified` after it
/// has let go of the lock). On loopback, one in some thousand transfers is missed.
///
/// Each server is waited for on a thread of its own, and only before it sends: if it is gone, the number would end the session of the
/// device, and if it waits for the device itself, both would wait for ever.
pub fn wake<'a>(from: impl IntoIterator<Item = &'a Device>, to: &Device, late: &Arc<Late>) {
    let to = to.clone().without_autodiff();
    for device in from.into_iter().map(|device| device.clone().without_autodiff()) {
        if remote_id(&device).is_some() && device != to {
            let (to, late) = (to.clone(), Arc::downgrade(late));
            // Without a thread, nobody is woken.
            drop(elsewhere(move || send_until_all_arrive(&device, &to, &late)));
        }
    }
}

/// Exists as long as a device is waited for.
#[derive(Debug)]
pub struct Late;

/// Sends numbers until all have arrived, as a request for one may be missed, too.
fn send_until_all_arrive(from: &Device, to: &Device, late: &Weak<Late>) {
    let (sender, receiver) = mpsc::channel();
    let (mut on_way, mut pause) = (0, PAUSE);
    while answered(from).is_ok() && (on_way > 0 || late.strong_count() > 0) {
        let (number, sender) = (Tensor::<1>::zeros([1], from).to_device(to), sender.clone());
        let receive = move || {
            let _ = sender.send(number.try_into_data().is_ok()); // nobody waits for others if one fails
        };
        if elsewhere(receive).is_err() {
            return;
        }
        on_way += 1;
        while let Ok(arrived) = receiver.recv_timeout(pause) {
            on_way -= 1;
            if !arrived || on_way == 0 {
                return;
            }
        }
        pause = (pause * 2).min(Duration::from_secs(60));
    }
}

/// How long to wait before others are woken.
const PAUSE: Duration = Duration::from_secs(1);

/// Runs a task on a thread of its own, on the stream of this thread.
///
/// # Errors
///
/// Returns an error if no thread can be started.
pub fn elsewhere(task: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let stream = StreamId::current();
    thread::Builder::new().name("answer".into()).spawn(move || stream.executes(task)).map(drop)
}

/// Why there is no answer if the thread that waits ends without one.
pub const PANICKED: &str = "the thread that waited for it panicked";

/// Why there is no answer without a thread to wait on.
pub fn without_thread(error: &io::Error) -> String {
    format!("no thread could be started to wait for it: {error}")
}

/// Waits until a deadline.
#[derive(Debug)]
pub struct Patience {
    deadline: Option<Instant>,
    /// `None` once they were woken.
    wake_at: Option<Instant>,
}

impl Patience {
    /// Until a time-out from now on.
    pub fn new(timeout: Option<Duration>) -> Self {
        let after = |time| Instant::now().checked_add(time);
        let pause = timeout.map_or(PAUSE, |timeout| PAUSE.min(timeout / 4));
        Self { deadline: timeout.and_then(after), wake_at: after(pause) }
    }

    /// Ends after this time from now on, unless there is a deadline already.
    pub fn end_after(&mut self, time: Duration) {
        self.deadline = self.deadline.or_else(|| Instant::now().checked_add(time));
    }

    /// The next message. Calls `wake` once, after a pause.
    ///
    /// # Errors
    ///
    /// Returns an error at the deadline, or if nobody can send any more.
    pub fn receive<T>(&mut self, receiver: &Receiver<T>, wake: impl Fn()) -> Result<T, RecvTimeoutError> {
        loop {
            let received = match self.wake_at.or(self.deadline) {
                None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(until) => receiver.recv_timeout(until.saturating_duration_since(Instant::now())),
            };
            match received {
                Err(RecvTimeoutError::Timeout) if self.wake_at.take().is_some() => wake(),
                received => return received,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn messages_come_in_time_late_or_not_at_all() {
        let woken = Cell::new(0);
        let wake = || woken.set(woken.get() + 1);
        let mut patience = Patience::new(Some(Duration::from_millis(40)));
        let (sender, receiver) = mpsc::channel();
        assert_eq!(patience.receive(&receiver, wake), Err(RecvTimeoutError::Timeout));
        // The time is that of all messages together. What has come by then is not lost.
        sender.send(5).expect("a receiver");
        assert_eq!(patience.receive(&receiver, wake), Ok(5));
        assert_eq!(patience.receive(&receiver, wake), Err(RecvTimeoutError::Timeout));
        drop(sender);
        let mut patience = Patience::new(None);
        assert_eq!(patience.receive(&receiver, wake), Err(RecvTimeoutError::Disconnected));
        assert_eq!(woken.get(), 1);
    }

    #[test]
    fn steps_end() {
        let stream = StreamId::current();
        let device = Device::default();
        let step = Step::new([&device], None);
        let failed = || Err(ExecutionError::WithContext { reason: "of a task".into() });
        step.run(|| {
            assert!(Step::current().is_some());
            // On this machine, there is nothing to wait for.
            assert!(answer::<u8>(&device, failed).is_err());
        });
        assert!(Step::current().is_none());
        let (sender, receiver) = mpsc::channel();
        elsewhere(move || sender.send(StreamId::current()).expect("a receiver")).expect("a thread");
        assert_eq!(receiver.recv(), Ok(stream));
    }
}
