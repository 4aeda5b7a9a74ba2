//! Recurrent layers against the same recurrences step by step, of tensors, and against the stock layers.
use crate::common::*;
use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::{
    BiGruConfig, BiLstmConfig, BiRnnConfig, GateController, GruConfig, LstmConfig, LstmState, RnnConfig,
    RnnState, activation::ActivationConfig,
};
use burn::tensor::{DType, Tensor, TensorData};
use burn_memsave::layers::*;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// Inputs: of the layer, its state, and the parameters of all gates, each kind cut out of one tensor.
const X: usize = 0;
const STATE: usize = 1;
const INPUT: usize = 2;
const HIDDEN: usize = 3;
const BIAS: usize = 4;

/// Options of a layer.
#[derive(Clone, Copy, Debug)]
struct Options {
    batch: usize,
    steps: usize,
    d_input: usize,
    hidden: usize,
    bias: bool,
    state: bool,
    batch_first: bool,
    reverse: bool,
    clip: Option<f64>,
    /// `input_forget` of an LSTM, `reset_after` of a GRU.
    variant: bool,
    /// Of our layers: after how many steps a state is kept, instead of gates.
    checkpoint: Option<usize>,
}

fn options() -> impl Strategy<Value = Options> {
    let sizes = [1..4usize, 1..6, 1..5, 1..6];
    let clip = prop::sample::select(vec![None, Some(0.2), Some(10.0)]);
    let checkpoint = prop::option::of(1..7usize);
    (sizes, any::<[bool; 5]>(), clip, checkpoint).prop_map(|(sizes, flags, clip, checkpoint)| {
        let [batch, steps, d_input, hidden] = sizes;
        let [bias, state, batch_first, reverse, variant] = flags;
        Options {
            batch,
            steps,
            d_input,
            hidden,
            bias,
            state,
            batch_first,
            reverse,
            clip,
            variant,
            checkpoint,
        }
    })
}

impl Options {
    /// `directions`: 1, or 2 with parameters of their own.
    fn inputs(&self, gates: usize, directions: usize) -> Vec<Input> {
        let &Self { batch, steps, d_input, hidden, .. } = self;
        let all = gates * directions;
        let x = if self.batch_first { [batch, steps, d_input] } else { [steps, batch, d_input] };
        vec![
            Input::random(x),
            Input::random([2 * directions, batch, hidden]),
            Input::random([all, d_input, hidden]),
            Input::random([all, hidden, hidden]),
            Input::random([2 * all, 1, hidden]),
        ]
    }
}

/// Gives a gate parameters that are views of the inputs, so that three gradients tell of all parameters.
fn fill(gate: &mut GateController, t: &Operands, index: usize, bias: bool) {
    let matrix = |from| {
        let matrix = t.get::<3>(from).narrow(0, index, 1).squeeze_dim::<2>(0);
        Param::initialized(ParamId::new(), matrix)
    };
    let vector = |index| {
        let vector = t.get::<3>(BIAS).narrow(0, index, 1).flatten::<1>(0, 2);
        bias.then(|| Param::initialized(ParamId::new(), vector))
    };
    gate.input_transform.weight = matrix(INPUT);
    gate.hidden_transform.weight = matrix(HIDDEN);
    gate.input_transform.bias = vector(2 * index);
    gate.hidden_transform.bias = vector(2 * index + 1);
}

/// `layer.forward(x, state)` as the options say.
macro_rules! forward {
    ($layer:expr, $x:expr, $state:expr, $checkpoint:expr) => {
        match $checkpoint {
            None => $layer.forward($x, $state),
            Some(every) => $layer.forward_checkpointed($x, $state, every),
        }
    };
}

/// Output and states as one tensor, so that gradients come from all of them.
fn together(y: Tensor<3>, states: Vec<Tensor<2>>) -> Tensor<1> {
    let states = states.into_iter().map(|state| state.flatten(0, 1));
    Tensor::cat(std::iter::once(y.flatten(0, 2)).chain(states).collect(), 0)
}

fn state(t: &Operands, index: usize) -> Tensor<2> {
    t.get::<3>(STATE).narrow(0, index, 1).squeeze_dim(0)
}

/// The products of a gate: with the input and with the hidden state.
fn products(gate: &GateController, x: Tensor<2>, h: Tensor<2>) -> [Tensor<2>; 2] {
    let linear = |linear: &burn::nn::Linear, x: Tensor<2>| {
        let y = x.matmul(linear.weight.val());
        linear.bias.iter().fold(y, |y, bias| y + bias.val().unsqueeze())
    };
    [linear(&gate.input_transform, x), linear(&gate.hidden_transform, h)]
}

/// (That of NdArray computes f64 in f32.)
fn sigmoid([a, b]: [Tensor<2>; 2]) -> Tensor<2> {
    ((a + b).neg().exp() + 1.0).recip()
}

fn clipped(x: Tensor<2>, clip: Option<f64>) -> Tensor<2> {
    match clip {
        Some(clip) => x.clamp(-clip, clip),
        None => x,
    }
}

/// The initial states: h and, in an LSTM, c.
fn initial(t: &Operands, options: &Options, count: usize) -> Vec<Tensor<2>> {
    let zeros = || {
        let x = t.get::<3>(X);
        Tensor::zeros([options.batch, options.hidden], (&x.device(), x.dtype()))
    };
    (0..count).map(|index| if options.state { state(t, index) } else { zeros() }).collect()
}

/// Runs a step function as the options say, and puts the outputs in order. (Stock makes its output in f32.)
fn sequence(
    t: &Operands,
    options: &Options,
    states: usize,
    step: impl Fn(Tensor<2>, Vec<Tensor<2>>) -> Vec<Tensor<2>>,
) -> Tensor<1> {
    let mut state = initial(t, options, states);
    let axis = usize::from(options.batch_first);
    let x = t.get::<3>(X);
    let mut outputs = vec![];
    for at in 0..options.steps {
        let at = if options.reverse { options.steps - 1 - at } else { at };
        state = step(x.clone().narrow(axis, at, 1).squeeze_dim(axis), state);
        outputs.push(state[0].clone().unsqueeze_dim::<3>(axis));
    }
    if options.reverse {
        outputs.reverse();
    }
    together(Tensor::cat(outputs, axis), state)
}

fn stock_lstm(t: &Operands, options: &Options) -> burn::nn::Lstm {
    let mut lstm = LstmConfig::new(options.d_input, options.hidden, options.bias)
        .with_batch_first(options.batch_first)
        .with_reverse(options.reverse)
        .with_clip(options.clip)
        .with_input_forget(options.variant)
        .init(t.device());
    fill(&mut lstm.input_gate, t, 0, options.bias);
    fill(&mut lstm.output_gate, t, 1, options.bias);
    fill(&mut lstm.cell_gate, t, 2, options.bias);
    lstm.forget_gate.iter_mut().for_each(|gate| fill(gate, t, 3, options.bias));
    lstm
}

fn lstm_gates(options: &Options) -> usize {
    if options.variant { 3 } else { 4 }
}

fn lstm(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let lstm = MemSaveLstm::from(stock_lstm(t, &options));
        let initial = options.state.then(|| LstmState::new(state(t, 1), state(t, 0)));
        let (y, last) = forward!(lstm, t.get(X), initial, options.checkpoint);
        together(y, vec![last.hidden, last.cell])
    }
}

fn lstm_by_steps(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let lstm = stock_lstm(t, &options);
        sequence(t, &options, 2, |x, state| {
            let [h, c] = [0, 1].map(|index| state[index].clone());
            let of = |gate| products(gate, x.clone(), h.clone());
            let i = sigmoid(of(&lstm.input_gate));
            let f = lstm.forget_gate.as_ref().map_or_else(|| 1.0 - i.clone(), |gate| sigmoid(of(gate)));
            let [x, h] = of(&lstm.cell_gate);
            let c = clipped(f * c + i * (x + h).tanh(), options.clip);
            vec![sigmoid(of(&lstm.output_gate)) * c.clone().tanh(), c]
        })
    }
}

fn stock_gru(t: &Operands, options: &Options) -> burn::nn::Gru {
    let mut gru = GruConfig::new(options.d_input, options.hidden, options.bias)
        .with_reset_after(options.variant)
        .with_clip(options.clip)
        .init(t.device());
    fill(&mut gru.reset_gate, t, 0, options.bias);
    fill(&mut gru.update_gate, t, 1, options.bias);
    fill(&mut gru.new_gate, t, 2, options.bias);
    gru
}

fn gru(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let gru = MemSaveGru::from(stock_gru(t, &options));
        let y = forward!(gru, t.get(X), options.state.then(|| state(t, 0)), options.checkpoint);
        let last = y.clone().narrow(1, options.steps - 1, 1).squeeze_dim(1);
        together(y, vec![last])
    }
}

fn gru_by_steps(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let gru = stock_gru(t, &options);
        sequence(t, &options, 1, |x, state| {
            let h = state[0].clone();
            let of = |gate, h: &Tensor<2>| products(gate, x.clone(), h.clone());
            let [r, z] = [&gru.reset_gate, &gru.update_gate].map(|gate| sigmoid(of(gate, &h)));
            let n = match options.variant {
                true => {
                    let [x, h] = of(&gru.new_gate, &h);
                    x + r * h
                }
                false => {
                    let [x, h] = of(&gru.new_gate, &(r * h.clone()));
                    x + h
                }
            };
            vec![clipped((1.0 - z.clone()) * n.tanh() + z * h, options.clip)]
        })
    }
}

fn stock_rnn(t: &Operands, options: &Options) -> burn::nn::Rnn {
    let mut rnn = RnnConfig::new(options.d_input, options.hidden, options.bias)
        .with_batch_first(options.batch_first)
        .with_reverse(options.reverse)
        .with_clip(options.clip)
        .init(t.device());
    fill(&mut rnn.gate, t, 0, options.bias);
    rnn
}

fn rnn(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let rnn = MemSaveRnn::from(stock_rnn(t, &options));
        let initial = options.state.then(|| RnnState::new(state(t, 0)));
        let (y, last) = forward!(rnn, t.get(X), initial, options.checkpoint);
        together(y, vec![last.hidden])
    }
}

fn rnn_by_steps(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let rnn = stock_rnn(t, &options);
        sequence(t, &options, 1, |x, state| {
            let [x, h] = products(&rnn.gate, x, state[0].clone());
            vec![clipped((x + h).tanh(), options.clip)]
        })
    }
}

fn check(options: &Options, gates: usize, setting: Setting) -> Check {
    Check::new(options.inputs(gates, 1), setting)
}

#[test]
fn lstm_equals_its_steps() {
    for_all(20, (options(), settings()), |(options, setting)| {
        check(&options, lstm_gates(&options), setting).compare::<1>(&lstm(options), &lstm_by_steps(options));
    });
}

#[test]
fn gru_equals_its_steps() {
    for_all(20, (options(), settings()), |(options, setting)| {
        let options = Options { batch_first: true, reverse: false, ..options };
        check(&options, 3, setting).compare::<1>(&gru(options), &gru_by_steps(options));
    });
}

#[test]
fn rnn_equals_its_steps() {
    for_all(20, (options(), settings()), |(options, setting)| {
        check(&options, 1, setting).compare::<1>(&rnn(options), &rnn_by_steps(options));
    });
}

const USUAL: Options = Options {
    batch: 2,
    steps: 4,
    d_input: 3,
    hidden: 5,
    bias: true,
    state: true,
    batch_first: true,
    reverse: false,
    clip: None,
    variant: true,
    checkpoint: None,
};

/// Rows for several threads, steps for several chunks.
#[test]
fn long_sequences_and_large_batches_equal_their_steps() {
    for (batch, steps, hidden, checkpoint) in [(1, 40, 3, 7), (5, 9, 4, 3), (40, 2, 260, 1)] {
        for (batch_first, checkpoint) in
            [true, false].into_iter().flat_map(|first| [(first, None), (first, Some(checkpoint))])
        {
            let sizes = Options { batch, steps, hidden, ..USUAL };
            let options = Options { batch_first, reverse: true, variant: false, checkpoint, ..sizes };
            let check = |gates: usize| {
                let mut inputs = options.inputs(gates, 1);
                inputs[HIDDEN] = Input::between([gates, hidden, hidden], -0.3..0.3);
                Check::new(inputs, Setting::of(DType::F64)).on(Backend::Flex)
            };
            check(4).compare::<1>(&lstm(options), &lstm_by_steps(options));
            check(1).compare::<1>(&rnn(options), &rnn_by_steps(options));
            if batch_first {
                let options = Options { reverse: false, ..options };
                check(3).compare::<1>(&gru(options), &gru_by_steps(options));
            }
        }
    }
}

/// Inputs in half precision, as tensors of any type can hold them.
fn inputs_of_half(options: Options, gates: usize, seed: u64, dtype: DType) -> Vec<Input> {
    let Options { batch, steps, d_input, hidden, .. } = options;
    let rounded = |shape: [usize; 3], index, range| {
        let values = uniform(shape.iter().product(), 5 * seed + index, range);
        Input::given(shape, numbers(&TensorData::new(values, shape).convert_dtype(dtype)))
    };
    vec![
        rounded([batch, steps, d_input], 1, 0.5..1.0),
        rounded([2, batch, hidden], 2, -1.0..1.0),
        rounded([gates, d_input, hidden], 3, -0.5..0.5),
        rounded([gates, hidden, hidden], 4, -0.5..0.5),
        rounded([2 * gates, 1, hidden], 5, -0.5..0.5),
    ]
}

/// The sum of the squares of what is off.
fn squares(gradient: &[f64], truth: &[f64]) -> f64 {
    gradient.iter().zip(truth).map(|(gradient, truth)| (gradient - truth).powi(2)).sum()
}

/// Errors against f64 are not above those of the steps, recorded by autodiff in the same precision: over many draws, since the
/// elements of one have most of their errors in common.
#[test]
fn half_precision_equals_the_steps() {
    let sizes = Options { batch: 4, steps: 5, d_input: 16, hidden: 24, ..USUAL };
    for dtype in HALF {
        let check = |name: &str, options: Options, gates: usize, ours: Op<1>, steps: Op<1>| {
            let mut errors = [[0.0; 2]; 5];
            for seed in 0..12 {
                let inputs = inputs_of_half(options, gates, seed, dtype);
                let gradients = |dtype, op| {
                    Check::new(inputs.clone(), Setting { seed, ..Setting::of(dtype) }).gradients(op)
                };
                let truth = gradients(DType::F64, steps);
                for (side, op) in [ours, steps].into_iter().enumerate() {
                    for (input, gradient) in gradients(dtype, op).iter().enumerate() {
                        errors[input][side] += squares(gradient, &truth[input]);
                    }
                }
            }
            for (input, [ours, stock]) in errors.into_iter().enumerate() {
                assert!(
                    ours <= stock,
                    "{name}, {dtype:?}: gradient of input {input}: squared error {ours:e}, by steps {stock:e}"
                );
            }
        };
        let options = Options { variant: false, ..sizes };
        check("lstm", options, 4, &lstm(options), &lstm_by_steps(options));
        check("rnn", sizes, 1, &rnn(sizes), &rnn_by_steps(sizes));
        for variant in [false, true] {
            let options = Options { variant, ..sizes };
            check("gru", options, 3, &gru(options), &gru_by_steps(options));
        }
    }
}

/// Sums over many steps and many segments are narrowed once: their errors against f64 are far below those of autodiff's, which
/// adds up step by step in half precision.
#[test]
fn sums_over_many_steps_are_made_in_f32() {
    for dtype in HALF {
        let check = |name: &str, options: Options, gates: usize, ours: Op<1>, steps: Op<1>| {
            let inputs = inputs_of_half(options, gates, 0, dtype);
            let gradients = |dtype, op| {
                let setting = Setting { reading: Reading::Sum, ..Setting::of(dtype) };
                Check::new(inputs.clone(), setting).gradients(op)
            };
            let truth = gradients(DType::F64, steps);
            let [ours, stock] = [ours, steps].map(|op| gradients(dtype, op));
            for input in [INPUT, HIDDEN, BIAS] {
                let [ours, stock] = [&ours, &stock].map(|all| squares(&all[input], &truth[input]));
                assert!(
                    9.0 * ours < stock,
                    "{name}, {dtype:?}, {options:?}: gradient of input {input}: squared error {ours:e}, by steps {stock:e}"
                );
            }
        };
        for checkpoint in [None, Some(1), Some(20)] {
            let options = Options { steps: 400, variant: false, checkpoint, ..USUAL };
            check("lstm", options, 4, &lstm(options), &lstm_by_steps(options));
            check("rnn", options, 1, &rnn(options), &rnn_by_steps(options));
            for variant in [false, true] {
                let options = Options { variant, ..options };
                check("gru", options, 3, &gru(options), &gru_by_steps(options));
            }
        }
    }
}

#[test]
fn layers_are_differentiated() {
    for (variant, clip) in [(false, None), (true, None), (false, Some(0.3)), (true, Some(0.3))] {
        let options = Options { variant, clip, reverse: true, ..USUAL };
        check(&options, lstm_gates(&options), Setting::default()).differentiate::<1>(&lstm(options));
        check(&options, 1, Setting::default()).differentiate::<1>(&rnn(options));
        let options = Options { reverse: false, ..options };
        check(&options, 3, Setting::default()).differentiate::<1>(&gru(options));
    }
}

/// A loss of the output only, of either final state and of both; and the input beside it.
#[test]
fn every_output_has_its_gradient() {
    for checkpoint in [None, Some(3)] {
        let options = Options { variant: false, checkpoint, ..USUAL };
        let count = options.batch * options.hidden;
        let (ours, truth) = (lstm(options), lstm_by_steps(options));
        let outputs = options.steps * count;
        for (start, len) in [(0, outputs), (outputs, count), (outputs + count, count), (outputs, 2 * count)] {
            let cut = |t: &Operands, y: Tensor<1>| y.narrow(0, start, len) + t.get::<3>(X).sum();
            check(&options, 4, Setting::default()).compare::<1>(&|t| cut(t, ours(t)), &|t| cut(t, truth(t)));
        }
    }
}

/// One final state alone: the other outputs are dropped.
#[test]
fn the_final_state_alone_has_its_gradient() {
    let options = Options { variant: false, ..USUAL };
    for cell in [false, true] {
        let of = move |state: LstmState<2>| if cell { state.cell } else { state.hidden };
        let initial = |t: &Operands| Some(LstmState::new(state(t, 1), state(t, 0)));
        check(&options, 4, Setting::default()).compare::<2>(
            &|t| of(MemSaveLstm::from(stock_lstm(t, &options)).forward(t.get(X), initial(t)).1),
            &|t| of(stock_lstm(t, &options).forward(t.get(X), initial(t)).1),
        );
    }
}

#[test]
fn layers_equal_stock() {
    for_all(16, options(), |options| {
        let setting = Setting::default();
        check(&options, lstm_gates(&options), setting).compare::<1>(&lstm(options), &|t| {
            let initial = options.state.then(|| LstmState::new(state(t, 1), state(t, 0)));
            let (y, last) = stock_lstm(t, &options).forward(t.get(X), initial);
            together(y, vec![last.hidden, last.cell])
        });
        check(&options, 1, setting).compare::<1>(&rnn(options), &|t| {
            let initial = options.state.then(|| RnnState::new(state(t, 0)));
            let (y, last) = stock_rnn(t, &options).forward(t.get(X), initial);
            together(y, vec![last.hidden])
        });
        let options = Options { batch_first: true, ..options };
        check(&options, 3, setting).compare::<1>(&gru(options), &|t| {
            let y = stock_gru(t, &options).forward(t.get(X), options.state.then(|| state(t, 0)));
            let last = y.clone().narrow(1, options.steps - 1, 1).squeeze_dim(1);
            together(y, vec![last])
        });
    });
}

/// The layers of the two directions have parameters of their own.
macro_rules! same_in_both_directions {
    ($options:expr, $gates:expr, $ours:ty, |$t:ident| $stock:expr, $initial:expr, |$outcome:ident| $result:expr) => {{
        let check = Check::new($options.inputs($gates, 2), Setting::default());
        check.compare::<1>(
            &|$t| {
                let $outcome = forward!(<$ours>::from($stock), $t.get(X), $initial, $options.checkpoint);
                $result
            },
            &|$t| {
                let $outcome = $stock.forward($t.get(X), $initial);
                $result
            },
        );
    }};
}

#[test]
fn both_directions_equal_stock() {
    for_all(12, options(), |options| {
        let Options { d_input, hidden, bias, batch_first, clip, variant, .. } = options;
        let states = |t: &Operands, first: usize| t.get::<3>(STATE).narrow(0, first, 2);
        let flat = |state: Tensor<3>| state.flatten::<2>(0, 1);
        let gates = lstm_gates(&options);
        same_in_both_directions!(
            options,
            gates,
            MemSaveBiLstm,
            |t| {
                let config = BiLstmConfig::new(d_input, hidden, bias).with_batch_first(batch_first);
                let mut layer = config.with_clip(clip).with_input_forget(variant).init(t.device());
                for (index, lstm) in [&mut layer.forward, &mut layer.reverse].into_iter().enumerate() {
                    fill(&mut lstm.input_gate, t, gates * index, bias);
                    fill(&mut lstm.output_gate, t, gates * index + 1, bias);
                    fill(&mut lstm.cell_gate, t, gates * index + 2, bias);
                    lstm.forget_gate.iter_mut().for_each(|gate| fill(gate, t, gates * index + 3, bias));
                }
                layer
            },
            options.state.then(|| LstmState::new(states(t, 0), states(t, 2))),
            |outcome| together(outcome.0, vec![flat(outcome.1.cell), flat(outcome.1.hidden)])
        );
        same_in_both_directions!(
            options,
            3,
            MemSaveBiGru,
            |t| {
                let config = BiGruConfig::new(d_input, hidden, bias).with_batch_first(batch_first);
                let mut layer = config.with_clip(clip).with_reset_after(variant).init(t.device());
                for (index, gru) in [&mut layer.forward, &mut layer.reverse].into_iter().enumerate() {
                    fill(&mut gru.update_gate, t, 3 * index, bias);
                    fill(&mut gru.reset_gate, t, 3 * index + 1, bias);
                    fill(&mut gru.new_gate, t, 3 * index + 2, bias);
                }
                layer
            },
            options.state.then(|| states(t, 0)),
            |outcome| together(outcome.0, vec![flat(outcome.1)])
        );
        same_in_both_directions!(
            options,
            1,
            MemSaveBiRnn,
            |t| {
                let config = BiRnnConfig::new(d_input, hidden, bias).with_batch_first(batch_first);
                let mut layer = config.with_clip(clip).init(t.device());
                fill(&mut layer.forward.gate, t, 0, bias);
                fill(&mut layer.reverse.gate, t, 1, bias);
                layer
            },
            options.state.then(|| RnnState::new(states(t, 0))),
            |outcome| together(outcome.0, vec![flat(outcome.1.hidden)])
        );
    });
}

/// With other activations than the usual the forward pass is Burn's own.
#[test]
fn unusual_activations_equal_stock() {
    let device = Backend::Flex.autodiff_devices()[0].clone();
    let x = || tensor::<3>(uniform(24, 1, -1.0..1.0), &[2, 4, 3], &device, DType::F32);
    let same = |ours: Tensor<3>, stock: Tensor<3>| ours.into_data().assert_eq(&stock.into_data(), true);
    let lstm = LstmConfig::new(3, 5, true).with_hidden_activation(ActivationConfig::Relu).init(&device);
    let expected = lstm.forward(x(), None).0;
    same(MemSaveLstm::from(lstm).forward(x(), None).0, expected);
    let gru = GruConfig::new(3, 5, true).with_gate_activation(ActivationConfig::Tanh).init(&device);
    let expected = gru.forward(x(), None);
    same(MemSaveGru::from(gru).forward(x(), None), expected);
    let rnn = RnnConfig::new(3, 5, true).with_hidden_activation(ActivationConfig::Gelu).init(&device);
    let expected = rnn.forward(x(), None).0;
    same(MemSaveRnn::from(rnn).forward(x(), None).0, expected);
    let both = BiGruConfig::new(3, 5, true).with_hidden_activation(ActivationConfig::Relu).init(&device);
    let expected = both.forward(x(), None).0;
    same(MemSaveBiGru::from(both).forward(x(), None).0, expected);
}

/// Step by step, as stock does it.
#[test]
fn an_lstm_runs_over_an_iterator() {
    let device = Backend::Flex.device();
    let x = tensor::<3>(uniform(24, 1, -1.0..1.0), &[2, 4, 3], &device, DType::F32);
    let lstm = MemSaveLstm::from(LstmConfig::new(3, 5, true).init(&device));
    let (y, _) = lstm.forward_iter(x.clone().iter_dim(1).enumerate(), None, 2, 4, &device);
    let expected = numbers(&lstm.forward(x, None).0.into_data());
    for (y, expected) in numbers(&y.into_data()).into_iter().zip(expected) {
        assert!((y - expected).abs() < 1e-6, "{y} instead of {expected}");
    }
}

/// What does not fit is for Burn to refuse.
#[test]
fn what_stock_refuses_is_refused() {
    let device = Backend::Flex.device();
    let refused = |run: &dyn Fn()| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).expect_err("refused");
        let text = panic.downcast_ref::<String>().cloned();
        text.or_else(|| panic.downcast_ref::<&str>().map(|text| text.to_string())).unwrap_or_default()
    };
    let stock = LstmConfig::new(3, 5, true).init(&device);
    let ours = MemSaveLstm::from(stock.clone());
    for (features, batch, hidden) in [(2, 2, 5), (7, 2, 5), (3, 2, 4), (3, 3, 5)] {
        let x = || Tensor::<3>::zeros([2, 4, features], &device);
        let state = || {
            let state = || Tensor::zeros([batch, hidden], &device);
            Some(LstmState::new(state(), state()))
        };
        assert_eq!(
            refused(&|| drop(ours.forward(x(), state()))),
            refused(&|| drop(stock.forward(x(), state())))
        );
    }
}

/// Counts the bytes that every thread asks for.
struct Counting;

thread_local! {
    static ALLOCATED: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: everything goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no counter any more.
        let _ = ALLOCATED.try_with(|bytes| bytes.set(bytes.get() + layout.size()));
        // SAFETY: the caller's promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promises.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Gives parameters a type.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| tensor.cast(self.0).detach().require_grad())
    }
}

/// The time is linear in the number of steps: the second half of the steps allocates what the first does. (A step that copied
/// all steps would allocate them.) In half precision a step reads its rows as views.
#[test]
fn a_step_costs_the_same_however_many_there_are() {
    let device = Backend::Flex.autodiff_devices()[0].clone();
    let [d_input, hidden] = [4, 16];
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let check = |name: &str, forward: &dyn Fn(Tensor<3>) -> Tensor<3>| {
            let allocated = |steps: usize| {
                let x = Tensor::<3>::ones([1, steps, d_input], (&device, dtype)).require_grad();
                let before = ALLOCATED.get();
                drop(forward(x).sum().backward());
                ALLOCATED.get() - before
            };
            let [first, both] = [500, 1000].map(allocated);
            assert!(
                both - first < first + first / 10,
                "{name} of {dtype:?}: {first} bytes for 500 steps, {both} for 1000"
            );
        };
        for input_forget in [false, true] {
            let config = LstmConfig::new(d_input, hidden, true).with_input_forget(input_forget);
            let lstm = MemSaveLstm::from(config.init(&device)).map(&mut Cast(dtype));
            check("lstm", &|x| lstm.forward(x, None).0);
            check("lstm with checkpoints", &|x| lstm.forward_checkpointed(x, None, 30).0);
        }
        for reset_after in [false, true] {
            let config = GruConfig::new(d_input, hidden, true).with_reset_after(reset_after);
            let gru = MemSaveGru::from(config.init(&device)).map(&mut Cast(dtype));
            check("gru", &|x| gru.forward(x, None));
        }
        let rnn = MemSaveRnn::from(RnnConfig::new(d_input, hidden, true).init(&device)).map(&mut Cast(dtype));
        check("rnn", &|x| rnn.forward(x, None).0);
    }
}
