//! Numbers of 8 bits.
//!
//! The dynamic codes are those of bitsandbytes (`create_dynamic_map`; Dettmers, 8-Bit Approximations for Parallelism in Deep Learning,
//! arXiv 1511.04561): 0, 1, and for each of seven powers of ten, from 1e-6 to 1, the middles of so many equal parts of `0.1..1` times
//! the power: 1, 2, 4, .. 64 parts with a sign, 2, 4, .. 128 without. There is no -1. Codes are the places in the sorted list.
use std::sync::LazyLock;

/// Codes that there are.
pub(super) const CODES: usize = 256;

/// Powers of ten.
const DECADES: u32 = 7;

/// The code of 0 among those with a sign; also of the linear codes.
pub(super) const SIGNED_ZERO: u8 = 127;

/// The numbers of dynamic codes, in order.
fn dynamic(is_signed: bool) -> Vec<f32> {
    let mut numbers = vec![0.0, 1.0];
    for decade in 0..DECADES {
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

/// Codes of one kind.
pub(super) struct Codes {
    /// The number of every code.
    pub(super) numbers: [f32; CODES],
    /// Where the next magnitude begins to be nearer, for every magnitude; infinite for the last.
    middles: [f32; CODES],
    /// The magnitude nearest to the first number that has some leading bits.
    cells: Vec<u8>,
    is_signed: bool,
}

/// Of the bits of an f32 those that tell which cell it is in are from here on: exponent and seven bits of the fraction.
const CELL: u32 = 16;
/// The first cell, of all numbers up to 2^-23.
const FIRST: u32 = (127 - 23) << 7;
/// The last one, of 1.
const LAST: u32 = 127 << 7;

impl Codes {
    fn new(is_signed: bool) -> Self {
        let numbers: [f32; CODES] = dynamic(is_signed).try_into().expect("as many as there are codes");
        let magnitudes: Vec<f32> = numbers.iter().copied().filter(|&number| number >= 0.0).collect();
        let mut middles = [f32::INFINITY; CODES];
        for (middle, pair) in middles.iter_mut().zip(magnitudes.windows(2)) {
            *middle = f64::midpoint(pair[0].into(), pair[1].into()) as f32;
        }
        if !is_signed {
            middles[0] = 0.0; // what is positive stays so
        }
        let first_of = |cell: u32| f32::from_bits(cell << CELL);
        let nearest = |number: f32| middles.iter().filter(|&&middle| middle < number).count() as u8;
        let cells =
            (FIRST..=LAST).map(|cell| if cell == FIRST { 0 } else { nearest(first_of(cell)) }).collect();
        Self { numbers, middles, cells, is_signed }
    }

    /// With a sign, for first moments.
    pub(super) fn signed() -> &'static Self {
        static SIGNED: LazyLock<Codes> = LazyLock::new(|| Codes::new(true));
        &SIGNED
    }

    /// Without, for second moments.
    pub(super) fn unsigned() -> &'static Self {
        static UNSIGNED: LazyLock<Codes> = LazyLock::new(|| Codes::new(false));
        &UNSIGNED
    }

    /// The numbers between which the nearest code changes, in order: one less than there are codes.
    #[cfg_attr(not(any(test, feature = "wgpu", feature = "cuda", feature = "remote")), allow(dead_code))]
    pub(super) fn thresholds(&self) -> Vec<f32> {
        let of_magnitudes = self.middles.iter().copied().filter(|middle| middle.is_finite());
        let mut thresholds: Vec<f32> = of_magnitudes.clone().collect();
        if self.is_signed {
            thresholds.extend(of_magnitudes.map(|middle| -middle).filter(|&middle| middle > self.numbers[0]));
        }
        thresholds.sort_by(f32::total_cmp);
        thresholds
    }

    /// The code of the number that is nearest to `x`, which is not above 1 but for rounding; without a sign, of 0 for nothing else.
    #[inline(always)]
    pub(super) fn nearest(&self, x: f32) -> u8 {
        let magnitude = f32::from_bits(x.to_bits() & 0x7FFF_FFFF);
        let cell = (magnitude.to_bits() >> CELL).clamp(FIRST, LAST) - FIRST;
        let below = self.cells[cell as usize];
        let nearest = below + u8::from(magnitude > self.middles[usize::from(below)]);
        match self.is_signed {
            false => nearest,
            true if x.is_sign_negative() => SIGNED_ZERO - nearest.min(SIGNED_ZERO),
            true => SIGNED_ZERO + nearest,
        }
    }
}

/// The linear code nearest to `x` in `-1..=1`: multiples of 1 / 127.
#[inline(always)]
pub(super) fn linear(x: f32) -> u8 {
    // The conversion saturates.
    (x * 127.0 + f32::from(SIGNED_ZERO) + 0.5).floor() as u8
}

/// The number of a linear code.
#[inline(always)]
pub(super) fn of_linear(code: u8) -> f32 {
    (f32::from(code) - f32::from(SIGNED_ZERO)) * (1.0 / 127.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Entries as bitsandbytes has them.
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
                let distance = |code: u8| (f64::from(codes.numbers[usize::from(code)]) - f64::from(x)).abs();
                let codes_of = if !codes.is_signed && x > 0.0 { 1..=255 } else { 0..=255 };
                let best = codes_of.map(distance).fold(f64::INFINITY, f64::min);
                let found = distance(codes.nearest(x));
                // The middle of two numbers is rounded itself.
                assert!(found <= best * (1.0 + 1e-6) + 1e-14, "{x}: {found}, not {best}");
            }
            for (code, &number) in codes.numbers.iter().enumerate() {
                assert_eq!(usize::from(codes.nearest(number)), code);
            }
            assert_eq!(codes.nearest(1.000_000_1), 255);
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
