//! [`Exchange`]: members on threads of their own give each other numbers in the middle of their forward and backward passes.
//!
//! A member that has given its numbers waits until all others have given theirs. All get all of them, in the order of the members, so all
//! compute the same. Nobody waits in vain: if a member panics, returns or waits for something else, so that an exchange can never be
//! complete, every member ends with the same [`ExchangeError`]. What cannot be seen, such as a device that does not answer, ends by a
//! time-out.
use super::aside::Aside;
use super::policy;
use crate::backend::remote::{NoAnswer, Step};
use crate::saved::SavedPolicy;
use burn::module::ParamId;
use core::any::Any;
use core::cell::RefCell;
use core::fmt;
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Why members could not exchange numbers. Members are numbered from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExchangeError {
    /// A member panicked.
    Panicked {
        /// The member.
        member: usize,
        /// What it panicked with.
        message: String,
    },
    /// A member waits for an exchange that others will never come to: they have finished, or wait for another one.
    Differ {
        /// The member that waits.
        member: usize,
        /// Those that it waits for.
        others: Vec<usize>,
    },
    /// A device gave a member no answer.
    NoAnswer(Box<NoAnswer>),
    /// Members did not come to an exchange in time.
    TimedOut {
        /// Those members.
        members: Vec<usize>,
        /// How long others waited.
        after: Duration,
    },
}

/// Where members exchange numbers in one step of training.
pub struct Exchange {
    state: Mutex<State>,
    changed: Condvar,
    timeout: Duration,
    /// The policy of the thread that made the exchange.
    policy: SavedPolicy,
    /// The step of that thread.
    step: Option<Step>,
}

/// Which exchange of a step it is. Every member must come to the same ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// Counts the operations that exchange in the forward pass, including those of recomputed segments.
    pub number: usize,
    /// Whether it is the exchange of the operation's backward pass.
    pub is_backward: bool,
}

#[derive(Default)]
struct State {
    rounds: HashMap<Place, Round>,
    doing: Vec<Doing>,
    failure: Option<ExchangeError>,
}

/// The numbers of one place.
struct Round {
    given: Vec<Option<Vec<f64>>>,
    /// How many members have taken them.
    taken: usize,
}

impl Round {
    fn is_complete(&self) -> bool {
        self.given.iter().all(Option::is_some)
    }

    fn missing(&self) -> Vec<usize> {
        (0..self.given.len()).filter(|&member| self.given[member].is_none()).collect()
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Doing {
    Running,
    Waiting(Place),
    Finished,
}

impl State {
    /// All numbers of a place, if they are there.
    fn take(&mut self, place: Place) -> Option<Vec<Vec<f64>>> {
        let round = self.rounds.get_mut(&place).filter(|round| round.is_complete())?;
        round.taken += 1;
        if round.taken == round.given.len() {
            return Some(self.rounds.remove(&place)?.given.into_iter().flatten().collect());
        }
        Some(round.given.iter().flatten().cloned().collect())
    }

    /// Notes the failure that no member can go on, if that is so.
    fn notice_that_all_wait(&mut self) {
        let incomplete =
            |place: &Place| self.rounds.get(place).filter(|round| !round.is_complete()).map(Round::missing);
        let mut stuck = None;
        for (member, doing) in self.doing.iter().enumerate() {
            match doing {
                Doing::Running => return,
                Doing::Finished => (),
                Doing::Waiting(place) => match incomplete(place) {
                    None => return, // it is about to wake up
                    Some(others) => stuck = stuck.or(Some((member, others))),
                },
            }
        }
        if let Some((member, others)) = stuck {
            self.failure.get_or_insert(ExchangeError::Differ { member, others });
        }
    }
}

impl Exchange {
    /// An exchange of so many members, each of which waits at most so long for the others. The members also have the
    /// [policy](crate::saved) and the [step](Step) of this thread.
    pub fn new(members: usize, timeout: Duration) -> Arc<Self> {
        let state = State { doing: vec![Doing::Running; members], ..State::default() };
        let policy = policy::current().unwrap_or(SavedPolicy::Keep);
        let (state, changed, step) = (Mutex::new(state), Condvar::new(), Step::current());
        Arc::new(Self { state, changed, timeout, policy, step })
    }

    /// A member.
    pub fn member(self: &Arc<Self>, index: usize) -> Member {
        let exchange = self.clone();
        Member(Arc::new(OfMember { exchange, index, next: AtomicUsize::new(0), updates: Mutex::default() }))
    }

    /// Why members failed: the first failure.
    pub fn failure(&self) -> Option<ExchangeError> {
        self.lock().failure.clone()
    }

    /// Has all members end with this failure, unless there is one already.
    pub fn fail(&self, failure: ExchangeError) {
        self.lock().failure.get_or_insert(failure);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
    }

    fn finished(&self, member: usize) {
        let mut state = self.lock();
        state.doing[member] = Doing::Finished;
        state.notice_that_all_wait();
        drop(state);
        self.changed.notify_all();
    }

    fn exchange(
        &self,
        member: usize,
        place: Place,
        numbers: Vec<f64>,
    ) -> Result<Vec<Vec<f64>>, ExchangeError> {
        let deadline = Instant::now().checked_add(self.timeout);
        let mut state = self.lock();
        let members = state.doing.len();
        let round = state.rounds.entry(place).or_insert(Round { given: vec![None; members], taken: 0 });
        round.given[member] = Some(numbers);
        state.doing[member] = Doing::Waiting(place);
        state.notice_that_all_wait();
        self.changed.notify_all();
        loop {
            if let Some(failure) = &state.failure {
                return Err(failure.clone());
            }
            if let Some(all) = state.take(place) {
                state.doing[member] = Doing::Running;
                return Ok(all);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                let members = state.rounds.get(&place).map(Round::missing).unwrap_or_default();
                state.failure = Some(ExchangeError::TimedOut { members, after: self.timeout });
                self.changed.notify_all();
                continue;
            }
            state = match left {
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => {
                    self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

/// A member of an [`Exchange`].
#[derive(Clone)]
pub struct Member(Arc<OfMember>);

struct OfMember {
    exchange: Arc<Exchange>,
    index: usize,
    next: AtomicUsize,
    /// With the parameter that each updates.
    updates: Mutex<Vec<(ParamId, Update)>>,
}

type Update = Box<dyn FnOnce() + Send>;

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Member({})", self.0.index)
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Member>> = const { RefCell::new(None) };
}

/// See [`apart`](crate::apart()).
pub(crate) fn set_aside() -> impl Sized {
    Aside::new(&CURRENT)
}

impl Member {
    /// The member that this thread runs.
    pub fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Runs the task of this member on this thread. `None` if it failed: see [`Exchange::failure`].
    pub fn run<R>(&self, task: impl FnOnce() -> R) -> Option<R> {
        let OfMember { exchange, index, .. } = &*self.0;
        let run = || {
            let _outer = set_aside();
            CURRENT.set(Some(self.clone()));
            let task = || exchange.policy.clone().scope(task);
            match &exchange.step {
                None => task(),
                Some(step) => step.run(task),
            }
        };
        match catch_unwind(AssertUnwindSafe(run)) {
            Ok(result) => {
                exchange.finished(*index);
                Some(result)
            }
            Err(payload) => {
                if let Some(no_answer) = payload.downcast_ref::<NoAnswer>() {
                    exchange.fail(ExchangeError::NoAnswer(Box::new(no_answer.clone())));
                } else if !payload.is::<ExchangeError>() {
                    let message = message(&*payload);
                    exchange.fail(ExchangeError::Panicked { member: *index, message });
                }
                None
            }
        }
    }

    /// The place of the next operation that exchanges in the forward pass.
    pub(crate) fn next(&self) -> Place {
        Place { number: self.0.next.fetch_add(1, Ordering::Relaxed), is_backward: false }
    }

    /// Gives numbers, and waits for those of all members, which it returns in the order of the members.
    ///
    /// # Panics
    ///
    /// Unwinds with an [`ExchangeError`] if a member failed or did not come in time.
    pub(crate) fn exchange(&self, place: Place, numbers: Vec<f64>) -> Vec<Vec<f64>> {
        let OfMember { exchange, index, .. } = &*self.0;
        // Without the hook that prints a panic: the exchange has the failure.
        exchange.exchange(*index, place, numbers).unwrap_or_else(|error| resume_unwind(Box::new(error)))
    }

    /// Keeps an update of a parameter until it is certain that all members succeed.
    pub(crate) fn update_later(&self, id: ParamId, update: impl FnOnce() + Send + 'static) {
        self.updates().push((id, Box::new(update)));
    }

    /// Runs the updates, in the order in which they were made.
    pub fn update(&self) {
        let updates = core::mem::take(&mut *self.updates());
        updates.into_iter().for_each(|(_, update)| update());
    }

    /// The parameters that wait for an update.
    pub fn to_be_updated(&self) -> Vec<ParamId> {
        self.updates().iter().map(|(id, _)| *id).collect()
    }

    fn updates(&self) -> MutexGuard<'_, Vec<(ParamId, Update)>> {
        self.0.updates.lock().unwrap_or_else(PoisonError::into_inner) // a list that only grows
    }
}

fn message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
    text.or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic without a message".into())
}

/// Whether this thread is one of a pool. A member that waits would keep it from others, which may need it.
pub fn is_thread_of_pool() -> bool {
    #[cfg(feature = "rayon")]
    return rayon::current_thread_index().is_some();
    #[cfg(not(feature = "rayon"))]
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    const LONG: Duration = Duration::from_secs(600);

    /// Runs a task per member on threads of their own.
    fn run(
        exchange: &Arc<Exchange>,
        members: usize,
        task: impl Fn(&Member, usize) -> f64 + Sync,
    ) -> Vec<Option<f64>> {
        thread::scope(|scope| {
            let threads: Vec<_> = (0..members)
                .map(|index| {
                    let (member, task) = (exchange.member(index), &task);
                    scope.spawn(move || member.run(|| task(&member, index)))
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("caught")).collect()
        })
    }

    fn sum(member: &Member, place: Place, number: f64) -> f64 {
        member.exchange(place, vec![number]).iter().flatten().sum()
    }

    #[test]
    fn all_get_the_numbers_of_all() {
        for members in 1..5 {
            let exchange = Exchange::new(members, LONG);
            let sums = run(&exchange, members, |member, index| {
                let places: Vec<Place> = (0..50).map(|_| member.next()).collect();
                let forward: f64 = places.iter().map(|&place| sum(member, place, index as f64)).sum();
                let back = |place: &Place| sum(member, Place { is_backward: true, ..*place }, 1.0);
                forward + places.iter().rev().map(back).sum::<f64>()
            });
            let each = (members * (members - 1) / 2 + members) as f64 * 50.0;
            assert_eq!(sums, vec![Some(each); members]);
            assert!(exchange.failure().is_none() && exchange.lock().rounds.is_empty());
        }
    }

    /// Whoever waits ends, with the failure of another member.
    #[test]
    fn failures_end_all() {
        let panicked = ExchangeError::Panicked { member: 1, message: "of member 1".into() };
        let differ = ExchangeError::Differ { member: 0, others: vec![1] };
        for (failure, of_second) in [
            (panicked, (|_: &Member| -> f64 { panic!("of member {}", 1) }) as fn(&Member) -> f64),
            (differ.clone(), |_| 0.0),
            (differ, |member| sum(member, Place { number: 7, is_backward: true }, 1.0)),
        ] {
            let exchange = Exchange::new(3, LONG);
            let ended = run(&exchange, 3, |member, index| match index {
                1 => of_second(member),
                _ => sum(member, member.next(), 1.0),
            });
            assert_eq!((ended[0], ended[2]), (None, None));
            assert_eq!(exchange.failure(), Some(failure));
        }
    }

    #[test]
    fn a_member_that_does_not_come_is_named() {
        let exchange = Exchange::new(2, Duration::from_millis(50));
        let ended = run(&exchange, 2, |member, index| {
            while index == 1 && exchange.failure().is_none() {
                thread::sleep(Duration::from_millis(5));
            }
            sum(member, member.next(), 1.0)
        });
        assert_eq!(ended, [None, None]);
        let Some(ExchangeError::TimedOut { members, .. }) = exchange.failure() else { panic!("a time-out") };
        assert_eq!(members, [1]);
    }
}
