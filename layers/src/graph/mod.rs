//! The engine: how an operation becomes a step of Burn's autodiff graph, and what that step keeps for the backward pass.
//!
//! An operation (a module in [`ops`](crate::ops)) only says what it computes, which inputs its backward pass reads, and how its gradients
//! are computed. The engine does the rest for all operations, and knows none of them by name. The diagram names the file of each part;
//! the words in it are explained below.
//!
//! ```text
//! forward pass                                                     backward pass: Burn runs the steps, the loss first
//!
//! functional::gelu(x)                                              Step::backward                         record.rs
//!   │ `extension!` makes one method per operation  extension.rs      │ consumes dy, the gradient of the output
//!   ▼                                                                ▼
//! Run::run ── no input is tracked ─▶ Operation::forward            Operation::backward(saved, dy, pass)   operation.rs
//!   │                                (keeps nothing)                 │
//!   │ an input is tracked: record(..)         run.rs, record.rs      ├─ pass.take(input) finds what was kept, one of:
//!   ▼                                                                │    the handle in Burn's checkpointer
//! Operation::plan: which inputs does the backward pass read?         │    an offered output, recomputed
//!   │ The step keeps each of them, in one of these forms:            │    a held tensor, unpacked
//!   ├─ a frozen weight: as the source to read it from  kept.rs       │    a frozen weight, read again
//!   ├─ a held tensor: packed, while it waits           held.rs       │
//!   ├─ any other tensor: in Burn's checkpointer                      ├─ pass.give(input, gradient)
//!   │                                                                ▼
//!   │ If the step can recompute its output from      recompute.rs  update::look: updates the parameters whose gradients
//!   │ them, it offers the output.                                  are complete                           update.rs
//!   ▼
//! Operation::forward_saving: the output, and what else the backward pass reads (masks, statistics)
//!   │
//!   ├─ ledger, watch: if somebody records a ledger or watches the step, they note what is kept
//!   ├─ tape: within a segment, notes which operation ran, and the random numbers that it drew
//!   ▼
//! Step in Burn's graph
//! ```
//!
//! | word | meaning |
//! | --- | --- |
//! | *tracked* | A tensor is tracked if it is part of a recorded graph, so that a gradient may flow to it. |
//! | *step* | A node of Burn's autodiff graph together with its backward pass. Burn runs the steps in reverse order. |
//! | *checkpointer* | Burn's store of the tensors that steps keep. It can also recompute a tensor from the parents of its node. |
//! | *kept* | A tensor is kept if a step retains it until its own backward pass, as a handle or in another form. |
//! | *held* | A kept tensor is held if a [policy](crate::saved) lets it wait in fewer bits or elsewhere, instead of in Burn's checkpointer. |
//! | *waiting* | A held tensor waits until the backward pass takes it: whole while something else has a handle of it, packed afterwards. |
//! | *packed* | Stored in the form that the policy says: in fewer bits, on the host, or in a file. |
//! | *offered* | An output is offered if its step can recompute it in the backward pass, so that the steps after it need not keep it. |
//! | *stand-in* | The node that takes the place of a held tensor in the graph. It unpacks the tensor for the backward pass. |
//! | *token* | A tensor of one element whose value means nothing. It connects steps where no tensor passes from one to the other. |
//! | *slot* | A numbered place through which steps, and the functions that they run, pass each other a tensor, outside of Burn's gradients. |
//! | *tape* | What a segment did in its first run: its operations and random draws. Its second run must do the same. |
//! | *segment* | A part of a network that keeps only its inputs, and is recomputed in the backward pass. |
//!
//! An operation may need numbers of other replicas in the middle of its passes, as a synchronized batch norm does. It gets them by an
//! [`Exchange`] (`exchange.rs`), in which every replica runs on a thread of its own.
//!
//! Not every step is an operation. Segments (`segment.rs`), updates of parameters in the backward pass (`update.rs`) and surveys, which
//! read the graph of a loss (`survey.rs`), add steps that compute nothing. They only pass gradients or tokens on, and do their work when
//! Burn runs them.
//!
//! No file here imports an operation, and `tests/arrows.rs` checks that.

mod aside;
mod bare;
mod exchange;
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
pub(crate) use exchange::Place;
pub use exchange::{Exchange, ExchangeError, Member, is_thread_of_pool};
pub(crate) use extension::extension;
pub use inputs::{Inputs, given};
pub(crate) use kept::KeptTensor;
pub use kept::Report;
pub use operation::{BackwardPass, KeepPlan, Operation, Recorder, Tracking};
pub use policy::is_exact;
pub use run::Run;
pub use segment::{ReplayOnce, SegmentOps};
pub use slots::Slots;
pub use survey::{Survey, SurveyOps};
pub use update::{GRADIENT, PARAMETER, UpdateOnce, UpdateOps, Updates, is_entered};
