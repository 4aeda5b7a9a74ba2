/// A normalization over rows: which elements share statistics, and which parameters they meet.
///
/// The elements of a tensor, in order, are `[repeats, groups, channels, inner]`: a row is `channels * inner` of them, and an
/// element at `[.., group, channel, ..]` has the parameters at `group * channels + channel`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowNorm {
    /// Whether the mean of the row is subtracted (it is not in an RMS norm).
    pub centered: bool,
    /// Added to the variance.
    pub epsilon: f64,
    /// Rows that follow each other with parameters of their own.
    pub groups: usize,
    /// Parameters per row.
    pub channels: usize,
    /// Elements that follow each other with the same parameter.
    pub inner: usize,
}

impl RowNorm {
    /// Over the last axis, of `features` elements.
    pub fn over_last(features: usize, centered: bool, epsilon: f64) -> Self {
        Self { centered, epsilon, groups: 1, channels: features, inner: 1 }
    }

    /// The elements of a row.
    pub fn row(&self) -> usize {
        self.channels * self.inner
    }

    /// The number of parameters.
    pub fn parameters(&self) -> usize {
        self.groups * self.channels
    }
}
