#[cfg(any(feature = "flex", feature = "ndarray"))]
use super::cpu::CpuElement;
#[cfg(any(feature = "flex", feature = "ndarray"))]
use num_traits::{One, Zero};

/// A function of one variable made of pieces of a line, with at most two slopes: one bit per element is enough for its
/// backward pass.
///
/// Each variant is the function of the same name in [`burn::tensor::activation`], with the same treatment of ties and NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PiecewiseLinear {
    /// `max(x, 0)`
    Relu,
    /// `x` if `x >= 0`, else `negative_slope * x`
    LeakyRelu {
        /// The slope below zero.
        negative_slope: f64,
    },
    /// `min(max(x, min), max)`
    Clamp {
        /// The lower bound.
        min: f64,
        /// The upper bound, not below `min`.
        max: f64,
    },
    /// `min(max(alpha x + beta, 0), 1)`
    HardSigmoid {
        /// The slope.
        alpha: f64,
        /// The value at zero.
        beta: f64,
    },
    /// `x - bias` if `x > lambda`, `x + bias` if `x < -lambda`, else 0
    Shrink {
        /// Half the width of the zero piece.
        lambda: f64,
        /// What is taken off outside of it.
        bias: f64,
    },
    /// `x` if `x > threshold`, else `value`
    Threshold {
        /// The end of the constant piece.
        threshold: f64,
        /// The value up to there.
        value: f64,
    },
}

impl PiecewiseLinear {
    /// The slope where the bit is clear, and where it is set.
    pub fn slopes(self) -> [f64; 2] {
        match self {
            Self::LeakyRelu { negative_slope } => [negative_slope, 1.0],
            Self::HardSigmoid { alpha, .. } => [0.0, alpha],
            _ => [0.0, 1.0],
        }
    }

    /// Whether the pieces come in the order that the formula supposes.
    pub(crate) fn is_ordered(self) -> bool {
        match self {
            Self::Clamp { min, max } => min <= max,
            Self::Shrink { lambda, .. } => lambda >= 0.0,
            _ => true,
        }
    }

    /// Calls the visitor with the function in the arithmetic of `T`: `x -> (value, bit)`. One call per variant, so that each
    /// gets a loop of its own.
    #[cfg(any(feature = "flex", feature = "ndarray"))]
    #[inline(always)]
    pub(crate) fn with<T: CpuElement, R>(self, visitor: impl Visitor<T, R>) -> R {
        let zero = T::zero();
        let num = |v: f64| T::from(v).expect("every float type can be made from f64");
        match self {
            Self::Relu => visitor.visit(move |x| {
                let on = x > zero || x.is_nan(); // a NaN stays, and passes its gradient, as in Burn
                (if on { x } else { zero }, on)
            }),
            Self::LeakyRelu { negative_slope } => {
                let slope = num(negative_slope);
                visitor.visit(move |x| {
                    let on = x >= zero || x.is_nan();
                    (if on { x } else { slope * x }, on)
                })
            }
            Self::Clamp { min, max } => {
                let (min, max) = (num(min), num(max));
                visitor.visit(move |x| {
                    let (low, high) = (x < min, x > max);
                    (
                        if high {
                            max
                        } else if low {
                            min
                        } else {
                            x
                        },
                        !(low | high),
                    )
                })
            }
            Self::HardSigmoid { alpha, beta } => {
                let [alpha, beta] = [alpha, beta].map(<T::Acc as CpuElement>::from_f64);
                visitor.visit(move |x| {
                    let y = alpha * x.widen() + beta; // rounded once, as in Burn
                    let (low, high) = (y < T::Acc::zero(), y > T::Acc::one());
                    (
                        if high {
                            T::one()
                        } else if low {
                            zero
                        } else {
                            T::narrow(y)
                        },
                        !(low | high),
                    )
                })
            }
            Self::Shrink { lambda, bias } => {
                let (lambda, bias) = (num(lambda), num(bias));
                visitor.visit(move |x| {
                    let on = x.abs() > lambda || x.is_nan();
                    let shift = if x > zero {
                        bias
                    } else if x < zero {
                        -bias
                    } else {
                        zero
                    };
                    (if on { x - shift } else { zero }, on)
                })
            }
            Self::Threshold { threshold, value } => {
                let (threshold, value) = (num(threshold), num(value));
                visitor.visit(move |x| {
                    let on = x > threshold || x.is_nan();
                    (if on { x } else { value }, on)
                })
            }
        }
    }
}

/// What to do with a function `x -> (value, bit)` whose type is known only inside.
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(crate) trait Visitor<T, R> {
    fn visit(self, f: impl Fn(T) -> (T, bool) + Copy + Send + Sync) -> R;
}
