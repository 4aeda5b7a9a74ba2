//! Rotation of pairs by Burn's operations.
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, Slice};

/// See [`MemBackend::rotate`](crate::backend::MemBackend::rotate).
pub fn rotate<B: Backend>(x: FloatTensor<B>, factors: FloatTensor<B>, adjoint: bool) -> FloatTensor<B> {
    let shape = x.shape();
    let [positions, features, _] = factors.shape().dims();
    let pairs =
        Shape::new([shape.num_elements() / (positions * features).max(1), positions, features / 2, 2]);
    let x = B::float_reshape(x, pairs);
    let one = |x: &FloatTensor<B>, at: usize| {
        let all = [0, 1, 2].map(|axis| Slice::from(0..x.shape()[axis]));
        let [repeats, positions, pairs] = all;
        B::float_slice(x.clone(), &[repeats, positions, pairs, Slice::from(at..at + 1)])
    };
    let (a, b) = (one(&x, 0), one(&x, 1));
    let factors = B::float_reshape(factors, Shape::new([1, positions, features / 2, 4]));
    let [cos_a, sin_a, cos_b, sin_b] = [0, 1, 2, 3].map(|at| one(&factors, at));
    let product = |x: &FloatTensor<B>, factor: FloatTensor<B>| B::float_mul(x.clone(), factor);
    let rotated = match adjoint {
        false => [
            B::float_sub(product(&a, cos_a), product(&b, sin_a)),
            B::float_add(product(&b, cos_b), product(&a, sin_b)),
        ],
        true => [
            B::float_add(product(&a, cos_a), product(&b, sin_b)),
            B::float_sub(product(&b, cos_b), product(&a, sin_a)),
        ],
    };
    B::float_reshape(B::float_cat(rotated.to_vec(), 3), shape)
}
