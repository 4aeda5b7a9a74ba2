//! Weights that are sent to the device when they are used, and those that stay there.
use crate::operations::check_products;
use crate::{alone, assert_products_close, gpu, tensor, values};
use burn::module::{Lora, Module, ModuleMapper, Param, ParamGroup};
use burn::tensor::{Device, Tensor, TensorData};
use burn_memsave::lazy::{LazyCache, LazyLoad, LazyOptions, WeightFile};
use burn_memsave::measure::{bytes_in_use, measure_layer};
use burn_memsave::nn::conv::Conv2dConfig;
use burn_memsave::nn::{EmbeddingConfig, Linear, LinearConfig};

/// What lazy layers need: a file of their weights.
fn saved(module: impl Module) -> (tempfile::TempDir, WeightFile) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("model.bpk");
    module.save_file(&path).expect("a burnpack");
    (directory, WeightFile::open(path).expect("what was written"))
}

fn lazy<M: Module>(module: M, file: &WeightFile) -> M {
    module.lazy_load(file, &LazyOptions::new().with_min_bytes(0).with_budget(0)).expect("the same module").0
}

#[test]
fn lazy_weights_equal_flex() {
    let linear = |device: &Device| LinearConfig::new(6, 5).init(device);
    let (_directory, file) = saved(linear(&Device::flex()));
    check_products("lazy linear", [2, 3, 6], |x: Tensor<3>, _| lazy(linear(&x.device()), &file).forward(x));

    let conv = |device: &Device| Conv2dConfig::new([2, 4], [3, 3]).init(device);
    let (_directory, file) = saved(conv(&Device::flex()));
    check_products("lazy convolution", [1, 2, 5, 5], |x: Tensor<4>, _| {
        lazy(conv(&x.device()), &file).forward(x)
    });

    let embedding = |device: &Device| EmbeddingConfig::new(9, 4).init(device);
    let (_directory, file) = saved(embedding(&Device::flex()));
    check_products("lazy embedding, tied to the head", [1, 3, 4], |x: Tensor<3>, _| {
        let lazy = lazy(embedding(&x.device()), &file);
        let rows = lazy.forward(Tensor::from_ints([[0, 8, 8]], &x.device()));
        lazy.logits(rows + x)
    });
}

/// A weight of 16 MiB, which nothing keeps between the passes.
#[test]
fn lazy_weights_leave_the_device() {
    const WIDTH: usize = 2048;
    let _alone = alone();
    let config = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
    let (_directory, file) = saved(config.init(&Device::flex()));
    let device = gpu().autodiff();
    let lazy = lazy(config.init(&device), &file);
    let run = || measure_layer(|| Tensor::<2>::ones([1, WIDTH], &device).require_grad(), |x| lazy.forward(x));
    run(); // compiles the kernels
    let measured = run();
    assert!(measured.kept.is_some_and(|kept| kept < 1 << 17), "{measured:?}");
}

/// Square layers one after the other.
#[derive(Module, Debug)]
struct Stack {
    layers: Vec<Linear>,
}

const LAYERS: usize = 8;
const WIDTH: usize = 512;
/// Of one of them.
const BYTES: u64 = (4 * WIDTH * WIDTH) as u64;

impl Stack {
    /// The factors of an adapter are small beside a weight.
    const RANK: usize = 2;

    fn new(device: &Device) -> Self {
        let layer = || LinearConfig::new(WIDTH, WIDTH).with_bias(false).init(device);
        Self { layers: (0..LAYERS).map(|_| layer()).collect() }
    }

    /// With the same adapters on every device, whose second factors are not zero.
    fn adapted(self, device: &Device) -> Self {
        struct Values<'a>(&'a Device, usize);
        impl ModuleMapper for Values<'_> {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                if !param.is_require_grad() {
                    return param;
                }
                self.1 += 1;
                param.map(|value| (tensor(values(value.dims(), self.1), self.0) * 0.02).require_grad())
            }
        }
        let group = ParamGroup::from_regex(r"weight$").expect("a regular expression");
        self.apply_lora(Lora::new(Self::RANK, 1.0).set_param_group(group)).map(&mut Values(device, 0))
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.layers.iter().fold(x, |x, layer| layer.forward(x))
    }

    /// The output, and the gradients of the input and all factors.
    fn run(&self, device: &Device) -> Vec<TensorData> {
        let x = tensor::<2>(values([3, WIDTH], 1), device).require_grad();
        let y = self.forward(x.clone());
        let gradients = y.clone().powf_scalar(2.0).sum().backward();
        let factors = self.layers.iter().flat_map(|layer| {
            let adapter = layer.weight.reparameterization::<burn_memsave::frozen::LazyWeight>();
            let adapter = adapter.map_or_else(|| layer.weight.adapter(), |lazy| lazy.adapter());
            let adapter = adapter.expect("an adapter");
            [adapter.a.val(), adapter.b.val()].map(|factor| factor.grad(&gradients).expect("tracked"))
        });
        let gradients = [x.grad(&gradients).expect("tracked")].into_iter().chain(factors);
        [y.inner()].into_iter().chain(gradients).map(Tensor::into_data).collect()
    }
}

fn lazy_stack(file: &WeightFile, device: &Device, budget: u64) -> (Stack, LazyCache) {
    let options = LazyOptions::new().with_min_bytes(0).with_device_budget(budget);
    let (stack, report) = Stack::new(device).lazy_load(file, &options).expect("the same module");
    (stack.adapted(device), report.cache)
}

/// Adapters of a model that does not fit on the device: those of its weights that fit stay, and the gradients are those of the
/// model that does.
#[test]
fn adapters_of_a_model_beyond_the_device_budget() {
    let _alone = alone();
    let (_directory, file) = saved(Stack::new(&Device::flex()));
    let device = gpu().autodiff();
    let eager = Stack::new(&Device::flex().autodiff()).load_file(file.path());
    let expected = eager.freeze().adapted(&Device::flex().autodiff()).run(&Device::flex().autodiff());
    let now = || {
        device.sync().expect("the device works");
        bytes_in_use(&device).expect("the pool counts")
    };
    for (budget, stays) in [(0, 0), (3 * BYTES + 7, 3), (u64::MAX, LAYERS as u64)] {
        let before = now();
        let (stack, cache) = lazy_stack(&file, &device, budget);
        for _ in 0..2 {
            for (at, (wgpu, flex)) in stack.run(&device).iter().zip(&expected).enumerate() {
                assert_products_close(&format!("budget {budget}: result {at}"), wgpu, flex);
            }
            assert_eq!(cache.device_bytes(), stays * BYTES);
        }
        // Twice per pass, forward and backward, from the memory of the host.
        let statistics = cache.statistics();
        let uses = |statistics: burn_memsave::lazy::Statistics| statistics.hits + statistics.stalls;
        stack.run(&device);
        assert_eq!(
            uses(cache.statistics()) - uses(statistics),
            2 * (LAYERS as u64 - stays),
            "budget {budget}"
        );

        let measured = measure_layer(
            || tensor::<2>(values([3, WIDTH], 1), &device).require_grad(),
            |x| stack.forward(x),
        );
        let at_most = now() - before + measured.peak.expect("launches are watched");
        let weights = (stays + 2).min(LAYERS as u64);
        assert!(at_most < weights * BYTES + BYTES / 2, "budget {budget}: {at_most} bytes in use");
        // Of a copy on the same device nothing is sent again, and nothing is left of any.
        let copy = stack.clone();
        drop(stack);
        assert_eq!(cache.device_bytes(), stays * BYTES);
        drop(copy);
        assert_eq!(cache.device_bytes(), 0);
        assert!(now() < before + BYTES / 2, "{} bytes in use, {before} before", now());
    }
}

/// Weights that wait until the device takes them are in host memory: no more of them than the budget says, and the one that is read.
#[test]
fn weights_that_wait_for_the_device_are_within_the_budget() {
    let _alone = alone();
    let (_directory, file) = saved(Stack::new(&Device::flex()));
    let device = gpu();
    let options = LazyOptions::new().with_min_bytes(0).with_budget(2 * BYTES).with_prefetch(0);
    let (stack, report) = Stack::new(&device).lazy_load(&file, &options).expect("the same module");
    for _ in 0..2 {
        let mut x = tensor::<2>(values([3, WIDTH], 1), &device);
        for layer in &stack.layers {
            x = layer.forward(x);
            let held = report.cache.cached_bytes();
            assert!(held <= 3 * BYTES, "{held} bytes");
        }
        x.into_data();
    }
}
