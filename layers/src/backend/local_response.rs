/// A local response normalization: `x / (k + alpha / size * sum(x^2))^beta`, the sum over a window of channels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LocalResponse {
    /// Channels in the window, at least one. Those beyond the first and the last channel count as zeros.
    pub size: usize,
    /// Scale of the mean square.
    pub alpha: f64,
    /// Exponent.
    pub beta: f64,
    /// Added to the scaled mean square.
    pub k: f64,
}

impl LocalResponse {
    /// How many channels of the window are before its own and behind it.
    pub fn reach(&self) -> [usize; 2] {
        [(self.size - 1) / 2, self.size / 2]
    }
}
