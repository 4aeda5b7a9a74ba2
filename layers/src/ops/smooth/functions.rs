//! The table of smooth functions. One entry says everything about a function; the enum, its kernels and the list for tests follow from it:
//!
//! ```text
//! /// What it computes
//! Name { /// What the number is
//!        number = its value in tests, }, "the name in the ledger", slope from input:      (or: from output)
//!     cpu { value(x) { .. } slope(x) { .. } }         of numbers of type `A`, in loops that become vectors
//!     #[cube] { value(x) { .. } slope(x) { .. } }     of a `Vector<W, N>`, in kernels for devices
//!     composed { value(x) { .. } slope(x) { .. } }    of a tensor of `B`: on other devices, and where Burn fuses operations
//! ```
//!
//! Formulas may use the functions of the file with the name of their section (`cpu.rs`, ..). A function has at most two numbers, because
//! the kernels for devices take two.

/// Numbers of the formulas.
pub(super) mod constants {
    /// The scale of SELU, <https://arxiv.org/abs/1706.02515>.
    pub const SELU_SCALE: f64 = 1.050_700_987_355_480_5;
    /// The limit of SELU below, negated and without the scale.
    pub const SELU_ALPHA: f64 = 1.673_263_242_354_377_2;
    /// `sqrt(2 / pi)`
    pub const SQRT_2_OVER_PI: f64 = core::f64::consts::FRAC_2_SQRT_PI * core::f64::consts::FRAC_1_SQRT_2;
    /// The coefficient of the cube in the approximation of GELU.
    pub const GELU_CUBE: f64 = 0.044715;
    /// From where on `log(1 + exp(x))` is `x`.
    pub const SOFTPLUS_THRESHOLD: f64 = 20.0;
}

/// Calls a macro with all entries.
macro_rules! smooth_functions {
    ($call:ident) => { $call! {

        /// `x / 2 * (1 + erf(x / sqrt(2)))`
        Gelu, "gelu", slope from input:
            cpu {
                value(x) { x * normal(x) }
                slope(x) {
                    let density = num::<A>(SQRT_2_OVER_PI * 0.5);
                    normal(x) + x * density * (-num::<A>(0.5) * x * x).fast_exp()
                }
            }
            #[cube] {
                value(x) { x * normal::<W, N>(x) }
                slope(x) {
                    let density = number::<W, N>(SQRT_2_OVER_PI * 0.5) * (number::<W, N>(-0.5) * x * x).exp();
                    normal::<W, N>(x) + x * density
                }
            }
            composed {
                value(x) { B::gelu(x) }
                slope(x) {
                    let erf = B::float_erf(times::<B>(x.clone(), core::f64::consts::FRAC_1_SQRT_2));
                    let normal = times::<B>(plus::<B>(erf, 1.0), 0.5);
                    let falling = B::float_exp(times::<B>(square::<B>(x.clone()), -0.5));
                    B::float_add(normal, B::float_mul(x, times::<B>(falling, SQRT_2_OVER_PI * 0.5)))
                }
            }

        /// `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`
        GeluApproximate, "gelu", slope from input:
            cpu {
                value(x) { num::<A>(0.5) * x * (A::one() + gelu_tanh(x)) }
                slope(x) {
                    let (half, one, t) = (num::<A>(0.5), A::one(), gelu_tanh(x));
                    let inner = num::<A>(SQRT_2_OVER_PI) * (one + num::<A>(3.0) * num(GELU_CUBE) * x * x);
                    half * (one + t) + half * x * (one - t * t) * inner
                }
            }
            #[cube] {
                value(x) { number::<W, N>(0.5) * x * (number::<W, N>(1.0) + gelu_tanh::<W, N>(x)) }
                slope(x) {
                    let (half, one, t) = (number::<W, N>(0.5), number::<W, N>(1.0), gelu_tanh::<W, N>(x));
                    let inner = number::<W, N>(SQRT_2_OVER_PI) * (one + number::<W, N>(3.0 * GELU_CUBE) * x * x);
                    half * (one + t) + half * x * (one - t * t) * inner
                }
            }
            composed {
                value(x) {
                    let tanh = B::float_tanh(gelu_inner::<B>(x.clone()));
                    times::<B>(B::float_mul(x, plus::<B>(tanh, 1.0)), 0.5)
                }
                slope(x) {
                    let tanh = B::float_tanh(gelu_inner::<B>(x.clone()));
                    let inner = plus::<B>(times::<B>(square::<B>(x.clone()), 3.0 * GELU_CUBE), 1.0);
                    let inner = times::<B>(B::float_mul(x, inner), SQRT_2_OVER_PI);
                    let falling = B::float_mul(inner, rest::<B>(square::<B>(tanh.clone())));
                    times::<B>(B::float_add(plus::<B>(tanh, 1.0), falling), 0.5)
                }
            }

        /// `x * sigmoid(x)`
        Silu, "silu", slope from input:
            cpu {
                value(x) { x * sigmoid(x) }
                slope(x) {
                    let s = sigmoid(x);
                    s * (A::one() + x * (A::one() - s))
                }
            }
            #[cube] {
                value(x) { x * sigmoid::<W, N>(x) }
                slope(x) {
                    let (s, one) = (sigmoid::<W, N>(x), number::<W, N>(1.0));
                    s * (one + x * (one - s))
                }
            }
            composed {
                value(x) { B::float_mul(x.clone(), B::sigmoid(x)) }
                slope(x) {
                    let s = sigmoid::<B>(x.clone());
                    let inner = plus::<B>(B::float_mul(x, rest::<B>(s.clone())), 1.0);
                    B::float_mul(s, inner)
                }
            }

        // With e = exp(x) and n = e (e + 2), tanh(log(1 + e)) is n / (n + 2), so one exponential is enough.
        /// `x * tanh(softplus(x))`
        Mish, "mish", slope from input:
            cpu {
                value(x) {
                    let e = capped_exp(x);
                    let n = e * (e + num(2.0));
                    x * (n / (n + num(2.0)))
                }
                slope(x) {
                    let (e, double) = (capped_exp(x), num::<A>(2.0));
                    let n = e * (e + double);
                    let falling = num::<A>(4.0) * e * (A::one() + e) / ((n + double) * (n + double));
                    n / (n + double) + if x > num(SOFTPLUS_THRESHOLD) { A::zero() } else { x * falling }
                }
            }
            #[cube] {
                value(x) { x * mish_tanh::<W, N>(x) }
                slope(x) {
                    let t = mish_tanh::<W, N>(x);
                    t + x * (number::<W, N>(1.0) - t * t) * sigmoid::<W, N>(x)
                }
            }
            composed {
                value(x) { B::float_mul(x.clone(), B::float_tanh(softplus::<B>(x, SOFTPLUS_THRESHOLD))) }
                slope(x) {
                    let tanh = B::float_tanh(softplus::<B>(x.clone(), SOFTPLUS_THRESHOLD));
                    let inner = B::float_mul(x.clone(), rest::<B>(square::<B>(tanh.clone())));
                    B::float_add(tanh, B::float_mul(inner, sigmoid::<B>(x)))
                }
            }

        /// `log(1 + exp(beta x)) / beta`, and `x` if `beta x > threshold`
        Softplus {
            /// The steepness.
            beta = 1.5,
            /// From where on the function is the identity.
            threshold = 1.0,
        }, "softplus", slope from input:
            cpu {
                value(x) { if beta * x > threshold { x } else { log_1p((beta * x).fast_exp()) / beta } }
                slope(x) { if beta * x > threshold { A::one() } else { sigmoid(beta * x) } }
            }
            #[cube] {
                value(x) {
                    let scaled = x * beta;
                    select_many(scaled.greater_than(&threshold), x, log_1p_exp::<W, N>(scaled) / beta)
                }
                slope(x) {
                    let scaled = x * beta;
                    select_many(scaled.greater_than(&threshold), number::<W, N>(1.0), sigmoid::<W, N>(scaled))
                }
            }
            composed {
                value(x) { B::float_div_scalar(softplus::<B>(times::<B>(x, beta), threshold), beta.into()) }
                slope(x) {
                    let scaled = times::<B>(x, beta);
                    let linear = above::<B>(scaled.clone(), threshold);
                    B::float_mask_fill(sigmoid::<B>(scaled), linear, 1.0.into())
                }
            }

        /// `x / (1 + |x|)`
        Softsign, "softsign", slope from input:
            cpu {
                value(x) { x / (A::one() + x.abs()) }
                slope(x) {
                    let inverse = A::one() / (A::one() + x.abs());
                    inverse * inverse
                }
            }
            #[cube] {
                value(x) { x / (number::<W, N>(1.0) + x.abs()) }
                slope(x) {
                    let one = number::<W, N>(1.0);
                    let inverse = one / (one + x.abs());
                    inverse * inverse
                }
            }
            composed {
                value(x) { B::float_div(x.clone(), plus::<B>(B::float_abs(x), 1.0)) }
                slope(x) { square::<B>(B::float_recip(plus::<B>(B::float_abs(x), 1.0))) }
            }

        /// `x` if `x > 0`, else `alpha * (exp(x) - 1)`
        Elu {
            /// The limit below, negated.
            alpha = 1.5,
        }, "elu", slope from input:
            cpu {
                value(x) { exp_branch(x, alpha, A::one()) }
                slope(x) { if x > A::zero() { A::one() } else { alpha * x.fast_exp() } }
            }
            #[cube] {
                value(x) { exp_branch::<W, N>(x, alpha, number::<W, N>(1.0)) }
                slope(x) {
                    select_many(x.greater_than(&number::<W, N>(0.0)), number::<W, N>(1.0), alpha * x.exp())
                }
            }
            composed {
                value(x) { exp_branch::<B>(x, alpha, 1.0) }
                slope(x) { exp_branch_slope::<B>(x, alpha, 1.0) }
            }

        /// `x` if `x > 0`, else `alpha * (exp(x / alpha) - 1)`
        Celu {
            /// The limit below, negated.
            alpha = 1.5,
        }, "celu", slope from input:
            cpu {
                value(x) { exp_branch(x, alpha, alpha) }
                slope(x) { if x > A::zero() { A::one() } else { (x / alpha).fast_exp() } }
            }
            #[cube] {
                value(x) { exp_branch::<W, N>(x, alpha, alpha) }
                slope(x) {
                    select_many(x.greater_than(&number::<W, N>(0.0)), number::<W, N>(1.0), (x / alpha).exp())
                }
            }
            composed {
                value(x) { exp_branch::<B>(x, alpha, alpha) }
                slope(x) { exp_branch_slope::<B>(x, alpha, alpha) }
            }

        // At 0 the slope is that of the line, as in stock.
        /// `1.0507 * elu(x)` with `alpha = 1.6733`
        Selu, "selu", slope from input:
            cpu {
                value(x) { num::<A>(SELU_SCALE) * exp_branch(x, num(SELU_ALPHA), A::one()) }
                slope(x) {
                    num::<A>(SELU_SCALE) * if x >= A::zero() { A::one() } else { num::<A>(SELU_ALPHA) * x.fast_exp() }
                }
            }
            #[cube] {
                value(x) {
                    let (alpha, one) = (number::<W, N>(SELU_ALPHA), number::<W, N>(1.0));
                    number::<W, N>(SELU_SCALE) * exp_branch::<W, N>(x, alpha, one)
                }
                slope(x) {
                    let below = number::<W, N>(SELU_ALPHA) * x.exp();
                    let line = x.greater_equal(&number::<W, N>(0.0));
                    number::<W, N>(SELU_SCALE) * select_many(line, number::<W, N>(1.0), below)
                }
            }
            composed {
                value(x) { times::<B>(exp_branch::<B>(x, SELU_ALPHA, 1.0), SELU_SCALE) }
                slope(x) {
                    let below = times::<B>(exp_below::<B>(x.clone(), 1.0), SELU_ALPHA);
                    times::<B>(B::float_mask_fill(below, at_least::<B>(x, 0.0), 1.0.into()), SELU_SCALE)
                }
            }

        /// `log(sigmoid(x))`
        LogSigmoid, "log_sigmoid", slope from input:
            cpu {
                value(x) { x.min(A::zero()) - log_1p((-x.abs()).fast_exp()) }
                slope(x) { sigmoid(-x) }
            }
            #[cube] {
                value(x) { -log_1p_exp::<W, N>(-x) }
                slope(x) { sigmoid::<W, N>(-x) }
            }
            composed {
                value(x) { B::log_sigmoid(x) }
                slope(x) { sigmoid::<B>(B::float_neg(x)) }
            }

        /// `x * min(max(x / 6 + 1/2, 0), 1)`
        HardSwish, "hard_swish", slope from input:
            cpu {
                value(x) { x * hard_gate(x).max(A::zero()).min(A::one()) }
                slope(x) {
                    let g = hard_gate(x);
                    if g < A::zero() {
                        A::zero()
                    } else if g > A::one() {
                        A::one()
                    } else {
                        g + x * num(1.0 / 6.0)
                    }
                }
            }
            #[cube] {
                value(x) { x * hard_gate::<W, N>(x).max(number::<W, N>(0.0)).min(number::<W, N>(1.0)) }
                slope(x) {
                    let (gate, zero, one) = (hard_gate::<W, N>(x), number::<W, N>(0.0), number::<W, N>(1.0));
                    let inside = gate + x * number::<W, N>(1.0 / 6.0);
                    let inside = select_many(gate.greater_than(&one), one, inside);
                    select_many(gate.less_than(&zero), zero, inside)
                }
            }
            composed {
                value(x) {
                    let gate = B::float_clamp(hard_gate::<B>(x.clone()), 0.0.into(), 1.0.into());
                    B::float_mul(x, gate)
                }
                slope(x) {
                    let inside = B::float_add(hard_gate::<B>(x.clone()), times::<B>(x.clone(), 1.0 / 6.0));
                    // Not by the gate, which half precision rounds to 1 for some `x` above 3: their slope would be 1.5.
                    let inside = B::float_mask_fill(inside, above::<B>(x.clone(), 3.0), 1.0.into());
                    B::float_mask_fill(inside, above::<B>(B::float_neg(x), 3.0), 0.0.into())
                }
            }

        /// `x - tanh(x)`
        Tanhshrink, "tanhshrink", slope from input:
            cpu {
                value(x) { x - x.fast_tanh() }
                slope(x) {
                    let t = x.fast_tanh();
                    t * t
                }
            }
            #[cube] {
                value(x) { x - x.tanh() }
                slope(x) {
                    let t = x.tanh();
                    t * t
                }
            }
            composed {
                value(x) { B::float_sub(x.clone(), B::float_tanh(x)) }
                slope(x) { square::<B>(B::float_tanh(x)) }
            }

        /// `1 / (1 + exp(-x))`
        Sigmoid, "sigmoid", slope from output:
            cpu {
                value(x) { sigmoid(x) }
                slope(y) { y * (A::one() - y) }
            }
            #[cube] {
                value(x) { sigmoid::<W, N>(x) }
                slope(y) { y * (number::<W, N>(1.0) - y) }
            }
            composed {
                value(x) { B::sigmoid(x) }
                slope(y) { B::float_mul(y.clone(), rest::<B>(y)) }
            }

        /// The hyperbolic tangent.
        Tanh, "tanh", slope from output:
            cpu {
                value(x) { x.fast_tanh() }
                slope(y) { A::one() - y * y }
            }
            #[cube] {
                value(x) { x.tanh() }
                slope(y) { number::<W, N>(1.0) - y * y }
            }
            composed {
                value(x) { B::float_tanh(x) }
                slope(y) { rest::<B>(square::<B>(y)) }
            }
    } };
}
pub(super) use smooth_functions;
