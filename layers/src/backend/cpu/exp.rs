//! The exponential function, the logarithm, `tanh` and `erf` in f32. They have no branches, so loops over them are vectorized.
use super::CpuElement;

/// The time of one of these functions in a vectorized loop, in units of the time to read an element.
pub(crate) const COST: usize = 4;

/// `e^x` to 2 units in the last place; subnormal results, infinities and NaN included.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; the polynomial of `e^r` is that of Moshier's Cephes library (`expf`).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    /// Adding it rounds to an integer, and puts the integer into the low bits.
    const ROUND: f32 = 1.5 * (1 << 23) as f32;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Beyond these bounds the result is 0 or infinite. A NaN stays a NaN.
    let x = x.clamp(-104.0, 89.0);
    let rounded = x * core::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let p = 1.987_569_1e-4;
    let p = p * r + 1.398_2e-3;
    let p = p * r + 8.333_452e-3;
    let p = p * r + 4.166_579_6e-2;
    let p = p * r + 1.666_666_5e-1;
    let p = p * r + 5e-1;
    let y = p * (r * r) + r + 1.0;
    // Two factors, since 2^n alone may underflow or overflow.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    let half = n >> 1;
    y * power(half) * power(n.wrapping_sub(half))
}

/// `ln(x)` to 2 units in the last place, including subnormal numbers, 0, infinities and NaN.
///
/// `x = 2^n m` with `sqrt(1/2) <= m < sqrt(2)`; the polynomial of `ln(m)` is that of Moshier's Cephes library (`logf`).
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    const SQRT_HALF: u32 = core::f32::consts::FRAC_1_SQRT_2.to_bits();
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let is_subnormal = x < f32::MIN_POSITIVE;
    let scaled = if is_subnormal { x * (1 << 23) as f32 } else { x };
    let beyond = scaled.to_bits().wrapping_sub(SQRT_HALF);
    let n = (beyond as i32 >> 23) as f32 - if is_subnormal { 23.0 } else { 0.0 };
    let m = f32::from_bits((beyond & 0x7f_ffff).wrapping_add(SQRT_HALF)) - 1.0;
    let p = 7.037_683_6e-2;
    let p = p * m - 1.151_461e-1;
    let p = p * m + 1.167_699_9e-1;
    let p = p * m - 1.242_014_1e-1;
    let p = p * m + 1.424_932_3e-1;
    let p = p * m - 1.666_805_8e-1;
    let p = p * m + 2.000_071_5e-1;
    let p = p * m - 2.499_999_4e-1;
    let p = p * m + 3.333_333e-1;
    let square = m * m;
    let y = p * m * square + n * LN_2_LOW - 0.5 * square + m + n * LN_2_HIGH;
    let of_zero_or_less = if x == 0.0 { f32::NEG_INFINITY } else { f32::NAN };
    let of_others = if x > 0.0 { x } else { of_zero_or_less };
    if (x > 0.0) & (x < f32::INFINITY) { y } else { of_others }
}

/// The hyperbolic tangent to 2 units in the last place. The polynomial near 0 is that of Cephes (`tanhf`).
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    let magnitude = x.abs();
    let far = 1.0 - 2.0 / (exp(2.0 * magnitude) + 1.0);
    let z = x * x;
    let p = -5.704_988_7e-3;
    let p = p * z + 2.063_909e-2;
    let p = p * z - 5.373_971_6e-2;
    let p = p * z + 1.333_144_2e-1;
    let p = p * z - 3.333_328e-1;
    let near = p * z * x + x;
    if magnitude < 0.625 { near } else { far.copysign(x) }
}

/// The error function to 2 units in the last place: an odd polynomial near 0, else `1 - e^p(|x|)`. Both polynomials minimize the largest
/// relative error of the result; they were fitted by Remez' algorithm.
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    /// From here on the result is 1.
    const ONE: f32 = 3.95;
    const NEAR: f32 = 0.925;
    let s = x * x;
    let p = -5.871_852e-4;
    let p = p * s + 4.969_677e-3;
    let p = p * s - 2.675_059_3e-2;
    let p = p * s + 1.128_138e-1;
    let p = p * s - 3.761_245_4e-1;
    let p = p * s + 1.283_791_5e-1;
    let near = p * x + x;
    let t = x.abs().min(ONE);
    let p = 1.971_814_3e-4;
    let p = p * t - 3.055_605e-3;
    let p = p * t + 2.227_707_7e-2;
    let p = p * t - 1.040_373_4e-1;
    let p = p * t - 6.370_598e-1;
    let p = p * t - 1.127_749_6;
    let p = p * t - 1.774_972e-4;
    let far = 1.0 - exp(p);
    // A NaN takes the branch near 0, and stays a NaN.
    if x.abs() > NEAR { far.copysign(x) } else { near }
}

/// `1 / (1 + exp(-x))` without overflow.
#[inline(always)]
pub(crate) fn sigmoid<A: CpuElement<Acc = A>>(x: A) -> A {
    let e = (-x.abs()).fast_exp();
    let s = A::one() / (A::one() + e);
    if x >= A::zero() { s } else { e * s }
}

/// `log(1 + x)` for `x >= 0`, by Kahan's method, which is exact to the last digits even where `1 + x` rounds to 1. It is faster than the
/// function of the platform.
#[inline(always)]
pub(crate) fn log_1p<A: CpuElement<Acc = A>>(x: A) -> A {
    let sum = A::one() + x;
    let log = sum.fast_ln() * (x / (sum - A::one()));
    if sum == A::one() { x } else { log }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The distance in units in the last place.
    fn ulps(a: f32, b: f32) -> u32 {
        a.to_bits().abs_diff(b.to_bits())
    }

    #[test]
    fn every_result_is_within_two_units_in_the_last_place() {
        let mut x = -110.0f32;
        while x < 95.0 {
            let exact = f64::from(x).exp() as f32;
            assert!(ulps(exp(x), exact) <= 2, "exp({x}) = {}, exactly {exact}", exp(x));
            x += 0.000_7;
        }
    }

    #[test]
    fn every_logarithm_is_within_two_units_in_the_last_place() {
        let check = |x: f32| {
            let exact = f64::from(x).ln() as f32;
            assert!(ulps(ln(x), exact) <= 2, "ln({x}) = {}, exactly {exact}", ln(x));
        };
        // Numbers of all sizes, subnormal ones included, and those near 1.
        (1..f32::INFINITY.to_bits()).step_by(997).map(f32::from_bits).for_each(check);
        (-100_000..100_000)
            .map(|step| f32::from_bits(1f32.to_bits().wrapping_add_signed(step)))
            .for_each(check);
        assert_eq!(
            [ln(0.0), ln(-0.0), ln(f32::INFINITY), ln(1.0)],
            [-f32::INFINITY, -f32::INFINITY, f32::INFINITY, 0.0]
        );
        assert!([-1.0, -1e-40, f32::NEG_INFINITY, f32::NAN].into_iter().all(|x| ln(x).is_nan()));
    }

    #[test]
    fn the_hyperbolic_tangent_is_within_two_units_in_the_last_place() {
        let mut x = -12.0f32;
        while x < 12.0 {
            let exact = f64::from(x).tanh() as f32;
            assert!(ulps(tanh(x), exact) <= 2, "tanh({x}) = {}, exactly {exact}", tanh(x));
            x += 0.000_13;
        }
        assert_eq!([tanh(0.0), tanh(1e-30), tanh(f32::INFINITY), tanh(f32::MIN)], [0.0, 1e-30, 1.0, -1.0]);
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn the_error_function_is_within_two_units_in_the_last_place() {
        let mut x = -5.0f32;
        while x < 5.0 {
            let exact = libm::erf(f64::from(x)) as f32;
            assert!(ulps(erf(x), exact) <= 2, "erf({x}) = {}, exactly {exact}", erf(x));
            x += 0.000_043;
        }
        assert_eq!([erf(0.0), erf(f32::INFINITY), erf(f32::MIN)], [0.0, 1.0, -1.0]);
        assert!(ulps(erf(1e-30), 1.128_379_2e-30) <= 2);
        assert!(erf(f32::NAN).is_nan());
    }

    #[test]
    fn limits() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::MAX), f32::INFINITY);
        assert_eq!(exp(f32::MIN), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }
}
