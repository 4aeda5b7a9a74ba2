//! The layers under test, and the same recurrences written step by step with tensors.
use super::*;
use burn::nn::{GruConfig, LstmConfig, LstmState, RnnConfig, RnnState};
use burn_memsave::layers::*;

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

pub(super) fn stock_lstm(t: &Operands, options: &Options) -> burn::nn::Lstm {
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

pub(super) fn lstm_gates(options: &Options) -> usize {
    if options.variant { 3 } else { 4 }
}

pub(super) fn lstm(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let lstm = MemSaveLstm::from(stock_lstm(t, &options));
        let initial = options.state.then(|| LstmState::new(state(t, 1), state(t, 0)));
        let (y, last) = forward!(lstm, t.get(X), initial, options.checkpoint);
        together(y, vec![last.hidden, last.cell])
    }
}

pub(super) fn lstm_by_steps(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
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

pub(super) fn stock_gru(t: &Operands, options: &Options) -> burn::nn::Gru {
    let mut gru = GruConfig::new(options.d_input, options.hidden, options.bias)
        .with_reset_after(options.variant)
        .with_clip(options.clip)
        .init(t.device());
    fill(&mut gru.reset_gate, t, 0, options.bias);
    fill(&mut gru.update_gate, t, 1, options.bias);
    fill(&mut gru.new_gate, t, 2, options.bias);
    gru
}

pub(super) fn gru(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let gru = MemSaveGru::from(stock_gru(t, &options));
        let y = forward!(gru, t.get(X), options.state.then(|| state(t, 0)), options.checkpoint);
        let last = y.clone().narrow(1, options.steps - 1, 1).squeeze_dim(1);
        together(y, vec![last])
    }
}

pub(super) fn gru_by_steps(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
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

pub(super) fn stock_rnn(t: &Operands, options: &Options) -> burn::nn::Rnn {
    let mut rnn = RnnConfig::new(options.d_input, options.hidden, options.bias)
        .with_batch_first(options.batch_first)
        .with_reverse(options.reverse)
        .with_clip(options.clip)
        .init(t.device());
    fill(&mut rnn.gate, t, 0, options.bias);
    rnn
}

pub(super) fn rnn(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let rnn = MemSaveRnn::from(stock_rnn(t, &options));
        let initial = options.state.then(|| RnnState::new(state(t, 0)));
        let (y, last) = forward!(rnn, t.get(X), initial, options.checkpoint);
        together(y, vec![last.hidden])
    }
}

pub(super) fn rnn_by_steps(options: Options) -> impl Fn(&Operands) -> Tensor<1> {
    move |t| {
        let rnn = stock_rnn(t, &options);
        sequence(t, &options, 1, |x, state| {
            let [x, h] = products(&rnn.gate, x, state[0].clone());
            vec![clipped((x + h).tanh(), options.clip)]
        })
    }
}
