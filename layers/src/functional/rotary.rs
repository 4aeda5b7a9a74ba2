//! Rotary positional encoding.
use crate::backend::wide;
use crate::ops::{Pairing, RotaryOps};
use burn::backend::Dispatch;
use burn::tensor::Tensor;

/// Rotates every pair of features of `x` `[..., positions, features]` by `factors` `[positions, features, 2]`: the cosine and
/// the sine for every feature, as in [`freq_complex`](burn::nn::RotaryEncoding::freq_complex).
///
/// Keeps a handle of the factors, if they are in the dtype of `x`, or in f32 for an `x` in half precision. Others are cast to the dtype of `x`,
/// and the cast is kept.
///
/// # Panics
///
/// Panics if the shapes do not fit, if the number of features is odd, or if the factors are tracked: they are constants here.
pub fn rotary_encoding<const D: usize>(x: Tensor<D>, factors: Tensor<3>) -> Tensor<D> {
    rotate(x, factors, Pairing::Adjacent)
}

/// [`rotary_encoding`] of pairs of features `i` and `i + features / 2`, where it has pairs `2 i` and `2 i + 1`. The factors of a pair are
/// the same: those of features `2 i` and `2 i + 1`.
///
/// Networks with rotary positions in Hugging Face's `transformers`, such as Llama, Mistral and Qwen, have these pairs. With this function,
/// their weights and the adapters on them load as they are.
///
/// Keeps what [`rotary_encoding`] keeps.
///
/// # Panics
///
/// Panics as [`rotary_encoding`] does.
pub fn rotary_encoding_halves<const D: usize>(x: Tensor<D>, factors: Tensor<3>) -> Tensor<D> {
    rotate(x, factors, Pairing::Halves)
}

fn rotate<const D: usize>(x: Tensor<D>, factors: Tensor<3>, pairing: Pairing) -> Tensor<D> {
    let [positions, features, parts] = factors.dims();
    assert!(
        D >= 2 && x.dims()[D - 2..] == [positions, features] && parts == 2 && features.is_multiple_of(2),
        "rotary_encoding: factors of shape {:?} for an input of shape {:?}",
        factors.dims(),
        x.dims(),
    );
    assert!(!factors.is_tracked(), "rotary_encoding: tracked factors");
    if x.shape().num_elements() == 0 {
        return x;
    }
    // Kernels compute in the wider dtype: for half precision, they read a table in f32 as it is.
    let factors = if factors.dtype() == wide(x.dtype()) { factors } else { factors.cast(x.dtype()) };
    Tensor::from_dispatch(Dispatch::memsave_rotary(x.into_dispatch(), factors.into_dispatch(), pairing))
}
