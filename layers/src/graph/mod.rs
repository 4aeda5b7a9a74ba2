//! The engine: how an operation becomes a step of Burn's autodiff graph, and what that step keeps for the backward pass.
//!
//! An operation (a room in [`ops`](crate::ops)) only says what it computes, which inputs its backward pass reads, and how the gradients
//! follow. The engine does the rest, once for all operations, and knows none of them:
//!
//! ```text
//! forward pass                                              backward pass: Burn runs the steps, the loss first
//!
//!   functional::gelu(x)                                       Step::backward(dy)
//!     │  `extension!`: one method per operation                 │
//!     ▼                                                         │  BackwardPass::take(input)
//!   Run::run ── no input is tracked ──▶ Operation::forward      │    ◀── the checkpointer's handle,
//!     │                                 (keeps nothing)         │        or what waits in another form,
//!     │  an input is tracked                                    │        or the frozen weight, read again,
//!     ▼                                                         │        or the output of another step, recomputed
//!   Operation::plan: which inputs does the backward pass read?  ▼
//!     │                                                       Operation::backward(saved, dy)
//!     ├─ kept       each is a handle in Burn's checkpointer,    │
//!     ├─ held       or waits in fewer bits or elsewhere,        │  BackwardPass::give(input, gradient)
//!     ├─ (frozen)   or is a weight that is read again;          ▼
//!     ├─ recompute  the output is offered: nobody need keep it  update: parameters whose gradients are
//!     ▼                                                         complete change now
//!   Operation::forward_saving: the output, and what is saved besides inputs
//!     │
//!     ├─ ledger, watch  report what is kept, while somebody listens
//!     ├─ tape           within a segment: what was drawn, which operation ran
//!     ▼
//!   Step in Burn's graph
//! ```
//!
//! | word | meaning |
//! | --- | --- |
//! | *tracked* | A tensor is tracked if it is part of a recorded graph, so that a gradient may flow to it. |
//! | *kept* | A tensor is kept if a step holds it until its backward pass, as a handle or in another form. |
//! | *held* | A kept tensor is held if a [policy](crate::saved) lets it wait in fewer bits or elsewhere, instead of in the checkpointer. |
//! | *waiting* | What is held waits: whole as long as somebody else has a handle of it, then packed, until the backward pass takes it. |
//! | *offered* | An output is offered if its step can recompute it in the backward pass, so that the steps after it need not keep it. |
//! | *stand-in* | The node that takes the place of a held tensor in the graph. It computes the tensor from what waits. |
//! | *token* | A tensor without meaning that connects steps, so that Burn runs them in the right order. |
//! | *slot* | A numbered place through which a tensor passes from one step to another, outside of Burn's gradients. |
//! | *tape* | What a segment did when it ran first: its operations and random draws. The second run must do the same. |
//! | *segment* | A part of a network that keeps only its inputs, and is computed again in the backward pass. |
//!
//! No file here imports an operation, and `tests/arrows.rs` checks that.

mod aside;
mod bare;
mod extension;
mod held;
mod inputs;
mod kept;
pub mod ledger;
mod operation;
pub(crate) mod policy;
mod recompute;
mod record;
mod run;
mod segment;
mod slots;
mod survey;
pub mod tape;
mod update;
pub mod watch;

mod apart;

pub use apart::apart;
pub(crate) use extension::extension;
pub use inputs::{Inputs, given};
pub use kept::{KeptTensor, Report};
pub use operation::{BackwardPass, KeepPlan, Operation, Recorder, Tracking};
pub use policy::is_exact;
pub use run::Run;
pub use segment::{ReplayOnce, SegmentOps};
pub use slots::Slots;
pub use survey::{Survey, SurveyOps};
pub use update::{GRADIENT, PARAMETER, UpdateOnce, UpdateOps, Updates, is_entered};
