//! Tools for tests that compare the default bodies of kernels, which run on any backend, with the CPU kernels.
use burn::backend::{Autodiff, Flex, flex::FlexDevice, ops::FloatTensorOps, read_sync, tensor::FloatTensor};
use burn::tensor::{Distribution, TensorData};
use core::cell::RefCell;
use rand::{SeedableRng, rngs::StdRng};

/// A backend whose kernels are the default bodies: Burn's operations on Flex, under `Autodiff`, which records nothing here.
pub(crate) type Composed = Autodiff<Flex>;

thread_local! {
    /// Each test runs on its own thread, so it draws the same numbers in every run.
    static RNG: RefCell<StdRng> = RefCell::new(StdRng::seed_from_u64(0));
}

/// A tensor of normally distributed numbers.
pub(crate) fn random(shape: &[usize]) -> FloatTensor<Flex> {
    drawn(shape, Distribution::Normal(0.0, 1.0))
}

/// A tensor of numbers drawn from a distribution.
pub(crate) fn drawn(shape: &[usize], distribution: Distribution) -> FloatTensor<Flex> {
    let data = RNG.with_borrow_mut(|rng| TensorData::random::<f32, _, _>(shape.to_vec(), distribution, rng));
    Flex::float_from_data(data, &FlexDevice)
}

/// The same tensor, for the default bodies.
pub(crate) fn composed(x: &FloatTensor<Flex>) -> FloatTensor<Composed> {
    FloatTensor::<Composed>::new(x.clone())
}

/// Fails if the results of the default bodies and of the CPU kernels differ by more than sums of the same numbers in another order may.
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
