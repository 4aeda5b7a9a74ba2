//! The kernels on a CPU: fused loops that read every element once.
use super::{PiecewiseLinear, PiecewiseLinearKernels, by_burn};
use crate::backend::cpu::{
    BitMask, CpuBackend, CpuElement,
    bit_mask::{BITS, PACKED_AT_ONCE, TASK, pack, pack_all, packs},
    elementwise::{nothing, stored},
    in_place::in_place_or_new,
    parallel::{self, Job, Work, vectorized},
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
        let x = B::contiguous(x);
        with_element!(x.dtype(), "piecewise_linear", E => f.with::<E, _>(Values::<B>(x)))
    }

    fn piecewise_linear_with_mask(x: FloatTensor<B>, f: PiecewiseLinear) -> (FloatTensor<B>, BitMask) {
        let x = B::contiguous(x);
        with_element!(x.dtype(), "piecewise_linear", E => f.with::<E, _>(ValuesAndBits::<B>(x)))
    }

    fn piecewise_mask(x: FloatTensor<B>, f: PiecewiseLinear) -> BitMask {
        let x = B::contiguous(x);
        with_element!(x.dtype(), "piecewise_linear", E => f.with(Bits(B::as_slice::<E>(&x))))
    }
}

impl PiecewiseLinear {
    /// Calls the visitor with the function `x -> (value, bit)`, in the arithmetic of `T`. Every variant has its own call, and so its own
    /// loop.
    #[inline(always)]
    fn with<T: CpuElement, R>(self, visitor: impl Visitor<T, R>) -> R {
        let zero = T::zero();
        let num = |v: f64| T::from(v).expect("every float type can be made from f64");
        match self {
            Self::Relu => visitor.visit(move |x| {
                let off = x <= zero; // false for a NaN, which stays and passes its gradient, as in Burn
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
                let (lambda, bias) = (num(lambda), num(bias).widen());
                visitor.visit(move |x| {
                    let off = x.abs() <= lambda; // which includes 0
                    let y = x.widen() - if x < zero { -bias } else { bias };
                    (T::narrow(if off { T::Acc::zero() } else { y }), !off)
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

impl PiecewiseLinear {
    /// Replaces every `x` by its value, on this thread.
    pub(in crate::ops) fn change<E: CpuElement>(self, x: &mut [E]) {
        self.with(Change(x));
    }

    /// Multiplies `dy` by the slope at `x`, on this thread.
    pub(in crate::ops) fn multiply_by_slope<E: CpuElement>(self, dy: &mut [E], x: &[E]) {
        let slopes = self.slopes().map(<E::Acc as CpuElement>::from_f64);
        self.with(Slopes { dy, x, slopes });
    }
}

/// What to do with a function `x -> (value, bit)` whose type is known only inside.
trait Visitor<T, R> {
    fn visit(self, f: impl Fn(T) -> (T, bool) + Copy + Send + Sync) -> R;
}

/// The values of the elements of a tensor.
struct Values<B: CpuBackend>(FloatTensor<B>);

impl<B: CpuBackend, E: CpuElement> Visitor<E, FloatTensor<B>> for Values<B> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> FloatTensor<B> {
        let (len, work) = (TASK * BITS, Work::of_pass::<E>(self.0.shape().num_elements()));
        let change = |values: &mut [E]| {
            parallel::chunks_mut(values, len, work, |_, values| {
                let nothing = nothing();
                values.iter_mut().for_each(|value| *value = stored(f(*value).0, nothing));
            });
        };
        in_place_or_new::<B, E>(self.0, change, |x| {
            // SAFETY: every element is written.
            unsafe {
                parallel::written(x.len(), len, work, |task, y| {
                    let (x, nothing) = (&x[task * len..], nothing());
                    y.iter_mut().zip(x).for_each(|(y, &x)| _ = y.write(stored(f(x).0, nothing)));
                })
            }
        })
    }
}

/// Replaces elements by their values.
struct Change<'a, E>(&'a mut [E]);

impl<E: CpuElement> Visitor<E, ()> for Change<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) {
        struct ChangeBy<'a, E, F>(&'a mut [E], F);
        impl<E: CpuElement, F: Fn(E) -> (E, bool)> Job for ChangeBy<'_, E, F> {
            type Result = ();

            #[inline(always)]
            fn run(self) {
                let nothing = nothing();
                for x in self.0 {
                    *x = stored((self.1)(*x).0, nothing);
                }
            }
        }
        vectorized(ChangeBy(self.0, f));
    }
}

/// Multiplies `dy` by slopes at `x`.
struct Slopes<'a, E: CpuElement> {
    dy: &'a mut [E],
    x: &'a [E],
    /// Where the bit is clear, and where it is set.
    slopes: [E::Acc; 2],
}

impl<E: CpuElement> Visitor<E, ()> for Slopes<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) {
        struct SlopesBy<'a, E: CpuElement, F>(Slopes<'a, E>, F);
        impl<E: CpuElement, F: Fn(E) -> (E, bool)> Job for SlopesBy<'_, E, F> {
            type Result = ();

            #[inline(always)]
            fn run(self) {
                let (Slopes { dy, x, slopes: [clear, set] }, f) = (self.0, self.1);
                let is_flat = clear == E::Acc::zero(); // there the gradient is 0 even if `dy` is infinite
                for (dy, &x) in dy.iter_mut().zip(x) {
                    let wide = dy.widen();
                    let off = if is_flat { clear } else { clear * wide };
                    *dy = E::narrow(if f(x).1 { set * wide } else { off });
                }
            }
        }
        vectorized(SlopesBy(self, f));
    }
}

/// The bits of elements.
struct Bits<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E, BitMask> for Bits<'_, E> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> BitMask {
        let mut words = vec![0; self.0.len().div_ceil(BITS)];
        parallel::chunks_mut(&mut words, TASK, Work::of_pass::<E>(self.0.len()), |task, words| {
            pack_all(&self.0[task * TASK * BITS..], |&value| f(value).1, words);
        });
        BitMask::from_words(words)
    }
}

/// The values of the elements of a tensor, and their bits.
struct ValuesAndBits<B: CpuBackend>(FloatTensor<B>);

impl<B: CpuBackend, E: CpuElement> Visitor<E, (FloatTensor<B>, BitMask)> for ValuesAndBits<B> {
    fn visit(self, f: impl Fn(E) -> (E, bool) + Copy + Send + Sync) -> (FloatTensor<B>, BitMask) {
        let Self(mut x) = self;
        let len = x.shape().num_elements();
        let (mut words, work) = (vec![0; len.div_ceil(BITS)], Work::of_pass::<E>(len));
        let y = if x.can_mut() {
            let values = B::as_slice_mut::<E>(&mut x);
            parallel::zip_chunks_mut(values, &mut words, [TASK * BITS, TASK], work, |_, values, words| {
                parallel::vectorized(Replaced { values, words, f });
            });
            x
        } else {
            let values = B::as_slice::<E>(&x);
            // SAFETY: `Written` writes every element.
            let y = unsafe {
                parallel::zip_written(len, &mut words, [TASK * BITS, TASK], work, |task, y, words| {
                    let x = &values[task * TASK * BITS..][..y.len()];
                    parallel::vectorized(Written { x, y, words, f });
                })
            };
            B::from_vec(y, x.shape())
        };
        (y, BitMask::from_words(words))
    }
}

/// Writes `f` of values, and their bits. (Copying the values first and then replacing them would take twice as long.)
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
        for ((x, y), words) in x.chunks(PACKED_AT_ONCE).zip(y.chunks_mut(PACKED_AT_ONCE)).zip(packs(words)) {
            pack(x.iter().zip(y), write, words);
        }
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
        for (values, words) in values.chunks_mut(PACKED_AT_ONCE).zip(packs(words)) {
            pack(values.iter_mut(), replace, words);
        }
    }
}
