//! How close two results must be. In half precision a tolerance says little. There the error against the same computation in f64 counts,
//! which must not be larger than that of stock.
use burn::tensor::{DType, TensorData};

/// How close two tensors must be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Closeness {
    /// The same numbers. All NaN are equal, as are 0 and -0.
    Equal,
    /// Within this tolerance, relative to the largest magnitude. Where terms cancel, both results carry rounding errors of larger numbers,
    /// which their magnitudes do not show. So if the result in f64 is known, it is also enough to be within the tolerance of that, or to
    /// have at most four times the error of stock, up to twenty times the tolerance.
    Relative(f64),
    /// The error against f64 is not larger than that of the truth. This holds for the root mean square, and for the largest error, to which
    /// one unit in the last place of the largest number is added, because it depends on the luck of one rounding. An error of up to one
    /// unit in the last place of the exact number counts as none.
    NotWorse,
}

/// Largest magnitudes below this count as this. Inputs and weights are about 1, and a sum of such numbers that cancels has no relative
/// precision.
pub const SMALLEST_SCALE: f64 = 0.1;

/// All numbers of `data`. (Burn is optimized in tests, and an iterator here is not.)
pub fn numbers(data: &TensorData) -> Vec<f64> {
    data.clone().convert_dtype(DType::F64).try_into_vec().expect("numbers of f64")
}

/// One unit in the last place of `number`; 0 in f64, for which [`Closeness::NotWorse`] has no slack.
fn unit_in_last_place(number: f64, dtype: DType) -> f64 {
    let (digits, smallest) = match dtype {
        DType::F16 => (10, -14),
        DType::BF16 => (7, -126),
        DType::F32 => (23, -126),
        _ => return 0.0,
    };
    let exponent = number.abs().log2().floor().max(f64::from(smallest));
    2f64.powf(exponent - f64::from(digits))
}

/// The largest number of a type in half precision.
fn largest(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 65504.0,
        _ => f64::from(f32::MAX),
    }
}

/// Errors of many numbers.
#[derive(Default)]
struct Errors {
    count: usize,
    largest: f64,
    squares: f64,
}

impl Errors {
    fn add(&mut self, error: f64) {
        self.count += 1;
        self.largest = self.largest.max(error);
        self.squares += error * error;
    }

    fn root_mean_square(&self) -> f64 {
        (self.squares / self.count.max(1) as f64).sqrt()
    }
}

impl Closeness {
    /// `exact` is the truth computed in f64: for [`Self::NotWorse`], and for [`Self::Relative`] where terms cancel.
    pub fn compare(
        self,
        ours: &TensorData,
        truth: &TensorData,
        exact: Option<&TensorData>,
    ) -> Result<(), String> {
        if ours.shape() != truth.shape() || ours.dtype() != truth.dtype() {
            let of = |data: &TensorData| format!("{:?} of {:?}", data.shape(), data.dtype());
            return Err(format!("{} instead of {}", of(ours), of(truth)));
        }
        let dtype = ours.dtype();
        let (ours, truth) = (numbers(ours), numbers(truth));
        match self {
            Self::Equal => all_close(&ours, &truth, 0.0),
            Self::Relative(tolerance) => all_close(&ours, &truth, tolerance).or_else(|difference| {
                let exact = numbers(exact.ok_or(difference.clone())?);
                let errors = truth.iter().zip(&exact).map(|(truth, exact)| (truth - exact).abs());
                let largest = errors.filter(|error| error.is_finite()).fold(0f64, f64::max);
                let tolerance = tolerance * scale(&exact);
                all_within(&ours, &exact, (4.0 * largest).clamp(tolerance, 20.0 * tolerance))
                    .map_err(|error| format!("{difference}; in f64: {error}, stock is off by {largest:e}"))
            }),
            Self::NotWorse => {
                not_worse(dtype, &ours, &truth, &numbers(exact.expect("a truth has its twin in f64")))
            }
        }
    }
}

fn scale(truth: &[f64]) -> f64 {
    truth.iter().filter(|t| t.is_finite()).fold(SMALLEST_SCALE, |scale, t| scale.max(t.abs()))
}

fn all_close(ours: &[f64], truth: &[f64], tolerance: f64) -> Result<(), String> {
    let scale = scale(truth);
    all_within(ours, truth, tolerance * scale)
        .map_err(|error| format!("{error}, tolerance {tolerance:e}, scale {scale:e}"))
}

fn all_within(ours: &[f64], truth: &[f64], difference: f64) -> Result<(), String> {
    for (at, &number) in ours.iter().enumerate() {
        let right = truth[at];
        // Neither is close if one of two is infinite or NaN, unless they are the same.
        let close = (number - right).abs() <= difference || same(number, right);
        if !close {
            return Err(format!("element {at} is {number:e} instead of {right:e}"));
        }
    }
    Ok(())
}

fn not_worse(dtype: DType, ours: &[f64], truth: &[f64], exact: &[f64]) -> Result<(), String> {
    assert_eq!(truth.len(), exact.len(), "a truth has the same shape in f64");
    let in_range = |number: f64| number.abs() <= largest(dtype);
    let (mut of_ours, mut of_truth, mut scale) = (Errors::default(), Errors::default(), 0f64);
    for (at, &ours) in ours.iter().enumerate() {
        let (truth, exact) = (truth[at], exact[at]);
        if in_range(truth) && in_range(exact) {
            // A NaN is an infinite error.
            let error = if ours.is_nan() { f64::INFINITY } else { (ours - exact).abs() };
            of_ours.add((error - unit_in_last_place(exact, dtype)).max(0.0));
            of_truth.add((truth - exact).abs());
            scale = scale.max(exact.abs());
        } else if !same(ours, truth) {
            // The truth is not a number, or is too large for the type: there is no error to compare.
            return Err(format!("{ours:e} instead of {truth:e}"));
        }
    }
    let largest_is_not_worse = of_ours.largest <= of_truth.largest + unit_in_last_place(scale, dtype);
    match largest_is_not_worse && of_ours.root_mean_square() <= of_truth.root_mean_square() {
        true => Ok(()),
        false => Err(format!(
            "errors against f64: largest {:.3e}, stock {:.3e}; root mean square {:.3e}, stock {:.3e}; scale {:.3e}",
            of_ours.largest,
            of_truth.largest,
            of_ours.root_mean_square(),
            of_truth.root_mean_square(),
            scale,
        )),
    }
}

fn same(a: f64, b: f64) -> bool {
    a == b || a.is_nan() && b.is_nan()
}
