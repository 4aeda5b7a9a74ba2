//! Exponents of growth, fitted to measured points.

/// The exponent `p` of `y = c x^p`, by least squares on logarithms. `None` if there are fewer than two different `x`, or if a value is
/// not positive.
pub fn exponent(points: &[(f64, f64)]) -> Option<f64> {
    if points.iter().any(|point| point.0 <= 0.0 || point.1 <= 0.0) {
        return None;
    }
    let count = points.len() as f64;
    let logs = || points.iter().map(|point| (point.0.ln(), point.1.ln()));
    let mean = |of: fn((f64, f64)) -> f64| logs().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|log| log.0), mean(|log| log.1));
    let spread = logs().map(|log| (log.0 - x).powi(2)).sum::<f64>();
    (spread > 0.0).then(|| logs().map(|log| (log.0 - x) * (log.1 - y)).sum::<f64>() / spread)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_exponent_of_a_power() {
        for power in [0.0, 1.0, 2.0, 0.5] {
            let points: Vec<(f64, f64)> = [1.0, 2.0, 5.0, 8.0].map(|x: f64| (x, 3.0 * x.powf(power))).into();
            let found = exponent(&points).unwrap();
            assert!((found - power).abs() < 1e-12, "{found} for {power}");
        }
    }

    /// By hand: logarithms (0, 0), (1, 1), (2, 1) have the slope 1/2.
    #[test]
    fn is_the_slope_of_least_squares() {
        let e = std::f64::consts::E;
        let found = exponent(&[(1.0, 1.0), (e, e), (e * e, e)]).unwrap();
        assert!((found - 0.5).abs() < 1e-12, "{found}");
    }

    #[test]
    fn is_none_where_there_is_none() {
        assert_eq!(exponent(&[]), None);
        assert_eq!(exponent(&[(2.0, 1.0), (2.0, 3.0)]), None);
        assert_eq!(exponent(&[(1.0, 0.0), (2.0, 3.0)]), None);
    }
}
