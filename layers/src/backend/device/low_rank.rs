//! Products with factors of low rank, and with quantized matrices, by Burn's own operations.
use burn::backend::{
    Backend, TensorMetadata,
    tensor::{FloatTensor, QuantizedTensor},
};
use burn::tensor::Shape;
use core::ops::Range;

/// See [`MemBackend::add_product`](crate::backend::MemBackend::add_product).
pub fn add_product<B: Backend>(y: FloatTensor<B>, u: FloatTensor<B>, v: FloatTensor<B>) -> FloatTensor<B> {
    let ([rank, columns], shape) = (v.shape().dims(), y.shape());
    let rows = shape.num_elements() / columns;
    let product = B::float_matmul(B::float_reshape(u, Shape::new([rows, rank])), v);
    B::float_add(y, B::float_reshape(product, shape))
}

/// See [`MemBackend::by_dequantized_blocks`](crate::backend::MemBackend::by_dequantized_blocks).
pub fn by_dequantized_blocks<B: Backend>(
    x: &FloatTensor<B>,
    weight: &QuantizedTensor<B>,
    axis: usize,
    f: impl Fn(FloatTensor<B>, Range<usize>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let len = weight.shape()[axis];
    f(B::dequantize(weight.clone(), x.dtype().into()), 0..len)
}

/// On Flex the results must be those of its own kernels.
#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::MemBackend;
    use burn::backend::{
        Distribution, Flex,
        flex::FlexDevice,
        ops::{FloatTensorOps, QTensorOps},
        read_sync,
    };
    use burn::tensor::{
        FloatDType,
        quantization::{QuantScheme, QuantStore, QuantValue},
    };

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

    /// Of one block and of several, of both axes; of a tensor whose elements do not lie in order, too.
    #[test]
    fn quantized_matrices_are_dequantized_as_by_the_kernel() {
        let scheme = QuantScheme::default().with_value(QuantValue::Q8S).with_store(QuantStore::Native);
        for (rows, columns) in [(16, 24), (1024, 300), (300, 1030)] {
            let weight = Flex::quantize_dynamic(random([rows, columns]), &scheme);
            let (x, dy) = (random([2, 3, rows]), random([2, 3, columns]));
            let product = |x: &Float, weight: Float| {
                let [rows, columns] = weight.shape().dims();
                Flex::float_matmul(x.clone(), Flex::float_reshape(weight, Shape::new([1, rows, columns])))
            };
            let forward = |weight: Float, _: Range<usize>| product(&x, weight);
            let backward = |weight: Float, _: Range<usize>| product(&dy, Flex::float_swap_dims(weight, 0, 1));
            let [device, cpu] = [
                by_dequantized_blocks::<Flex>(&x, &weight, 1, forward),
                Flex::by_dequantized_blocks(&x, &weight, 1, forward),
            ];
            assert_close(device, cpu);
            let [device, cpu] = [
                by_dequantized_blocks::<Flex>(&dy, &weight, 0, backward),
                Flex::by_dequantized_blocks(&dy, &weight, 0, backward),
            ];
            assert_close(device, cpu);
            let transposed = Flex::q_swap_dims(weight, 0, 1);
            let [device, cpu] = [
                by_dequantized_blocks::<Flex>(&x, &transposed, 0, forward_of(&x)),
                Flex::by_dequantized_blocks(&x, &transposed, 0, forward_of(&x)),
            ];
            assert_close(device, cpu);
        }
    }

    /// `x weight^T`
    fn forward_of(x: &Float) -> impl Fn(Float, Range<usize>) -> Float + Copy + '_ {
        move |weight, _| {
            let [rows, columns] = weight.shape().dims();
            let weight = Flex::float_reshape(weight, Shape::new([1, rows, columns]));
            Flex::float_matmul(x.clone(), Flex::float_swap_dims(weight, 1, 2))
        }
    }
}
