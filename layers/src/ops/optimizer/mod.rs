//! Steps of optimizers, which change a weight and its moments in place. The moments are codes of 8 bits, or f32.
//!
//! | | computes, `t` the number of the step |
//! | --- | --- |
//! | [`memsave_adamw`](OptimizerOps::memsave_adamw) | `m = b1 m + (1 - b1) g`, `v = b2 v + (1 - b2) g^2`, `w = (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`; cautious: `decay` only where `w` and `m` have the same sign |
//! | [`memsave_adamw_8bit`](OptimizerOps::memsave_adamw_8bit) | the same, with moments that are stored in dynamic codes |
//! | [`memsave_momentum_8bit`](OptimizerOps::memsave_momentum_8bit) | `v = momentum v + (1 - dampening) g`, in linear codes, and `v`, or with Nesterov's momentum `g + momentum v` |
//! | [`memsave_descend`](OptimizerOps::memsave_descend) | `w = keep w - lr u` |
//!
//! A code stands for a number times the largest magnitude in its block. A block is 256 consecutive elements in row-major order. Moments are
//! f32 in a step, also for f64 weights, and a step computes with moments that are not yet rounded to codes. A positive second moment is not
//! rounded to 0, since its root is a divisor, unless all moments of its block are below 1.2e-38. An element that is not finite makes its
//! whole block NaN.
//!
//! Steps of weights in half precision are computed in f32. With a seed, these weights and the codes of second moments are rounded
//! stochastically: up or down at random, such that the mean is right. The direction depends only on the seed and the position. Numbers
//! below the least code, 3e-7 of the largest in the block, are rounded up. Without a seed, everything is rounded to nearest. A second
//! moment could then never fall while the largest of its block stays the same: with `b2` = 0.999 a step lowers it by at most a thousandth,
//! but codes are at least 0.35 % apart. The composition of Burn's operations always rounds codes to nearest.
use crate::backend::{composing_backends, plain_backends, wide, widen};
use crate::burn_next::routed;
use burn::backend::{
    Backend, ExtensionType, TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, FloatDType, Shape};

#[allow(dead_code, reason = "every backend uses its part")]
mod codes;
mod composed;
#[cfg(any(feature = "flex", feature = "ndarray"))]
mod cpu;
#[cfg(any(feature = "wgpu", feature = "cuda"))]
mod cube;

/// Elements that share a scale.
pub const BLOCK: usize = 256;

/// The bound to which finite gradients are clamped if moments are codes, about 2^63. The square of a larger gradient may be infinite, which
/// would make its block NaN; and on devices without subnormal numbers, a scale beyond 2^126 has no inverse.
pub const LARGEST_GRADIENT: f32 = (1u64 << 63) as f32;

/// Codes of 8 bits per word, on devices that have no bytes.
pub const CODES_OF_WORD: usize = 4;

/// The options of one step of AdamW.
#[derive(Clone, Copy, Debug)]
pub struct AdamWStep {
    /// The learning rate.
    pub lr: f64,
    /// The decay rate of the first moment.
    pub beta_1: f32,
    /// The decay rate of the second moment.
    pub beta_2: f32,
    /// Added to the root, so that the quotient stays finite.
    pub epsilon: f32,
    /// The decay of the weight, per unit of the learning rate.
    pub weight_decay: f64,
    /// Whether a weight decays only where it and the first moment have the same sign.
    pub cautious: bool,
    /// The number of the step, from 1 on.
    pub time: u32,
    /// Rounds stochastically: a weight in half precision, and codes of the second moment.
    pub seed: Option<u32>,
}

/// The factors of a step.
#[derive(Clone, Copy)]
struct StepFactors {
    /// The factor of the weight.
    keep: f64,
    /// The factor of the first moment.
    rate: f32,
    /// The factor of the root of the second moment.
    root: f32,
}

impl AdamWStep {
    fn factors(&self) -> StepFactors {
        let power = |beta: f32| 1.0 - f64::from(beta).powi(i32::try_from(self.time).unwrap_or(i32::MAX));
        StepFactors {
            keep: 1.0 - self.lr * self.weight_decay,
            rate: (self.lr / power(self.beta_1)) as f32,
            root: power(self.beta_2).sqrt().recip() as f32,
        }
    }

    /// Another seed than that of weights, so that codes are not rounded up at the same positions.
    #[cfg(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda"))]
    fn seed_of_codes(&self) -> Option<u32> {
        self.seed.map(|seed| !seed)
    }
}

/// The options of one step of momentum.
#[derive(Clone, Copy, Debug)]
pub struct MomentumStep {
    /// The factor of the previous momentum.
    pub momentum: f32,
    /// The factor of the gradient.
    pub gradient: f32,
    /// Whether the direction is Nesterov's.
    pub nesterov: bool,
}

/// The options of one step of descent.
#[derive(Clone, Copy, Debug)]
pub struct Descent {
    /// The factor of the weight.
    pub keep: f64,
    /// The learning rate, the factor of the direction.
    pub lr: f64,
    /// Rounds a weight in half precision stochastically.
    pub seed: Option<u32>,
}

/// A weight and its moments, of the same shape.
#[derive(ExtensionType)]
pub struct AdamWTensors<B: Backend> {
    /// The weight.
    pub weight: FloatTensor<B>,
    /// The first moment, in f32.
    pub first: FloatTensor<B>,
    /// The second moment, in f32.
    pub second: FloatTensor<B>,
}

/// A weight, the codes of its moments, and the scale of every block in f32. The codes are those of whole blocks, in u8 if tensors are in
/// the memory of the host, else four per word.
#[derive(ExtensionType)]
pub struct AdamW8bitTensors<B: Backend> {
    /// The weight.
    pub weight: FloatTensor<B>,
    /// Codes of the first moment.
    pub first: IntTensor<B>,
    /// Their scales.
    pub first_scales: FloatTensor<B>,
    /// Codes of the second moment.
    pub second: IntTensor<B>,
    /// Their scales.
    pub second_scales: FloatTensor<B>,
}

/// The result of a step of momentum: the direction in f32, and the momentum in codes.
#[derive(ExtensionType)]
pub struct MomentumTensors<B: Backend> {
    /// The direction in which the weight descends.
    pub direction: FloatTensor<B>,
    /// Codes of the momentum.
    pub codes: IntTensor<B>,
    /// Their scales.
    pub scales: FloatTensor<B>,
}

routed! {
    []
    /// Steps of optimizers.
    pub trait OptimizerOps: Backend {
        /// AdamW with moments in f32.
        fn memsave_adamw(
            gradient: FloatTensor<Self>,
            #[extension_type] tensors: AdamWTensors<Self>,
            step: AdamWStep,
        ) -> AdamWTensors<Self>;

        /// AdamW with moments in dynamic codes.
        fn memsave_adamw_8bit(
            gradient: FloatTensor<Self>,
            #[extension_type] tensors: AdamW8bitTensors<Self>,
            step: AdamWStep,
        ) -> AdamW8bitTensors<Self>;

        /// Momentum in linear codes, of a gradient in f32.
        fn memsave_momentum_8bit(
            gradient: FloatTensor<Self>,
            codes: IntTensor<Self>,
            scales: FloatTensor<Self>,
            step: MomentumStep,
        ) -> MomentumTensors<Self>;

        /// Subtracts a direction in f32 from a weight.
        fn memsave_descend(
            weight: FloatTensor<Self>,
            direction: FloatTensor<Self>,
            descent: Descent,
        ) -> FloatTensor<Self>;
    }
}

plain_backends!(OptimizerOps {
    fn memsave_adamw(
        gradient: FloatTensor<Self>,
        tensors: AdamWTensors<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        Self::adamw(gradient, tensors, step)
    }

    fn memsave_adamw_8bit(
        gradient: FloatTensor<Self>,
        tensors: AdamW8bitTensors<Self>,
        step: AdamWStep,
    ) -> AdamW8bitTensors<Self> {
        Self::adamw_8bit(gradient, tensors, step)
    }

    fn memsave_momentum_8bit(
        gradient: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        step: MomentumStep,
    ) -> MomentumTensors<Self> {
        Self::momentum_8bit(gradient, codes, scales, step)
    }

    fn memsave_descend(
        weight: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        descent: Descent,
    ) -> FloatTensor<Self> {
        Self::descend(weight, direction, descent)
    }
});

/// The kernels.
pub trait OptimizerKernels: Backend {
    /// See [`OptimizerOps::memsave_adamw`].
    fn adamw(
        gradient: FloatTensor<Self>,
        tensors: AdamWTensors<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        let AdamWTensors { weight, first, second } = tensors;
        let gradient = Self::float_cast(gradient, FloatDType::F32);
        let [first, second] = composed::moments::<Self>(gradient, first, second, &step);
        let weight = composed::adamw::<Self>(weight, first.clone(), second.clone(), &step);
        AdamWTensors { weight, first, second }
    }

    /// See [`OptimizerOps::memsave_adamw_8bit`].
    fn adamw_8bit(
        gradient: FloatTensor<Self>,
        tensors: AdamW8bitTensors<Self>,
        step: AdamWStep,
    ) -> AdamW8bitTensors<Self> {
        let AdamW8bitTensors { weight, first, first_scales, second, second_scales } = tensors;
        let (shape, elements) = (weight.shape(), weight.shape().num_elements());
        let [signed, unsigned] = [codes::Codes::signed(), codes::Codes::unsigned()];
        let gradient = composed::at_most_largest::<Self>(Self::float_cast(gradient, FloatDType::F32));
        let gradient = composed::blocks::<Self>(gradient);
        let first = composed::decoded::<Self>(first, first_scales, signed);
        let second = composed::decoded::<Self>(second, second_scales, unsigned);
        let [first, second] = composed::moments::<Self>(gradient, first, second, &step);
        let of_weight = |moment: &FloatTensor<Self>| {
            let flat = Self::float_reshape(moment.clone(), Shape::new([moment.shape().num_elements()]));
            Self::float_reshape(Self::float_slice(flat, &[(0..elements).into()]), shape.clone())
        };
        let weight = composed::adamw::<Self>(weight, of_weight(&first), of_weight(&second), &step);
        let (first, first_scales) = composed::encoded::<Self>(first, signed);
        let (second, second_scales) = composed::encoded::<Self>(second, unsigned);
        AdamW8bitTensors { weight, first, first_scales, second, second_scales }
    }

    /// See [`OptimizerOps::memsave_momentum_8bit`].
    fn momentum_8bit(
        gradient: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        step: MomentumStep,
    ) -> MomentumTensors<Self> {
        let (shape, elements) = (gradient.shape(), gradient.shape().num_elements());
        let gradient = composed::blocks::<Self>(gradient);
        let before = composed::decoded_linear::<Self>(codes, scales);
        let momentum = Self::float_add(
            Self::float_mul_scalar(before, step.momentum.into()),
            Self::float_mul_scalar(gradient.clone(), step.gradient.into()),
        );
        let direction = match step.nesterov {
            true => Self::float_add(Self::float_mul_scalar(momentum.clone(), step.momentum.into()), gradient),
            false => momentum.clone(),
        };
        let flat = Self::float_reshape(direction, Shape::new([momentum.shape().num_elements()]));
        let direction = Self::float_reshape(Self::float_slice(flat, &[(0..elements).into()]), shape);
        let (codes, scales) = composed::encoded_linear::<Self>(momentum);
        MomentumTensors { direction, codes, scales }
    }

    /// See [`OptimizerOps::memsave_descend`].
    fn descend(
        weight: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        descent: Descent,
    ) -> FloatTensor<Self> {
        let dtype = weight.dtype();
        composed::refuse_random(dtype, descent.seed);
        let weight = Self::float_mul_scalar(widen::<Self>(weight), descent.keep.into());
        let direction = Self::float_cast(direction, wide(dtype).into());
        let weight = Self::float_sub(weight, Self::float_mul_scalar(direction, descent.lr.into()));
        Self::float_cast(weight, dtype.into())
    }
}
composing_backends!(OptimizerKernels);

/// Whether a weight of this dtype is rounded when it is written.
pub fn is_rounded(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::cpu::CpuBackend;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{
        Flex,
        flex::FlexDevice,
        ops::{FloatTensorOps, IntTensorOps},
        read_sync,
    };
    use burn::tensor::IntDType;

    const STEP: AdamWStep = AdamWStep {
        lr: 0.01,
        beta_1: 0.9,
        beta_2: 0.99,
        epsilon: 1e-5,
        weight_decay: 0.1,
        cautious: false,
        time: 1,
        seed: None,
    };

    /// One element, a part of a block, many tasks.
    const LENGTHS: [usize; 5] = [1, 255, 256, 5003, 1 << 18];

    fn zeros(len: usize) -> FloatTensor<Flex> {
        Flex::from_vec(vec![0f32; len], Shape::new([len]))
    }

    fn bytes(codes: IntTensor<Flex>) -> Vec<u8> {
        read_sync(Flex::int_into_data(codes)).expect("a CPU tensor").as_bytes().to_vec()
    }

    fn codes(blocks: usize, dtype: IntDType) -> IntTensor<Flex> {
        let len = if dtype == IntDType::U8 { blocks * BLOCK } else { blocks * BLOCK / CODES_OF_WORD };
        Flex::int_zeros(Shape::new([len]), &FlexDevice, dtype)
    }

    /// Codes of both may differ by one where a number is halfway between two, and by more in a second step that follows from that.
    fn assert_near(what: &str, is_first: bool, composed: IntTensor<Flex>, cpu: IntTensor<Flex>) {
        let (composed, cpu) = (bytes(composed), bytes(cpu));
        assert_eq!(composed.len(), cpu.len());
        let steps: Vec<u8> = composed.iter().zip(&cpu).map(|(a, b)| a.abs_diff(*b)).collect();
        assert!(!is_first || steps.iter().all(|&step| step <= 1), "{what}");
        let differing = steps.iter().filter(|&&step| step > 0).count();
        assert!(differing * 1000 <= cpu.len(), "{what}: {differing} of {}", cpu.len());
    }

    #[test]
    fn compositions_do_the_same() {
        for len in LENGTHS {
            let (weight, gradient) = (random(&[len]), random(&[len]));
            let of = AdamWTensors { weight: weight.clone(), first: zeros(len), second: zeros(len) };
            let step = AdamWStep { cautious: len % 2 == 1, ..STEP };
            let cpu = Flex::adamw(gradient.clone(), of, step);
            let [w, m, v] = [weight, zeros(len), zeros(len)].map(|x| composed(&x));
            let other =
                Composed::adamw(composed(&gradient), AdamWTensors { weight: w, first: m, second: v }, step);
            assert_close("weight", other.weight, cpu.weight.clone());
            assert_close("first", other.first, cpu.first);
            assert_close("second", other.second, cpu.second);
            let descent = Descent { keep: 0.9, lr: 0.1, seed: None };
            let other = Composed::descend(composed(&cpu.weight), composed(&gradient), descent);
            assert_close("descent", other, Flex::descend(cpu.weight, gradient, descent));
        }
    }

    #[test]
    fn compositions_round_to_the_same_codes() {
        for len in LENGTHS {
            let blocks = len.div_ceil(BLOCK);
            let mut cpu = AdamW8bitTensors {
                weight: random(&[len]),
                first: codes(blocks, IntDType::U8),
                first_scales: zeros(blocks),
                second: codes(blocks, IntDType::U8),
                second_scales: zeros(blocks),
            };
            let words = || codes(blocks, IntDType::I32);
            let mut other = AdamW8bitTensors {
                weight: composed(&cpu.weight),
                first: words(),
                first_scales: composed(&zeros(blocks)),
                second: words(),
                second_scales: composed(&zeros(blocks)),
            };
            for time in 1..=2 {
                let (gradient, step) = (random(&[len]), AdamWStep { time, ..STEP });
                cpu = Flex::adamw_8bit(gradient.clone(), cpu, step);
                other = Composed::adamw_8bit(composed(&gradient), other, step);
                assert_near("first", time == 1, other.first.clone(), cpu.first.clone());
                assert_near("second", time == 1, other.second.clone(), cpu.second.clone());
                assert_close("scales", other.first_scales.clone(), cpu.first_scales.clone());
                assert_close("scales", other.second_scales.clone(), cpu.second_scales.clone());
                if time == 1 {
                    assert_close("weight", other.weight.clone(), cpu.weight.clone());
                }
            }
        }
    }

    #[test]
    fn compositions_have_the_same_momentum() {
        for len in LENGTHS {
            for nesterov in [false, true] {
                let step = MomentumStep { momentum: 0.9, gradient: 0.7, nesterov };
                let blocks = len.div_ceil(BLOCK);
                let (mut cpu, mut scales) = (codes(blocks, IntDType::U8), zeros(blocks));
                let (mut words, mut others) = (codes(blocks, IntDType::I32), composed(&scales));
                for is_first in [true, false] {
                    let gradient = random(&[len]);
                    let of = Flex::momentum_8bit(gradient.clone(), cpu, scales, step);
                    let other = Composed::momentum_8bit(composed(&gradient), words, others, step);
                    assert_near("momentum", is_first, other.codes.clone(), of.codes.clone());
                    assert_close("scales", other.scales.clone(), of.scales.clone());
                    // Of the second step, a code apart.
                    let [a, b] = [other.direction.into_primitive(), of.direction]
                        .map(|x| read_sync(Flex::float_into_data(x)).expect("a CPU tensor"));
                    let close = |(a, b): (f32, f32)| (a - b).abs() < 0.06;
                    assert!(a.iter::<f32>().zip(b.iter::<f32>()).all(close));
                    (cpu, scales, words, others) = (of.codes, of.scales, other.codes, other.scales);
                }
            }
        }
    }
}
