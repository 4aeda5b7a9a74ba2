//! Tensors of a device in the memory of the host: policy `Host`.
//!
//! | when | what happens |
//! | --- | --- |
//! | forward pass | The copy begins, and a separate thread blocks on it. Until it is done, the tensor stays on the device. |
//! | in between | The elements are in memory of the host. |
//! | backward pass | Whoever asks for a tensor begins the copy back, and that of the tensor that was stored before it. At most one tensor is on the device ahead of its use. |
//!
//! Copies to the host run on the stream of the thread that stores the tensor, so the device orders them after whatever wrote the tensor.
//! Copies back run on the stream of the backward pass.
//!
//! Both go through pinned memory if the runtime has it, and free its buffers when they are done. (CubeCL 0.11.3 on CUDA has a pool of
//! such buffers per stream, for all that is read from the device, and for writes of less than 100 MiB.) Stored elements are in ordinary
//! memory, because pinned memory is scarce.
use super::{on_stream, zeros};
use burn::backend::{Backend, ExecutionError, TensorMetadata, read_sync, tensor::FloatTensor};
use burn::tensor::{StreamId, TensorData};
use core::any::Any;
use core::task::{Context, Poll, Waker};
use std::sync::mpsc::{self, Receiver, SendError, Sender, TryRecvError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A tensor of a device in the memory of the host.
pub(crate) struct OnHost<B: Backend>(Arc<Slot<B>>);

struct Slot<B: Backend> {
    shared: Arc<Shared>,
    /// The number of the tensor in `shared`.
    id: u64,
    device: B::Device,
    copy: Mutex<Transfer>,
    /// The tensor that was stored before.
    before: Option<Weak<dyn Fetch>>,
}

enum Transfer {
    /// The copy is not finished.
    Copying(Receiver<Read>),
    Copied(Read),
}

/// The elements, or the error that prevented the copy.
type Read = Result<TensorData, String>;

type Job = Box<dyn FnOnce() + Send>;

/// What all tensors that one thread stored have in common. The backward pass may run on another thread.
struct Shared {
    jobs: Sender<Job>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many tensors were stored.
    count: u64,
    /// The tensor that was stored last.
    last: Option<Weak<dyn Fetch>>,
    /// The tensor that is on the device ahead of its use, a `FloatTensor<B>`.
    ahead: Option<(u64, Box<dyn Any + Send>)>,
}

thread_local! {
    static SHARED: Arc<Shared> = Arc::new(Shared::new());
}

impl Shared {
    fn new() -> Self {
        let (jobs, todo) = mpsc::channel::<Job>();
        // If no thread can be started, `send` runs the jobs itself.
        let _ = std::thread::Builder::new()
            .name("saved tensors".into())
            .spawn(move || todo.into_iter().for_each(|job| job()));
        Self { jobs, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
    }

    fn send(&self, job: Job) {
        if let Err(SendError(job)) = self.jobs.send(job) {
            job();
        }
    }

    /// The tensor that is on the device ahead of its use, if it has this number.
    fn take_ahead(&self, id: u64) -> Option<Box<dyn Any + Send>> {
        self.lock().ahead.take_if(|(ahead, _)| *ahead == id).map(|(_, x)| x)
    }
}

impl<B: Backend> OnHost<B> {
    /// Begins the copy.
    pub(super) fn new(x: FloatTensor<B>) -> Self {
        let device = x.device();
        Self::reading(B::float_into_data(x), device)
    }

    fn reading(
        reading: impl Future<Output = Result<TensorData, ExecutionError>> + Send + 'static,
        device: B::Device,
    ) -> Self {
        let stream = StreamId::current();
        let mut reading = Box::pin(reading);
        // Begins here, so that it comes after all operations of this thread that wrote the tensor.
        let begun = reading.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        let (reply, copying) = mpsc::sync_channel(1);
        let job = move || {
            let read = on_stream(stream, || {
                let data = match begun {
                    Poll::Ready(data) => data,
                    Poll::Pending => read_sync(reading),
                };
                data.map(owned).map_err(|error| error.to_string())
            });
            let _ = reply.send(read.flatten()); // whoever asked may be gone
        };
        let shared = SHARED.with(Arc::clone);
        shared.send(Box::new(job));
        let mut state = shared.lock();
        let slot = Arc::new(Slot {
            shared: shared.clone(),
            id: state.count,
            device,
            copy: Mutex::new(Transfer::Copying(copying)),
            before: state.last.take(),
        });
        state.count += 1;
        let last: Weak<dyn Fetch> = Arc::downgrade(&(slot.clone() as Arc<dyn Fetch>));
        state.last = Some(last);
        drop(state);
        Self(slot)
    }

    /// Whether the copy is done, so that the tensor takes no memory on the device.
    pub(super) fn is_there(&self) -> bool {
        matches!(&*self.0.copy(), Transfer::Copied(_))
    }

    /// Blocks until that is so.
    pub(super) fn arrive(&self) {
        drop(self.0.arrived());
    }

    /// Restores the tensor on its device. Begins to fetch the one that was stored before it.
    ///
    /// # Panics
    ///
    /// Panics if the device could not be read.
    pub(super) fn load(&self) -> FloatTensor<B> {
        let slot = &self.0;
        let ahead = slot.shared.take_ahead(slot.id).and_then(|x| x.downcast().ok());
        let x = ahead.map_or_else(
            || match &*slot.arrived() {
                Transfer::Copied(Ok(data)) => B::float_from_data(data.clone(), &slot.device),
                Transfer::Copied(Err(error)) => panic!("saved tensors: reading from the device: {error}"),
                Transfer::Copying(_) => unreachable!("it has arrived"),
            },
            |x| *x,
        );
        if let Some(before) = slot.before.as_ref().and_then(Weak::upgrade) {
            before.fetch();
        }
        x
    }
}

impl<B: Backend> Slot<B> {
    /// The copy, as far as it is known without blocking.
    fn copy(&self) -> MutexGuard<'_, Transfer> {
        let mut copy = self.copy.lock().unwrap_or_else(PoisonError::into_inner); // it is replaced at once
        if let Transfer::Copying(copying) = &*copy {
            match copying.try_recv() {
                Ok(read) => *copy = Transfer::Copied(read),
                Err(TryRecvError::Disconnected) => *copy = Transfer::Copied(Err("the thread is gone".into())),
                Err(TryRecvError::Empty) => {}
            }
        }
        copy
    }

    /// Blocks until the copy is done.
    fn arrived(&self) -> MutexGuard<'_, Transfer> {
        let mut copy = self.copy();
        if let Transfer::Copying(copying) = &*copy {
            *copy = Transfer::Copied(copying.recv().unwrap_or_else(|_| Err("the thread is gone".into())));
        }
        copy
    }
}

impl<B: Backend> Drop for Slot<B> {
    /// Nobody will ask for the tensor, so it need not be ahead.
    fn drop(&mut self) {
        drop(self.shared.take_ahead(self.id));
    }
}

/// A stored tensor of any backend, which can be fetched before it is asked for.
trait Fetch: Send + Sync {
    /// Begins the copy to the device. Drops any other tensor that is ahead.
    fn fetch(&self);
}

impl<B: Backend> Fetch for Slot<B> {
    fn fetch(&self) {
        let mut state = self.shared.lock();
        if state.ahead.as_ref().is_some_and(|(id, _)| *id == self.id) {
            return;
        }
        let other = state.ahead.take();
        drop(state);
        drop(other); // first, so that there are never two
        let data = match &*self.copy() {
            Transfer::Copied(Ok(data)) => data.clone(),
            // Does not block for an unfinished copy. Errors go to whoever asks for the tensor.
            Transfer::Copied(Err(_)) | Transfer::Copying(_) => return,
        };
        let x = B::float_from_data(data, &self.device);
        let other = self.shared.lock().ahead.replace((self.id, Box::new(x)));
        drop(other); // if another thread fetched one meanwhile
    }
}

/// Copies the data into ordinary memory, whose clones are handles. Devices read into buffers that they share with the host, which are
/// scarce.
fn owned(data: TensorData) -> TensorData {
    let (bytes, shape, dtype) = data.into_parts();
    let mut own = zeros(bytes.len(), dtype.size());
    own.copy_from_slice(&bytes);
    TensorData::from_bytes(own.shared(), shape, dtype)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use burn::backend::{Flex, flex::FlexDevice, ops::FloatTensorOps};
    use std::thread;

    fn data(seed: usize) -> TensorData {
        TensorData::new((0..1000).map(|at| (at * 7 + seed) as f32).collect::<Vec<_>>(), [10, 100])
    }

    fn store(seed: usize) -> OnHost<Flex> {
        OnHost::new(Flex::float_from_data(data(seed), &FlexDevice))
    }

    #[track_caller]
    fn is(x: FloatTensor<Flex>, seed: usize) {
        assert_eq!(read_sync(Flex::float_into_data(x)).expect("a CPU tensor"), data(seed));
    }

    /// The number of the tensor that is on the device ahead of its use.
    fn ahead(of: &OnHost<Flex>) -> Option<u64> {
        of.0.shared.lock().ahead.as_ref().map(|(id, _)| *id)
    }

    #[test]
    fn one_tensor_is_ahead() {
        let mut stored: Vec<_> = (0..5).map(store).collect();
        stored.iter().for_each(OnHost::arrive);
        let ids: Vec<_> = stored.iter().map(|stored| stored.0.id).collect();
        is(stored[4].load(), 4);
        assert_eq!(ahead(&stored[4]), Some(ids[3]));
        is(stored[4].load(), 4); // again
        assert_eq!(ahead(&stored[4]), Some(ids[3]));
        // Not the tensor that is ahead.
        is(stored[2].load(), 2);
        assert_eq!(ahead(&stored[2]), Some(ids[1]));
        drop(stored.remove(1));
        assert_eq!(ahead(&stored[0]), None, "nobody asks for it any more");
        // The tensor that was stored before is gone.
        is(stored[1].load(), 2);
        assert_eq!(ahead(&stored[1]), None);
        is(stored[3].load(), 4);
        is(stored[2].load(), 3);
        is(stored[0].load(), 0);
        // The result is the tensor that is ahead, not another copy.
        is(stored[2].load(), 3);
        assert_eq!(ahead(&stored[1]), Some(ids[2]));
        let marked = Box::new(Flex::float_from_data(data(77), &FlexDevice));
        stored[1].0.shared.lock().ahead = Some((ids[2], marked));
        is(stored[1].load(), 77);
        is(stored[1].load(), 2);
    }

    #[test]
    fn the_backward_pass_is_of_another_thread() {
        for _ in 0..20 {
            let stored: Vec<_> = (0..50).map(store).collect();
            let shared = stored[0].0.shared.clone();
            thread::scope(|scope| {
                let stored = &stored;
                // Two threads ask for the same tensors.
                for _ in 0..2 {
                    scope.spawn(move || (0..50).rev().for_each(|seed| is(stored[seed].load(), seed)));
                }
            });
            drop(stored);
            assert!(shared.lock().ahead.is_none());
        }
        let stored = thread::spawn(|| (0..3).map(store).collect::<Vec<_>>()).join().expect("no panic");
        stored.iter().enumerate().rev().for_each(|(seed, stored)| is(stored.load(), seed));
    }

    /// An unfinished copy blocks whoever asks for the tensor, not whoever stores it, nor whoever fetches it ahead.
    #[test]
    fn copies_take_their_time() {
        let (done, waits) = mpsc::channel();
        let mut waits = Some(waits);
        let mut polls = 0;
        let reading = core::future::poll_fn(move |context| {
            polls += 1;
            if polls == 1 {
                return Poll::Pending;
            }
            if let Some(waits) = waits.take() {
                waits.recv().expect("it is sent");
            }
            context.waker().wake_by_ref();
            Poll::Ready(Ok(data(5)))
        });
        let slow = OnHost::<Flex>::reading(reading, FlexDevice);
        let next = store(6);
        assert!(!slow.is_there() && !next.is_there(), "copies are done in order");
        done.send(()).expect("it is received");
        is(next.load(), 6);
        is(slow.load(), 5);
        assert!(slow.is_there() && next.is_there());
    }

    /// A device fails with an error, or later with a panic when its bytes are read.
    #[test]
    fn errors_are_of_the_backward_pass() {
        type Reading = core::pin::Pin<Box<dyn Future<Output = Result<TensorData, ExecutionError>> + Send>>;
        let mut first = true;
        let panics = core::future::poll_fn(move |_| {
            if core::mem::take(&mut first) { Poll::Pending } else { panic!("the device is lost") }
        });
        let fails = async { Err(ExecutionError::WithContext { reason: "the device is lost".into() }) };
        for reading in [Box::pin(panics) as Reading, Box::pin(fails)] {
            let failed = OnHost::<Flex>::reading(reading, FlexDevice);
            failed.arrive();
            assert!(failed.is_there());
            let next = store(1);
            next.arrive();
            is(next.load(), 1); // does not fetch what failed
            for _ in 0..2 {
                let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| failed.load()));
                let message = super::super::message(panic.expect_err("there is nothing to load"));
                assert!(message.starts_with("saved tensors: reading from the device"), "{message}");
                assert!(message.contains("the device is lost"), "{message}");
            }
        }
    }

    /// Copies run on the stream of the thread that stored the tensor.
    #[test]
    fn streams() {
        let (found, streams) = mpsc::channel();
        let mut first = true;
        let reading = core::future::poll_fn(move |_| {
            found.send((StreamId::current(), thread::current().id())).expect("it is received");
            if core::mem::take(&mut first) { Poll::Pending } else { Poll::Ready(Ok(data(3))) }
        });
        is(OnHost::<Flex>::reading(reading, FlexDevice).load(), 3);
        let [begun, copied] =
            [streams.recv(), streams.recv()].map(|found| found.expect("it was polled twice"));
        assert_eq!(begun, (StreamId::current(), thread::current().id()));
        assert_eq!(copied.0, begun.0);
        assert_ne!(copied.1, begun.1);
    }
}
