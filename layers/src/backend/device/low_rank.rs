//! Products with factors of low rank, by Burn's own operations.
use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

/// See [`MemBackend::add_product`](crate::backend::MemBackend::add_product).
pub fn add_product<B: Backend>(y: FloatTensor<B>, u: FloatTensor<B>, v: FloatTensor<B>) -> FloatTensor<B> {
    let ([rank, columns], shape) = (v.shape().dims(), y.shape());
    let rows = shape.num_elements() / columns;
    let product = B::float_matmul(B::float_reshape(u, Shape::new([rows, rank])), v);
    B::float_add(y, B::float_reshape(product, shape))
}

/// On Flex the results must be those of its own kernels.
#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::MemBackend;
    use burn::backend::{Distribution, Flex, flex::FlexDevice, ops::FloatTensorOps, read_sync};
    use burn::tensor::FloatDType;

    type Float = FloatTensor<Flex>;

    fn random<const D: usize>(shape: [usize; D]) -> Float {
        let normal = Distribution::Normal(0.0, 1.0);
        Flex::float_random(Shape::new(shape), normal, &FlexDevice, FloatDType::F32)
    }

    fn assert_close(device: Float, cpu: Float) {
        let [device, cpu] = [device, cpu].map(|x| read_sync(Flex::float_into_data(x)).expect("a CPU tensor"));
        assert_eq!(device.shape(), cpu.shape());
        for (device, cpu) in device.iter::<f32>().zip(cpu.iter::<f32>()) {
            assert!((device - cpu).abs() <= 1e-4 * cpu.abs().max(1.0), "{device}, kernel {cpu}");
        }
    }

    #[test]
    fn products_are_added_as_by_the_kernel() {
        for (rows, columns, rank) in [(3, 7, 1), (400, 5, 4), (700, 1030, 7), (3, 9, 33), (700, 1030, 40)] {
            let (y, u, v) = (random([2, rows, columns]), random([2, rows, rank]), random([rank, columns]));
            let device = add_product::<Flex>(y.clone(), u.clone(), v.clone());
            assert_close(device, Flex::add_product(y, u, v));
        }
        let (y, u) = (random([9, 5]), random([9, 3]));
        let v = Flex::float_swap_dims(random([5, 3]), 0, 1);
        assert_close(add_product::<Flex>(y.clone(), u.clone(), v.clone()), Flex::add_product(y, u, v));
    }
}
