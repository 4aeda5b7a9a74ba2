//! Fused loops: one pass.
use super::{GELU_CUBE, SELU_ALPHA, SELU_SCALE, SOFTPLUS_THRESHOLD, SQRT_2_OVER_PI, Smooth, SmoothKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::{log_1p, sigmoid},
    parallel::{self, Job, vectorized},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};

impl<B: CpuBackend> SmoothKernels for B {
    fn smooth(x: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
        let mut x = B::contiguous(x);
        with_element!(x.dtype(), "smooth", E => {
            if x.can_mut() {
                f.with(ForwardInPlace(B::as_slice_mut::<E>(&mut x)));
                x
            } else {
                B::from_vec(f.with(Forward(B::as_slice::<E>(&x))), x.shape())
            }
        })
    }

    fn smooth_backward(read: FloatTensor<B>, f: Smooth, dy: FloatTensor<B>) -> FloatTensor<B> {
        let (read, mut dy) = (B::contiguous(read), B::contiguous(dy));
        with_element!(dy.dtype(), "smooth", E => {
            f.with(Multiplied::<_, true> { y: B::as_slice_mut::<E>(&mut dy), read: B::as_slice(&read) });
        });
        dy
    }
}

impl Smooth {
    /// Calls the visitor with the function, in the arithmetic of `A`. One call per variant, so that each gets loops of its own.
    #[inline(always)]
    pub fn with<A: CpuElement<Acc = A>, R>(self, visitor: impl Visitor<A, R>) -> R {
        let num = A::from_f64;
        match self {
            Self::Gelu => visitor.visit(Gelu),
            Self::GeluApproximate => visitor.visit(GeluApproximate),
            Self::Silu => visitor.visit(Silu),
            Self::Mish => visitor.visit(Mish),
            Self::Softplus { beta, threshold } => {
                // Beyond the capped threshold the function is the identity to the last digit.
                let threshold = num(threshold).min(A::max_value().ln());
                visitor.visit(Softplus { beta: num(beta), threshold })
            }
            Self::Softsign => visitor.visit(Softsign),
            Self::Elu { alpha } => visitor.visit(Elu { alpha: num(alpha) }),
            Self::Celu { alpha } => visitor.visit(Celu { alpha: num(alpha) }),
            Self::Selu => visitor.visit(Selu),
            Self::LogSigmoid => visitor.visit(LogSigmoid),
            Self::HardSwish => visitor.visit(HardSwish),
            Self::Tanhshrink => visitor.visit(Tanhshrink),
            Self::Sigmoid => visitor.visit(Sigmoid),
            Self::Tanh => visitor.visit(Tanh),
        }
    }
}

/// What to do with a function whose type is known only inside.
pub trait Visitor<A, R> {
    fn visit(self, curve: impl Curve<A>) -> R;
}

/// A function and its slope, from the input or the [output](Smooth::reads_output). Both are `#[inline(always)]`, which closures cannot
/// be: in loops they become vectors only then.
pub trait Curve<A>: Copy + Send + Sync {
    fn value(self, x: A) -> A;
    fn slope(self, x: A) -> A;
}

macro_rules! curves {
    ($($curve:ident $([$($field:ident),+])? {
        value($x:ident) $value:block
        slope($y:ident) $slope:block
    })+) => {$(
        curves!(@struct $curve $([$($field),+])?);
        impl<A: CpuElement<Acc = A>> Curve<A> for curves!(@type $curve $([$($field),+])?) {
            #[inline(always)]
            fn value(self, $x: A) -> A {
                $(let Self { $($field),+ } = self;)?
                $value
            }
            #[inline(always)]
            fn slope(self, $y: A) -> A {
                $(#[allow(unused_variables, reason = "of the function only")]
                let Self { $($field),+ } = self;)?
                $slope
            }
        }
    )+};
    (@struct $curve:ident [$($field:ident),+]) => {
        #[derive(Clone, Copy)]
        struct $curve<A> { $($field: A),+ }
    };
    (@struct $curve:ident) => {
        #[derive(Clone, Copy)]
        struct $curve;
    };
    (@type $curve:ident [$($field:ident),+]) => { $curve<A> };
    (@type $curve:ident) => { $curve };
}

/// A constant.
#[inline(always)]
fn num<A: CpuElement>(value: f64) -> A {
    A::from_f64(value)
}

/// The distribution function of the normal distribution.
#[inline(always)]
fn normal<A: CpuElement>(x: A) -> A {
    num::<A>(0.5) * (A::one() + (x / num(core::f64::consts::SQRT_2)).fast_erf())
}

/// `tanh` of the cubic of the approximate GELU.
#[inline(always)]
fn gelu_tanh<A: CpuElement>(x: A) -> A {
    (num::<A>(SQRT_2_OVER_PI) * (x + num::<A>(GELU_CUBE) * x * x * x)).fast_tanh()
}

/// `e^x` where [`Mish`] is not the identity.
#[inline(always)]
fn capped_exp<A: CpuElement>(x: A) -> A {
    x.min(num(SOFTPLUS_THRESHOLD)).fast_exp()
}

/// `x`, and below zero `alpha (e^(x / width) - 1)`.
#[inline(always)]
fn exp_branch<A: CpuElement>(x: A, alpha: A, width: A) -> A {
    if x > A::zero() { x } else { alpha * ((x / width).fast_exp() - A::one()) }
}

/// Of [`HardSwish`].
#[inline(always)]
fn hard_gate<A: CpuElement>(x: A) -> A {
    x * num(1.0 / 6.0) + num(0.5)
}

curves! {
    Gelu {
        value(x) { x * normal(x) }
        slope(x) {
            let density = num::<A>(SQRT_2_OVER_PI * 0.5);
            normal(x) + x * density * (-num::<A>(0.5) * x * x).fast_exp()
        }
    }
    GeluApproximate {
        value(x) { num::<A>(0.5) * x * (A::one() + gelu_tanh(x)) }
        slope(x) {
            let (half, one, t) = (num::<A>(0.5), A::one(), gelu_tanh(x));
            let inner = num::<A>(SQRT_2_OVER_PI) * (one + num::<A>(3.0) * num(GELU_CUBE) * x * x);
            half * (one + t) + half * x * (one - t * t) * inner
        }
    }
    Silu {
        value(x) { x * sigmoid(x) }
        slope(x) {
            let s = sigmoid(x);
            s * (A::one() + x * (A::one() - s))
        }
    }
    // With e = exp(x) and n = e (e + 2): tanh(log(1 + e)) = n / (n + 2), so that one exponential is enough.
    Mish {
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
    Softplus [beta, threshold] {
        value(x) { if beta * x > threshold { x } else { log_1p((beta * x).fast_exp()) / beta } }
        slope(x) { if beta * x > threshold { A::one() } else { sigmoid(beta * x) } }
    }
    Softsign {
        value(x) { x / (A::one() + x.abs()) }
        slope(x) {
            let inverse = A::one() / (A::one() + x.abs());
            inverse * inverse
        }
    }
    Elu [alpha] {
        value(x) { exp_branch(x, alpha, A::one()) }
        slope(x) { if x > A::zero() { A::one() } else { alpha * x.fast_exp() } }
    }
    Celu [alpha] {
        value(x) { exp_branch(x, alpha, alpha) }
        slope(x) { if x > A::zero() { A::one() } else { (x / alpha).fast_exp() } }
    }
    Selu {
        value(x) { num::<A>(SELU_SCALE) * exp_branch(x, num(SELU_ALPHA), A::one()) }
        slope(x) {
            num::<A>(SELU_SCALE) * if x >= A::zero() { A::one() } else { num::<A>(SELU_ALPHA) * x.fast_exp() }
        }
    }
    LogSigmoid {
        value(x) { x.min(A::zero()) - log_1p((-x.abs()).fast_exp()) }
        slope(x) { sigmoid(-x) }
    }
    HardSwish {
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
    Tanhshrink {
        value(x) { x - x.fast_tanh() }
        slope(x) {
            let t = x.fast_tanh();
            t * t
        }
    }
    Sigmoid {
        value(x) { sigmoid(x) }
        slope(y) { y * (A::one() - y) }
    }
    Tanh {
        value(x) { x.fast_tanh() }
        slope(y) { A::one() - y * y }
    }
}

/// Elements per task.
pub const TASK: usize = 1 << 12;
/// How much longer a function and its slope take than reading an element, in loops for vectors.
pub const COST: usize = 8;

struct Forward<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E::Acc, Vec<E>> for Forward<'_, E> {
    fn visit(self, curve: impl Curve<E::Acc>) -> Vec<E> {
        parallel::copied(self.0, TASK, parallel::Work::of([COST, self.0.len()]), |_, x| {
            vectorized(Values { x, curve })
        })
    }
}

struct ForwardInPlace<'a, E>(&'a mut [E]);

impl<E: CpuElement> Visitor<E::Acc, ()> for ForwardInPlace<'_, E> {
    fn visit(self, curve: impl Curve<E::Acc>) {
        let work = parallel::Work::of([COST, self.0.len()]);
        parallel::chunks_mut(self.0, TASK, work, |_, x| vectorized(Values { x, curve }));
    }
}

/// Replaces `x` by the function of it.
struct Values<'a, E, C> {
    x: &'a mut [E],
    curve: C,
}

impl<E: CpuElement, C: Curve<E::Acc>> Job for Values<'_, E, C> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, curve } = self;
        // A loop is inlined, and so compiled for wide vectors; a closure of this size is not.
        for x in x {
            *x = E::narrow(curve.value(x.widen()));
        }
    }
}

/// Replaces `y` by its product with the slope at `read`, or with the value there.
pub struct Multiplied<'a, E, const SLOPE: bool> {
    pub y: &'a mut [E],
    pub read: &'a [E],
}

impl<E: CpuElement, const SLOPE: bool> Visitor<E::Acc, ()> for Multiplied<'_, E, SLOPE> {
    fn visit(self, curve: impl Curve<E::Acc>) {
        let Self { y, read } = self;
        let work = parallel::Work::of([COST, y.len()]);
        parallel::chunks_mut(y, TASK, work, |index, y| {
            vectorized(Multiply::<_, _, SLOPE> { y, read: &read[index * TASK..], curve });
        });
    }
}

/// [`Multiplied`], of a chunk.
pub struct Multiply<'a, E, C, const SLOPE: bool> {
    pub y: &'a mut [E],
    pub read: &'a [E],
    pub curve: C,
}

impl<E: CpuElement, C: Curve<E::Acc>, const SLOPE: bool> Job for Multiply<'_, E, C, SLOPE> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { y, read, curve } = self;
        for (y, read) in y.iter_mut().zip(read) {
            let factor = if SLOPE { curve.slope(read.widen()) } else { curve.value(read.widen()) };
            *y = E::narrow(y.widen() * factor);
        }
    }
}
