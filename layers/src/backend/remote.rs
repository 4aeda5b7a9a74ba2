//! Devices of compute servers, which may answer late or never.
use burn::backend::{Backend, DeviceId, tensor::Device as BackendDevice};
use burn::tensor::{Device, ExecutionError, StreamId, Tensor, TensorData};
use core::cell::RefCell;
use core::fmt;
use core::time::Duration;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
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

/// The step that this thread runs, set aside until this is dropped.
struct Outer(Option<Step>);

impl Drop for Outer {
    fn drop(&mut self) {
        STEP.set(self.0.take());
    }
}

/// Sets the step aside that this thread runs.
pub(crate) fn set_aside() -> impl Sized {
    Outer(STEP.take())
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
    enum Message<T> {
        /// What the task returned, unless it panicked.
        Answer(Option<T>),
        /// Another device failed, and this one may wait for what that will never send.
        OtherFailed,
    }
    let Some(step) = Step::current().filter(|_| remote_id(device).is_some()) else { return task() };
    let (sender, receiver) = mpsc::channel();
    let other_failed = sender.clone();
    let late = Arc::new(Late::telling(move || drop(other_failed.send(Message::OtherFailed))));
    // Nobody may wait for the answer any more.
    let error = match elsewhere(task, move |answer| drop(sender.send(Message::Answer(answer)))) {
        Err(error) => Some(without_thread(&error)),
        Ok(()) => {
            let mut patience = Patience::new(step.timeout);
            loop {
                match patience.receive(&receiver, || wake(&*step.devices, device, &late)) {
                    Some(Message::Answer(Some(Ok(answer)))) => return Ok(answer),
                    Some(Message::Answer(Some(Err(error)))) => break Some(error.to_string()),
                    Some(Message::Answer(None)) => break Some(PANICKED.into()),
                    Some(Message::OtherFailed) => patience.end_after(TIMEOUT),
                    None => break None,
                }
            }
        }
    };
    resume_unwind(Box::new(NoAnswer { device: device.clone(), error }))
}

/// How long devices are waited for, by default, when another one has failed, and how long replicas wait for each other.
pub const TIMEOUT: Duration = Duration::from_secs(600);

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
            drop(elsewhere(move || send_until_all_arrive(&device, &to, &late), |_| ()));
        }
    }
}

/// Exists as long as a device is waited for.
#[derive(Default)]
pub struct Late {
    /// Is told that another device failed.
    other_failed: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Late {
    fn telling(other_failed: impl Fn() + Send + Sync + 'static) -> Self {
        Self { other_failed: Some(Box::new(other_failed)) }
    }
}

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Late")
    }
}

/// The most numbers on their way from one device to another. Requests for those that wait there already are not missed.
const WINDOW: usize = 8;

/// Sends numbers until all have arrived, as a request for one may be missed, too.
fn send_until_all_arrive(from: &Device, to: &Device, late: &Weak<Late>) {
    let (sender, receiver) = mpsc::channel();
    let (mut on_way, mut pause) = (0, PAUSE);
    loop {
        if answered(from).is_err() {
            if let Some(tell) = late.upgrade().as_ref().and_then(|late| late.other_failed.as_ref()) {
                tell();
            }
            return;
        }
        if on_way == 0 && late.strong_count() == 0 {
            return;
        }
        if on_way < WINDOW {
            let (number, sender) = (Tensor::<1>::zeros([1], from).to_device(to), sender.clone());
            let receive = move || number.try_into_data().is_ok();
            let hand_over = move |arrived: Option<bool>| {
                let _ = sender.send(arrived.unwrap_or(false)); // nobody waits for others if one fails
            };
            if elsewhere(receive, hand_over).is_err() {
                return;
            }
            on_way += 1;
        }
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

/// Runs a task on a thread of its own, on the stream of this thread, which then hands over what the task returned, or `None` if it
/// panicked.
///
/// # Errors
///
/// Returns an error if no thread can be started.
pub fn elsewhere<R>(
    task: impl FnOnce() -> R + Send + 'static,
    hand_over: impl FnOnce(Option<R>) + Send + 'static,
) -> io::Result<()> {
    let stream = StreamId::current();
    let run = move || hand_over(catch_unwind(AssertUnwindSafe(|| stream.executes(task))).ok());
    thread::Builder::new().name("answer".into()).spawn(run).map(drop)
}

/// Why there is no answer if the thread that waits panics.
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

    /// The next message. Calls `wake` once, after a pause. `None` at the deadline, or if nobody can send any more.
    pub fn receive<T>(&mut self, receiver: &Receiver<T>, wake: impl Fn()) -> Option<T> {
        loop {
            let received = match self.wake_at.or(self.deadline) {
                None => receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
                Some(until) => receiver.recv_timeout(until.saturating_duration_since(Instant::now())),
            };
            match received {
                Err(RecvTimeoutError::Timeout) if self.wake_at.take().is_some() => wake(),
                received => return received.ok(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::apart;
    use std::cell::Cell;

    #[test]
    fn messages_come_in_time_late_or_not_at_all() {
        let woken = Cell::new(0);
        let wake = || woken.set(woken.get() + 1);
        let mut patience = Patience::new(Some(Duration::from_millis(40)));
        let (sender, receiver) = mpsc::channel();
        assert_eq!(patience.receive(&receiver, wake), None);
        // The time is that of all messages together. What has come by then is not lost.
        sender.send(5).expect("a receiver");
        assert_eq!(patience.receive(&receiver, wake), Some(5));
        assert_eq!(patience.receive(&receiver, wake), None);
        drop(sender);
        let mut patience = Patience::new(None);
        assert_eq!(patience.receive(&receiver, wake), None);
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
            assert!(apart(Step::current).is_none() && Step::current().is_some());
            // On this machine, there is nothing to wait for.
            assert!(answer::<u8>(&device, failed).is_err());
        });
        assert!(Step::current().is_none());
        let (sender, receiver) = mpsc::channel();
        let hand_over = |sender: &mpsc::Sender<_>| {
            let sender = sender.clone();
            move |stream| sender.send(stream).expect("a receiver")
        };
        elsewhere(StreamId::current, hand_over(&sender)).expect("a thread");
        assert_eq!(receiver.recv(), Ok(Some(stream)));
        elsewhere(|| resume_unwind(Box::new("of the task")), hand_over(&sender)).expect("a thread");
        assert_eq!(receiver.recv(), Ok(None));
    }
}
