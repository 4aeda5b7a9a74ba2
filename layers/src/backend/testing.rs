//! For tests of kernels: the default bodies, which run on any backend, against the kernels of the CPU.
use burn::backend::{Autodiff, Flex, flex::FlexDevice, ops::FloatTensorOps, read_sync, tensor::FloatTensor};
use burn::tensor::{Distribution, TensorData};
use core::cell::RefCell;
use rand::{SeedableRng, rngs::StdRng};

/// A backend whose kernels are the default bodies: Burn's operations on Flex, under an autodiff that records nothing.
pub(crate) type Composed = Autodiff<Flex>;

thread_local! {
    /// A test is a thread of its own, and has the same numbers in every run.
    static RNG: RefCell<StdRng> = RefCell::new(StdRng::seed_from_u64(0));
}

/// Normally distributed numbers, the same tensor for both backends.
pub(crate) fn random(shape: &[usize]) -> FloatTensor<Flex> {
    drawn(shape, Distribution::Normal(0.0, 1.0))
}

/// Numbers of a distribution.
pub(crate) fn drawn(shape: &[usize], distribution: Distribution) -> FloatTensor<Flex> {
    let data = RNG.with_borrow_mut(|rng| TensorData::random::<f32, _, _>(shape.to_vec(), distribution, rng));
    Flex::float_from_data(data, &FlexDevice)
}

/// A tensor for the default bodies.
pub(crate) fn composed(x: &FloatTensor<Flex>) -> FloatTensor<Composed> {
    FloatTensor::<Composed>::new(x.clone())
}

/// Fails if the default bodies and the kernels of the CPU differ by more than two sums of the same numbers in another order do.
pub(crate) fn assert_close(what: &str, composed: FloatTensor<Composed>, cpu: FloatTensor<Flex>) {
    let [composed, cpu] =
        [composed.into_primitive(), cpu].map(|x| read_sync(Flex::float_into_data(x)).expect("a CPU tensor"));
    assert_eq!(composed.shape(), cpu.shape(), "{what}");
    let largest = cpu.iter::<f32>().fold(0.0, |largest: f32, cpu| largest.max(cpu.abs()));
    for (composed, cpu) in composed.iter::<f32>().zip(cpu.iter::<f32>()) {
        let error = 3e-5 * cpu.abs().max(1.0) + 1e-6 * largest;
        assert!((composed - cpu).abs() <= error, "{what}: {composed}, kernel {cpu}");
    }
}
