//! Which blocks to recompute.
use super::explanation::{Remedy, Suggestion};
use crate::measure::{Ledger, LedgerRow};
use crate::plan::BlockProfile;

/// What recomputing a block gives, if anything.
pub(super) fn suggestion(block: &BlockProfile, ledger: &Ledger) -> Option<Suggestion> {
    let kept = block.costs.first()?;
    let again = block.costs.iter().find(|cost| cost.treatment.recompute)?;
    let bytes = u64::try_from(kept.kept - again.kept).ok().filter(|bytes| *bytes > 0)?;
    let [before, after] = [kept, again].map(|cost| cost.forward_time + cost.backward_time);
    // What runs twice takes longer, even where the clock does not show it.
    let extra_time = after.saturating_sub(before).max(kept.forward_time);
    let of_block = format!("{}.", block.module);
    let is_inside = |row: &LedgerRow| row.module == block.module || row.module.starts_with(&of_block);
    Some(Suggestion {
        remedy: Remedy::Checkpoint,
        module: block.module.clone(),
        bytes,
        measured: None,
        extra_time: Some(extra_time),
        rows: ledger.numbers_of(|row| is_inside(row) && row.counts()),
    })
}
