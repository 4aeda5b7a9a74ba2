//! How the two halves of a lazy parameter tell each other what Burn does not tell them.
//!
//! To Burn, a parameter with a reparameterization is two things: a *base*, which is a tensor with two functions that Burn
//! calls when it loads and when it saves the parameter (`ParamMapper`), and the *reparameterization*, here a `LazyWeight`.
//! Mappers and visitors receive the base first, then the reparameterization, separately. Yet two facts must pass between the
//! two. Each is left in a thread-local, for the call that follows on the same thread:
//!
//! ```text
//! A mapper: `load_record`, `load_from`, `apply_lora`, ...
//!
//!   Burn ──▶ mapper.map_float(base) ──▶ base.load(value)         only if a record has the parameter
//!    │                                    └─ note_loaded(id) ───┐
//!    │                                                       LOADED
//!    │                                                          │
//!    └─────▶ LazyWeight::map(mapper) ◀───── take_loaded(id) ────┘
//!
//!   With a note, the base was loaded from a record, which has no second tensor under that path: nothing is left to do.
//!   Without one, the mapper may be `apply_lora`: the parameter is offered to it for an adapter (`LazyWeight::offer`).
//!
//! A visitor that must not read the weight: `Recorded::of(param)`
//!
//!   ask_for_weight ── Asked ──▶ ASKED
//!    ├────────────────────────────│──▶ param.transform_for_save() ──▶ base.save(placeholder)
//!    │                            ◀──────── Answered(weight) ───────────┘ answer(weight)
//!    └◀── weight ─────────────── ASKED
//!
//!   If nobody asked, Burn makes a record, and `base.save` reads the weight and returns it.
//! ```
//!
//! A cell shared by base and reparameterization would not do: the clones of a module share the functions of the base, and
//! would find each other's notes.
use super::FrozenWeight;
use burn::module::ParamId;
use burn::tensor::DType;
use core::cell::{Cell, RefCell};
use std::sync::Arc;

thread_local! {
    static LOADED: Cell<Option<(ParamId, DType)>> = const { Cell::new(None) };
    static ASKED: RefCell<Question> = const { RefCell::new(Question::None) };
}

/// Notes that a value of this dtype was loaded into the base of this parameter.
pub(super) fn note_loaded(id: ParamId, dtype: DType) {
    LOADED.set(Some((id, dtype)));
}

/// The dtype of the value that was just loaded into the base of this parameter, if one was. Removes the note, whosever it is.
pub(super) fn take_loaded(id: ParamId) -> Option<DType> {
    LOADED.take().and_then(|(loaded, dtype)| (loaded == id).then_some(dtype))
}

/// Calls functions of a base without leaving a note, and without losing one.
pub(super) fn without_note<T>(call: impl FnOnce() -> T) -> T {
    let before = LOADED.take();
    let result = call();
    LOADED.set(before);
    result
}

/// The question for the weight of the base that is being saved.
enum Question {
    None,
    Asked,
    Answered(Arc<dyn FrozenWeight>),
}

/// Saves a base, and returns its weight if it is lazy: then what was saved is the placeholder.
pub(super) fn ask_for_weight<T>(save: impl FnOnce() -> T) -> (T, Option<Arc<dyn FrozenWeight>>) {
    /// Withdraws the question, also if saving panics.
    struct Withdraw;
    impl Drop for Withdraw {
        fn drop(&mut self) {
            ASKED.set(Question::None);
        }
    }
    let _withdraw = Withdraw;
    ASKED.set(Question::Asked);
    let saved = save();
    match ASKED.replace(Question::None) {
        Question::Answered(weight) => (saved, Some(weight)),
        Question::None | Question::Asked => (saved, None),
    }
}

/// Answers with the weight, if somebody asked; returns whether somebody did.
pub(super) fn answer(weight: &Arc<dyn FrozenWeight>) -> bool {
    ASKED.with_borrow_mut(|question| {
        let asked = !matches!(question, Question::None);
        if asked {
            *question = Question::Answered(weight.clone());
        }
        asked
    })
}
