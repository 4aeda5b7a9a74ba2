//! Which way weights in half precision are rounded.
use crate::ops::is_rounded;
use burn::tensor::DType;

/// The seed of a step; `None` if the weight is not rounded at random.
///
/// Of the seed of the optimizer and the number of the step: a run that goes on from a record goes on as it would have.
pub(super) fn seed(of_optimizer: Option<u64>, dtype: DType, time: u32) -> Option<u32> {
    let seed = of_optimizer.filter(|_| is_rounded(dtype))?;
    // The finalizer of SplitMix64.
    let x = seed.wrapping_add(u64::from(time).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    Some((x >> 32) as u32)
}
