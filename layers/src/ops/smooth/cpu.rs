//! Fused loops: one pass, with the `cpu` formulas of `functions.rs`.
use super::functions::{constants::*, smooth_functions};
use super::{Smooth, SmoothKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::{log_1p, sigmoid},
    in_place::in_place_or_new,
    parallel::{self, Job, vectorized},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};
use core::marker::PhantomData;

impl<B: CpuBackend> SmoothKernels for B {
    fn smooth(x: FloatTensor<B>, f: Smooth) -> FloatTensor<B> {
        let x = B::contiguous(x);
        with_element!(x.dtype(), "smooth", E => {
            in_place_or_new::<B, E>(x, |x| f.with(ForwardInPlace(x)), |x| f.with(Forward(x)))
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
    ($(
        $(#[$doc:meta])*
        $variant:ident $({ $($(#[$of_field:meta])* $field:ident = $tested:literal,)+ })?, $name:literal, slope from $read:ident:
            cpu {
                value($x:ident) $value:tt
                slope($y:ident) $slope:tt
            }
            #[cube] $cube:tt
            composed $composed:tt
    )+) => {
        impl Smooth {
            /// Calls the visitor with the function, in the arithmetic of `A`. One call per variant, so that each gets loops of its own.
            #[inline(always)]
            pub(crate) fn with<A: CpuElement<Acc = A>, R>(self, visitor: impl Visitor<A, R>) -> R {
                match self.capped::<A>() {$(
                    Self::$variant $({ $($field),+ })? => {
                        visitor.visit($variant::<A> { $($($field: num($field),)+)? of: PhantomData })
                    }
                )+}
            }
        }
        $(
            #[derive(Clone, Copy)]
            struct $variant<A> {
                $($($field: A,)+)?
                of: PhantomData<A>,
            }

            impl<A: CpuElement<Acc = A>> Curve<A> for $variant<A> {
                #[inline(always)]
                fn value(self, $x: A) -> A {
                    $(let Self { $($field,)+ .. } = self;)?
                    $value
                }
                #[inline(always)]
                fn slope(self, $y: A) -> A {
                    $(#[allow(unused_variables, reason = "of the function only")]
                    let Self { $($field,)+ .. } = self;)?
                    $slope
                }
            }
        )+
    };
}
smooth_functions!(curves);

impl Smooth {
    /// The same function of numbers of type `A`: beyond the largest threshold, softplus is the identity to the last digit.
    fn capped<A: CpuElement>(self) -> Self {
        match self {
            Self::Softplus { beta, threshold } => {
                Self::Softplus { beta, threshold: threshold.min(A::max_value().ln().into_f64()) }
            }
            other => other,
        }
    }
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

/// Replaces every `x` by the function of it, on this thread.
pub fn change<E: CpuElement>(x: &mut [E], f: Smooth) {
    struct Change<'a, E>(&'a mut [E]);
    impl<E: CpuElement> Visitor<E::Acc, ()> for Change<'_, E> {
        fn visit(self, curve: impl Curve<E::Acc>) {
            vectorized(Values { x: self.0, curve });
        }
    }
    f.with(Change(x));
}

/// Multiplies `y` by the slope at `read`, on this thread.
pub fn multiply_by_slope<E: CpuElement>(y: &mut [E], read: &[E], f: Smooth) {
    struct Slopes<'a, E>(&'a mut [E], &'a [E]);
    impl<E: CpuElement> Visitor<E::Acc, ()> for Slopes<'_, E> {
        fn visit(self, curve: impl Curve<E::Acc>) {
            vectorized(Multiply::<_, _, true> { y: self.0, read: self.1, curve });
        }
    }
    f.with(Slopes(y, read));
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
