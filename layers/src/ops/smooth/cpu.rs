//! Fused loops: one pass.
use super::{GELU_CUBE, SELU_ALPHA, SELU_SCALE, SOFTPLUS_THRESHOLD, SQRT_2_OVER_PI, Smooth, SmoothKernels};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    exp::{log_1p, sigmoid},
    parallel, with_element, zip_in_place,
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
            f.with(Backward { read: B::as_slice::<E>(&read), dy: B::as_slice_mut(&mut dy) });
        });
        dy
    }
}

impl Smooth {
    /// Calls the visitor with the function and its slope (from input or [output](Self::reads_output)) in the arithmetic of `A`.
    /// One call per variant, so that each gets loops of its own.
    #[inline(always)]
    pub fn with<A: CpuElement<Acc = A>, R>(self, visitor: impl Visitor<A, R>) -> R {
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
                // Beyond the capped threshold the function is the identity to the last digit.
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

/// What to do with a function and its slope, whose types are known only inside.
pub trait Visitor<A, R> {
    fn visit(
        self,
        value: impl Fn(A) -> A + Copy + Send + Sync,
        slope: impl Fn(A) -> A + Copy + Send + Sync,
    ) -> R;
}

/// Elements per task.
pub const TASK: usize = 1 << 12;
/// How much longer an exponential takes than reading an element.
pub const COST: usize = 16;

struct Forward<'a, E>(&'a [E]);

impl<E: CpuElement> Visitor<E::Acc, Vec<E>> for Forward<'_, E> {
    fn visit(
        self,
        value: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) -> Vec<E> {
        let x = self.0;
        parallel::filled(x.len(), E::zero(), TASK, COST * x.len(), |index, y| {
            let pairs = y.iter_mut().zip(&x[index * TASK..]);
            pairs.for_each(|(y, x)| *y = E::narrow(value(x.widen())));
        })
    }
}

struct ForwardInPlace<'a, E>(&'a mut [E]);

impl<E: CpuElement> Visitor<E::Acc, ()> for ForwardInPlace<'_, E> {
    fn visit(
        self,
        value: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        _: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let work = COST * self.0.len();
        parallel::chunks_mut(self.0, TASK, work, |_, x| {
            x.iter_mut().for_each(|x| *x = E::narrow(value(x.widen())));
        });
    }
}

struct Backward<'a, E> {
    read: &'a [E],
    dy: &'a mut [E],
}

impl<E: CpuElement> Visitor<E::Acc, ()> for Backward<'_, E> {
    fn visit(
        self,
        _: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
        slope: impl Fn(E::Acc) -> E::Acc + Copy + Send + Sync,
    ) {
        let Self { read, dy } = self;
        let work = COST * dy.len();
        zip_in_place(dy, read, TASK, work, |dy, read| dy * slope(read));
    }
}
