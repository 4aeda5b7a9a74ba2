//! Whether what is computed again is what it was.
use burn::tensor::{DType, Shape, Slice, Tensor, TensorData, kind::Basic};
use std::any::TypeId;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// What every tensor in the output is known by.
pub(super) type Samples = Vec<Sample>;

/// A tensor, in short.
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
    /// Panics if output `number` of `name`, computed again, is another.
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

/// Whether two samples, of one shape and dtype, are those of one computation, but for rounding: sums may be made in another order
/// the second time.
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

/// How often segments with a module and a function were computed again; counts some more times.
pub(super) fn times<F: 'static>(more: usize) -> usize {
    static TIMES: LazyLock<Mutex<HashMap<TypeId, usize>>> = LazyLock::new(Mutex::default);
    let mut times = TIMES.lock().unwrap_or_else(PoisonError::into_inner); // counts are whole
    let times = times.entry(TypeId::of::<F>()).or_default();
    *times += more;
    *times
}

/// What is known of segments with a module and a function, by the hash of the parameters.
static KNOWN: LazyLock<Mutex<HashMap<TypeId, HashMap<u64, Search>>>> = LazyLock::new(Mutex::default);

/// Whether segments are to be searched for captured tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Search {
    /// They were not.
    Due,
    /// Nothing was found in them.
    Done,
    /// No output was tracked, so there was nothing to search for. When one is, the next segment is searched.
    Untracked,
}

fn known() -> MutexGuard<'static, HashMap<TypeId, HashMap<u64, Search>>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner) // every statement leaves it whole
}

/// Whether segments with a module and a function are to be searched. A thousand of them are: what is remembered must not grow where
/// every step has parameters of its own.
pub(super) fn search<F: 'static>(parameters: u64) -> Search {
    const MOST: usize = 1000;
    match known().get(&TypeId::of::<F>()) {
        Some(found) => {
            let left = if found.len() < MOST { Search::Due } else { Search::Done };
            found.get(&parameters).copied().unwrap_or(left)
        }
        None => Search::Due,
    }
}

/// Remembers how it went.
pub(super) fn searched<F: 'static>(parameters: u64, search: Search) {
    let mut known = known();
    let known = known.entry(TypeId::of::<F>()).or_default();
    match search {
        Search::Due => drop(known.remove(&parameters)),
        _ => drop(known.insert(parameters, search)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_is_remembered() {
        struct Segment;
        let is = |parameters, expected| assert_eq!(search::<Segment>(parameters), expected);
        is(0, Search::Due);
        for state in [Search::Untracked, Search::Due, Search::Done] {
            searched::<Segment>(0, state);
            is(0, state);
        }
        is(1, Search::Due);
        (1..1000).for_each(|parameters| searched::<Segment>(parameters, Search::Done));
        is(1000, Search::Done);
        assert_eq!(search::<()>(0), Search::Due);
    }
}
