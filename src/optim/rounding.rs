//! Stochastic rounding: the seed that decides how each element is rounded, up or down.

/// The seed of a step.
///
/// It depends on the optimizer's seed and the number of the step only, so a run that resumes from a record rounds as it
/// would have without a break.
pub(super) fn seed(of_optimizer: u64, time: u32) -> u32 {
    // The finalizer of SplitMix64.
    let x = of_optimizer.wrapping_add(u64::from(time).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (x >> 32) as u32
}
