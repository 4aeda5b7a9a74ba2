//! Codes of 8 bits, and the numbers that they stand for.
//!
//! The dynamic codes are those of bitsandbytes (`create_dynamic_map`; Dettmers, 8-Bit Approximations for Parallelism in Deep Learning,
//! arXiv 1511.04561). Their numbers are 0, 1, and for each of seven powers of ten, from 1e-6 to 1, the middles of equal parts of `0.1..1`
//! times the power: 1, 2, 4, .. 64 parts for codes with a sign, 2, 4, .. 128 without. There is no -1. A code is an index into the sorted
//! list of numbers. The linear codes stand for multiples of 1 / 127.
use std::sync::LazyLock;

/// The number of codes.
pub(super) const CODES: usize = 256;

/// Powers of ten.
pub(super) const DECADES: usize = 7;

/// The code of 0 among codes with a sign, and among linear codes.
pub(super) const SIGNED_ZERO: u8 = 127;

/// The numbers of dynamic codes, in order.
fn dynamic(is_signed: bool) -> Vec<f32> {
    let mut numbers = vec![0.0, 1.0];
    for decade in 0..DECADES as u32 {
        let parts = 1 << (decade + u32::from(!is_signed));
        let power = 10f64.powi(decade as i32 + 1 - DECADES as i32);
        for part in 0..parts {
            let middle = 0.1 + 0.9 * (f64::from(part) + 0.5) / f64::from(parts);
            let number = (power * middle) as f32;
            numbers.push(number);
            if is_signed {
                numbers.push(-number);
            }
        }
    }
    numbers.sort_by(f32::total_cmp);
    numbers
}

/// The dynamic codes with or without a sign.
pub(super) struct Codes {
    /// The number of every code.
    pub(super) numbers: [f32; CODES],
    is_signed: bool,
}

impl Codes {
    fn new(is_signed: bool) -> Self {
        Self { numbers: dynamic(is_signed).try_into().expect("as many as there are codes"), is_signed }
    }

    /// The codes with a sign, for first moments.
    pub(super) fn signed() -> &'static Self {
        static SIGNED: LazyLock<Codes> = LazyLock::new(|| Codes::new(true));
        &SIGNED
    }

    /// The codes without a sign, for second moments.
    pub(super) fn unsigned() -> &'static Self {
        static UNSIGNED: LazyLock<Codes> = LazyLock::new(|| Codes::new(false));
        &UNSIGNED
    }

    /// The numbers at which the nearest code changes, in order: one fewer than there are codes.
    pub(super) fn thresholds(&self) -> Vec<f32> {
        let middle = |pair: &[f32]| f64::midpoint(pair[0].into(), pair[1].into()) as f32;
        let mut thresholds: Vec<f32> = self.numbers.windows(2).map(middle).collect();
        if !self.is_signed {
            thresholds[0] = 0.0; // positive numbers stay positive
        }
        thresholds
    }
}

/// The numbers of one power of ten, which are at equal distances.
#[derive(Clone, Copy)]
pub(super) struct Decade {
    /// The first number.
    pub(super) begin: f32,
    /// The inverse of the distance.
    pub(super) scale: f32,
    /// The count of the numbers.
    pub(super) parts: f32,
    /// The distance divided by that from the last number to the next decade, or to 1.
    pub(super) beyond: f32,
}

/// All decades between 0 and 1. The place of a number is its index in the sorted list of 0 and all their numbers, so that of 0 is 0. In a
/// decade of `parts` numbers, the first has the place `parts + 1 - lowest` and the last `2 parts - lowest`, with `lowest` the parts of the
/// lowest decade.
pub(super) const SIGNED_DECADES: [Decade; DECADES] = decades(1);
pub(super) const UNSIGNED_DECADES: [Decade; DECADES] = decades(2);

/// Decades of which the lowest has `lowest` parts.
const fn decades(lowest: u32) -> [Decade; DECADES] {
    const POWERS: [f64; DECADES] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];
    let mut decades = [Decade { begin: 0.0, scale: 0.0, parts: 0.0, beyond: 0.0 }; DECADES];
    let mut decade = 0;
    while decade < DECADES {
        let parts = lowest << decade;
        let distance = 0.9 / parts as f64;
        decades[decade] = Decade {
            begin: (POWERS[decade] * (0.1 + distance / 2.0)) as f32,
            scale: (1.0 / POWERS[decade] / distance) as f32,
            parts: parts as f32,
            // To the next decade it is half a distance plus half of the next decade's, which is five times as long. To 1 it is half a
            // distance.
            beyond: if decade + 1 < DECADES { 1.0 / 3.0 } else { 2.0 },
        };
        decade += 1;
    }
    decades
}

/// In a decade the place is a linear function of the number. At 0 this function has the value `OFFSET parts + 1 / 2 - lowest`, because the
/// first number is `parts / 9 + 1 / 2` distances from 0.
pub(super) const OFFSET: f32 = 8.0 / 9.0;

/// The place of a magnitude, from 0 for 0 to that of 1. Between two numbers it is between their places. There are no branches, so loops
/// over it are vectorized. In these, a constant or a choice between two takes as long as a product.
#[inline(always)]
fn place(magnitude: f32, decades: &[Decade; DECADES]) -> f32 {
    let Decade { begin: least, mut scale, parts: lowest, beyond: mut of_gap } = decades[0];
    let mut number = 0;
    for decade in &decades[1..] {
        let is_in = magnitude >= decade.begin;
        number += u32::from(is_in);
        scale = if is_in { decade.scale } else { scale };
        of_gap = if is_in { decade.beyond } else { of_gap };
    }
    let parts = f32::from_bits(lowest.to_bits() + (number << (f32::MANTISSA_DIGITS - 1))); // twice as many for every decade
    let at = magnitude * scale + (parts * OFFSET + (0.5 - lowest));
    let gap = at - (2.0 * parts - lowest);
    let place = at - if gap > 0.0 { gap } else { 0.0 } * (1.0 - of_gap);
    if magnitude < least { magnitude * (1.0 / least) } else { place }
}

/// Added before the fraction is dropped, it rounds to nearest. A random number from 0..1 in its place makes the mean right.
pub(super) const NEAREST: f32 = 0.5;

/// The nearest code with a sign for `x`, whose magnitude is at most 1, up to rounding errors.
#[inline(always)]
pub(super) fn signed(x: f32) -> u8 {
    /// There is no -1.
    const MOST: f32 = (CODES / 2 - 1) as f32;
    let most = if x < 0.0 { MOST } else { MOST + 1.0 };
    let place = place(x.abs(), &SIGNED_DECADES);
    let place = if place < most { place } else { most };
    nearest(place.copysign(x), SIGNED_ZERO)
}

/// The code without a sign for `x`, which is at most 1, up to rounding errors. `up` is added to its place. Only 0 gets the code of 0.
#[inline(always)]
pub(super) fn unsigned(x: f32, up: f32) -> u8 {
    const MOST: f32 = (CODES - 1) as f32;
    let place = place(x, &UNSIGNED_DECADES) + (up - NEAREST);
    // A minimum and a maximum in an instruction each, unlike `clamp`.
    let place = if place < MOST { place } else { MOST };
    let place = if place > 1.0 { place } else { 1.0 };
    nearest(if x > 0.0 { place } else { 0.0 }, 0)
}

/// The integer nearest to `x`, plus `zero`, in 0..=255.
#[inline(always)]
fn nearest(x: f32, zero: u8) -> u8 {
    /// Adding it rounds to an integer, and puts the integer into the low bits.
    const INTEGERS: f32 = (1 << 23) as f32;
    (x + (INTEGERS + f32::from(zero))).to_bits() as u8
}

/// The nearest linear code for `x` in `-1..=1`.
#[inline(always)]
pub(super) fn linear(x: f32) -> u8 {
    nearest((x * 127.0).clamp(-127.0, 127.0), SIGNED_ZERO)
}

/// The number of a linear code.
#[inline(always)]
pub(super) fn of_linear(code: u8) -> f32 {
    (f32::from(code) - f32::from(SIGNED_ZERO)) * (1.0 / 127.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some entries of bitsandbytes' table.
    #[test]
    fn dynamic_codes_are_those_of_bitsandbytes() {
        let (signed, unsigned) = (&Codes::signed().numbers, &Codes::unsigned().numbers);
        let close = |a: f32, b: f64| assert!((f64::from(a) - b).abs() <= 1e-7 * b.abs(), "{a}, {b}");
        // Signed: one part of 1e-6, two of 1e-5; 64 of 1.
        for (code, number) in [
            (0, -0.992_968_75),
            (1, -0.978_906_25),
            (63, -0.107_031_25),
            (64, -0.098_593_75),
            (126, -5.5e-7),
            (127, 0.0),
            (128, 5.5e-7),
            (129, 3.25e-6),
            (130, 7.75e-6),
            (131, 2.125e-5),
            (254, 0.992_968_75),
            (255, 1.0),
        ] {
            close(signed[code], number);
        }
        for (code, number) in [
            (0, 0.0),
            (1, 3.25e-7),
            (2, 7.75e-7),
            (3, 2.125e-6),
            (126, 0.099_296_875),
            (127, 0.103_515_625),
            (254, 0.996_484_375),
            (255, 1.0),
        ] {
            close(unsigned[code], number);
        }
        for numbers in [signed, unsigned] {
            assert!(numbers.windows(2).all(|pair| pair[0] < pair[1]));
        }
    }

    fn rounded(codes: &Codes, x: f32) -> u8 {
        if codes.is_signed { signed(x) } else { unsigned(x, NEAREST) }
    }

    /// Over all numbers that may be added, the mean of the codes of a number is the number itself.
    #[test]
    fn what_is_added_makes_the_mean_right() {
        const DRAWS: usize = 1 << 12;
        let numbers = &Codes::unsigned().numbers;
        for pair in numbers[1..].windows(2) {
            for share in [0.1, 0.5, 0.8] {
                let x = pair[0] + share * (pair[1] - pair[0]);
                let draw = |at: usize| numbers[usize::from(unsigned(x, at as f32 / DRAWS as f32))];
                let mean = (0..DRAWS).map(|at| f64::from(draw(at))).sum::<f64>() / DRAWS as f64;
                let distance = f64::from(pair[1] - pair[0]);
                assert!((mean - f64::from(x)).abs() < 1e-3 * distance, "{x}: {mean}, {pair:?}");
            }
        }
        // A positive number stays positive, and no code is above 1.
        let most = 1.0 - f32::EPSILON / 2.0;
        assert_eq!([0.0, most].map(|up| unsigned(1e-20, up)), [1, 1]);
        assert_eq!([unsigned(1.000_000_1, most), unsigned(0.0, most)], [255, 0]);
    }

    #[test]
    fn the_nearest_code_is_found() {
        for codes in [Codes::signed(), Codes::unsigned()] {
            let sign = if codes.is_signed { -1.0 } else { 1.0 };
            let thresholds = codes.thresholds();
            assert_eq!(thresholds.len(), CODES - 1);
            let around = thresholds.iter().flat_map(|&x| {
                [-2, -1, 0, 1, 2].map(|step| f32::from_bits(x.to_bits().wrapping_add_signed(step)))
            });
            let spread = (0..100_000).map(|at| (-(at as f32) * 1.7e-4).exp());
            for x in around.chain(spread.clone()).chain(spread.map(|x| sign * x)).chain([0.0, 1.0]) {
                if !x.is_finite() || x < 0.0 && !codes.is_signed {
                    continue; // beside the threshold 0
                }
                let distance = |code: u8| (f64::from(codes.numbers[usize::from(code)]) - f64::from(x)).abs();
                let codes_of = if !codes.is_signed && x > 0.0 { 1..=255 } else { 0..=255 };
                let best = codes_of.map(distance).fold(f64::INFINITY, f64::min);
                let found = distance(rounded(codes, x));
                // Halfway between two numbers either may be found, since places are rounded, too.
                assert!(found <= best * (1.0 + 1e-4) + 1e-14, "{x}: {found}, not {best}");
            }
            for (code, &number) in codes.numbers.iter().enumerate() {
                assert_eq!(usize::from(rounded(codes, number)), code);
            }
            assert_eq!(rounded(codes, 1.000_000_1), 255);
        }
    }

    #[test]
    fn linear_codes_are_multiples() {
        for code in 0..=254 {
            assert_eq!(linear(of_linear(code)), code);
        }
        assert_eq!((of_linear(0), of_linear(127), of_linear(254)), (-1.0, 0.0, 1.0));
        assert_eq!(linear(0.5 / 127.0 - 1e-4), 127);
        assert_eq!(linear(0.5 / 127.0 + 1e-4), 128);
        assert_eq!(linear(-0.5 / 127.0 - 1e-4), 126);
    }
}
