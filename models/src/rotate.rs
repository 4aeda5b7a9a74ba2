//! Rotations of heads by their positions, for both kinds of layers.
use burn::tensor::Tensor;

/// Rotates the first features of `[batch, heads, tokens, width]`, as many as the encoding has. The first token is at `start`. Pairs of features
/// are from both halves of them, or neighbors.
pub(crate) fn rotate(
    encoding: &burn_memsave::nn::RotaryEncoding,
    x: Tensor<4>,
    start: usize,
    halves: bool,
) -> Tensor<4> {
    of_first_features(x, encoding.freq_complex.dims()[1], |x| {
        if halves { encoding.apply_halves(x, start) } else { encoding.apply(x, start) }
    })
}

/// The same by Burn's layer, which rotates neighbors.
#[cfg(feature = "stock")]
pub(crate) fn rotate_by_burn(
    encoding: &burn::nn::RotaryEncoding,
    x: Tensor<4>,
    start: usize,
    halves: bool,
) -> Tensor<4> {
    of_first_features(x, encoding.freq_complex.dims()[1], |x| {
        if !halves {
            return encoding.apply(x, start);
        }
        let [batch, heads, tokens, width] = x.dims();
        let reordered = |x: Tensor<4>, pairs: [usize; 2]| {
            let [rows, columns] = pairs;
            let x = x.reshape([batch, heads, tokens, rows, columns]).swap_dims(3, 4);
            x.reshape([batch, heads, tokens, width])
        };
        let neighbors = reordered(x, [2, width / 2]);
        reordered(encoding.apply(neighbors, start), [width / 2, 2])
    })
}

/// Changes the first features only.
fn of_first_features(x: Tensor<4>, count: usize, f: impl FnOnce(Tensor<4>) -> Tensor<4>) -> Tensor<4> {
    let width = x.dims()[3];
    if count == width {
        return f(x);
    }
    let [first, rest] =
        [(0, count), (count, width - count)].map(|(from, count)| x.clone().narrow(3, from, count));
    Tensor::cat(vec![f(first), rest], 3)
}
