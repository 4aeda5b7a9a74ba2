//! The tape of a segment: what its first run did, so that its second run, the replay, does the same.
//!
//! Operations draw random numbers through `draw`: the tape remembers them, and the replay finds them there, without touching the generator.
//! Every recorded operation calls `did` when it ran. A segment that does something else the second time panics.
//!
//! The output of the last operation need not be recomputed if nothing reads it, neither in the segment nor in its backward pass. Whoever
//! replays the tape may [leave it out](Tape::leave_out_end).
use super::aside::Aside;
use super::held;
use super::kept::Report;
use super::{exchange, ledger, watch::Watch};
use crate::backend::Saved;
use burn::backend::{TensorMetadata, autodiff::NodeId};
use burn::tensor::{DType, Shape};
use core::any::Any;
use core::cell::RefCell;
use std::vec::IntoIter;

/// What a segment did.
#[derive(Debug, Default)]
pub struct Tape {
    operations: Vec<Done>,
    draws: Vec<Box<dyn Any + Send>>,
    /// The output of the last operation, if it is tracked.
    last: Option<NodeId>,
    /// Whether the replay leaves that output out.
    leaves_out_end: bool,
}

impl Tape {
    /// Whether this is the output of the last operation.
    pub fn ends_with(&self, output: Option<NodeId>) -> bool {
        output.is_some() && output == self.last
    }

    /// Has the replay leave out the output of the last operation, if the backward pass of that operation does not need it.
    pub fn leave_out_end(&mut self) {
        self.leaves_out_end = true;
    }
}

/// An operation that ran, and its output.
#[derive(Clone, Debug, PartialEq)]
struct Done {
    operation: &'static str,
    shape: Shape,
    dtype: DType,
}

impl core::fmt::Display for Done {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}, which gives {:?} of {:?}", self.operation, self.shape, self.dtype)
    }
}

/// A segment whose forward pass this thread is running.
enum Frame {
    Recording(Tape),
    Replaying {
        operations: IntoIter<Done>,
        draws: IntoIter<Box<dyn Any + Send>>,
        leaves_out_end: bool,
        left_out: Option<NodeId>,
    },
    /// Only to see what the outputs are computed from.
    Probing {
        draws: Vec<Box<dyn Any + Send>>,
        next: usize,
    },
}

thread_local! {
    /// From the outermost segment to the innermost.
    static FRAMES: RefCell<Vec<Frame>> = const { RefCell::new(vec![]) };
}

/// See [`apart`](crate::apart()).
pub(crate) fn set_aside() -> impl Sized {
    Aside::new(&FRAMES)
}

/// Runs the forward pass of a segment for the first time. Its graph is dropped soon, so no policy applies to its tensors.
pub fn record<R>(forward: impl FnOnce() -> R) -> (R, Tape) {
    let entered = Entered::new(Frame::Recording(Tape::default()));
    let result = held::in_segment(forward);
    match entered.leave() {
        Frame::Recording(tape) => (result, tape),
        _ => unreachable!("frames are left in order"),
    }
}

/// Runs the forward pass once more, to see what its outputs are computed from. It finds the random numbers that it drew, which stay on
/// the tape. No outer segment, ledger, watch or exchange hears of this run, since not every replica has one.
pub fn probe<R>(tape: &mut Tape, forward: impl FnOnce() -> R) -> R {
    let entered = Entered::new(Frame::Probing { draws: core::mem::take(&mut tape.draws), next: 0 });
    let _exchange = exchange::set_aside();
    let run = || Watch::default().during(|| held::in_segment(forward));
    let (result, _) = ledger::record(run);
    if let Frame::Probing { draws, .. } = entered.leave() {
        tape.draws = draws;
    }
    result
}

/// Runs the forward pass again, for the backward pass. Also returns the node of the output that was left out, if one was: its elements
/// mean nothing.
///
/// # Panics
///
/// Panics if the segment does something else than the first time.
pub fn replay<R>(
    Tape { operations, draws, leaves_out_end, .. }: Tape,
    forward: impl FnOnce() -> R,
) -> (R, Option<NodeId>) {
    let (operations, draws) = (operations.into_iter(), draws.into_iter());
    let entered = Entered::new(Frame::Replaying { operations, draws, leaves_out_end, left_out: None });
    let result = held::in_segment(forward);
    let Frame::Replaying { mut operations, mut draws, left_out, .. } = entered.leave() else {
        unreachable!("frames are left in order")
    };
    assert!(draws.next().is_none(), "checkpoint: computed again, a segment draws fewer random numbers");
    if let Some(missing) = operations.next() {
        panic!("checkpoint: computed again, a segment ends before {missing}");
    }
    (result, left_out)
}

/// While this exists, the last frame is that of its segment.
struct Entered;

impl Entered {
    fn new(frame: Frame) -> Self {
        FRAMES.with_borrow_mut(|frames| frames.push(frame));
        Self
    }

    fn leave(self) -> Frame {
        core::mem::forget(self);
        FRAMES.with_borrow_mut(|frames| frames.pop()).expect("one that was entered")
    }
}

impl Drop for Entered {
    /// After a panic.
    fn drop(&mut self) {
        FRAMES.with_borrow_mut(|frames| frames.pop());
    }
}

/// Whether this thread runs the forward pass of a segment.
pub fn is_within() -> bool {
    FRAMES.with_borrow(|frames| !frames.is_empty())
}

/// The frames that hear of what happens: the innermost one that does not record, and the recording ones inside it.
fn hearing(frames: &mut [Frame]) -> (Option<&mut Frame>, &mut [Frame]) {
    match frames.iter().rposition(|frame| !matches!(frame, Frame::Recording(_))) {
        None => (None, frames),
        Some(last) => {
            let (before, recording) = frames.split_at_mut(last + 1);
            (before.last_mut(), recording)
        }
    }
}

/// Draws random numbers, or finds those of the first run if the segment runs again.
pub(crate) fn draw<T: Saved>(draw: impl FnOnce() -> T) -> T {
    let known = FRAMES.with_borrow_mut(|frames| match hearing(frames) {
        (Some(Frame::Replaying { draws, .. }), _) => {
            let known = draws.next().and_then(|drawn| drawn.downcast::<T>().ok());
            Some(
                *known.expect("checkpoint: computed again, a segment draws other random numbers than before"),
            )
        }
        (Some(Frame::Probing { draws, next }), _) => {
            *next += 1;
            draws.get(*next - 1)?.downcast_ref::<T>().cloned()
        }
        _ => None,
    });
    let drawn = known.unwrap_or_else(draw);
    FRAMES.with_borrow_mut(|frames| {
        for frame in hearing(frames).1 {
            if let Frame::Recording(tape) = frame {
                let report = Report::new("checkpoint", None);
                tape.draws.push(Box::new(report.state(
                    "drawn",
                    drawn.clone(),
                    "the segment is computed again",
                )));
            }
        }
    });
    drawn
}

/// The shape and dtype of the output of this operation, if the replay leaves it out.
pub(crate) fn leaves_out(operation: &'static str) -> Option<(Shape, DType)> {
    FRAMES.with_borrow(|frames| match frames.last()? {
        Frame::Replaying { operations, leaves_out_end: true, .. } => match operations.as_slice() {
            [last] if last.operation == operation => Some((last.shape.clone(), last.dtype)),
            _ => None,
        },
        _ => None,
    })
}

/// Tells the tape the output of an operation, if it is tracked, and whether it was left out.
pub(crate) fn gave(output: Option<NodeId>, is_left_out: bool) {
    FRAMES.with_borrow_mut(|frames| {
        let (replaying, recording) = hearing(frames);
        if let Some(Frame::Replaying { left_out, .. }) = replaying
            && is_left_out
        {
            *left_out = output;
        }
        for frame in recording {
            if let Frame::Recording(tape) = frame {
                tape.last = output;
            }
        }
    });
}

/// Tells the tape that an operation ran. In a replay, panics if another one ran in its place.
pub(crate) fn did(operation: &'static str, output: &impl TensorMetadata) {
    FRAMES.with_borrow_mut(|frames| {
        if frames.is_empty() {
            return;
        }
        let done = Done { operation, shape: output.shape(), dtype: output.dtype() };
        let (replaying, recording) = hearing(frames);
        if let Some(Frame::Replaying { operations, .. }) = replaying {
            match operations.next() {
                Some(before) if before == done => {}
                Some(before) => {
                    panic!("checkpoint: computed again, a segment runs {done}, in the place of {before}")
                }
                None => panic!("checkpoint: computed again, a segment runs {done}, more than before"),
            }
        }
        for frame in recording {
            if let Frame::Recording(tape) = frame {
                tape.operations.push(done.clone());
            }
        }
    });
}
