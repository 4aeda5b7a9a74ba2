//! AdamW with moments of 8 bits.
use super::*;
use burn::module::Module;
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::Int;
use burn_memsave::optim::AdamW8bitConfig;
use proptest::prelude::*;

const BETA_1: f64 = 0.9;
const BETA_2: f64 = 0.999;
const EPSILON: f64 = 1e-5;
const DECAY: f64 = 0.1;
const LR: f64 = 0.01;

fn config() -> AdamW8bitConfig {
    AdamW8bitConfig::new().with_weight_decay(DECAY as f32)
}

/// bitsandbytes' dynamic codes, as it computes them.
fn dynamic_map(is_signed: bool) -> Vec<f64> {
    let mut data = vec![0.0, 1.0];
    for i in 0..7 {
        let items = if is_signed { 1 << i } else { 2 << i };
        let boundary = |at: i32| 0.1 + 0.9 * f64::from(at) / f64::from(items);
        for at in 0..items {
            let mean = 10f64.powi(i - 6) * (boundary(at) + boundary(at + 1)) / 2.0;
            data.push(mean);
            if is_signed {
                data.push(-mean);
            }
        }
    }
    assert_eq!(data.len(), 256);
    data.sort_by(f64::total_cmp);
    data
}

/// A block to codes and back, by a search through all of them.
fn rounded(block: &mut [f64], is_signed: bool) {
    let map = dynamic_map(is_signed);
    let scale = block.iter().fold(0.0, |scale: f64, x| scale.max(x.abs()));
    for x in block {
        let y = *x / scale;
        let nearest = map.iter().copied().min_by(|a, b| (a - y).abs().total_cmp(&(b - y).abs())).unwrap();
        // A positive second moment stays positive.
        *x = scale * if !is_signed && y > 0.0 { nearest.max(map[1]) } else { nearest };
    }
}

/// The definition, in f64.
struct Definition {
    weight: Vec<f64>,
    first: Vec<f64>,
    second: Vec<f64>,
    time: i32,
}

impl Definition {
    fn new(weight: Vec<f64>) -> Self {
        let zeros = vec![0.0; weight.len()];
        Self { weight, first: zeros.clone(), second: zeros, time: 0 }
    }

    fn step(&mut self, gradient: &[f64], is_coded: bool) {
        self.time += 1;
        for (at, g) in gradient.iter().enumerate() {
            self.first[at] = BETA_1 * self.first[at] + (1.0 - BETA_1) * g;
            self.second[at] = BETA_2 * self.second[at] + (1.0 - BETA_2) * g * g;
            let m = self.first[at] / (1.0 - BETA_1.powi(self.time));
            let v = self.second[at] / (1.0 - BETA_2.powi(self.time));
            self.weight[at] = (1.0 - LR * DECAY) * self.weight[at] - LR * m / (v.sqrt() + EPSILON);
        }
        if is_coded {
            self.first.chunks_mut(256).for_each(|block| rounded(block, true));
            self.second.chunks_mut(256).for_each(|block| rounded(block, false));
        }
    }
}

/// Small tensors have moments in f32: what Burn computes.
#[test]
fn small_tensors_are_burns_adamw() {
    let _alone = alone();
    let device = device();
    let burn = AdamWConfig::new().with_weight_decay(DECAY as f32).init();
    let (mut burn, mut ours) = (burn, config().init());
    let value = random([63, 65], &device);
    let [mut a, mut b] = [parameter(value.clone()), parameter(value)];
    for _ in 0..20 {
        let gradient = random([63, 65], &device);
        a = step_with(&mut burn, a, gradient.clone(), LR);
        b = step_with(&mut ours, b, gradient, LR);
        assert_near(&b.val().into_data(), &f64s(&a.val().into_data()), 1e-5, 1e-6);
    }
}

/// Beside the definition, to nearest, over lengths that are no multiples of a block or of a task.
#[test]
fn large_tensors_are_the_definition_in_codes() {
    let _alone = alone();
    let device = device();
    for shape in [[64, 64], [1, 4097], [67, 131], [37, 1000]] {
        let value = random(shape, &device);
        let mut definition = Definition::new(f64s(&value.to_data()));
        let mut optimizer = config().with_stochastic_rounding(false).init();
        let mut ours = parameter(value);
        for _ in 0..6 {
            let gradient = random(shape, &device).powf_scalar(3.0);
            definition.step(&f64s(&gradient.to_data()), true);
            ours = step_with(&mut optimizer, ours, gradient, LR);
            let data = ours.val().into_data();
            // Where a moment is between two codes, f32 and f64 may differ: few elements, by less than a step.
            let far = data.iter::<f64>().zip(&definition.weight).filter(|(a, b)| (a - *b).abs() > 1e-5);
            let far: Vec<f64> = far.map(|(a, b)| (a - b).abs()).collect();
            assert!(far.len() * 200 <= data.num_elements(), "{} of {}", far.len(), data.num_elements());
            assert!(far.iter().all(|&error| error < LR), "{far:?}");
        }
    }
}

/// Where gradients become small beside others in their block, steps grow as those of f32 do. Second moments that are rounded to nearest
/// stay as they are, and so do the steps.
#[test]
fn second_moments_follow_their_gradients() {
    const LEN: usize = 8192;
    /// With large gradients, then with small ones.
    const STEPS: [usize; 2] = [100, 700];
    let _alone = alone();
    let device = device();
    let gradient = |is_small: bool| {
        let of = |at: usize| if is_small && at.is_multiple_of(2) { 0.1f32 } else { 1.0 };
        let values: Vec<f32> = (0..LEN).map(|at| of(at) * (1.0 + (at % 97) as f32 / 97.0)).collect();
        Tensor::<1>::from_data(TensorData::new(values, [LEN]), &device)
    };
    // How far the elements with small gradients go, on average.
    let distance = |mut optimizer: ModuleOptimizer| {
        let mut weight = parameter(Tensor::zeros([LEN], &device));
        for step in 0..STEPS[0] + STEPS[1] {
            weight = step_with(&mut optimizer, weight, gradient(step >= STEPS[0]), 1e-3);
        }
        let values = f64s(&weight.val().into_data());
        values.iter().step_by(2).sum::<f64>() / (LEN / 2) as f64
    };
    // First moments are the gradients.
    let config = || AdamW8bitConfig::new().with_weight_decay(0.0).with_beta_1(0.0);
    let exact = distance(config().with_min_8bit_size(usize::MAX).init());
    let relative = |optimizer: ModuleOptimizer| (distance(optimizer) / exact - 1.0).abs();
    let random = relative(config().init());
    assert!(random < 0.02, "{random}"); // the mean of the root is not the root of the mean
    let nearest = relative(config().with_stochastic_rounding(false).init());
    assert!(nearest > 0.1, "{nearest}");
}

/// In the first step nothing has been rounded.
#[test]
fn the_first_step_is_exact_in_every_dtype() {
    let _alone = alone();
    let device = device();
    for (dtype, relative) in
        [(FloatDType::F32, 1e-6), (FloatDType::F64, 1e-7), (FloatDType::BF16, 4e-3), (FloatDType::F16, 5e-4)]
    {
        let value = random([70, 64], &device).cast(dtype);
        let gradient = random([70, 64], &device).cast(dtype);
        let mut definition = Definition::new(f64s(&value.to_data()));
        definition.step(&f64s(&gradient.to_data()), true);
        for is_random in [false, true] {
            let mut optimizer = config().with_stochastic_rounding(is_random).init();
            let after =
                step_with(&mut optimizer, parameter(value.clone()), gradient.clone(), LR).val().into_data();
            assert_eq!(after.dtype(), dtype.into());
            let relative = if is_random { 2.0 * relative } else { relative };
            assert_near(&after, &definition.weight, relative, 2e-6);
        }
    }
}

/// A gradient with strides is read in the order of its elements.
#[test]
fn gradients_may_have_strides() {
    let _alone = alone();
    let device = device();
    let (value, gradient) = (random([80, 64], &device), random([64, 80], &device));
    let step =
        |gradient| step_with(&mut config().init(), parameter(value.clone()), gradient, LR).val().into_data();
    let copied = Tensor::from_data(gradient.clone().transpose().into_data(), &device);
    assert_eq!(step(gradient.transpose()), step(copied));
}

#[test]
fn what_is_not_a_number_spoils_its_block() {
    let _alone = alone();
    let device = device();
    for bad in [f32::NAN, f32::INFINITY] {
        let mut values = vec![1.0f32; 5000];
        values[300] = bad;
        let bad = Tensor::<1>::from_data(TensorData::new(values, [5000]), &device);
        let mut optimizer = config().init();
        let ours = step_with(&mut optimizer, parameter(random([5000], &device)), bad, LR);
        let after = step_with(&mut optimizer, ours, random([5000], &device), LR).val().into_data();
        for (at, value) in after.iter::<f32>().enumerate() {
            assert_eq!(value.is_nan(), (256..512).contains(&at), "{at}: {value}");
        }
    }
}

/// Gradients that are zero, or as small as numbers are, leave finite weights.
#[test]
fn tiny_gradients_are_harmless() {
    let _alone = alone();
    let device = device();
    for tiny in [0.0f32, 1e-44, 1e-30, 1e-20] {
        let mut optimizer = config().init();
        let value = random::<1>([5000], &device);
        let mut ours = parameter(value.clone());
        for _ in 0..3 {
            ours = step_with(&mut optimizer, ours, Tensor::full([5000], tiny, &device), LR);
        }
        let expected: Vec<f64> =
            f64s(&value.into_data()).iter().map(|x| x * (1.0 - LR * DECAY).powi(3)).collect();
        assert_near(&ours.val().into_data(), &expected, 1e-6, 1e-7);
    }
}

/// From a record training goes on bit for bit.
#[test]
fn records_are_exact() {
    let _alone = alone();
    let device = device();
    for (dtype, len) in
        [(FloatDType::F32, 100), (FloatDType::F32, 5000), (FloatDType::BF16, 100), (FloatDType::BF16, 5001)]
    {
        let mut optimizer = config().with_seed(7).init();
        let draw = || random::<1>([len], &device).cast(dtype);
        let mut ours = parameter(draw());
        for _ in 0..3 {
            ours = step_with(&mut optimizer, ours, draw(), LR);
        }
        let bytes = optimizer.into_bytes().expect("a record");
        let mut restored = config().with_seed(7).init().from_bytes(bytes).expect("the same record");
        let mut other = ours.clone();
        for _ in 0..3 {
            let gradient = draw();
            ours = step_with(&mut optimizer, ours, gradient.clone(), LR);
            other = step_with(&mut restored, other, gradient, LR);
            assert_eq!(ours.val().into_data(), other.val().into_data());
        }
        let [a, b] = [optimizer, restored].map(|optimizer| optimizer.into_bytes().expect("a record"));
        assert_eq!(a[..], b[..]);
    }
}

/// From a record of Burn's, training goes on: exactly in f32, to within the codes in 8 bits, where a step anew is far off.
#[test]
fn records_of_burn_are_read() {
    let _alone = alone();
    let device = device();
    for dtype in [FloatDType::F32, FloatDType::BF16] {
        for len in [100, 5000] {
            let plain = || config().with_stochastic_rounding(false).init();
            let mut burn = AdamWConfig::new().with_weight_decay(DECAY as f32).init();
            let draw = || random::<1>([len], &device).cast(dtype);
            let mut weight = parameter(draw());
            for _ in 0..5 {
                weight = step_with(&mut burn, weight, draw(), LR);
            }
            let record = burn.into_bytes().expect("a record");
            let (mut restored, mut anew) = (plain().from_bytes(record).expect("a record"), plain());
            let gradient = draw();
            let [expected, ours, anew] = [&mut burn, &mut restored, &mut anew].map(|optimizer| {
                let stepped = step_with(optimizer, weight.clone(), gradient.clone(), LR);
                f64s(&stepped.val().cast(FloatDType::F32).into_data())
            });
            let error = |of: &[f64]| {
                let errors = of.iter().zip(&expected).map(|(of, expected)| (of - expected).abs());
                errors.sum::<f64>() / (len as f64 * LR)
            };
            // A weight of up to 1 in bf16 is rounded to a multiple of 1 / 256.
            let rounding = if dtype == FloatDType::F32 { 1e-5 } else { 0.1 };
            let bound = if len == 100 { rounding } else { rounding + 0.02 };
            assert!(error(&ours) < bound, "{dtype:?}, {len}: {}", error(&ours));
            assert!(error(&anew) > 3.0 * bound, "{dtype:?}, {len}: {}", error(&anew));
            let bytes = restored.into_bytes().expect("a record").len();
            assert!(len == 100 || bytes < 4 * len, "in 8 bits after a step: {bytes} bytes");
        }
    }
}

#[test]
#[should_panic = "the state is that of a tensor that is not"]
fn a_state_of_another_shape_is_refused() {
    let _alone = alone();
    let device = device();
    let mut optimizer = config().init();
    let ours =
        step_with(&mut optimizer, parameter(random::<1>([5000], &device)), random([5000], &device), LR);
    // Of as many blocks.
    let other = Param::initialized(ours.id, random::<1>([5010], &device).require_grad());
    step_with(&mut optimizer, other, random([5010], &device), LR);
}

#[derive(Module, Debug)]
struct Net {
    table: Embedding,
    linear: Linear,
}

/// Embeddings of a module have moments in f32.
#[test]
fn embeddings_are_not_rounded() {
    let _alone = alone();
    let device = device();
    let net = || Net {
        table: EmbeddingConfig::new(100, 64).init(&device),
        linear: LinearConfig::new(64, 100).with_bias(false).init(&device),
    };
    let bytes = |optimizer: ModuleOptimizer, net: Net| {
        let mut optimizer = optimizer;
        let y = net.linear.forward(net.table.forward(Tensor::<2, Int>::ones([2, 3], &device)));
        let gradients = GradientsParams::from_grads(y.sum().backward(), &net);
        optimizer.step(LR, net, gradients);
        optimizer.into_bytes().expect("a record").len()
    };
    let of = net();
    let (aware, unaware) = (config().init_for(&of), config().init());
    let (aware, unaware) = (bytes(aware, of), bytes(unaware, net()));
    // Two moments of 100 x 64 elements: 4 bytes more each but for a byte and the scales, 25 of them.
    let grown = aware as i64 - unaware as i64;
    assert!((grown - 2 * (3 * 6400 - 100)).abs() < 1024, "{grown}");
}

/// A head that comes first, whose weight is that of the embedding.
#[derive(Module, Debug)]
struct Tied {
    head: Linear,
    table: Embedding,
}

/// An embedding has moments in f32 also where an optimizer finds it as the weight of another module.
#[test]
fn tied_embeddings_are_not_rounded() {
    let _alone = alone();
    let device = device();
    let table = EmbeddingConfig::new(100, 64).init(&device);
    let mut head = LinearConfig::new(100, 64).with_bias(false).init(&device);
    head.weight = table.weight.clone();
    let bytes = |mut optimizer: ModuleOptimizer| {
        let net = Tied { head: head.clone(), table: table.clone() };
        let y = net.head.forward(Tensor::<2>::ones([2, 100], &device));
        let gradients = GradientsParams::from_grads(y.sum().backward(), &net);
        optimizer.step(LR, net, gradients);
        optimizer.into_bytes().expect("a record").len()
    };
    let net = Tied { head: head.clone(), table: table.clone() };
    let (aware, unaware) = (bytes(config().init_for(&net)), bytes(config().init()));
    assert!(aware > unaware + 2 * 2 * 6400, "{aware}, {unaware}");
}

/// The square of a gradient may be more than a number can be: that spoils nothing.
#[test]
fn a_huge_gradient_leaves_finite_weights() {
    let _alone = alone();
    let device = device();
    for huge in [2e19f32, -1e30, f32::MAX] {
        let mut values = vec![1.0f32; 5000];
        values[300] = huge;
        let gradient = Tensor::<1>::from_data(TensorData::new(values, [5000]), &device);
        let mut optimizer = config().init();
        let mut ours = step_with(&mut optimizer, parameter(random([5000], &device)), gradient, LR);
        for _ in 0..3 {
            ours = step_with(&mut optimizer, ours, Tensor::zeros([5000], &device), LR);
        }
        // A step is hardly larger than the learning rate, whatever the gradient is.
        assert!(ours.val().into_data().iter::<f32>().all(|x| x.abs() < 10.0), "{huge}");
    }
}

/// Of large tensors the state takes at most 0.26 of two f32.
#[test]
fn states_are_small() {
    let _alone = alone();
    let device = device();
    let state = |optimizer: &dyn Fn() -> ModuleOptimizer| {
        let run = || {
            let (mut optimizer, ours) = (optimizer(), parameter(random([1000, 500], &device)));
            let ours = step_with(&mut optimizer, ours, random([1000, 500], &device), LR);
            let with_state = TrackingAllocator::live();
            drop(optimizer);
            let without = TrackingAllocator::live();
            drop(ours);
            with_state as i64 - without as i64
        };
        run();
        run()
    };
    let [burn, ours] = [state(&|| AdamWConfig::new().init()), state(&|| config().init())];
    assert!(ours as f64 <= 0.26 * burn as f64, "{ours}, Burn's {burn}");
    // Codes of whole blocks, and a scale of each.
    let blocks = i64::from(500_000u32.div_ceil(256));
    assert!((0..4096).contains(&(ours - 2 * (256 + 4) * blocks)), "{ours}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The same weights whatever the shape that a number of elements has.
    #[test]
    fn shapes_do_not_matter(rows in 1usize..40, columns in 200usize..400) {
    let _alone = alone();
        let device = device();
        let (value, gradient) = (random([rows, columns], &device), random([rows, columns], &device));
        let flat = |x: &Tensor<2>| x.clone().reshape([rows * columns]);
        let (mut of_matrix, mut of_row) = (config().init(), config().init());
        let (mut matrix, mut row) = (parameter(value.clone()), parameter(flat(&value)));
        for _ in 0..3 {
            matrix = step_with(&mut of_matrix, matrix, gradient.clone(), LR);
            row = step_with(&mut of_row, row, flat(&gradient), LR);
        }
        prop_assert_eq!(flat(&matrix.val()).into_data(), row.val().into_data());
    }
}
