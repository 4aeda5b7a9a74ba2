//! Tests policies that keep tensors in fewer bits: gradients, bytes, and tensors that something else also holds.
#![cfg(feature = "flex")]
#![recursion_limit = "256"]
use burn::module::{LoraAdapter, Module, Param};
use burn::tensor::{DType, Device, Distribution, FloatDType, Tensor, TensorData, activation};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::functional;
use burn_memsave::lora::DoraAdapter;
use burn_memsave::measure::{TrackingAllocator, ledger, measure_layer};
use burn_memsave::mixed::Precision;
use burn_memsave::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn_memsave::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_memsave::saved::SavedPolicy;
use meter::{alone, bytes, devices, measure};
use proptest::prelude::*;

#[path = "memory/meter.rs"]
#[allow(dead_code, reason = "every test uses its part")]
mod meter;

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

const PACKING: [SavedPolicy; 3] = [SavedPolicy::Half, SavedPolicy::HalfF16, SavedPolicy::Int8];
/// So many rows that a tensor is large enough.
const ROWS: usize = 128;
const WIDTH: usize = 64;

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// The same numbers, which nobody else holds and Burn does not compute again.
fn copied<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    let width = x.dims()[D - 1];
    let one = Tensor::<2>::eye(width, &x.device()).cast(FloatDType::from(x.dtype()));
    functional::linear(x, one, None)
}

/// A transformer block.
#[derive(Module, Debug)]
struct Block {
    attention: MultiHeadAttention,
    norm: LayerNorm,
    first: Linear,
    second: Linear,
}

impl Block {
    fn new(device: &Device) -> Self {
        Self {
            attention: MultiHeadAttentionConfig::new(WIDTH, 4).with_dropout(0.0).init(device),
            norm: LayerNormConfig::new(WIDTH).init(device),
            first: LinearConfig::new(WIDTH, 2 * WIDTH).init(device),
            second: LinearConfig::new(2 * WIDTH, WIDTH).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let y = self.attention.forward(MhaInput::self_attn(x.clone())).context + x;
        let z = self.first.forward(self.norm.forward(y.clone()));
        self.second.forward(functional::gelu(z)) + y
    }
}

/// The output, and the gradients of the input and of some parameters.
fn step(block: &Block, x: &Tensor<3>, policy: &SavedPolicy, segment: bool) -> [TensorData; 4] {
    let x = x.clone().detach().require_grad();
    let y = policy.scope(|| match segment {
        true => checkpoint(block, copied(x.clone()), Block::forward),
        false => block.forward(copied(x.clone())),
    });
    let weights = random([WIDTH], &y.device()).unsqueeze();
    let gradients = (y.clone() * y.clone() * weights).sum().backward();
    let of = |weight: &Param<Tensor<2>>| weight.grad(&gradients).unwrap().into_data();
    [
        y.into_data(),
        x.grad(&gradients).unwrap().into_data(),
        of(&block.first.weight),
        of(&block.attention.query.weight),
    ]
}

/// The norm of the difference over that of the expected.
fn error(expected: &TensorData, found: &TensorData) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let pairs = expected.iter::<f64>().zip(found.iter::<f64>());
    norm(&mut pairs.map(|(a, b)| a - b)) / norm(&mut expected.iter::<f64>())
}

#[test]
fn a_block_has_close_gradients() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(&device);
        let x = random([2, ROWS, WIDTH], &device);
        let run = |policy: &SavedPolicy, segment| {
            device.seed(5);
            step(&block, &x, policy, segment)
        };
        run(&SavedPolicy::Keep, false); // initializes the parameters
        for segment in [false, true] {
            let exact = run(&SavedPolicy::Keep, segment);
            for (policy, most) in
                [(SavedPolicy::Half, 0.01), (SavedPolicy::HalfF16, 0.01 / 8.0), (SavedPolicy::Int8, 0.05)]
            {
                let close = run(&policy, segment);
                assert_eq!(exact[0], close[0], "the output");
                for (exact, close) in exact.iter().zip(&close).skip(1) {
                    let error = error(exact, close);
                    assert!(error > 0.0 && error < most, "{policy:?}, {segment}: {error}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Nothing is rounded but what is kept: the gradient of a weight is that of rounded inputs, bit by bit.
    #[test]
    fn gradients_are_those_of_rounded_inputs(
        rows in ROWS..2 * ROWS,
        dtype in 0..4usize,
        tracked: bool,
        freezes: bool,
        checkpointing: bool,
        turned: bool,
    ) {
        let _alone = alone();
        let (dtype, halves) = [
            (DType::F32, Some([DType::BF16, DType::F16])), (DType::F64, Some([DType::F32; 2])), (DType::BF16, None),
            (DType::F16, None),
        ][dtype];
        let device = devices()[usize::from(checkpointing)].clone();
        let cast = |x: Tensor<2>| x.cast(FloatDType::from(dtype));
        let new = || {
            let x = if turned { random([WIDTH, rows], &device).transpose() } else { random([rows, WIDTH], &device) };
            cast(x)
        };
        let x = new();
        let [first, second] = [(); 2].map(|()| cast(random([WIDTH, WIDTH], &device)));
        let dy = cast(random([rows, WIDTH], &device));
        let run = |x: &Tensor<2>, policy: &SavedPolicy| {
            let x = x.clone().detach().set_require_grad(tracked);
            let first = first.clone().set_require_grad(!freezes);
            let second = second.clone().set_require_grad(true);
            let y = policy.scope(|| {
                let x = copied(x.clone());
                functional::linear(x.clone(), first.clone(), None) + functional::linear(x, second.clone(), None)
            });
            let gradients = (y * dy.clone()).sum().backward();
            [x, first, second].map(|of| of.grad(&gradients).map(Tensor::into_data))
        };
        for (index, policy) in [SavedPolicy::Half, SavedPolicy::HalfF16].iter().enumerate() {
            let rounded = match halves {
                Some(halves) => x.clone().cast(FloatDType::from(halves[index])).cast(FloatDType::from(dtype)),
                None => x.clone(),
            };
            // In row-major order, as it comes back.
            let rounded = Tensor::from_data(rounded.into_data(), (&device, dtype));
            let (expected, found) = (run(&rounded, &SavedPolicy::Keep), run(&x, policy));
            prop_assert_eq!(expected, found);
        }
        let [of_x, of_first, of_second] = run(&x, &SavedPolicy::Int8);
        let exact = run(&x, &SavedPolicy::Keep);
        prop_assert_eq!(&of_x, &exact[0]); // it takes no part
        for (exact, close) in exact.iter().zip([of_x, of_first, of_second]).skip(1) {
            prop_assert_eq!(exact.is_some(), close.is_some());
            if let (Some(exact), Some(close)) = (exact, close) {
                let error = error(exact, &close);
                prop_assert!(error > 0.0 && error < 0.03, "{}", error);
            }
        }
    }
}

/// Bytes that are kept, without the records of the graph.
#[track_caller]
fn kept(device: &Device, policy: &SavedPolicy, forward: impl Fn(Tensor<2>) -> Tensor<2>) -> i64 {
    let measured = measure(
        device,
        || random([16 * ROWS, WIDTH], device).require_grad(),
        |x| policy.scope(|| forward(copied(x))), // leaves stay as they are
    );
    bytes(measured.kept)
}

/// The records of a few steps, and a weight that copies.
const SLACK: i64 = 48 << 10;

#[track_caller]
fn is_about(kept: i64, expected: i64) {
    assert!((expected..=expected + SLACK).contains(&kept), "{kept}, not {expected}");
}

const ELEMENTS: i64 = (16 * ROWS * WIDTH) as i64;

/// The bytes of a tensor.
fn of(policy: &SavedPolicy) -> i64 {
    match policy {
        SavedPolicy::Half | SavedPolicy::HalfF16 => 2 * ELEMENTS,
        SavedPolicy::Int8 => ELEMENTS + 4 * ELEMENTS / 128,
        _ => 4 * ELEMENTS,
    }
}

#[test]
fn inputs_take_fewer_bytes() {
    let _alone = alone();
    for device in devices() {
        for policy in PACKING {
            let gelus = |x| functional::silu(functional::gelu(functional::tanhshrink(x)));
            // Outputs of activations are computed again from the first input.
            is_about(kept(&device, &policy, gelus), of(&policy));
            let weights = [(); 4].map(|()| random([WIDTH, WIDTH], &device).require_grad());
            let layers = |x| weights.iter().fold(x, |x, weight| functional::linear(x, weight.clone(), None));
            is_about(kept(&device, &policy, layers), 4 * of(&policy));
        }
    }
    // Burn's own checkpointing would keep the terms of sums.
    let device = Device::flex().autodiff();
    let weights = [(); 4].map(|()| random([WIDTH, WIDTH], &device).require_grad());
    let linear: Linear = LinearConfig::new(WIDTH, WIDTH).init(&device);
    for policy in PACKING {
        // Steps that keep the same tensor share it.
        let shared = |x: Tensor<2>| {
            let y = weights.iter().map(|weight| functional::linear(x.clone(), weight.clone(), None));
            y.reduce(|a, b| a + b).unwrap()
        };
        is_about(kept(&device, &policy, shared), of(&policy));
        // A tensor that no gradient flows to.
        let constant = |x: Tensor<2>| shared(x.clone().detach() * 2.0) + x;
        is_about(kept(&device, &policy, constant), of(&policy));
        // One that a segment is computed again from, and another step takes, too.
        let with_segment =
            |x: Tensor<2>| checkpoint(&linear, x.clone(), |linear, x| linear.forward(x)) + shared(x);
        is_about(kept(&device, &policy, with_segment), of(&policy));
    }
}

/// Operations whose backward pass reads their output.
const BY_OUTPUT: [fn(Tensor<2>) -> Tensor<2>; 6] = [
    |x| functional::softmax(x, 1),
    |x| functional::softmin(x, 1),
    |x| functional::quiet_softmax(x, 1),
    |x| functional::log_softmax(x, 1),
    functional::sigmoid,
    functional::tanh,
];

/// Rounded, an output near 1 would have no slope.
#[test]
fn outputs_stay_exact() {
    let _alone = alone();
    for device in devices() {
        let x = random([ROWS, WIDTH], &device) * 10.0;
        let [weight, dy] = [[WIDTH, WIDTH], [ROWS, WIDTH]].map(|shape| random(shape, &device));
        for operation in BY_OUTPUT {
            let run = |policy: &SavedPolicy| {
                let x = x.clone().require_grad();
                // What follows does not keep it: a step at which it would be packed.
                let next = |y| functional::linear(y, weight.clone(), None);
                let y = policy.scope(|| next(next(operation(copied(x.clone())))));
                let gradients = (y * dy.clone()).sum().backward();
                x.grad(&gradients).unwrap().into_data()
            };
            let exact = run(&SavedPolicy::Keep);
            PACKING.iter().for_each(|policy| assert_eq!(exact, run(policy), "{policy:?}"));
        }
    }
}

/// Adapters keep products of their own, which are no outputs.
#[test]
fn products_of_adapters_take_fewer_bytes() {
    let _alone = alone();
    for device in devices() {
        let weight = random([16 * WIDTH, 16 * WIDTH], &device);
        let factor = |shape: [usize; 2]| Param::from_tensor(random(shape, &device));
        let lora = LoraAdapter { a: factor([16 * WIDTH, 4]), b: factor([4, 16 * WIDTH]), scale: 0.1 };
        let adapter = DoraAdapter::new(weight.clone(), lora);
        // Of fewer rows than columns, so that the product is kept, beside `x`.
        let tensor = (ROWS * 16 * WIDTH * 4) as i64;
        let kept = |policy: &SavedPolicy| {
            let input = || random([ROWS, 16 * WIDTH], &device).require_grad();
            let layer =
                |x| policy.scope(|| functional::linear_dora(copied(x), weight.clone(), &adapter, None));
            bytes(measure(&device, input, layer).kept)
        };
        let exact = kept(&SavedPolicy::Keep);
        for policy in PACKING {
            let fewer = tensor - of(&policy) * tensor / (4 * ELEMENTS);
            is_about(kept(&policy), exact - 2 * fewer);
        }
    }
}

/// A tensor that somebody held in the forward pass, so that it was not packed, is freed when the step that keeps it is done.
#[test]
fn what_others_held_goes_with_its_step() {
    let _alone = alone();
    let weight = |device: &Device| random([WIDTH, WIDTH], device).require_grad();
    for device in devices() {
        for policy in PACKING {
            let linear: Linear = LinearConfig::new(WIDTH, WIDTH).init(&device);
            let step = |x| functional::linear(x, linear.weight.val(), None);
            let segment = |x| checkpoint(&linear, x, Linear::forward);
            let keeps: [(&dyn Fn(Tensor<2>) -> Tensor<2>, bool); 3] =
                [(&step, false), (&step, true), (&segment, true)];
            for (keep, is_tracked) in keeps {
                let first = weight(&device).set_require_grad(is_tracked);
                let of_step = || {
                    let x = functional::linear(random([16 * ROWS, WIDTH], &device), first.clone(), None);
                    let y = policy.scope(|| keep(x.clone()));
                    drop(x);
                    let before = TrackingAllocator::live() as i64;
                    drop(y.sum().backward());
                    before - TrackingAllocator::live() as i64
                };
                of_step(); // pays for what is initialized lazily
                let freed = of_step();
                assert!(freed >= 4 * ELEMENTS, "{policy:?}, {is_tracked}: {freed}");
            }
        }
    }
}

/// What others hold stays as it is, and nothing more is kept.
#[test]
fn tensors_of_others_stay() {
    let _alone = alone();
    for device in devices() {
        let held = random([16 * ROWS, WIDTH], &device).require_grad();
        let weight = random([WIDTH, WIDTH], &device).require_grad();
        let linear = |x| functional::linear(x, weight.clone(), None);
        for policy in PACKING {
            let ours = |x| linear(held.clone()) + x;
            let exact = kept(&device, &SavedPolicy::Keep, ours);
            assert!(kept(&device, &policy, ours) <= exact + SLACK);
            // Burn's operation keeps its input, and so does ours.
            let with_burn = |x: Tensor<2>| linear(x.clone()) + activation::sigmoid(x).powi_scalar(3);
            let exact = kept(&device, &SavedPolicy::Keep, with_burn);
            assert!(kept(&device, &policy, with_burn) <= exact + SLACK);
        }
    }
}

/// On disk, a tensor comes back as it was; no more than a few are in memory until they are written.
#[test]
fn tensors_in_a_file() {
    const LAYERS: usize = 12;
    let _alone = alone();
    let directory = tempfile::tempdir().unwrap();
    let disk = SavedPolicy::disk(directory.path()).unwrap();
    for device in devices() {
        let weights = [(); LAYERS].map(|()| random([WIDTH, WIDTH], &device).require_grad());
        let forward = |x| weights.iter().fold(x, |x, weight| functional::linear(x, weight.clone(), None));
        assert!(kept(&device, &SavedPolicy::Keep, forward) >= LAYERS as i64 * 4 * ELEMENTS);
        // How many are written by the end is a matter of time.
        let start = || random([16 * ROWS, WIDTH], &device).require_grad();
        let on_disk = measure_layer(start, |x| disk.scope(|| forward(x)));
        assert!(bytes(on_disk.kept) <= 4 * 4 * ELEMENTS + SLACK);
        let x = random([16 * ROWS, WIDTH], &device).require_grad();
        let run = |policy: &SavedPolicy| {
            let gradients = policy.scope(|| forward(x.clone())).sum().backward();
            let of_weights = weights.iter().map(|weight| weight.grad(&gradients).unwrap().into_data());
            (x.grad(&gradients).unwrap().into_data(), of_weights.collect::<Vec<_>>())
        };
        assert_eq!(run(&SavedPolicy::Keep), run(&disk));
        // A tensor that several steps take, in and out of segments.
        let block = Block::new(&device);
        let x = random([2, ROWS, WIDTH], &device);
        for segment in [false, true] {
            let run = |policy: &SavedPolicy| {
                device.seed(5);
                step(&block, &x, policy, segment)
            };
            run(&SavedPolicy::Keep);
            for (memory, disk) in run(&SavedPolicy::Keep).iter().zip(&run(&disk)) {
                assert!(error(memory, disk) < 1e-5);
            }
        }
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "a file without a name");
    assert!(SavedPolicy::disk(directory.path().join("missing")).is_err());
    // What is on the host stays there.
    let device = Device::flex().autodiff();
    is_about(kept(&device, &SavedPolicy::Host, functional::gelu), 4 * ELEMENTS);
}

/// At the end of its scope a policy is over; the innermost one counts; a global one counts outside of all.
#[test]
fn scopes() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let gelu = |x| functional::gelu(x);
    let expect = |scope: &SavedPolicy, inner: &SavedPolicy, expected: &SavedPolicy| {
        is_about(kept(&device, scope, |x| inner.scope(|| gelu(x))), of(expected));
    };
    let [half, int8, keep] = [SavedPolicy::Half, SavedPolicy::Int8, SavedPolicy::Keep];
    expect(&half, &int8, &int8);
    expect(&int8, &SavedPolicy::HalfF16, &SavedPolicy::HalfF16);
    expect(&half, &keep, &keep);
    expect(&keep, &half, &half);
    half.clone().set_global();
    let outside = || {
        let input = || random([16 * ROWS, WIDTH], &device).require_grad();
        bytes(measure(&device, input, |x| gelu(copied(x))).kept)
    };
    is_about(outside(), of(&half));
    expect(&keep, &keep, &keep);
    keep.set_global();
    is_about(outside(), 4 * ELEMENTS);
    let caught = std::panic::catch_unwind(|| half.scope(|| panic!("in a scope")));
    assert!(caught.is_err());
    is_about(outside(), 4 * ELEMENTS);
}

/// A policy inside of another one, also in segments: what was kept for one is not taken for the other.
#[test]
fn exact_inside_of_rounded() {
    let _alone = alone();
    for device in devices() {
        let linear: Linear = LinearConfig::new(WIDTH, WIDTH).init(&device);
        let x = random([16 * ROWS, WIDTH], &device);
        let weights = [(); 2].map(|()| random([WIDTH, WIDTH], &device).require_grad());
        let disk = SavedPolicy::disk(std::env::temp_dir()).unwrap();
        for (outer, inner) in [(SavedPolicy::Int8, SavedPolicy::Keep), (SavedPolicy::Half, disk)] {
            let run = |outer: &SavedPolicy| {
                let y = outer.scope(|| {
                    let h = copied(x.clone().require_grad());
                    let a = functional::linear(h.clone(), weights[0].clone(), None);
                    let b = inner.scope(|| functional::linear(h.clone(), weights[1].clone(), None));
                    a + b + inner.scope(|| checkpoint(&linear, h, |linear, x| linear.forward(x)))
                });
                let gradients = y.sum().backward();
                let of = |weight: &Tensor<2>| weight.grad(&gradients).unwrap().into_data();
                [of(&weights[0]), of(&weights[1]), of(&linear.weight.val())]
            };
            let (exact, found) = (run(&SavedPolicy::Keep), run(&outer));
            assert!(error(&exact[0], &found[0]) < 0.05);
            assert!(error(&exact[1], &found[1]) < 1e-6 && error(&exact[2], &found[2]) < 1e-6);
        }
    }
}

/// A bias from which logits are computed again is a parameter, also where it is no leaf, such as a cast one.
#[test]
fn biases_of_heads_stay() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let classes = ROWS * WIDTH;
    let [x, weight] = [[8, WIDTH], [WIDTH, classes]].map(|shape| random(shape, &device).require_grad());
    let bias = random::<1>([classes], &device).require_grad();
    let run = |is_leaf: bool| {
        let logs = SavedPolicy::Int8.scope(|| {
            let bias = if is_leaf { bias.clone() } else { bias.clone() * 1.0 };
            let targets = Tensor::zeros([8], &device);
            functional::linear_log_prob(x.clone(), weight.clone(), Some(bias), targets, Default::default())
        });
        let gradients = logs.sum().backward();
        x.grad(&gradients).unwrap().into_data()
    };
    assert_eq!(run(false), run(true));
}

/// Leaves and parameters are part of any number of graphs, one after the other.
#[test]
fn graphs_that_share_leaves() {
    let _alone = alone();
    for device in devices() {
        let x = random([16 * ROWS, WIDTH], &device).require_grad();
        let weights = [(); 2].map(|()| random([WIDTH, WIDTH], &device).require_grad());
        let lstm: burn_memsave::nn::Lstm = burn_memsave::nn::LstmConfig::new(64, 64, true).init(&device);
        let sequence = random([2, 8, 64], &device);
        for policy in PACKING {
            let ys = policy.scope(|| {
                weights.each_ref().map(|weight| functional::linear(x.clone(), weight.clone(), None))
            });
            let gradients = ys.map(|y| y.sum().backward());
            assert!(gradients.iter().all(|gradients| x.grad(gradients).is_some()));
            let ys = policy.scope(|| [(); 2].map(|()| lstm.forward(sequence.clone(), None).0));
            let gradients = ys.map(|y| y.sum().backward());
            let weight = &lstm.output_gate.hidden_transform.weight;
            assert_eq!(
                weight.grad(&gradients[0]).unwrap().into_data(),
                weight.grad(&gradients[1]).unwrap().into_data()
            );
        }
    }
}

/// One tensor as two inputs; one that is many in memory; one that lives longer than the scope.
#[test]
fn odd_tensors() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let weight = random([WIDTH, WIDTH], &device).require_grad();
    let linear = |x| functional::linear(x, weight.clone(), None);
    for policy in PACKING {
        let twice = |x: Tensor<2>| functional::silu_gate(x.clone(), x);
        is_about(kept(&device, &policy, twice), of(&policy));
        let expanded = |x: Tensor<2>| linear(copied(x.slice_dim(0, 0..1)).expand([16 * ROWS, WIDTH]));
        let exact = kept(&device, &SavedPolicy::Keep, expanded);
        assert!(kept(&device, &policy, expanded) <= exact + SLACK);
        let blocks = |x: Tensor<2>| {
            let x = copied(x);
            // The residual is alive at the end of each scope.
            (0..8).fold(x, |x, _| policy.scope(|| linear(x.clone())) + x)
        };
        let input = || random([16 * ROWS, WIDTH], &device).require_grad();
        let kept = bytes(measure(&device, input, blocks).kept);
        // The last one is looked at in the next step.
        assert!(kept <= 7 * of(&policy) + 4 * ELEMENTS + SLACK, "{kept}");
    }
}

/// Forward passes without a backward pass are freed as Burn frees its own: in the next backward pass.
#[test]
fn abandoned_graphs_are_freed() {
    let _alone = alone();
    for device in devices() {
        let weight = random([WIDTH, WIDTH], &device).require_grad();
        let held = random([16 * ROWS, WIDTH], &device).require_grad();
        let forward = || {
            let x = random([16 * ROWS, WIDTH], &device).require_grad();
            let y = functional::linear(functional::gelu(x), weight.clone(), None);
            y + functional::linear(held.clone(), weight.clone(), None)
        };
        for is_global in [false, true] {
            let run = || if is_global { forward() } else { SavedPolicy::Int8.scope(forward) };
            if is_global {
                SavedPolicy::Int8.set_global();
            }
            let live = || {
                drop(run().sum().backward());
                TrackingAllocator::live()
            };
            live();
            let before = live();
            (0..50).for_each(|_| drop(run()));
            live();
            live();
            let after = live();
            SavedPolicy::Keep.set_global();
            assert!(after <= before + 4096, "{before} bytes before, {after} after");
        }
    }
}

/// Of an input that comes back rounded, a batch norm cannot compute its statistics again.
#[test]
fn statistics_of_rounded_inputs_are_kept() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let norm = burn_memsave::nn::BatchNormConfig::new(WIDTH).init(&device);
    let norm = Precision::f16().half_copy(&norm).expect("f16");
    for (policy, keeps) in [(SavedPolicy::Keep, false), (SavedPolicy::Int8, true)] {
        let x = random::<2>([ROWS, WIDTH], &device).cast(FloatDType::F16).require_grad();
        let (_, ledger) = policy.scope(|| ledger(&norm, x, |norm, x| norm.forward(copied(x)).sum()));
        assert_eq!(ledger.rows.iter().any(|row| row.tensor == "variance"), keeps, "{policy:?}: {ledger}");
    }
}

/// The ledger says what waits in another form.
#[test]
fn the_ledger() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let weights = [(); 2].map(|()| random([WIDTH, WIDTH], &device).require_grad());
    let linear = burn::nn::Relu::new();
    for policy in PACKING {
        let x = random([16 * ROWS, WIDTH], &device).require_grad();
        let (_y, ledger) = ledger(&linear, x, |_, x| {
            policy.scope(|| {
                let x = copied(x);
                let y = weights.each_ref().map(|weight| functional::linear(x.clone(), weight.clone(), None));
                y.into_iter().reduce(|a, b| a + b).unwrap()
            })
        });
        let rows: Vec<_> = ledger.rows.iter().filter(|row| row.tensor == "x").collect();
        assert_eq!(rows.iter().map(|row| row.bytes).collect::<Vec<_>>(), [Some(of(&policy) as u64); 2]);
        assert!(rows[1].shared);
        assert!(rows.iter().all(|row| row.reason.contains("bits")), "{ledger}");
    }
}

/// Threads have scopes of their own, and give the same as one alone.
#[test]
fn threads() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let block = Block::new(&device);
    let x = random([2, ROWS, WIDTH], &device);
    step(&block, &x, &SavedPolicy::Keep, false);
    let run = |policy: SavedPolicy| {
        let (block, x) = (block.clone(), x.clone());
        std::thread::spawn(move || {
            let y = policy.scope(|| block.forward(x.require_grad()));
            block.first.weight.grad(&(y.clone() * y).sum().backward()).unwrap().into_data()
        })
    };
    let alone = PACKING.map(|policy| run(policy).join().unwrap());
    let threads: Vec<_> = (0..4).map(|thread| run(PACKING[thread % 2].clone())).collect();
    for (thread, found) in threads.into_iter().enumerate() {
        assert_eq!(found.join().unwrap(), alone[thread % 2]);
    }
}
