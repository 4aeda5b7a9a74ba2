//! Tests what a segment may consist of.
use super::*;
use burn::module::{Lora, ModuleMapper};
use burn::nn;
use burn::tensor::{Bool, DType, FloatDType, Int, Tolerance};
use burn_memsave::checkpoint::{
    Checkpointed, TensorMapper, Tensors, checkpoint_sequential, checkpoint_tiled,
};
use burn_memsave::functional as F;
use burn_memsave::nn as ours;
use burn_memsave::saved::SavedPolicy;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

#[derive(Module, Debug)]
pub struct Block {
    norm: ours::RmsNorm,
    up: ours::Linear,
    down: ours::Linear,
    dropout: ours::Dropout,
}

impl Block {
    pub fn new(width: usize, dropout: f64, device: &Device) -> Self {
        Self {
            norm: ours::RmsNormConfig::new(width).init(device),
            up: ours::LinearConfig::new(width, 2 * width).init(device),
            down: ours::LinearConfig::new(2 * width, width).init(device),
            dropout: ours::DropoutConfig::new(dropout).init(),
        }
    }

    pub fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = ours::activation::Relu::new().forward(self.up.forward(self.norm.forward(x.clone())));
        x + self.down.forward(self.dropout.forward(hidden))
    }

    fn twice(&self, x: Tensor<2>) -> Tensor<2> {
        self.forward(self.forward(x))
    }
}

#[test]
fn twice_nested_and_beside() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(6, 0.3, &device);
        let x = random([5, 6], &device);
        let once = |block: &Block, x| checkpoint(block, x, Block::forward);
        same(&block, x.clone(), true, Block::forward, once);
        same(&block, x.clone(), false, Block::forward, once);
        same(&block, x.clone(), true, Block::twice, |block, x| once(block, once(block, x)));
        same(&block, x.clone(), true, Block::twice, |block, x| checkpoint(block, x, Block::twice));
        same(&block, x.clone(), true, Block::twice, |block, x| {
            checkpoint(block, x, move |block, x| block.forward(once(block, x)))
        });
        same(&block, x.clone(), true, Block::twice, |block, x| {
            checkpoint(block, x, move |block, x| once(block, block.forward(x)))
        });
        // Parameters that are used outside, too.
        let beside = |block: &Block, x| block.down.forward(block.up.forward(block.forward(x)));
        same(&block, x.clone(), true, beside, |block, x| {
            block.down.forward(block.up.forward(checkpoint(block, x, Block::forward)))
        });
    }
}

#[test]
fn frozen_parameters_stay_frozen() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(6, 0.3, &device);
        let once = |block: &Block, x| checkpoint(block, x, Block::forward);
        let frozen = [
            Block { up: block.up.clone().freeze(), ..block.clone() },
            Block { norm: block.norm.clone().freeze(), down: block.down.clone().freeze(), ..block.clone() },
            block.clone().freeze(),
        ];
        for block in frozen {
            for tracked in [true, false] {
                same(&block, random([5, 6], &device), tracked, Block::forward, once);
            }
        }
    }
}

#[test]
fn adapters_are_trained() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(6, 0.3, &device).apply_lora(Lora::new(2, 4.0));
        same(&block, random([5, 6], &device), true, Block::forward, |block, x| {
            checkpoint(block, x, Block::forward)
        });
    }
}

#[test]
fn layers_of_burn() {
    #[derive(Module, Debug)]
    struct Stock {
        linear: nn::Linear,
        norm: nn::LayerNorm,
        gelu: nn::Gelu,
    }
    fn forward(stock: &Stock, x: Tensor<2>) -> Tensor<2> {
        x.clone() * stock.gelu.forward(stock.norm.forward(stock.linear.forward(x)))
    }
    let _alone = alone();
    for device in devices() {
        let stock = Stock {
            linear: nn::LinearConfig::new(6, 6).init(&device),
            norm: nn::LayerNormConfig::new(6).init(&device),
            gelu: nn::Gelu::new(),
        };
        let x = random([5, 6], &device);
        same(&stock, x, true, forward, |stock, x| checkpoint(stock, x, forward));
    }
}

/// A parameter that is in two places of a module, as one leaf of the graph and as two.
#[test]
fn tied_parameters() {
    #[derive(Module, Debug)]
    struct Tied {
        first: ours::Linear,
        second: ours::Linear,
    }
    fn forward(tied: &Tied, x: Tensor<2>) -> Tensor<2> {
        tied.second.forward(tied.first.forward(x).tanh())
    }
    let _alone = alone();
    for device in devices() {
        let first: ours::Linear = ours::LinearConfig::new(6, 6).init(&device);
        drop(first.forward(random([1, 6], &device)));
        let one_leaf = Tied { second: first.clone(), first };
        let two_leaves = one_leaf.valid().train();
        for tied in [one_leaf, two_leaves] {
            let device = tied.first.weight.val().device();
            let x = random([5, 6], &device);
            same(&tied, x, true, forward, |tied, x| checkpoint(tied, x, forward));
        }
    }
}

#[test]
fn running_statistics_are_updated_once() {
    let _alone = alone();
    for device in devices() {
        let x = random([5, 4, 3], &device);
        let statistics = |norm: &ours::BatchNorm| {
            [norm.running_mean.value_sync(), norm.running_var.value_sync()].map(Tensor::into_data)
        };
        let [plain, checked, untouched] = [(); 3].map(|()| ours::BatchNormConfig::new(4).init(&device));
        plain.forward(x.clone().require_grad()).sum().backward();
        checkpoint(&checked, x.clone().require_grad(), |norm, x: Tensor<3>| norm.forward(x)).sum().backward();
        assert_eq!(statistics(&plain), statistics(&checked));
        assert_ne!(statistics(&untouched), statistics(&checked));
    }
}

/// Several inputs, of which one is not read, one is not tracked and one comes twice; several outputs, of which one is not used and
/// one is an input.
#[derive(Clone)]
struct Inputs {
    x: Tensor<2>,
    again: Tensor<2>,
    unread: Tensor<1>,
    scale: Option<Tensor<2>>,
    hidden: Tensor<2, Bool>,
    rows: Vec<Tensor<1, Int>>,
}

impl Tensors for Inputs {
    fn map_tensors(self, mapper: &mut impl TensorMapper) -> Self {
        Self {
            x: self.x.map_tensors(mapper),
            again: self.again.map_tensors(mapper),
            unread: self.unread.map_tensors(mapper),
            scale: self.scale.map_tensors(mapper),
            hidden: self.hidden.map_tensors(mapper),
            rows: self.rows.map_tensors(mapper),
        }
    }
}

type Outputs = (Tensor<2>, [Tensor<2>; 2], Tensor<1, Int>);

fn several(block: &Block, inputs: Inputs) -> Outputs {
    let Inputs { x, again, scale, hidden, rows, .. } = inputs;
    let y = block.forward(x.clone() * again).mask_fill(hidden, 0.0).select(0, rows[0].clone());
    let unused = y.clone() * 2.0;
    let y = y * scale.expect("given");
    let largest = y.clone().argmax(1).flatten(0, 1);
    (y, [x, unused], largest)
}

#[test]
fn several_inputs_and_outputs() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(6, 0.3, &device);
        drop(block.forward(random([1, 6], &device)));
        let run = |forward: &dyn Fn(&Block, Inputs) -> Outputs| {
            device.seed(3);
            let leaf = random([5, 6], &device).require_grad();
            let read = random([4], &device).require_grad();
            let x = leaf.clone() * 3.0; // no leaf
            let inputs = Inputs {
                again: x.clone(),
                x,
                unread: read.clone() * 2.0,
                scale: Some(random([3, 6], &device)),
                hidden: random([5, 6], &device).greater_elem(1.0),
                rows: vec![Tensor::from_ints([4, 0, 4], &device)],
            };
            let unread = inputs.unread.clone();
            let (y, [x, _], largest) = forward(&block, inputs);
            let gradients = ((y.clone() * y).sum() + x.sum() + unread.sum()).backward();
            let of_leaves =
                [leaf.grad(&gradients).unwrap().into_data(), read.grad(&gradients).unwrap().into_data()];
            (of_leaves, gradients_of(&block, &gradients), largest.into_data())
        };
        assert_eq!(run(&several), run(&|block, inputs| checkpoint(block, inputs, several)));
    }
}

/// A parameter that takes no part has no gradient, an input has zeros.
#[test]
fn what_takes_no_part() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(6, 0.0, &device);
        let x = random([5, 6], &device).require_grad();
        let y = checkpoint(&block, (x.clone() * 2.0, x.clone()), |block, (_, x)| block.up.forward(x));
        let gradients = y.sum().backward();
        assert!(block.down.weight.grad(&gradients).is_none() && block.up.weight.grad(&gradients).is_some());
        // Constants are not tracked.
        let y = checkpoint(&block, x.clone() * 2.0, |_, x| x.zeros_like() + 1.0);
        assert!(y.is_autodiff() && !y.is_tracked());
        // Without autodiff.
        let plain = block.valid();
        let y = checkpoint(&plain, x.clone().inner(), Block::forward);
        assert!(!y.is_autodiff());
        assert_eq!(y.into_data(), plain.forward(x.inner()).into_data());
    }
}

#[test]
fn attention_with_dropout_and_random_slopes() {
    #[derive(Module, Debug)]
    struct Attending {
        attention: ours::attention::MultiHeadAttention,
        slopes: ours::activation::RRelu,
    }
    fn forward(attending: &Attending, x: Tensor<3>) -> Tensor<3> {
        let x = attending.slopes.forward(x);
        attending.attention.forward(ours::attention::MhaInput::self_attn(x)).context
    }
    let _alone = alone();
    for device in devices() {
        let attending = Attending {
            attention: ours::attention::MultiHeadAttentionConfig::new(8, 2).with_dropout(0.4).init(&device),
            slopes: ours::activation::RReluConfig::new().init(),
        };
        let x = random([2, 5, 8], &device);
        same(&attending, x, true, forward, |attending, x| checkpoint(attending, x, forward));
    }
}

struct Cast(FloatDType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| value.detach().set_require_grad(false).cast(self.0).require_grad())
    }
}

#[test]
fn other_precisions() {
    let _alone = alone();
    for device in devices() {
        for dtype in [DType::F64, DType::F16, DType::BF16] {
            let float = FloatDType::from(dtype);
            let block = Block::new(6, 0.3, &device);
            drop(block.forward(random([1, 6], &device)));
            let block = block.map(&mut Cast(float));
            let x = random([5, 6], &device).cast(float);
            same(&block, x, true, Block::forward, |block, x| checkpoint(block, x, Block::forward));
        }
    }
}

/// Threads share a generator: what each drew must be what it finds again.
#[test]
fn four_threads_at_once() {
    let _alone = alone();
    for device in devices() {
        let train = || {
            let dropout = ours::DropoutConfig::new(0.5).init();
            let block = Block::new(6, 0.0, &device);
            block.forward(random([1, 6], &device)).sum().backward();
            for _ in 0..30 {
                let x = random([40, 6], &device).abs().add_scalar(1.0).require_grad();
                let y = checkpoint(&dropout, x.clone(), |dropout, x| dropout.forward(x) * 3.0);
                let dx = x.grad(&y.clone().sum().backward()).unwrap();
                (dx * x.clone().inner())
                    .into_data()
                    .assert_approx_eq::<f32>(&y.into_data(), Default::default());
                let gradients = |y: Tensor<2>| gradients_of(&block, &(y.clone() * y).sum().backward());
                let plain = gradients(block.forward(x.clone()));
                assert_eq!(plain, gradients(checkpoint(&block, x, Block::forward)));
            }
        };
        thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(train))));
    }
}

#[test]
fn a_wrapper_has_the_record_of_its_module() {
    #[derive(Module, Debug)]
    struct Plain {
        block: Block,
        head: ours::Linear,
    }
    #[derive(Module, Debug)]
    struct Wrapped {
        block: Checkpointed<Block>,
        head: ours::Linear,
    }
    let _alone = alone();
    for device in devices() {
        let head = || ours::LinearConfig::new(6, 2).init(&device);
        let plain = Plain { block: Block::new(6, 0.0, &device), head: head() };
        let wrapped = Wrapped { block: Checkpointed::new(Block::new(6, 0.0, &device)), head: head() };
        let wrapped = wrapped.load_record(plain.clone().into_record());
        let x = random([5, 6], &device);
        let y = wrapped.head.forward(wrapped.block.run(x.clone(), Block::forward));
        assert_eq!(plain.head.forward(plain.block.forward(x)).into_data(), y.into_data());
        assert_eq!(wrapped.num_params(), plain.num_params());
        let back = plain.load_record(wrapped.clone().into_record());
        assert_eq!(back.block.up.weight.val().into_data(), wrapped.block.up.weight.val().into_data());
        let shown = format!("{wrapped}");
        assert!(shown.contains("up: MemSaveLinear"), "{shown}");
    }
}

#[test]
fn sequences() {
    let _alone = alone();
    for device in devices() {
        for blocks in [0, 1, 2, 5, 9] {
            let blocks: Vec<Block> = (0..blocks).map(|_| Block::new(6, 0.3, &device)).collect();
            let plain = |blocks: &Vec<Block>, x| blocks.iter().fold(x, |x, block| block.forward(x));
            same(&blocks, random([5, 6], &device), true, plain, |blocks, x| {
                checkpoint_sequential(blocks, x, Block::forward)
            });
        }
    }
}

/// Sums over many tiles are made in f32: no further from f64 than the whole input in half precision.
#[test]
fn many_tiles_in_half_precision_are_not_worse_than_the_whole() {
    let _alone = alone();
    for device in devices() {
        device.seed(7);
        for dtype in [FloatDType::BF16, FloatDType::F16] {
            let block = Block::new(16, 0.0, &device);
            drop(block.forward(random([1, 16], &device)));
            let block = block.map(&mut Cast(dtype));
            let of_f64 = block.clone().map(&mut Cast(FloatDType::F64));
            let x = random([512, 16], &device).cast(dtype);
            let run = |block: &Block, x: Tensor<2>, tile: Option<usize>| -> Vec<f64> {
                let y = match tile {
                    Some(tile) => checkpoint_tiled(block, x, 0, tile, Block::forward),
                    None => block.forward(x),
                };
                let gradients = y.cast(FloatDType::F64).powf_scalar(2.0).mean().backward();
                let all = gradients_of(block, &gradients).into_iter();
                all.flat_map(|(_, gradient)| {
                    gradient.expect("it is tracked").iter::<f64>().collect::<Vec<_>>()
                })
                .collect()
            };
            let exact = run(&of_f64, x.clone().cast(FloatDType::F64), None);
            let error = |found: Vec<f64>| {
                assert_eq!(found.len(), exact.len());
                let square = |(a, b): (f64, &f64)| (a - b).powi(2);
                let squares: f64 = found.into_iter().zip(&exact).map(square).sum();
                (squares / exact.iter().map(|x| x * x).sum::<f64>()).sqrt()
            };
            let whole = error(run(&block, x.clone(), None));
            for tile in [1, 2, 8] {
                let tiles = error(run(&block, x.clone(), Some(tile)));
                assert!(tiles <= 1.1 * whole, "{dtype:?}, {tile}: {tiles}, of the whole {whole}");
            }
        }
    }
}

/// The same but for the order of sums over tiles.
#[test]
fn tiles() {
    let _alone = alone();
    for device in devices() {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F64, 1e-10), (DType::BF16, 2e-2)] {
            let block = Block::new(6, 0.0, &device);
            drop(block.forward(random([1, 6], &device)));
            let block = block.map(&mut Cast(dtype.into()));
            let frozen = Block { up: block.up.clone().freeze(), ..block.clone() };
            for (block, tracked) in [(&block, true), (&frozen, true), (&block, false)] {
                let x = random([13, 6], &device).cast(FloatDType::from(dtype));
                let run = |tile: Option<usize>| {
                    let x = x.clone().detach().set_require_grad(tracked);
                    let y = match tile {
                        Some(tile) => checkpoint_tiled(block, x.clone(), 0, tile, Block::forward),
                        None => block.forward(x.clone()),
                    };
                    let gradients = (y.clone() * y.clone()).sum().backward();
                    let of_x = x.grad(&gradients).map(Tensor::into_data);
                    let mut all = vec![Some(y.into_data()), of_x];
                    all.extend(gradients_of(block, &gradients).into_iter().map(|(_, gradient)| gradient));
                    all
                };
                let whole = run(None);
                for tile in [1, 4, 13, 20] {
                    for (tiled, whole) in run(Some(tile)).into_iter().zip(&whole) {
                        assert_eq!(tiled.is_some(), whole.is_some());
                        let Some((tiled, whole)) = tiled.zip(whole.clone()) else { continue };
                        assert_eq!((tiled.dtype(), tiled.shape()), (whole.dtype(), whole.shape()));
                        let scale = whole.iter::<f64>().fold(0.0, |scale: f64, v| scale.max(v.abs()));
                        for (a, b) in tiled.iter::<f64>().zip(whole.iter::<f64>()) {
                            assert!((a - b).abs() <= tolerance * scale, "{dtype:?}, {tile}: {a}, {b}");
                        }
                    }
                }
            }
        }
        // Nothing is tracked.
        let block = Block::new(6, 0.0, &device).freeze();
        let x = random([13, 6], &device);
        let y = checkpoint_tiled(&block, x.clone(), 0, 4, Block::forward);
        assert!(!y.is_tracked());
        y.into_data().assert_approx_eq::<f32>(&block.forward(x).into_data(), Tolerance::default());
    }
}

#[test]
#[should_panic = "a tile of 4 gives 3 along axis 0"]
fn tiles_that_lose_elements() {
    let _alone = alone();
    let [device, _] = devices();
    let x = random([8, 6], &device).require_grad();
    checkpoint_tiled(&Vec::<ours::Linear>::new(), x, 0, 4, |_, x| x.slice(0..3));
}

/// What `Module::train` would not give back: a parameter that requires gradients though it was frozen, and a module for validation
/// in a graph.
#[test]
fn modules_are_as_they_were() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(6, 0.3, &device);
        drop(block.forward(random([1, 6], &device)));
        let up = block.up.clone().freeze();
        let up = ours::Linear { weight: up.weight.clone().map(Tensor::require_grad), ..up };
        let thawed = Block { up, ..block.clone() };
        assert!(thawed.up.weight.val().is_require_grad());
        let once = |block: &Block, x| checkpoint(block, x, Block::forward);
        same(&thawed, random([5, 6], &device), true, Block::forward, once);
        same(&block.valid(), random([5, 6], &device), true, Block::forward, once);
    }
}

/// Parameters that are results of other operations: as after a step of an optimizer that is differentiated.
#[test]
fn parameters_that_are_no_leaves() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(6, 0.3, &device);
        drop(block.forward(random([1, 6], &device)));
        let run = |forward: &dyn Fn(&Block, Tensor<2>) -> Tensor<2>| {
            device.seed(5);
            let leaf = random([6, 12], &device).require_grad();
            let weight = block.up.weight.clone().map(|_| leaf.clone() * 2.0);
            let up = ours::Linear { weight, ..block.up.clone() };
            let block = Block { up, ..block.clone() };
            let gradients = forward(&block, random([5, 6], &device)).sum().backward();
            (leaf.grad(&gradients).map(Tensor::into_data), gradients_of(&block.down, &gradients))
        };
        let checked = run(&|block, x| checkpoint(block, x, Block::forward));
        assert!(checked.0.is_some());
        assert_eq!(run(&Block::forward), checked);
        let unread =
            |block: &Block, x: Tensor<2>| block.down.forward(block.dropout.forward(x.repeat_dim(1, 2)));
        let (of_leaf, _) = run(&|block, x| checkpoint(block, x, unread));
        assert_eq!(of_leaf.unwrap(), Tensor::<2>::zeros([6, 12], &device).into_data());
    }
}

/// Tensors in a module that are no parameters.
#[test]
fn constants() {
    let _alone = alone();
    for device in devices() {
        let rotary: ours::RotaryEncoding = ours::RotaryEncodingConfig::new(5, 8).init(&device);
        let x = random([2, 5, 8], &device);
        let forward = |rotary: &ours::RotaryEncoding, x: Tensor<3>| rotary.forward(x);
        same(&rotary, x.clone(), true, forward, |rotary, x| {
            checkpoint(rotary, x, |rotary, x| rotary.forward(x))
        });
        let stock: nn::PositionalEncoding = nn::PositionalEncodingConfig::new(8).init(&device);
        let forward = |encoding: &nn::PositionalEncoding, x: Tensor<3>| encoding.forward(x).tanh();
        same(&stock, x, true, forward, |encoding, x| {
            checkpoint(encoding, x, |encoding, x| encoding.forward(x).tanh())
        });
    }
}

#[derive(Module, Debug)]
struct Gated {
    linear: ours::Linear,
    dropout: ours::Dropout,
    /// Whose running statistics are no parameters, either.
    norm: Option<ours::BatchNorm>,
    /// No parameter.
    gate: Tensor<2>,
}

/// Operations of a constant, with autodiff as without.
#[test]
fn operations_of_constants() {
    let _alone = alone();
    for (device, norm) in devices().into_iter().flat_map(|device| [(device.clone(), false), (device, true)]) {
        let gate = random([5, 6], &device);
        for gate in [gate.clone(), gate.inner()] {
            // Beside running statistics it is without autodiff when it is computed again: nothing is dropped.
            let is_refused = norm && gate.is_autodiff();
            let linear = ours::LinearConfig::new(6, 6).init(&device);
            let norm = norm.then(|| ours::BatchNormConfig::new(6).init(&device));
            // (Beside them, the search for captured tensors drops elements also of what is without autodiff, and draws for that.)
            let dropout =
                ours::DropoutConfig::new(if norm.is_some() && !gate.is_autodiff() { 0.0 } else { 0.3 });
            let dropout = dropout.init();
            let forward = |gated: &Gated, x: Tensor<2>| {
                let gate = gated.dropout.forward(F::sigmoid(gated.gate.clone()));
                let y = gated.linear.forward(x) * F::silu(gate);
                gated.norm.iter().fold(y, |y, norm| norm.forward(y))
            };
            let gated = Gated { linear, dropout, norm, gate };
            if is_refused {
                let y = checkpoint(&gated, random([5, 6], &device), forward);
                let refused = catch_unwind(AssertUnwindSafe(|| drop(y.sum().backward())));
                assert!(refused.is_err());
                continue;
            }
            for tracked in [true, false] {
                same(&gated, random([5, 6], &device), tracked, forward, |gated, x| {
                    checkpoint(gated, x, forward)
                });
            }
        }
    }
}

/// What a segment keeps while it is computed is not rounded, whatever scopes are opened there.
#[test]
fn policies_within_a_segment() {
    let _alone = alone();
    for device in devices() {
        let block = Block::new(64, 0.3, &device);
        let rounded = |block: &Block, x| SavedPolicy::Int8.scope(|| block.forward(x));
        let x = random([128, 64], &device);
        same(&block, x.clone(), true, Block::forward, |block, x| checkpoint(block, x, rounded));
        same(&block, x, true, Block::forward, |block, x| {
            checkpoint(block, x, move |block, x| checkpoint(block, x, rounded))
        });
    }
}
