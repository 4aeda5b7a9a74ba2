//! Whether what is computed again is what it was.
use burn::tensor::{Slice, Tensor, TensorData};
use std::any::TypeId;
use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

/// A few elements of every float in the output, if it is to be compared.
pub(super) type Samples = Vec<Option<TensorData>>;

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

/// Whether two samples are those of one computation, but for rounding: sums may be made in another order the second time.
pub(super) fn is_same(now: &TensorData, before: &TensorData) -> bool {
    let rounding = if before.dtype().size() < 4 { 1e-2 } else { 1e-5 };
    let scale = before.iter::<f64>().filter(|v| v.is_finite()).fold(0.0, |scale: f64, v| scale.max(v.abs()));
    let close = |(now, before): (f64, f64)| {
        now == before || (now - before).abs() <= rounding * scale || !before.is_finite() && !now.is_finite()
    };
    now.shape() == before.shape()
        && now.dtype() == before.dtype()
        && now.iter::<f64>().zip(before.iter::<f64>()).all(close)
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
