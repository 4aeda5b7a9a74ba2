//! Packing on a CPU, in loops on slices.
use super::{Format, GROUP, INFINITE, NO_NUMBER, PackingKernels, STEPS, STEPS_BESIDE, noise};
use crate::backend::Saved;
use crate::backend::cpu::{
    CpuBackend, CpuElement,
    parallel::{self, Job, vectorized},
    with_element,
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::{DType, Shape, bf16, f16};
use core::mem::MaybeUninit;

/// Groups per task.
const GROUPS: usize = 64;
/// Elements per task.
const TASK: usize = GROUPS * GROUP;

/// A tensor in fewer bits.
#[derive(Clone, Debug)]
pub struct Packed {
    bits: Bits,
    shape: Shape,
    dtype: DType,
}

#[derive(Clone, Debug)]
enum Bits {
    /// Elements of f32.
    Bf16(Vec<bf16>),
    /// Elements of f32.
    F16(Vec<f16>),
    /// Elements of f64.
    F32(Vec<f32>),
    Int8 {
        values: Vec<i8>,
        scales: Vec<f32>,
    },
}

impl Saved for Packed {
    fn bytes(&self) -> usize {
        match &self.bits {
            Bits::Bf16(values) => size_of_val(&values[..]),
            Bits::F16(values) => size_of_val(&values[..]),
            Bits::F32(values) => size_of_val(&values[..]),
            Bits::Int8 { values, scales } => size_of_val(&values[..]) + size_of_val(&scales[..]),
        }
    }
}

impl<B: CpuBackend> PackingKernels for B {
    const IS_HOST: bool = true;
    type Packed = Packed;

    fn is_expanded(x: &FloatTensor<B>) -> bool {
        B::buffer_bytes(x).is_some_and(|bytes| bytes < x.shape().num_elements() * x.dtype().size())
    }

    fn pack(x: FloatTensor<B>, format: Format, seed: u32) -> Packed {
        let x = B::contiguous(x);
        let (shape, dtype) = (x.shape(), x.dtype());
        let bits = match (format, dtype) {
            (Format::Half | Format::HalfF16, DType::F64) => Bits::F32(narrowed(B::as_slice::<f64>(&x))),
            (Format::Half, _) => Bits::Bf16(narrowed(B::as_slice::<f32>(&x))),
            (Format::HalfF16, _) => Bits::F16(narrowed(B::as_slice::<f32>(&x))),
            (Format::Int8, _) => with_element!(dtype, "pack", E => bytes(B::as_slice::<E>(&x), seed)),
        };
        Packed { bits, shape, dtype }
    }

    fn unpack(Packed { bits, shape, dtype }: &Packed) -> FloatTensor<B> {
        let shape = shape.clone();
        match bits {
            Bits::Bf16(values) => B::from_vec::<f32>(narrowed(values), shape),
            Bits::F16(values) => B::from_vec::<f32>(narrowed(values), shape),
            Bits::F32(values) => B::from_vec::<f64>(narrowed(values), shape),
            Bits::Int8 { values, scales } => with_element!(*dtype, "unpack", E => {
                B::from_vec::<E>(from_bytes(values, scales), shape)
            }),
        }
    }
}

/// The numbers in another type, rounded.
fn narrowed<E: CpuElement, F: CpuElement>(x: &[E]) -> Vec<F> {
    /// Converts as many elements as there are on both sides.
    struct Convert<'a, E, F> {
        x: &'a [E],
        y: &'a mut [MaybeUninit<F>],
    }

    impl<E: CpuElement, F: CpuElement> Job for Convert<'_, E, F> {
        type Result = ();

        #[inline(always)]
        fn run(self) {
            let Self { x, y } = self;
            for (y, x) in y.iter_mut().zip(x) {
                *y = MaybeUninit::new(F::from_f64(x.into_f64()));
            }
        }
    }

    // SAFETY: there are as many elements of `x` from the beginning of a chunk on.
    unsafe {
        parallel::written(x.len(), TASK, x.len(), |index, y| vectorized(Convert { x: &x[index * TASK..], y }))
    }
}

fn bytes<E: CpuElement>(x: &[E], seed: u32) -> Bits {
    let mut scales = vec![0.0; x.len().div_ceil(GROUP)];
    let values = parallel::zip_filled(
        (x.len(), 0i8),
        &mut scales,
        [TASK, GROUPS],
        parallel::Work::of([2, x.len()]),
        |index, values, scales| {
            let groups = x[index * TASK..].chunks(GROUP).zip(values.chunks_mut(GROUP)).zip(scales);
            for (group, ((x, values), scale)) in groups.enumerate() {
                let start = (index * TASK + group * GROUP) as u32;
                *scale = vectorized(Group { x, values, start, seed });
            }
        },
    );
    Bits::Int8 { values, scales }
}

/// Rounds a group of elements, the first of which has the position `start`, and returns its scale.
struct Group<'a, E> {
    x: &'a [E],
    values: &'a mut [i8],
    start: u32,
    seed: u32,
}

impl<E: CpuElement> Job for Group<'_, E> {
    type Result = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        // Compared as integers, a NaN is larger than all numbers.
        let largest = self.x.iter().fold(0, |largest: u32, &x| largest.max(single(x).abs().to_bits()));
        let largest = f32::from_bits(largest);
        if !largest.is_finite() {
            return self.run_beside();
        }
        let Self { x, values, start, seed } = self;
        let Scale { scale, inverse } = Scale::of(largest, STEPS);
        for (index, (value, &x)) in values.iter_mut().zip(x).enumerate() {
            *value = rounded(single(x) * inverse, STEPS, start.wrapping_add(index as u32), seed);
        }
        scale
    }
}

impl<E: CpuElement> Group<'_, E> {
    /// The same for a group with elements that are not finite. Its scale is negative.
    #[cold]
    fn run_beside(self) -> f32 {
        let Self { x, values, start, seed } = self;
        let finite = x.iter().map(|&x| single(x).abs()).filter(|x| x.is_finite());
        let Scale { scale, inverse } = Scale::of(finite.fold(0.0, f32::max), STEPS_BESIDE);
        for (index, (value, &x)) in values.iter_mut().zip(x).enumerate() {
            *value = match single(x) {
                x if x.is_nan() => NO_NUMBER,
                f32::INFINITY => INFINITE,
                f32::NEG_INFINITY => -INFINITE,
                x => rounded(x * inverse, STEPS_BESIDE, start.wrapping_add(index as u32), seed),
            };
        }
        -scale.max(f32::MIN_POSITIVE)
    }
}

#[inline(always)]
fn single<E: CpuElement>(x: E) -> f32 {
    x.into_f64() as f32
}

/// The number that the elements of a group are multiples of, and its inverse.
struct Scale {
    scale: f32,
    inverse: f32,
}

impl Scale {
    #[inline(always)]
    fn of(largest: f32, steps: f32) -> Self {
        let scale = largest / steps;
        // The inverse of a smaller scale would be infinite.
        match scale < f32::MIN_POSITIVE {
            true => Self { scale: 0.0, inverse: 0.0 },
            false => Self { scale, inverse: 1.0 / scale },
        }
    }
}

/// `steps`, rounded stochastically, and clamped to `most` steps.
#[inline(always)]
fn rounded(steps: f32, most: f32, position: u32, seed: u32) -> i8 {
    let up = (noise(position, seed) >> 8) as f32 * (1.0 / (1 << 24) as f32);
    (steps + up).floor().clamp(-most, most) as i8
}

fn from_bytes<E: CpuElement>(values: &[i8], scales: &[f32]) -> Vec<E> {
    // SAFETY: there are as many values and scales from the beginning of a chunk on.
    unsafe {
        parallel::written(values.len(), TASK, values.len(), |index, x| {
            let groups = x.chunks_mut(GROUP).zip(values[index * TASK..].chunks(GROUP));
            for ((x, values), &scale) in groups.zip(&scales[index * GROUPS..]) {
                if scale < 0.0 {
                    for (x, &value) in x.iter_mut().zip(values) {
                        *x = MaybeUninit::new(E::from_f64(beside(value, -scale).into()));
                    }
                    continue;
                }
                vectorized(|| {
                    for (x, &value) in x.iter_mut().zip(values) {
                        *x = MaybeUninit::new(E::from_f64((f32::from(value) * scale).into()));
                    }
                });
            }
        })
    }
}

/// An element of a group with elements that are not finite.
fn beside(value: i8, scale: f32) -> f32 {
    match value {
        NO_NUMBER => f32::NAN,
        INFINITE => f32::INFINITY,
        value if value == -INFINITE => f32::NEG_INFINITY,
        value => f32::from(value) * scale,
    }
}
