//! The cache of tensors for inference token by token.
use burn::tensor::Tensor;

/// A cached tensor, which grows by one position per call or is computed once.
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

    /// The first call returns `f(x)` for `x` `[batch, length, ..]`. Later calls compute `f` of the last position alone and
    /// append it to the cached tensor along `dim`.
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

    /// The first call returns `f(x)`; later calls return the same value.
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
