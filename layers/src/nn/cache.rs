//! Caches for inference token by token.
use burn::tensor::Tensor;

/// A tensor that grows by one position at a time, or that is computed once.
pub struct TensorCache<const D: usize> {
    value: Option<Tensor<D>>,
}

impl<const D: usize> TensorCache<D> {
    /// Creates a new empty cache.
    pub fn empty() -> Self {
        Self { value: None }
    }

    /// Whether nothing has been computed yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.value.is_none()
    }

    /// `f(x)` the first time, for `x` `[batch, length, ..]`; from then on `f` of the last position alone, appended along `dim`
    /// to what is cached.
    pub(crate) fn extend(
        &mut self,
        x: Tensor<3>,
        dim: usize,
        f: impl FnOnce(Tensor<3>) -> Tensor<D>,
    ) -> Tensor<D> {
        let value = match self.value.take() {
            Some(known) => {
                let last = x.dims()[1] - 1;
                Tensor::cat(vec![known, f(x.slice_dim(1, last..last + 1))], dim)
            }
            None => f(x),
        };
        self.value.insert(value).clone()
    }

    /// `f(x)` the first time, and the same value from then on.
    pub(crate) fn once(&mut self, x: Tensor<3>, f: impl FnOnce(Tensor<3>) -> Tensor<D>) -> Tensor<D> {
        self.value.get_or_insert_with(|| f(x)).clone()
    }
}

/// [`extend`](TensorCache::extend) along the sequence if there is a cache, else `f(x)`.
pub(crate) fn cached(
    cache: Option<&mut TensorCache<3>>,
    x: Tensor<3>,
    f: impl FnOnce(Tensor<3>) -> Tensor<3>,
) -> Tensor<3> {
    match cache {
        Some(cache) => cache.extend(x, 1, f),
        None => f(x),
    }
}
