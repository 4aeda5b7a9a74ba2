#[cfg(any(feature = "flex", feature = "ndarray"))]
use super::{
    cpu::CpuElement,
    cpu::exp::{log_1p, sigmoid},
};

/// The loss of an element `x`, most often given a target `t`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ElementLoss {
    /// `x^2`
    Square,
    /// `x^2 / 2` if `|x| <= delta`, else `delta |x| - bias`
    Huber {
        /// From where on the loss is linear.
        delta: f64,
        /// `delta^2 / 2`
        bias: f64,
    },
    /// `log(max(x, min))`
    LogAbove {
        /// The smallest argument of the logarithm.
        min: f64,
    },
    /// `-t log(p) - (1 - t) log(1 - p)`, `p = sigmoid(x)`
    BinaryLogits,
    /// `-t log(x) - (1 - t) log(1 - x)`, no logarithm below -100
    BinaryProbabilities,
    /// `t (log(min(max(t, min), 1)) - x)`
    Divergence {
        /// The smallest argument of the logarithm.
        min: f64,
    },
    /// `exp(t) (t - x)`
    LogDivergence,
}

/// Where logarithms of probabilities end, in a binary cross entropy.
pub(crate) const LOWEST_LOG: f64 = -100.0;

/// Which argument of a loss.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Side {
    /// What is scored.
    X,
    /// What it is compared with.
    Target,
}

impl ElementLoss {
    /// How much longer than reading an element the loss takes, or its slope on a side: logarithms and exponentials do.
    #[cfg(any(feature = "flex", feature = "ndarray"))]
    pub(crate) fn cost(self, slope: Option<Side>) -> usize {
        let is_cheap = match self {
            Self::Square | Self::Huber { .. } => true,
            Self::LogAbove { .. } => slope.is_some(),
            Self::Divergence { .. } => slope == Some(Side::X),
            Self::BinaryLogits | Self::BinaryProbabilities | Self::LogDivergence => false,
        };
        if is_cheap { 1 } else { 16 }
    }

    /// Calls the visitor with the loss and its slopes in `x` and in `t`, in the arithmetic of `A`. One call per variant, so that
    /// each gets loops of its own.
    #[cfg(any(feature = "flex", feature = "ndarray"))]
    #[inline(always)]
    pub(crate) fn with<A: CpuElement<Acc = A>, R>(self, visitor: impl Visitor<A, R>) -> R {
        let num = A::from_f64;
        let [zero, half, one] = [0.0, 0.5, 1.0].map(num);
        let none = move |_: A, _: A| zero;
        match self {
            Self::Square => visitor.visit(|x, _| x * x, |x, _| x + x, none),
            Self::Huber { delta, bias } => {
                let (delta, bias) = (num(delta), num(bias));
                let clamp = move |x: A| {
                    if x > delta {
                        delta
                    } else if x < -delta {
                        -delta
                    } else {
                        x
                    }
                };
                visitor.visit(
                    move |x, _| if x.abs() > delta { clamp(x) * x - bias } else { half * x * x },
                    move |x, _| clamp(x),
                    none,
                )
            }
            Self::LogAbove { min } => {
                let min = num(min);
                visitor.visit(
                    move |x, _| if x < min { min.ln() } else { x.ln() },
                    move |x, _| if x < min { zero } else { one / x },
                    none,
                )
            }
            Self::BinaryLogits => visitor.visit(
                move |x, t| (one - t) * x - (x.min(zero) - log_1p((-x.abs()).fast_exp())),
                |x, t| sigmoid(x) - t,
                none,
            ),
            Self::BinaryProbabilities => {
                let (lowest, smallest) = (num(LOWEST_LOG), num(LOWEST_LOG.exp()));
                let log = move |log: A| if log < lowest { lowest } else { log };
                let slope = move |weight: A, x: A| if x < smallest { zero } else { weight / x };
                visitor.visit(
                    move |x, t| (t - one) * log((-x).ln_1p()) - t * log(x.ln()),
                    move |x, t| slope(one - t, one - x) - slope(t, x),
                    none,
                )
            }
            Self::Divergence { min } => {
                let min = num(min);
                let log = move |t: A| {
                    if t < min {
                        min.ln()
                    } else if t > one {
                        zero
                    } else {
                        t.ln()
                    }
                };
                visitor.visit(
                    move |x, t| t * (log(t) - x),
                    |_, t| -t,
                    move |x, t| log(t) - x + if t < min || t > one { zero } else { one },
                )
            }
            Self::LogDivergence => visitor.visit(
                |x, t| t.fast_exp() * (t - x),
                |_, t| -t.fast_exp(),
                move |x, t| t.fast_exp() * (t - x + one),
            ),
        }
    }
}

/// What to do with a loss and its slopes.
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(crate) trait Visitor<A, R> {
    fn visit(
        self,
        loss: impl Fn(A, A) -> A + Copy + Send + Sync,
        x_slope: impl Fn(A, A) -> A + Copy + Send + Sync,
        target_slope: impl Fn(A, A) -> A + Copy + Send + Sync,
    ) -> R;
}
