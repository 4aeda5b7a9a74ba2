/// A softmax along one axis: the function of the same name in [`burn::tensor::activation`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Softmax {
    /// `exp(x) / sum(exp(x))`
    Softmax,
    /// `x - log(sum(exp(x)))`
    LogSoftmax,
    /// `exp(-x) / sum(exp(-x))`
    Softmin,
    /// `exp(x) / (1 + sum(exp(x)))`
    QuietSoftmax,
}
