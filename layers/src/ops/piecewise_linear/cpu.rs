//! Fused loops: every element is read once.
use super::{PiecewiseLinear, PiecewiseLinearKernels, by_burn};
use crate::backend::cpu::{
    BitMask, CpuBackend, CpuElement,
    bit_mask::{BITS, TASK, TOGETHER, of_blocks, pack, pack_all},
    elementwise::{nothing, stored},
    parallel::{self, Job, Work},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, bf16, f16};
use core::mem::MaybeUninit;
use num_traits::{One, Zero};

impl<B: CpuBackend> PiecewiseLinearKernels for B {
    fn piecewise_linear(x: FloatTensor<B>, f: PiecewiseLinear) -> FloatTensor<B> {
        if f.is_a_pass_in_burn() {
            return by_burn::<B>(x, f);
        }
        let mut x = B::contiguous(x);
        with_element!(x.dtype(), "piecewise_linear", E => {
            if x.can_mut() {
                f.with(ValuesInPlace(B::as_slice_mut::<E>(&mut x)));
                x
            } else {
                B::from_vec(f.with(Values(B::as_slice::<E>(&x))), x.shape())
            }
        })
    }

    fn piecewise_linear_with_mask(x: FloatTensor<B>, f: PiecewiseLinear) -> (FloatTensor<B>, BitMask) {
        let mut x = B::contiguous(x);
        with_element!(x.dtype(), "piecewise_linear", E => {
            if x.can_mut() {
                let words = f.with(ApplyInPlace(B::as_slice_mut::<E>(&mut x)));
                (x, BitMask::from_words(words))
            } else {
                let (y, words) = f.with(Apply(B::as_slice::<E>(&x)));
                (B::from_vec(y, x.shape()), BitMask::from_words(words))
            }
        })
    }

    fn piecewise_mask(x: FloatTensor<B>, f: PiecewiseLinear) -> BitMask {
        let x = B::contiguous(x);
        let words = with_element!(x.dtype(), "piecewise_linear", E => f.with(Bits(B::as_slice::<E>(&x))));
        BitMask::from_words(words)
    }
}

impl PiecewiseLinear {
    /// Calls the visitor with the function in the arithmetic of `T`: `x -> (value, bit)`. One call per variant, so that each
    /// gets a loop of its own.
    #[inline(always)]
    fn with<T: CpuElement, R>(self, visitor: impl Visitor<T, R>) -> R {
        let zero = T::zero();
        let num = |v: f64| T::from(v).expect("every float type can be made from f64");
        match self {
            Self::Relu => visitor.visit(move |x| {
                let off = x <= zero; // of a NaN not: it stays, and passes its gradient, as in Burn
                (if off { zero } else { x }, !off)
            }),
            Self::LeakyRelu { negative_slope } => {
                let slope = <T::Acc as CpuElement>::from_f64(negative_slope);
                visitor.visit(move |x| {
                    let off = x < zero;
                    (if off { T::narrow(slope * x.widen()) } else { x }, !off) // rounded once, as in Burn
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
                    let off = x.abs() <= lambda;
                    let shift = if x > zero {
                        bias
                    } else if x < zero {
                        -bias
                    } else {
                        zero
                    };
                    (if off { zero } else { x - shift }, !off)
                })
            }
            Self::Threshold { threshold, value } => {
                let (threshold, value) = (num(threshold), num(value));
                visitor.visit(move |x| {
                    let off = x <= threshold;
                    (if off { value } else { x }, !off)
                })
            }
        }
    }
}
/// What to do with a function `x -> (value, bit)` whose type is known only inside.
trait Visitor<T, R> {
    fn visit(self, f: impl Fn(T) -> (T, bool) + Copy + Send + Sync) -> R;
}

struct Values<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E, Vec<E>> for Values<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> Vec<E> {
        // SAFETY: every element is written.
        unsafe {
            parallel::written(self.0.len(), TASK * BITS, Work::of_pass::<E>(self.0.len()), |task, y| {
                let (x, nothing) = (&self.0[task * TASK * BITS..], nothing());
                y.iter_mut().zip(x).for_each(|(y, &x)| _ = y.write(stored(f(x).0, nothing)));
            })
        }
    }
}

struct ValuesInPlace<'a, E>(&'a mut [E]);

impl<E: CpuElement> Visitor<E, ()> for ValuesInPlace<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) {
        let work = Work::of_pass::<E>(self.0.len());
        parallel::chunks_mut(self.0, TASK * BITS, work, |_, values| replace_all(values, f));
    }
}

struct Bits<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E, Vec<u64>> for Bits<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> Vec<u64> {
        let mut words = vec![0; self.0.len().div_ceil(BITS)];
        parallel::chunks_mut(&mut words, TASK, Work::of_pass::<E>(self.0.len()), |task, words| {
            pack_all(&self.0[task * TASK * BITS..], |&value| f(value).1, words);
        });
        words
    }
}

struct Apply<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E, (Vec<E>, Vec<u64>)> for Apply<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> (Vec<E>, Vec<u64>) {
        let mut words = vec![0; self.0.len().div_ceil(BITS)];
        // SAFETY: `Written` writes every element.
        let out = unsafe {
            parallel::zip_written(
                self.0.len(),
                &mut words,
                [TASK * BITS, TASK],
                Work::of_pass::<E>(self.0.len()),
                |task, y, words| {
                    let x = &self.0[task * TASK * BITS..][..y.len()];
                    parallel::vectorized(Written { x, y, words, f });
                },
            )
        };
        (out, words)
    }
}

/// Writes `f` of values, and their bits. (To copy the values and replace them takes twice as long.)
struct Written<'a, E, F> {
    x: &'a [E],
    y: &'a mut [MaybeUninit<E>],
    words: &'a mut [u64],
    f: F,
}

impl<E: CpuElement, F: Fn(E) -> (E, bool)> Job for Written<'_, E, F> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { x, y, words, f } = self;
        let nothing = nothing();
        let write = |(x, y): (&E, &mut MaybeUninit<E>)| {
            let (value, bit) = f(*x);
            y.write(stored(value, nothing));
            bit
        };
        for ((x, y), words) in x.chunks(TOGETHER).zip(y.chunks_mut(TOGETHER)).zip(of_blocks(words)) {
            pack(x.iter().zip(y), write, words);
        }
    }
}

struct ApplyInPlace<'a, E>(&'a mut [E]);

impl<E: CpuElement> Visitor<E, Vec<u64>> for ApplyInPlace<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> Vec<u64> {
        let work = Work::of_pass::<E>(self.0.len());
        let mut words = vec![0; self.0.len().div_ceil(BITS)];
        parallel::zip_chunks_mut(self.0, &mut words, [TASK * BITS, TASK], work, |_, values, words| {
            parallel::vectorized(Replaced { values, words, f });
        });
        words
    }
}

/// Replaces values by `f` of them, and writes their bits.
struct Replaced<'a, E, F> {
    values: &'a mut [E],
    words: &'a mut [u64],
    f: F,
}

impl<E: CpuElement, F: Fn(E) -> (E, bool)> Job for Replaced<'_, E, F> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { values, words, f } = self;
        let nothing = nothing();
        let replace = |value: &mut E| {
            let (y, bit) = f(*value);
            *value = stored(y, nothing);
            bit
        };
        for (values, words) in values.chunks_mut(TOGETHER).zip(of_blocks(words)) {
            pack(values.iter_mut(), replace, words);
        }
    }
}

/// Replaces values by `f` of them.
#[inline(always)]
fn replace_all<E: CpuElement>(values: &mut [E], f: impl Fn(E) -> (E, bool)) {
    let nothing = nothing();
    values.iter_mut().for_each(|value| *value = stored(f(*value).0, nothing));
}
