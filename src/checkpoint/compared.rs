//! Checks that a recomputed segment gives the same outputs as the first time.
use burn::tensor::{DType, Shape, Slice, Tensor, TensorData, kind::Basic};
use std::any::TypeId;
use std::collections::{HashMap, HashSet};
use std::sync::{LazyLock, Mutex, PoisonError};

/// What is remembered of every tensor in the output.
pub(super) type Samples = Vec<Sample>;

/// What is remembered of a tensor, to compare it.
pub(super) struct Sample {
    shape: Shape,
    dtype: DType,
    /// A few of its elements, if they are to be compared, too.
    values: Option<TensorData>,
}

impl Sample {
    pub(super) fn of<const D: usize, K: Basic>(tensor: &Tensor<D, K>, values: Option<TensorData>) -> Self {
        Self { shape: tensor.shape(), dtype: tensor.dtype(), values }
    }

    /// Whether its elements are to be compared.
    pub(super) fn has_values(&self) -> bool {
        self.values.is_some()
    }

    /// # Panics
    ///
    /// Panics if output `number` of `name` differs after recomputation.
    pub(super) fn check(self, now: Self, number: usize, name: &str) {
        let Self { shape, dtype, values } = self;
        assert!(
            (&now.shape, now.dtype) == (&shape, dtype),
            "checkpoint: computed again, output {number} of {name} is {:?} of {:?}, in the place of {shape:?} of {dtype:?}",
            now.shape,
            now.dtype,
        );
        if let Some((before, now)) = values.zip(now.values) {
            assert!(
                is_same(&now, &before),
                "checkpoint: computed again, output {number} of {name} is another: it draws random numbers that are not this \
                 library's, or reads something that has changed since",
            );
        }
    }
}

/// Some elements of a tensor, spread over it.
pub(super) fn sample<const D: usize>(tensor: &Tensor<D>) -> TensorData {
    const PER_AXIS: [usize; 4] = [256, 16, 6, 4];
    let most = PER_AXIS.get(D - 1).copied().unwrap_or(3);
    let mut some = if tensor.is_autodiff() { tensor.clone().inner() } else { tensor.clone() };
    for (axis, len) in tensor.dims().into_iter().enumerate() {
        if len > most {
            some = some.slice_dim(axis, Slice::new(0, None, len.div_ceil(most) as isize));
        }
    }
    some.into_data()
}

/// Whether two samples of the same shape and dtype are equal up to rounding: sums may be computed in another order the second time.
fn is_same(now: &TensorData, before: &TensorData) -> bool {
    let rounding = if before.dtype().size() < 4 { 1e-2 } else { 1e-5 };
    let scale = before.iter::<f64>().filter(|v| v.is_finite()).fold(0.0, |scale: f64, v| scale.max(v.abs()));
    let close = |(now, before): (f64, f64)| {
        now == before || (now - before).abs() <= rounding * scale || !before.is_finite() && !now.is_finite()
    };
    now.iter::<f64>().zip(before.iter::<f64>()).all(close)
}

/// How often the outputs of a segment are compared where that takes time.
pub(super) const CHECKS: usize = 2;

/// How often segments with one type of module and one function were recomputed.
#[derive(Default)]
struct Times {
    with_any: usize,
    with_parameters: HashMap<u64, usize>,
}

/// How often segments with one type of module and one function were recomputed, with any parameters and with those of this hash. Adds
/// `more` to both first.
pub(super) fn times<F: 'static>(parameters: u64, more: usize) -> [usize; 2] {
    static TIMES: LazyLock<Mutex<HashMap<TypeId, Times>>> = LazyLock::new(Mutex::default);
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner); // counts are whole
    let Times { with_any, with_parameters } = times.entry(TypeId::of::<F>()).or_default();
    *with_any += more;
    let knows = with_parameters.len() < MOST || with_parameters.contains_key(&parameters);
    let with_these = if knows { with_parameters.entry(parameters).or_default() } else { &mut 0 };
    *with_these += more;
    [*with_any, *with_these]
}

/// How many sets of parameters are remembered for a type of module and a function. Without a limit, memory would grow if every step had
/// parameters of its own.
const MOST: usize = 1000;

/// By type of module and function: the hashes of the parameters with which segments were searched for captured tensors.
static SEARCHED: LazyLock<Mutex<HashMap<TypeId, HashSet<u64>>>> = LazyLock::new(Mutex::default);

/// Whether segments with these parameters are still to be searched. Up to a thousand sets of parameters are.
pub(super) fn is_new<F: 'static>(parameters: u64) -> bool {
    let searched = SEARCHED.lock().unwrap_or_else(PoisonError::into_inner); // every statement leaves it whole
    searched.get(&TypeId::of::<F>()).is_none_or(|found| found.len() < MOST && !found.contains(&parameters))
}

/// Remembers that nothing was found with these parameters.
pub(super) fn is_searched<F: 'static>(parameters: u64) {
    let mut searched = SEARCHED.lock().unwrap_or_else(PoisonError::into_inner); // every statement leaves it whole
    searched.entry(TypeId::of::<F>()).or_default().insert(parameters);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_are_searched() {
        struct Segment;
        (0..1000).for_each(|parameters| {
            assert!(is_new::<Segment>(parameters));
            is_searched::<Segment>(parameters);
            assert!(!is_new::<Segment>(parameters));
        });
        assert!(!is_new::<Segment>(1000));
        assert!(is_new::<()>(0));
    }
}
