//! Kernels for devices: one for a step, in place where nobody else holds a tensor. Codes are words of 32 bits, four codes each, so that
//! no device needs numbers of 8 bits; a cube takes a block of them.
use super::codes::{DECADES, Decade, NEAREST, OFFSET, SIGNED_DECADES, SIGNED_ZERO, UNSIGNED_DECADES};
use super::{
    AdamW8bitTensors, AdamWStep, AdamWTensors, BLOCK, CODES_OF_WORD, Descent, Factors, LARGEST_GRADIENT,
    MomentumStep, MomentumTensors, OptimizerKernels, is_rounded,
};
use crate::backend::cube::{
    Output, address_type, constant, cubes, max_over_units, random::noise, types, units, vector_size,
};
use burn::backend::{
    Backend, Cube, TensorMetadata, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

/// Units of a cube, which takes a block; a unit takes a word.
const UNITS: usize = BLOCK / CODES_OF_WORD;

impl OptimizerKernels for Cube {
    fn adamw(
        gradient: FloatTensor<Self>,
        tensors: AdamWTensors<Self>,
        step: AdamWStep,
    ) -> AdamWTensors<Self> {
        let AdamWTensors { weight, first, second } = tensors;
        let (weight, first, second) = Self::cube_adamw(gradient, weight, first, second, step);
        AdamWTensors { weight, first, second }
    }

    fn adamw_8bit(
        gradient: FloatTensor<Self>,
        tensors: AdamW8bitTensors<Self>,
        step: AdamWStep,
    ) -> AdamW8bitTensors<Self> {
        let AdamW8bitTensors { weight, first, first_scales, second, second_scales } = tensors;
        let (weight, first, first_scales, second, second_scales) =
            Self::cube_adamw_8bit(gradient, weight, first, first_scales, second, second_scales, step);
        AdamW8bitTensors { weight, first, first_scales, second, second_scales }
    }

    fn momentum_8bit(
        gradient: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        step: MomentumStep,
    ) -> MomentumTensors<Self> {
        let (direction, codes, scales) = Self::cube_momentum_8bit(gradient, codes, scales, step);
        MomentumTensors { direction, codes, scales }
    }

    fn descend(
        weight: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        descent: Descent,
    ) -> FloatTensor<Self> {
        Self::cube_descend(weight, direction, descent)
    }
}

#[allow(clippy::type_complexity, reason = "Burn's macro reads the tuple")]
#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait OptimizerCube: Backend {
    /// The weight, and both moments.
    #[fusion(meta = |_gradient, weight, first, second, _step| (weight.clone(), first.clone(), second.clone()))]
    fn cube_adamw(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>);

    /// The weight, and codes and scales of both moments.
    #[fusion(meta = |_gradient, weight, first, first_scales, second, second_scales, _step| {
        (weight.clone(), first.clone(), first_scales.clone(), second.clone(), second_scales.clone())
    })]
    fn cube_adamw_8bit(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        first: IntTensor<Self>,
        first_scales: FloatTensor<Self>,
        second: IntTensor<Self>,
        second_scales: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>);

    /// The direction, codes and scales.
    #[fusion(meta = |gradient, codes, scales, _step| (gradient.clone(), codes.clone(), scales.clone()))]
    fn cube_momentum_8bit(
        gradient: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        step: MomentumStep,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>);

    /// The weight.
    #[fusion(dtype = weight, shape = weight)]
    fn cube_descend(
        weight: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        descent: Descent,
    ) -> FloatTensor<Self>;
}

/// How a weight is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Rounding {
    Nearest,
    /// At random, to bf16.
    Bf16,
    /// At random, to f16.
    F16,
}

impl Rounding {
    fn of(dtype: DType, seed: Option<u32>) -> Self {
        match (seed.is_some() && is_rounded(dtype), dtype) {
            (false, _) => Self::Nearest,
            (true, DType::BF16) => Self::Bf16,
            (true, _) => Self::F16,
        }
    }
}

/// What AdamW computes with, for every element.
#[derive(CubeType, CubeLaunch)]
struct Step {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    rate: f32,
    root: f32,
    seed: u32,
    seed_of_codes: u32,
}

impl AdamWStep {
    fn launch(&self) -> StepLaunch {
        let Factors { rate, root, .. } = self.factors();
        let [seed, of_codes] = [self.seed, self.seed_of_codes()].map(|seed| seed.unwrap_or(0));
        StepLaunch::new(self.beta_1, self.beta_2, self.epsilon, rate, root, seed, of_codes)
    }
}

impl OptimizerCube for CubeBackend {
    fn cube_adamw(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        first: FloatTensor<Self>,
        second: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatTensor<Self>, FloatTensor<Self>, FloatTensor<Self>) {
        let (elements, dtypes) = (weight.shape().num_elements(), types(weight.dtype));
        let rounding = Rounding::of(weight.dtype, step.seed);
        let [of_weight, of_first, of_second] = [(&weight, 1), (&first, 2), (&second, 3)]
            .map(|(x, input)| Output::replacing_contiguous(x, input));
        if elements > 0 {
            let (client, at) = (weight.client.clone(), address_type(&[&gradient, &weight, &first, &second]));
            let (count, dim) = units(&client, elements);
            let keep = InputScalar::new(step.factors().keep, dtypes[1]);
            // SAFETY: the kernel compares every position with the shape.
            unsafe {
                adamw::launch_unchecked(
                    &client,
                    count,
                    dim,
                    at,
                    gradient.into_linear_view(),
                    weight.into_linear_view(),
                    first.into_linear_view(),
                    second.into_linear_view(),
                    of_weight.view(),
                    of_first.view(),
                    of_second.view(),
                    step.launch(),
                    keep,
                    step.cautious,
                    rounding,
                    dtypes,
                );
            }
        }
        (of_weight.tensor, of_first.tensor, of_second.tensor)
    }

    fn cube_adamw_8bit(
        gradient: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        first: IntTensor<Self>,
        first_scales: FloatTensor<Self>,
        second: IntTensor<Self>,
        second_scales: FloatTensor<Self>,
        step: AdamWStep,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
        let (elements, dtypes) = (weight.shape().num_elements(), types(weight.dtype));
        let rounding = Rounding::of(weight.dtype, step.seed);
        let outputs = [(&weight, 1), (&first, 2), (&first_scales, 3), (&second, 4), (&second_scales, 5)];
        let outputs = outputs.map(|(x, input)| Output::replacing_contiguous(x, input));
        if elements > 0 {
            let size = vector_size(&[&gradient, &weight, &outputs[0].tensor], CODES_OF_WORD);
            let (client, at) = (weight.client.clone(), address_type(&[&gradient, &weight]));
            let keep = InputScalar::new(step.factors().keep, dtypes[1]);
            let [of_weight, of_first, of_first_scales, of_second, of_second_scales] =
                outputs.each_ref().map(Output::view);
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                adamw_8bit::launch_unchecked(
                    &client,
                    cubes(elements.div_ceil(BLOCK)),
                    CubeDim::new_1d(UNITS as u32),
                    at,
                    size,
                    gradient.into_linear_view(),
                    weight.into_linear_view(),
                    first.into_linear_view(),
                    first_scales.into_linear_view(),
                    second.into_linear_view(),
                    second_scales.into_linear_view(),
                    of_weight,
                    of_first,
                    of_first_scales,
                    of_second,
                    of_second_scales,
                    step.launch(),
                    keep,
                    step.cautious,
                    rounding,
                    step.seed.is_some(),
                    dtypes,
                );
            }
        }
        let [weight, first, first_scales, second, second_scales] = outputs.map(|output| output.tensor);
        (weight, first, first_scales, second, second_scales)
    }

    fn cube_momentum_8bit(
        gradient: FloatTensor<Self>,
        codes: IntTensor<Self>,
        scales: FloatTensor<Self>,
        step: MomentumStep,
    ) -> (FloatTensor<Self>, IntTensor<Self>, FloatTensor<Self>) {
        let elements = gradient.shape().num_elements();
        let [direction, of_codes, of_scales] = [(&gradient, 0), (&codes, 1), (&scales, 2)]
            .map(|(x, input)| Output::replacing_contiguous(x, input));
        if elements > 0 {
            let size = vector_size(&[&gradient, &direction.tensor], CODES_OF_WORD);
            let (client, at) = (gradient.client.clone(), address_type(&[&gradient]));
            // SAFETY: the kernel compares every position with the shapes.
            unsafe {
                momentum_8bit::launch_unchecked(
                    &client,
                    cubes(elements.div_ceil(BLOCK)),
                    CubeDim::new_1d(UNITS as u32),
                    at,
                    size,
                    gradient.into_linear_view(),
                    codes.into_linear_view(),
                    scales.into_linear_view(),
                    direction.view(),
                    of_codes.view(),
                    of_scales.view(),
                    step.momentum,
                    step.gradient,
                    step.nesterov,
                );
            }
        }
        (direction.tensor, of_codes.tensor, of_scales.tensor)
    }

    fn cube_descend(
        weight: FloatTensor<Self>,
        direction: FloatTensor<Self>,
        descent: Descent,
    ) -> FloatTensor<Self> {
        let (elements, dtypes) = (weight.shape().num_elements(), types(weight.dtype));
        let output = Output::replacing_contiguous(&weight, 0);
        if elements > 0 {
            let (client, at) = (weight.client.clone(), address_type(&[&weight, &direction]));
            let (count, dim) = units(&client, elements);
            let [keep, lr] = [descent.keep, descent.lr].map(|factor| InputScalar::new(factor, dtypes[1]));
            let rounding = Rounding::of(weight.dtype, descent.seed);
            // SAFETY: the kernel compares every position with the shape.
            unsafe {
                descend::launch_unchecked(
                    &client,
                    count,
                    dim,
                    at,
                    weight.into_linear_view(),
                    direction.into_linear_view(),
                    output.view(),
                    keep,
                    lr,
                    descent.seed.unwrap_or(0),
                    rounding,
                    dtypes,
                );
            }
        }
        output.tensor
    }
}

/// In 0..1.
#[cube]
fn unit(bits: u32) -> f32 {
    f32::cast_from(bits >> 8u32) * constant::<f32>(comptime!(1.0 / (1 << 24) as f32))
}

/// A weight, rounded to its type as on CPU backends.
#[cube]
fn rounded<T: Float, W: Float>(x: W, position: usize, seed: u32, #[comptime] rounding: Rounding) -> T {
    if comptime!(rounding == Rounding::Nearest) {
        T::cast_from(x)
    } else {
        let x = f32::cast_from(x);
        let bits = u32::reinterpret(x);
        let up = noise(u32::cast_from(position), seed);
        let random = if comptime!(rounding == Rounding::Bf16) {
            f32::reinterpret((bits + (up >> 16u32)) & 0xFFFF_0000u32)
        } else {
            // Subnormal numbers are multiples of 2^-24; above 2^-14 there are 13 bits less than in an f32.
            let steps = constant::<f32>(comptime!((1 << 24) as f32));
            let down = (x * steps).floor();
            let subnormal = (down + select(unit(up) < x * steps - down, 1.0, 0.0)) / steps;
            let normal = f32::reinterpret((bits + (up >> 19u32)) & 0xFFFF_E000u32);
            select(x.abs() < f32::new(6.103_515_6e-5), subnormal, normal)
        };
        let is_finite = (bits & 0x7FFF_FFFFu32) < 0x7F80_0000u32;
        T::cast_from(select(is_finite, random, x))
    }
}

#[derive(CubeType, Clone, Copy)]
struct Moments {
    first: f32,
    second: f32,
}

/// Both moments of an element after a step.
#[cube]
fn moments(gradient: f32, before: Moments, step: &Step) -> Moments {
    Moments {
        first: step.beta_1 * before.first + (1.0 - step.beta_1) * gradient,
        second: step.beta_2 * before.second + (1.0 - step.beta_2) * (gradient * gradient),
    }
}

/// What is subtracted from the weight.
#[cube]
fn change(moments: Moments, step: &Step) -> f32 {
    moments.first * step.rate / (moments.second.sqrt() * step.root + step.epsilon)
}

/// The weight after its decay.
#[cube]
fn kept<W: Float>(weight: W, first: f32, keep: W, #[comptime] cautious: bool) -> W {
    let decayed = weight * keep;
    if comptime!(cautious) {
        select((weight >= W::new(0.0)) != (first >= 0.0), weight, decayed)
    } else {
        decayed
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adamw<T: Float, W: Float>(
    gradient: LinearView<'_, T>,
    weight: LinearView<'_, T>,
    first: LinearView<'_, f32>,
    second: LinearView<'_, f32>,
    mut new_weight: LinearViewMut<'_, T>,
    mut new_first: LinearViewMut<'_, f32>,
    mut new_second: LinearViewMut<'_, f32>,
    step: Step,
    keep: InputScalar,
    #[comptime] cautious: bool,
    #[comptime] rounding: Rounding,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if !weight.is_in_bounds(at) {
        terminate!();
    }
    let before = Moments { first: first.read(at), second: second.read(at) };
    let after = moments(f32::cast_from(gradient.read(at)), before, &step);
    new_first.write(at, after.first);
    new_second.write(at, after.second);
    let kept = kept::<W>(W::cast_from(weight.read(at)), after.first, keep.get::<W>(), cautious);
    let moved = kept - W::cast_from(change(after, &step));
    new_weight.write(at, rounded::<T, W>(moved, at, step.seed, rounding));
}

/// A decade of the codes with a sign, or of those without.
fn decade(is_signed: bool, decade: usize) -> Decade {
    if is_signed { SIGNED_DECADES[decade] } else { UNSIGNED_DECADES[decade] }
}

/// The place of the largest of the magnitudes, which is 1.
fn place_of_one(is_signed: bool) -> f32 {
    if is_signed { 128.0 } else { 255.0 }
}

/// The magnitude that has this place, which is an integer.
#[cube]
fn magnitude(place: f32, #[comptime] is_signed: bool) -> f32 {
    let lowest = comptime!(decade(is_signed, 0).parts);
    let mut begin = constant::<f32>(comptime!(decade(is_signed, 0).begin));
    let mut scale = constant::<f32>(comptime!(decade(is_signed, 0).scale));
    let mut first = f32::new(1.0);
    #[unroll]
    for next in 1..DECADES {
        let of_next = constant::<f32>(comptime!(decade(is_signed, next).parts + 1.0 - lowest));
        let is_in = place >= of_next;
        begin = select(is_in, constant::<f32>(comptime!(decade(is_signed, next).begin)), begin);
        scale = select(is_in, constant::<f32>(comptime!(decade(is_signed, next).scale)), scale);
        first = select(is_in, of_next, first);
    }
    let number = begin + (place - first) / scale;
    let is_one = place >= constant::<f32>(comptime!(place_of_one(is_signed)));
    select(place == 0.0, 0.0, select(is_one, 1.0, number))
}

/// The number of a dynamic code.
#[cube]
fn number(code: u32, #[comptime] is_signed: bool) -> f32 {
    if comptime!(is_signed) {
        let place = f32::cast_from(code) - constant::<f32>(comptime!(f32::from(SIGNED_ZERO)));
        let magnitude = magnitude(place.abs(), is_signed);
        select(place < 0.0, -magnitude, magnitude)
    } else {
        magnitude(f32::cast_from(code), is_signed)
    }
}

/// The place of a magnitude among all, as on CPU backends.
#[cube]
fn place(magnitude: f32, #[comptime] is_signed: bool) -> f32 {
    let lowest = comptime!(decade(is_signed, 0).parts);
    let least = comptime!(decade(is_signed, 0).begin);
    let mut scale = constant::<f32>(comptime!(decade(is_signed, 0).scale));
    let mut parts = constant::<f32>(comptime!(decade(is_signed, 0).parts));
    let mut of_gap = constant::<f32>(comptime!(decade(is_signed, 0).beyond));
    #[unroll]
    for next in 1..DECADES {
        let is_in = magnitude >= constant::<f32>(comptime!(decade(is_signed, next).begin));
        scale = select(is_in, constant::<f32>(comptime!(decade(is_signed, next).scale)), scale);
        parts = select(is_in, constant::<f32>(comptime!(decade(is_signed, next).parts)), parts);
        of_gap = select(is_in, constant::<f32>(comptime!(decade(is_signed, next).beyond)), of_gap);
    }
    let at = magnitude * scale + (parts * constant::<f32>(OFFSET) + constant::<f32>(comptime!(0.5 - lowest)));
    let last = 2.0 * parts - constant::<f32>(lowest);
    let gap = at - last;
    let place = select(gap > 0.0, last + gap * of_gap, at);
    select(magnitude < constant::<f32>(least), magnitude * constant::<f32>(comptime!(1.0 / least)), place)
}

/// The code with a sign of the number that is nearest.
#[cube]
fn signed(x: f32) -> u32 {
    let most = constant::<f32>(comptime!(place_of_one(true)));
    let nearest = (place(x.abs(), true) + constant::<f32>(NEAREST)).floor();
    // There is no -1.
    let of_sign = select(x < 0.0, -min(nearest, most - 1.0), min(nearest, most));
    u32::cast_from(of_sign + constant::<f32>(comptime!(f32::from(SIGNED_ZERO))))
}

/// The code without a sign, `up` added to the place; of 0 for nothing else.
#[cube]
fn unsigned(x: f32, up: f32) -> u32 {
    let place = (place(x, false) + up).floor();
    let positive = clamp(place, 1.0, constant::<f32>(comptime!(place_of_one(false))));
    u32::cast_from(select(x > 0.0, positive, 0.0))
}

/// The code of a word.
#[cube]
fn byte(word: u32, #[comptime] element: usize) -> u32 {
    (word >> comptime!(8 * element as u32)) & 0xFFu32
}

/// The magnitude of a number as an integer, by which what is not a number is larger than all numbers.
#[cube]
fn ordered(x: f32) -> u32 {
    u32::reinterpret(x) & 0x7FFF_FFFFu32
}

/// Of a block, from the largest of its magnitudes.
#[derive(CubeType, Clone, Copy)]
struct Scale {
    inverse: f32,
    /// What is stored: of what is not finite, no number.
    stored: f32,
}

#[cube]
fn scale_of(largest: u32) -> Scale {
    let is_finite = largest < 0x7F80_0000u32;
    // Below, its inverse would be infinite.
    let is_zero = largest < 0x0080_0000u32;
    let scale = f32::reinterpret(select(is_finite, largest, 0x3F80_0000u32));
    let inverse = select(is_zero, 0.0, 1.0 / scale);
    let stored = select(is_finite, select(is_zero, 0.0, scale), f32::reinterpret(0x7FC0_0000u32));
    Scale { inverse, stored }
}

/// See [`LARGEST_GRADIENT`]; what is not finite stays.
#[cube]
fn at_most_largest(gradient: f32) -> f32 {
    let most = constant::<f32>(LARGEST_GRADIENT);
    let is_finite = ordered(gradient) < 0x7F80_0000u32;
    select(is_finite, clamp(gradient, -most, most), gradient)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn adamw_8bit<T: Float, W: Float, N: Size>(
    gradient: LinearView<'_, Vector<T, N>>,
    weight: LinearView<'_, Vector<T, N>>,
    first: LinearView<'_, u32>,
    first_scales: LinearView<'_, f32>,
    second: LinearView<'_, u32>,
    second_scales: LinearView<'_, f32>,
    mut new_weight: LinearViewMut<'_, Vector<T, N>>,
    mut new_first: LinearViewMut<'_, u32>,
    mut new_first_scales: LinearViewMut<'_, f32>,
    mut new_second: LinearViewMut<'_, u32>,
    mut new_second_scales: LinearViewMut<'_, f32>,
    step: Step,
    keep: InputScalar,
    #[comptime] cautious: bool,
    #[comptime] rounding: Rounding,
    #[comptime] random_codes: bool,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let block = CUBE_POS;
    if !first_scales.is_in_bounds(block) {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = comptime!(CODES_OF_WORD / size);
    let word = block * UNITS + UNIT_POS as usize;
    let (codes_1, codes_2) = (first.read(word), second.read(word));
    let (scale_1, scale_2) = (first_scales.read(block), second_scales.read(block));
    // What is beyond the last element stays 0.
    let mut firsts = Array::<f32>::new(CODES_OF_WORD);
    let mut seconds = Array::<f32>::new(CODES_OF_WORD);
    let mut largest_1 = 0u32;
    let mut largest_2 = 0u32;
    #[unroll]
    for part in 0..vectors {
        let at = word * vectors + part;
        #[unroll]
        for lane in 0..size {
            firsts[part * size + lane] = 0.0;
            seconds[part * size + lane] = 0.0;
        }
        if weight.is_in_bounds(at) {
            let gradients = Vector::<f32, N>::cast_from(gradient.read(at));
            let weights = Vector::<W, N>::cast_from(weight.read(at));
            let mut moved = Vector::<T, N>::new(T::new(0.0));
            #[unroll]
            for lane in 0..size {
                let element = comptime!(part * size + lane);
                let before = Moments {
                    first: number(byte(codes_1, element), true) * scale_1,
                    second: number(byte(codes_2, element), false) * scale_2,
                };
                let after = moments(at_most_largest(gradients.extract(lane)), before, &step);
                firsts[element] = after.first;
                seconds[element] = after.second;
                largest_1 = max(largest_1, ordered(after.first));
                largest_2 = max(largest_2, ordered(after.second));
                let kept = kept::<W>(weights.extract(lane), after.first, keep.get::<W>(), cautious);
                let weight = kept - W::cast_from(change(after, &step));
                let position = word * CODES_OF_WORD + element;
                moved.insert(lane, rounded::<T, W>(weight, position, step.seed, rounding));
            }
            new_weight.write(at, moved);
        }
    }
    let of_first = scale_of(max_over_units::<u32>(largest_1, UNITS));
    let of_second = scale_of(max_over_units::<u32>(largest_2, UNITS));
    if UNIT_POS == 0 {
        new_first_scales.write(block, of_first.stored);
        new_second_scales.write(block, of_second.stored);
    }
    let mut word_1 = 0u32;
    let mut word_2 = 0u32;
    #[unroll]
    for element in 0..CODES_OF_WORD {
        let shift = comptime!(8 * element as u32);
        let up = if comptime!(random_codes) {
            unit(noise(u32::cast_from(word * CODES_OF_WORD + element), step.seed_of_codes))
        } else {
            constant::<f32>(NEAREST)
        };
        word_1 |= (signed(firsts[element] * of_first.inverse) & 0xFFu32) << shift;
        word_2 |= (unsigned(seconds[element] * of_second.inverse, up) & 0xFFu32) << shift;
    }
    new_first.write(word, word_1);
    new_second.write(word, word_2);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn momentum_8bit<N: Size>(
    gradient: LinearView<'_, Vector<f32, N>>,
    codes: LinearView<'_, u32>,
    scales: LinearView<'_, f32>,
    mut direction: LinearViewMut<'_, Vector<f32, N>>,
    mut new_codes: LinearViewMut<'_, u32>,
    mut new_scales: LinearViewMut<'_, f32>,
    keep: f32,
    factor: f32,
    #[comptime] nesterov: bool,
) {
    let block = CUBE_POS;
    if !scales.is_in_bounds(block) {
        terminate!();
    }
    let size = N::value().comptime();
    let vectors = comptime!(CODES_OF_WORD / size);
    let word = block * UNITS + UNIT_POS as usize;
    let (bytes, scale) = (codes.read(word), scales.read(block));
    let zero = constant::<f32>(comptime!(f32::from(SIGNED_ZERO)));
    let mut velocities = Array::<f32>::new(CODES_OF_WORD);
    let mut largest = 0u32;
    #[unroll]
    for part in 0..vectors {
        let at = word * vectors + part;
        #[unroll]
        for lane in 0..size {
            velocities[part * size + lane] = 0.0;
        }
        if gradient.is_in_bounds(at) {
            let gradients = gradient.read(at);
            let mut directions = Vector::<f32, N>::new(0.0);
            #[unroll]
            for lane in 0..size {
                let element = comptime!(part * size + lane);
                let before = (f32::cast_from(byte(bytes, element)) - zero) / 127.0 * scale;
                let velocity = keep * before + factor * gradients.extract(lane);
                velocities[element] = velocity;
                largest = max(largest, ordered(velocity));
                if comptime!(nesterov) {
                    directions.insert(lane, keep * velocity + gradients.extract(lane));
                } else {
                    directions.insert(lane, velocity);
                }
            }
            direction.write(at, directions);
        }
    }
    let of_block = scale_of(max_over_units::<u32>(largest, UNITS));
    if UNIT_POS == 0 {
        new_scales.write(block, of_block.stored);
    }
    let mut packed = 0u32;
    #[unroll]
    for element in 0..CODES_OF_WORD {
        let place = (velocities[element] * of_block.inverse * 127.0 + (zero + 0.5)).floor();
        packed |= (u32::cast_from(clamp(place, 0.0, 254.0)) & 0xFFu32) << comptime!(8 * element as u32);
    }
    new_codes.write(word, packed);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn descend<T: Float, W: Float>(
    weight: LinearView<'_, T>,
    direction: LinearView<'_, f32>,
    mut new_weight: LinearViewMut<'_, T>,
    keep: InputScalar,
    lr: InputScalar,
    seed: u32,
    #[comptime] rounding: Rounding,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if !weight.is_in_bounds(at) {
        terminate!();
    }
    let down = W::cast_from(direction.read(at)) * lr.get::<W>();
    let moved = W::cast_from(weight.read(at)) * keep.get::<W>() - down;
    new_weight.write(at, rounded::<T, W>(moved, at, seed, rounding));
}
