//! The kernels of optimizer steps on devices.
use super::codes::{byte, number, ordered, scale_of, signed, unsigned};
use crate::backend::cube::{constant, max_over_units, random};
use crate::ops::optimizer::codes::{NEAREST, SIGNED_ZERO};
use crate::ops::optimizer::{BLOCK, CODES_OF_WORD, LARGEST_GRADIENT};
use burn_cubecl::cubecl::{
    self,
    ir::ElemType,
    prelude::*,
    std::tensor::layout::linear::{LinearView, LinearViewMut},
};

/// Units of a cube, which takes a block. A unit takes a word.
pub(super) const UNITS: usize = BLOCK / CODES_OF_WORD;

/// How a weight is rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Rounding {
    Nearest,
    /// Stochastic, to bf16.
    Bf16,
    /// Stochastic, to f16.
    F16,
}

/// The numbers that AdamW computes with, the same for every element.
#[derive(CubeType, CubeLaunch)]
pub(super) struct AdamWScalars {
    beta_1: f32,
    beta_2: f32,
    epsilon: f32,
    rate: f32,
    root: f32,
    seed: u32,
    seed_of_codes: u32,
}

/// A weight, rounded to its dtype as on CPU backends.
#[cube]
fn rounded<T: Float, W: Float>(x: W, position: usize, seed: u32, #[comptime] rounding: Rounding) -> T {
    if comptime!(rounding == Rounding::Nearest) {
        T::cast_from(x)
    } else {
        let x = f32::cast_from(x);
        let bits = u32::reinterpret(x);
        let up = random::noise(u32::cast_from(position), seed);
        let random = if comptime!(rounding == Rounding::Bf16) {
            f32::reinterpret((bits + (up >> 16u32)) & 0xFFFF_0000u32)
        } else {
            // Subnormal numbers are multiples of 2^-24; above 2^-14, an f16 has 13 bits less than an f32.
            let steps = constant::<f32>(comptime!((1 << 24) as f32));
            let down = (x * steps).floor();
            let subnormal = (down + select(random::unit::<f32>(up) < x * steps - down, 1.0, 0.0)) / steps;
            let normal = f32::reinterpret((bits + (up >> 19u32)) & 0xFFFF_E000u32);
            select(x.abs() < f32::new(6.103_515_6e-5), subnormal, normal)
        };
        let is_finite = (bits & 0x7FFF_FFFFu32) < 0x7F80_0000u32;
        T::cast_from(select(is_finite, random, x))
    }
}

#[derive(CubeType, Clone, Copy)]
struct AdamMoments {
    first: f32,
    second: f32,
}

/// Both moments of an element after a step.
#[cube]
fn moments(gradient: f32, before: AdamMoments, step: &AdamWScalars) -> AdamMoments {
    AdamMoments {
        first: step.beta_1 * before.first + (1.0 - step.beta_1) * gradient,
        second: step.beta_2 * before.second + (1.0 - step.beta_2) * (gradient * gradient),
    }
}

/// The change that is subtracted from the weight.
#[cube]
fn change(moments: AdamMoments, step: &AdamWScalars) -> f32 {
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
pub(super) fn adamw<T: Float, W: Float>(
    gradient: LinearView<'_, T>,
    weight: LinearView<'_, T>,
    first: LinearView<'_, f32>,
    second: LinearView<'_, f32>,
    mut new_weight: LinearViewMut<'_, T>,
    mut new_first: LinearViewMut<'_, f32>,
    mut new_second: LinearViewMut<'_, f32>,
    step: AdamWScalars,
    keep: InputScalar,
    #[comptime] cautious: bool,
    #[comptime] rounding: Rounding,
    #[define(T, W)] _dtypes: [ElemType; 2],
) {
    let at = ABSOLUTE_POS;
    if !weight.is_in_bounds(at) {
        terminate!();
    }
    let before = AdamMoments { first: first.read(at), second: second.read(at) };
    let after = moments(f32::cast_from(gradient.read(at)), before, &step);
    new_first.write(at, after.first);
    new_second.write(at, after.second);
    let kept = kept::<W>(W::cast_from(weight.read(at)), after.first, keep.get::<W>(), cautious);
    let moved = kept - W::cast_from(change(after, &step));
    new_weight.write(at, rounded::<T, W>(moved, at, step.seed, rounding));
}

/// The gradient, clamped to [`LARGEST_GRADIENT`]; infinities and NaN stay.
#[cube]
fn at_most_largest(gradient: f32) -> f32 {
    let most = constant::<f32>(LARGEST_GRADIENT);
    let is_finite = ordered(gradient) < 0x7F80_0000u32;
    select(is_finite, clamp(gradient, -most, most), gradient)
}

#[cube(launch_unchecked, address_type = "dynamic")]
pub(super) fn adamw_8bit<T: Float, W: Float, N: Size>(
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
    step: AdamWScalars,
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
    // Beyond the last element, moments stay 0.
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
                let before = AdamMoments {
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
            random::unit::<f32>(random::noise(
                u32::cast_from(word * CODES_OF_WORD + element),
                step.seed_of_codes,
            ))
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
pub(super) fn momentum_8bit<N: Size>(
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
pub(super) fn descend<T: Float, W: Float>(
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
