//! Dynamic codes of 8 bits and the scales of their blocks, in kernels for devices.
use crate::backend::cube::constant;
use crate::ops::optimizer::codes::{
    DECADES, Decade, NEAREST, OFFSET, SIGNED_DECADES, SIGNED_ZERO, UNSIGNED_DECADES,
};
use burn_cubecl::cubecl::{self, prelude::*};

/// A decade of the codes with a sign, or of those without.
fn decade(is_signed: bool, decade: usize) -> Decade {
    if is_signed { SIGNED_DECADES[decade] } else { UNSIGNED_DECADES[decade] }
}

/// The place of the largest magnitude, which is 1.
fn place_of_one(is_signed: bool) -> f32 {
    if is_signed { 128.0 } else { 255.0 }
}

/// The magnitude at a place, which is an integer.
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
pub(super) fn number(code: u32, #[comptime] is_signed: bool) -> f32 {
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

/// The code with a sign whose number is nearest.
#[cube]
pub(super) fn signed(x: f32) -> u32 {
    let most = constant::<f32>(comptime!(place_of_one(true)));
    let nearest = (place(x.abs(), true) + constant::<f32>(NEAREST)).floor();
    // There is no -1.
    let of_sign = select(x < 0.0, -min(nearest, most - 1.0), min(nearest, most));
    u32::cast_from(of_sign + constant::<f32>(comptime!(f32::from(SIGNED_ZERO))))
}

/// The code without a sign at the place plus `up`, rounded down. Only 0 has the code of 0.
#[cube]
pub(super) fn unsigned(x: f32, up: f32) -> u32 {
    let place = (place(x, false) + up).floor();
    let positive = clamp(place, 1.0, constant::<f32>(comptime!(place_of_one(false))));
    u32::cast_from(select(x > 0.0, positive, 0.0))
}

/// One of the codes of a word.
#[cube]
pub(super) fn byte(word: u32, #[comptime] element: usize) -> u32 {
    (word >> comptime!(8 * element as u32)) & 0xFFu32
}

/// The magnitude of a number as an integer in the same order; NaN is larger than all numbers.
#[cube]
pub(super) fn ordered(x: f32) -> u32 {
    u32::reinterpret(x) & 0x7FFF_FFFFu32
}

/// The scale of a block, from its largest magnitude.
#[derive(CubeType, Clone, Copy)]
pub(super) struct BlockScale {
    pub inverse: f32,
    /// As it is stored: NaN if the largest magnitude is not finite.
    pub stored: f32,
}

#[cube]
pub(super) fn scale_of(largest: u32) -> BlockScale {
    let is_finite = largest < 0x7F80_0000u32;
    // Below, its inverse would be infinite.
    let is_zero = largest < 0x0080_0000u32;
    let scale = f32::reinterpret(select(is_finite, largest, 0x3F80_0000u32));
    let inverse = select(is_zero, 0.0, 1.0 / scale);
    let stored = select(is_finite, select(is_zero, 0.0, scale), f32::reinterpret(0x7FC0_0000u32));
    BlockScale { inverse, stored }
}
