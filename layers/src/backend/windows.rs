//! Windows of pools: how many there are.

/// The number of windows of a max or average pool along one axis, as [`burn::tensor::module`] computes it. The window
/// must not be larger than the padded input. `prepadded`: the padding differs between the two sides of some axis, so that
/// Burn pads before it pools.
pub(crate) fn pool_output_size(
    size: usize,
    kernel: usize,
    stride: usize,
    (begin, end): (usize, usize),
    dilation: usize,
    ceil_mode: bool,
    prepadded: bool,
) -> usize {
    let padded = size + begin + end;
    let span = padded - (dilation * (kernel - 1) + 1);
    if !ceil_mode {
        return span / stride + 1;
    }
    let mut windows = span.div_ceil(stride) + 1;
    // The last window must start inside the input. Burn checks this twice: in the backend, which sees an input that is
    // already padded where the padding is asymmetric, and once more with the true size.
    let end_of_input = if prepadded { padded } else { size + begin };
    if (windows - 1) * stride >= end_of_input {
        windows -= 1;
    }
    if windows > 1 && (windows - 1) * stride >= size + begin {
        windows -= 1;
    }
    windows
}
