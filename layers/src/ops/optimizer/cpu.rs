//! The kernels on a CPU: loops on slices, in place, a block at a time.
use super::codes::{self, Codes, linear, of_linear};
use super::{
    AdamW8bitTensors, AdamWStep, AdamWTensors, BLOCK, Descent, LARGEST_GRADIENT, MomentumStep,
    MomentumTensors, OptimizerKernels, StepFactors,
};
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    parallel::{self, Job, vectorized},
    with_element,
};
use crate::saved::packing::noise;
use burn::backend::{
    TensorMetadata,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, bf16, f16};

/// Blocks per task.
const BLOCKS: usize = 32;
/// Elements per task.
const TASK: usize = BLOCKS * BLOCK;
/// The time of a step of an element, in units of the time to read one.
const WORK: usize = 8;

/// The type of a weight's elements.
trait WeightElement: CpuElement {
    /// In f32.
    fn single(self) -> f32;
    /// `keep self - change`, rounded as `up` says if this is half precision.
    fn moved(self, keep: f64, change: f32, up: Up) -> Self;
}

/// The rounding of a weight in half precision.
#[derive(Clone, Copy)]
enum Up {
    Nearest,
    /// Stochastic rounding, with these random bits.
    Random(u32),
}

impl WeightElement for f32 {
    #[inline(always)]
    fn single(self) -> f32 {
        self
    }
    #[inline(always)]
    fn moved(self, keep: f64, change: f32, _: Up) -> Self {
        self * keep as f32 - change
    }
}

impl WeightElement for f64 {
    #[inline(always)]
    fn single(self) -> f32 {
        self as f32
    }
    #[inline(always)]
    fn moved(self, keep: f64, change: f32, _: Up) -> Self {
        self * keep - f64::from(change)
    }
}

impl WeightElement for bf16 {
    #[inline(always)]
    fn single(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn moved(self, keep: f64, change: f32, up: Up) -> Self {
        let x = self.single() * keep as f32 - change;
        match up {
            Up::Nearest => Self::from_f32(x),
            Up::Random(_) if !x.is_finite() => Self::from_f32(x),
            Up::Random(bits) => Self::from_bits((x.to_bits().wrapping_add(bits >> 16) >> 16) as u16),
        }
    }
}

impl WeightElement for f16 {
    #[inline(always)]
    fn single(self) -> f32 {
        self.to_f32()
    }
    #[inline(always)]
    fn moved(self, keep: f64, change: f32, up: Up) -> Self {
        /// The inverse of the distance between subnormal numbers, 2^-24. From 2^-14 on, there are 13 bits fewer than in an f32.
        const STEPS: f32 = (1 << 24) as f32;
        let x = self.single() * keep as f32 - change;
        match up {
            Up::Random(bits) if x.is_finite() => Self::from_f32(match x.abs() < 6.103_515_6e-5 {
                true => {
                    let steps = x * STEPS;
                    let down = steps.floor();
                    let up = unit(bits) < steps - down; // exact on both sides, unlike their sum with `down`
                    (if up { down + 1.0 } else { down }) / STEPS
                }
                false => f32::from_bits(x.to_bits().wrapping_add(bits >> 19) & !0x1FFF),
            }),
            _ => Self::from_f32(x),
        }
    }
}

/// A number in 0..1.
#[inline(always)]
fn unit(bits: u32) -> f32 {
    (bits >> 8) as f32 * (1.0 / (1 << 24) as f32)
}

/// The random bits of every position, given a seed.
#[derive(Clone, Copy)]
struct Noise(Option<u32>);

impl Noise {
    #[inline(always)]
    fn at(self, position: usize) -> Up {
        match self.0 {
            Some(seed) => Up::Random(noise(position as u32, seed)),
            None => Up::Nearest,
        }
    }

    /// The number that is added to the place of a code.
    #[inline(always)]
    fn unit(self, position: usize) -> f32 {
        match self.0 {
            Some(seed) => unit(noise(position as u32, seed)),
            None => codes::NEAREST,
        }
    }
}

/// The gradient and the weight of some blocks, from position `start` on.
struct WeightPart<'a, E> {
    gradient: &'a [E],
    weight: &'a mut [E],
    start: usize,
}

/// The parts of tasks.
fn parts<'a, E>(gradient: &'a [E], weight: &'a mut [E]) -> impl Iterator<Item = WeightPart<'a, E>> {
    let parts = gradient.chunks(TASK).zip(weight.chunks_mut(TASK)).enumerate();
    parts.map(|(part, (gradient, weight))| WeightPart { gradient, weight, start: part * TASK })
}

/// The codes and scales of some blocks.
struct CodedPart<'a> {
    codes: &'a mut [u8],
    scales: &'a mut [f32],
}

fn coded_parts<'a>(codes: &'a mut [u8], scales: &'a mut [f32]) -> impl Iterator<Item = CodedPart<'a>> {
    let parts = codes.chunks_mut(TASK).zip(scales.chunks_mut(BLOCKS));
    parts.map(|(codes, scales)| CodedPart { codes, scales })
}

/// The numbers that a step of AdamW needs for every element.
#[derive(Clone, Copy)]
struct AdamW {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    factors: StepFactors,
    cautious: bool,
    noise: Noise,
    /// The random bits of codes of the second moment.
    of_codes: Noise,
    /// The largest magnitude of a gradient.
    largest: f32,
}

impl AdamW {
    fn of(step: &AdamWStep, largest: f32) -> Self {
        let AdamWStep { beta_1, beta_2, epsilon, cautious, seed, .. } = *step;
        let [noise, of_codes] = [Noise(seed), Noise(step.seed_of_codes())];
        Self { beta_1, beta_2, epsilon, factors: step.factors(), cautious, noise, of_codes, largest }
    }

    /// Changes the moments and weights of one block, or of the part of it that exists, from position `start` on.
    #[inline(always)]
    fn block<E: WeightElement>(
        self,
        gradient: &[E],
        weight: &mut [E],
        [first, second]: [&mut [f32]; 2],
        start: usize,
    ) {
        let Self { beta_1, beta_2, epsilon, factors, cautious, noise, largest, .. } = self;
        let moments = first.iter_mut().zip(second);
        for (at, ((weight, gradient), (first, second))) in
            weight.iter_mut().zip(gradient).zip(moments).enumerate()
        {
            let gradient = gradient.single();
            let is_too_large = gradient.is_finite() & (gradient.abs() > largest);
            let gradient = if is_too_large { largest.copysign(gradient) } else { gradient };
            *first = beta_1 * *first + (1.0 - beta_1) * gradient;
            *second = beta_2 * *second + (1.0 - beta_2) * (gradient * gradient);
            let change = *first * factors.rate / (second.sqrt() * factors.root + epsilon);
            let stays = cautious & ((weight.single() >= 0.0) != (*first >= 0.0));
            *weight = weight.moved(if stays { 1.0 } else { factors.keep }, change, noise.at(start + at));
        }
    }
}

/// A task of AdamW with moments in f32.
struct AdamWJob<'a, E> {
    part: WeightPart<'a, E>,
    moments: [&'a mut [f32]; 2],
    step: AdamW,
}

impl<E: WeightElement> Job for AdamWJob<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { part: WeightPart { gradient, weight, start }, moments, step } = self;
        step.block(gradient, weight, moments, start);
    }
}

/// A task of AdamW with moments in codes.
struct AdamW8bitJob<'a, E> {
    part: WeightPart<'a, E>,
    first: CodedPart<'a>,
    second: CodedPart<'a>,
    step: AdamW,
}

impl<E: WeightElement> Job for AdamW8bitJob<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { part: WeightPart { gradient, weight, start }, first, second, step } = self;
        let [signed, unsigned] = [Codes::signed(), Codes::unsigned()];
        let blocks = gradient.chunks(BLOCK).zip(weight.chunks_mut(BLOCK));
        let firsts = first.codes.chunks_exact_mut(BLOCK).zip(first.scales);
        let seconds = second.codes.chunks_exact_mut(BLOCK).zip(second.scales);
        let [m, v] = &mut [[0.0; BLOCK]; 2];
        for (block, (((gradient, weight), first), second)) in blocks.zip(firsts).zip(seconds).enumerate() {
            let (first, second) =
                (Coded { codes: first.0, scale: first.1 }, Coded { codes: second.0, scale: second.1 });
            first.decode(m, |code| signed.numbers[usize::from(code)]);
            second.decode(v, |code| unsigned.numbers[usize::from(code)]);
            let len = gradient.len();
            // Codes beyond the last element stay those of 0.
            step.block(gradient, weight, [&mut m[..len], &mut v[..len]], start + block * BLOCK);
            first.encode(m, |_, x| codes::signed(x));
            let (start, noise) = (start + block * BLOCK, step.of_codes);
            second.encode(v, |at, x| codes::unsigned(x, noise.unit(start + at)));
        }
    }
}

/// The codes of one block.
struct Coded<'a> {
    codes: &'a mut [u8],
    scale: &'a mut f32,
}

impl Coded<'_> {
    #[inline(always)]
    fn decode(&self, x: &mut [f32; BLOCK], number: impl Fn(u8) -> f32) {
        // In two loops, since the first is not vectorized.
        for (x, &code) in x.iter_mut().zip(&*self.codes) {
            *x = number(code);
        }
        for x in x {
            *x *= *self.scale;
        }
    }

    #[inline(always)]
    fn encode(self, x: &[f32; BLOCK], code: impl Fn(usize, f32) -> u8) {
        // Compared as integers, a NaN is larger than all numbers.
        let largest = x.iter().fold(0, |largest: u32, x| largest.max(x.to_bits() & 0x7FFF_FFFF));
        let scale = f32::from_bits(largest);
        // The inverse of a smaller scale would be infinite. An element that is not finite makes its block NaN.
        let scale = if scale < f32::MIN_POSITIVE { 0.0 } else { scale };
        let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
        *self.scale = if scale.is_finite() { scale } else { f32::NAN };
        for (at, (to, x)) in self.codes.iter_mut().zip(x).enumerate() {
            *to = code(at, x * inverse);
        }
    }
}

/// A task of momentum.
struct MomentumJob<'a> {
    /// Holds the gradient at first, then the direction.
    direction: &'a mut [f32],
    momentum: CodedPart<'a>,
    step: MomentumStep,
}

impl Job for MomentumJob<'_> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { direction, momentum, step: MomentumStep { momentum: keep, gradient: factor, nesterov } } =
            self;
        let blocks = momentum.codes.chunks_exact_mut(BLOCK).zip(momentum.scales);
        for (direction, (codes, scale)) in direction.chunks_mut(BLOCK).zip(blocks) {
            let coded = Coded { codes, scale };
            let mut velocity = [0.0; BLOCK];
            coded.decode(&mut velocity, of_linear);
            for (velocity, direction) in velocity.iter_mut().zip(&mut *direction) {
                let gradient = *direction;
                *velocity = keep * *velocity + factor * gradient;
                *direction = if nesterov { keep * *velocity + gradient } else { *velocity };
            }
            velocity[direction.len()..].fill(0.0);
            coded.encode(&velocity, |_, x| linear(x));
        }
    }
}

/// A task of a descent.
struct DescentJob<'a, E> {
    weight: &'a mut [E],
    direction: &'a [f32],
    descent: Descent,
    start: usize,
}

impl<E: WeightElement> Job for DescentJob<'_, E> {
    type Result = ();

    #[inline(always)]
    fn run(self) {
        let Self { weight, direction, descent: Descent { keep, lr, seed }, start } = self;
        let (lr, noise) = (lr as f32, Noise(seed));
        for (at, (weight, direction)) in weight.iter_mut().zip(direction).enumerate() {
            *weight = weight.moved(keep, lr * direction, noise.at(start + at));
        }
    }
}

impl<B: CpuBackend> OptimizerKernels for B {
    fn adamw(gradient: FloatTensor<B>, tensors: AdamWTensors<B>, step: AdamWStep) -> AdamWTensors<B> {
        let AdamWTensors { weight, first, second } = tensors;
        let gradient = B::contiguous(gradient);
        let [mut weight, mut first, mut second] = [weight, first, second].map(B::contiguous);
        with_element!(weight.dtype(), "adamw", E => {
            let gradient = B::as_slice::<E>(&gradient);
            let moments = [&mut first, &mut second].map(|moment| B::as_slice_mut::<f32>(moment).chunks_mut(TASK));
            let [first, second] = moments;
            let parts = parts(gradient, B::as_slice_mut::<E>(&mut weight)).zip(first).zip(second);
            let step = AdamW::of(&step, f32::INFINITY);
            let jobs = parts.map(|((part, first), second)| AdamWJob { part, moments: [first, second], step });
            parallel::each(jobs.collect(), parallel::Work::of([WORK, gradient.len()]), vectorized);
        });
        AdamWTensors { weight, first, second }
    }

    fn adamw_8bit(
        gradient: FloatTensor<B>,
        tensors: AdamW8bitTensors<B>,
        step: AdamWStep,
    ) -> AdamW8bitTensors<B> {
        let AdamW8bitTensors { weight, mut first, first_scales, mut second, second_scales } = tensors;
        let gradient = B::contiguous(gradient);
        let [mut weight, mut first_scales, mut second_scales] =
            [weight, first_scales, second_scales].map(B::contiguous);
        with_element!(weight.dtype(), "adamw", E => {
            let gradient = B::as_slice::<E>(&gradient);
            let parts = parts(gradient, B::as_slice_mut::<E>(&mut weight));
            let firsts = coded_parts(B::codes_mut(&mut first), B::as_slice_mut::<f32>(&mut first_scales));
            let seconds = coded_parts(B::codes_mut(&mut second), B::as_slice_mut::<f32>(&mut second_scales));
            let step = AdamW::of(&step, LARGEST_GRADIENT);
            let jobs = parts.zip(firsts).zip(seconds);
            let jobs = jobs.map(|((part, first), second)| AdamW8bitJob { part, first, second, step });
            parallel::each(jobs.collect(), parallel::Work::of([WORK, gradient.len()]), vectorized);
        });
        AdamW8bitTensors { weight, first, first_scales, second, second_scales }
    }

    fn momentum_8bit(
        gradient: FloatTensor<B>,
        mut codes: IntTensor<B>,
        scales: FloatTensor<B>,
        step: MomentumStep,
    ) -> MomentumTensors<B> {
        let [mut direction, mut scales] = [gradient, scales].map(B::contiguous);
        let elements = direction.shape().num_elements();
        let parts = B::as_slice_mut::<f32>(&mut direction).chunks_mut(TASK);
        let momentum = coded_parts(B::codes_mut(&mut codes), B::as_slice_mut::<f32>(&mut scales));
        let jobs = parts.zip(momentum).map(|(direction, momentum)| MomentumJob { direction, momentum, step });
        parallel::each(jobs.collect(), parallel::Work::of([WORK, elements]), vectorized);
        MomentumTensors { direction, codes, scales }
    }

    fn descend(weight: FloatTensor<B>, direction: FloatTensor<B>, descent: Descent) -> FloatTensor<B> {
        let [mut weight, direction] = [weight, direction].map(B::contiguous);
        with_element!(weight.dtype(), "descend", E => {
            let direction = B::as_slice::<f32>(&direction);
            let parts = B::as_slice_mut::<E>(&mut weight).chunks_mut(TASK).zip(direction.chunks(TASK)).enumerate();
            let jobs = parts.map(|(part, (weight, direction))| {
                DescentJob { weight, direction, descent, start: part * TASK }
            });
            parallel::each(jobs.collect(), parallel::Work::of([WORK, direction.len()]), vectorized);
        });
        weight
    }
}
