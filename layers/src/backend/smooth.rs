#[cfg(any(feature = "flex", feature = "ndarray"))]
use super::cpu::CpuElement;

/// A function of one variable whose slope is read off its input, or off its output.
///
/// Each variant is the function of the same name in [`burn::tensor::activation`], computed in f32 or in f64 as the tensor is,
/// in one pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Smooth {
    /// `x / 2 * (1 + erf(x / sqrt(2)))`
    Gelu,
    /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`
    GeluApproximate,
    /// `x * sigmoid(x)`
    Silu,
    /// `x * tanh(softplus(x))`
    Mish,
    /// `log(1 + exp(beta x)) / beta`, and `x` if `beta x > threshold`
    Softplus {
        /// The steepness.
        beta: f64,
        /// From where on the function is the identity.
        threshold: f64,
    },
    /// `x / (1 + |x|)`
    Softsign,
    /// `x` if `x > 0`, else `alpha * (exp(x) - 1)`
    Elu {
        /// The limit below, negated.
        alpha: f64,
    },
    /// `x` if `x > 0`, else `alpha * (exp(x / alpha) - 1)`
    Celu {
        /// The limit below, negated.
        alpha: f64,
    },
    /// `1.0507 * elu(x)` with `alpha = 1.6733`
    Selu,
    /// `log(sigmoid(x))`
    LogSigmoid,
    /// `x * min(max(x / 6 + 1/2, 0), 1)`
    HardSwish,
    /// `x - tanh(x)`
    Tanhshrink,
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
}

/// The scale of SELU, <https://arxiv.org/abs/1706.02515>.
pub(crate) const SELU_SCALE: f64 = 1.050_700_987_355_480_5;
/// The limit of SELU below, negated and without the scale.
pub(crate) const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
/// `sqrt(2 / pi)`
pub(crate) const SQRT_2_OVER_PI: f64 = core::f64::consts::FRAC_2_SQRT_PI * core::f64::consts::FRAC_1_SQRT_2;
/// The coefficient of the cube in the approximation of GELU.
pub(crate) const GELU_CUBE: f64 = 0.044715;
/// From where on `log(1 + exp(x))` is `x`.
pub(crate) const SOFTPLUS_THRESHOLD: f64 = 20.0;

impl Smooth {
    /// Whether the slope is read off the output; else off the input.
    pub fn reads_output(self) -> bool {
        matches!(self, Self::Sigmoid | Self::Tanh)
    }

    /// Calls the visitor with the function and its slope (of what it [reads](Self::reads_output)) in the arithmetic of `A`. One
    /// call per variant, so that each gets loops of its own.
    #[cfg(any(feature = "flex", feature = "ndarray"))]
    #[inline(always)]
    pub(crate) fn with<A: CpuElement<Acc = A>, R>(self, visitor: impl Visitor<A, R>) -> R {
        let num = A::from_f64;
        let [zero, half, one] = [0.0, 0.5, 1.0].map(num);
        let exp_branch =
            move |x: A, alpha: A, width: A| if x > zero { x } else { alpha * ((x / width).fast_exp() - one) };
        match self {
            Self::Gelu => {
                let (sqrt_2, density) = (num(core::f64::consts::SQRT_2), num(SQRT_2_OVER_PI * 0.5));
                let normal = move |x: A| half * (one + (x / sqrt_2).fast_erf());
                visitor.visit(
                    move |x| x * normal(x),
                    move |x| normal(x) + x * density * (-half * x * x).fast_exp(),
                )
            }
            Self::GeluApproximate => {
                let (scale, cube) = (num(SQRT_2_OVER_PI), num(GELU_CUBE));
                let tanh = move |x: A| (scale * (x + cube * x * x * x)).fast_tanh();
                visitor.visit(
                    move |x| half * x * (one + tanh(x)),
                    move |x| {
                        let t = tanh(x);
                        let inner = scale * (one + num(3.0) * cube * x * x);
                        half * (one + t) + half * x * (one - t * t) * inner
                    },
                )
            }
            Self::Silu => visitor.visit(
                |x| x * sigmoid(x),
                move |x| {
                    let s = sigmoid(x);
                    s * (one + x * (one - s))
                },
            ),
            Self::Mish => {
                // With e = exp(x) and n = e (e + 2): tanh(log(1 + e)) = n / (n + 2), so that one exponential is enough.
                let capped = move |x: A| x.min(num(SOFTPLUS_THRESHOLD)).fast_exp();
                let double = num(2.0);
                visitor.visit(
                    move |x| {
                        let e = capped(x);
                        let n = e * (e + double);
                        x * (n / (n + double))
                    },
                    move |x| {
                        let e = capped(x);
                        let n = e * (e + double);
                        let falling = num(4.0) * e * (one + e) / ((n + double) * (n + double));
                        n / (n + double) + if x > num(SOFTPLUS_THRESHOLD) { zero } else { x * falling }
                    },
                )
            }
            Self::Softplus { beta, threshold } => {
                // Beyond the capped one the function is the identity to the last digit.
                let (beta, threshold) = (num(beta), num(threshold).min(A::max_value().ln()));
                visitor.visit(
                    move |x| if beta * x > threshold { x } else { log_1p((beta * x).fast_exp()) / beta },
                    move |x| if beta * x > threshold { one } else { sigmoid(beta * x) },
                )
            }
            Self::Softsign => visitor.visit(
                move |x| x / (one + x.abs()),
                move |x| {
                    let inverse = one / (one + x.abs());
                    inverse * inverse
                },
            ),
            Self::Elu { alpha } => {
                let alpha = num(alpha);
                visitor.visit(
                    move |x| exp_branch(x, alpha, one),
                    move |x| if x > zero { one } else { alpha * x.fast_exp() },
                )
            }
            Self::Celu { alpha } => {
                let alpha = num(alpha);
                visitor.visit(
                    move |x| exp_branch(x, alpha, alpha),
                    move |x| if x > zero { one } else { (x / alpha).fast_exp() },
                )
            }
            Self::Selu => {
                let (scale, alpha) = (num(SELU_SCALE), num(SELU_ALPHA));
                visitor.visit(
                    move |x| scale * exp_branch(x, alpha, one),
                    move |x| scale * if x >= zero { one } else { alpha * x.fast_exp() },
                )
            }
            Self::LogSigmoid => {
                visitor.visit(move |x| x.min(zero) - log_1p((-x.abs()).fast_exp()), |x| sigmoid(-x))
            }
            Self::HardSwish => {
                let sixth = num(1.0 / 6.0);
                let gate = move |x: A| x * sixth + half;
                visitor.visit(
                    move |x| x * gate(x).max(zero).min(one),
                    move |x| {
                        let g = gate(x);
                        if g < zero {
                            zero
                        } else if g > one {
                            one
                        } else {
                            g + x * sixth
                        }
                    },
                )
            }
            Self::Tanhshrink => visitor.visit(
                |x| x - x.fast_tanh(),
                |x| {
                    let t = x.fast_tanh();
                    t * t
                },
            ),
            Self::Sigmoid => visitor.visit(sigmoid, move |y| y * (one - y)),
            Self::Tanh => visitor.visit(|x| x.fast_tanh(), move |y| one - y * y),
        }
    }
}

/// `1 / (1 + exp(-x))` without overflow.
#[cfg(any(feature = "flex", feature = "ndarray"))]
#[inline(always)]
pub(crate) fn sigmoid<A: CpuElement<Acc = A>>(x: A) -> A {
    let e = (-x.abs()).fast_exp();
    let s = A::one() / (A::one() + e);
    if x >= A::zero() { s } else { e * s }
}

/// `log(1 + x)` for `x >= 0`, to the last digits also where `1 + x` is 1, after Kahan: faster than the function of the platform.
#[cfg(any(feature = "flex", feature = "ndarray"))]
#[inline(always)]
pub(super) fn log_1p<A: CpuElement<Acc = A>>(x: A) -> A {
    let sum = A::one() + x;
    if sum == A::one() { x } else { sum.ln() * (x / (sum - A::one())) }
}

/// What to do with a function and its slope, whose types are known only inside.
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub(crate) trait Visitor<A, R> {
    fn visit(
        self,
        value: impl Fn(A) -> A + Copy + Send + Sync,
        slope: impl Fn(A) -> A + Copy + Send + Sync,
    ) -> R;
}
