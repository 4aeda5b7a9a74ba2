//! Checks that a recomputed segment gives the same outputs as the first time. The process remembers which segments were checked, by their
//! types and parameters ([`SameSegments`]).
//!
//! Outputs that take time to compare are compared only the first times, and so the last product of a segment, if it is
//! [`EarlyStop`](super::EarlyStop), is later not recomputed at all: a block of a language model takes 1.06x the time at half the peak, and
//! not 1.18x. A search for captured tensors costs a forward pass, and is done once.
use burn::tensor::{DType, Shape, Slice, Tensor, TensorData, kind::Basic};
use burn_memsave_layers::backend::remote::data;
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
    data(&tensor.device(), move || some.try_into_data())
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

/// How many sets of parameters are remembered for a type of module and a function. Without a limit, memory would grow if every step had
/// parameters of its own.
const MOST: usize = 1000;

/// What is remembered of all segments with one type of module and one function.
#[derive(Default)]
struct History {
    /// How often they were recomputed.
    recomputed: usize,
    /// How often they were recomputed, by the hash of their parameters.
    recomputed_with: HashMap<u64, usize>,
    /// The hashes of the parameters with which they were searched for captured tensors.
    searched_with: HashSet<u64>,
}

/// By the type of module and function.
static HISTORIES: LazyLock<Mutex<HashMap<TypeId, History>>> = LazyLock::new(Mutex::default);

/// All segments with one type of module, one function, and one hash of their parameters.
#[derive(Clone, Copy)]
pub(super) struct SameSegments {
    types: TypeId,
    parameters: u64,
}

impl SameSegments {
    pub(super) fn of<M: 'static, F: 'static>(parameters: u64) -> Self {
        Self { types: TypeId::of::<(M, F)>(), parameters }
    }

    fn history<R>(self, f: impl FnOnce(&mut History) -> R) -> R {
        let mut histories = HISTORIES.lock().unwrap_or_else(PoisonError::into_inner); // every statement leaves it whole
        f(histories.entry(self.types).or_default())
    }

    /// Whether they are still to be searched. Segments are searched with up to a thousand sets of parameters.
    pub(super) fn are_to_be_searched(self) -> bool {
        self.history(|History { searched_with, .. }| {
            searched_with.len() < MOST && !searched_with.contains(&self.parameters)
        })
    }

    /// Remembers that a search found nothing.
    pub(super) fn note_search(self) {
        self.history(|history| history.searched_with.insert(self.parameters));
    }

    /// Remembers that one of them was recomputed.
    pub(super) fn note_recomputation(self) {
        self.count(1);
    }

    /// How often segments of these types were recomputed with any parameters, and with these.
    pub(super) fn recomputed(self) -> [usize; 2] {
        self.count(0)
    }

    /// The same after so many more. Only a thousand sets of parameters are counted: others were never recomputed.
    fn count(self, more: usize) -> [usize; 2] {
        self.history(|History { recomputed, recomputed_with, .. }| {
            *recomputed += more;
            let is_counted = recomputed_with.len() < MOST || recomputed_with.contains_key(&self.parameters);
            let with_these =
                if is_counted { recomputed_with.entry(self.parameters).or_default() } else { &mut 0 };
            *with_these += more;
            [*recomputed, *with_these]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thousand_are_searched() {
        struct Module;
        let with = SameSegments::of::<Module, ()>;
        (0..1000).for_each(|parameters| {
            assert!(with(parameters).are_to_be_searched());
            with(parameters).note_search();
            assert!(!with(parameters).are_to_be_searched());
        });
        assert!(!with(1000).are_to_be_searched());
        assert!(SameSegments::of::<(), ()>(0).are_to_be_searched());
    }

    #[test]
    fn a_thousand_are_counted() {
        struct Module;
        let with = SameSegments::of::<Module, ()>;
        (0..=1000).for_each(|parameters| with(parameters).note_recomputation());
        assert_eq!(with(999).recomputed(), [1001, 1]);
        assert_eq!(with(1000).recomputed(), [1001, 0]);
    }
}
