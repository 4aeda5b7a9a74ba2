//! Compares recurrent layers with the stock layers: outputs, gradients, and what they refuse.
use super::layers::*;
use super::*;
use burn::nn::{
    BiGruConfig, BiLstmConfig, BiRnnConfig, GruConfig, LstmConfig, LstmState, RnnConfig, RnnState,
    activation::ActivationConfig,
};
use burn::tensor::DType;
use burn_memsave::layers::*;

#[test]
fn layers_equal_stock() {
    for_all(8, options(), |options| {
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
    let _generator = generator();
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
    let _generator = generator();
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
    let _generator = generator();
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
