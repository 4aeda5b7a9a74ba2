//! Rows of recurrent layers.
use super::{Case, Check, Input, STEPS, Shapes, Visitor, kept, row};
use burn::nn::Initializer;

const VARIANT: &[Check] = &[Check::Time];
const OTHER_SIZES: &str = "the same kernels as the row before it";
const STATES_IN_F32: &str = "the type of the states and outputs that stock makes";

/// The hidden size, in tests larger than the number of features.
fn hidden(features: usize) -> usize {
    if features == STEPS.test[2] { 24 } else { features }
}

/// Kept are the gates of every step, and `x` for the gradients of its weights.
fn gates(gates: usize) -> impl Fn(Case, Input<3>) -> usize {
    move |case, x| {
        let [batch, steps, features] = x.shape;
        let states = Input { shape: [batch, steps, hidden(features)], ..x };
        let of_gates = if case.any() { gates * states.floats() } else { 0 };
        of_gates + kept::bilinear(case, x)
    }
}

pub fn visit(visitor: &mut impl Visitor) {
    row! {
        visitor, "gru", STEPS, gates(3), config_one_way(device) |nn, [.., n]| nn::GruConfig::new(n, hidden(n), true),
        forward |nn, layer, x| layer.forward(x, None), only_f32(STATES_IN_F32)
    }
    row! {
        visitor, "lstm", STEPS, gates(4), config_one_way(device) |nn, [.., n]| nn::LstmConfig::new(n, hidden(n), true),
        forward |nn, layer, x| layer.forward(x, None).0, only_f32(STATES_IN_F32)
    }
    // The gate of an RNN is its output.
    row! {
        visitor, "rnn", STEPS, gates(1), config_one_way(device) |nn, [.., n]| nn::RnnConfig::new(n, hidden(n), true),
        forward |nn, layer, x| layer.forward(x, None).0, only_f32(STATES_IN_F32), summed()
    }
    const BOTH_WAYS: &str = "two layers and the copies of what they read";
    row! {
        visitor, "bilstm", STEPS, kept::nothing,
        config_one_way(device) |nn, [.., n]| nn::BiLstmConfig::new(n, hidden(n), true),
        forward |nn, layer, x| layer.forward(x, None).0, only_f32(STATES_IN_F32), unstated(BOTH_WAYS)
    }
    row! {
        visitor, "bigru", STEPS, kept::nothing,
        config_one_way(device) |nn, [.., n]| nn::BiGruConfig::new(n, hidden(n), true),
        forward |nn, layer, x| layer.forward(x, None).0,
        only_f32(STATES_IN_F32), unstated(BOTH_WAYS), without(VARIANT, "as bilstm")
    }
    row! {
        visitor, "birnn", STEPS, kept::nothing,
        config_one_way(device) |nn, [.., n]| nn::BiRnnConfig::new(n, hidden(n), false),
        forward |nn, layer, x| layer.forward(x, None).0,
        only_f32(STATES_IN_F32), unstated(BOTH_WAYS), without(VARIANT, "as bilstm")
    }
    for coupled in [false, true] {
        row! {
            visitor, format!("lstm, reverse, coupled {coupled}"), STEPS, gates(if coupled { 3 } else { 4 }),
            config_one_way(device) |nn, [.., n]|
                nn::LstmConfig::new(n, hidden(n), true).with_input_forget(coupled).with_reverse(true),
            forward |nn, layer, x| layer.forward(x, None).0,
            only_f32(STATES_IN_F32), without(VARIANT, OTHER_SIZES)
        }
        // The steps are the first axis.
        row! {
            visitor, format!("bilstm of steps, coupled {coupled}"), STEPS.test([6, 8, 16]), kept::nothing,
            config_one_way(device) |nn, [.., n]| {
                let lstm = nn::BiLstmConfig::new(n, hidden(n), false).with_input_forget(coupled);
                lstm.with_batch_first(false)
            },
            forward |nn, layer, x| layer.forward(x, None).0,
            only_f32(STATES_IN_F32), without(VARIANT, OTHER_SIZES),
            without(&[Check::Bytes], "its first axis is no batch")
        }
    }
    row! {
        visitor, "gate controller", Shapes::only([8, 16]), kept::nothing,
        module(device) |nn, [_, n]| nn::GateController::new(n, n, true, Initializer::Ones, device),
        forward |nn, layer, x| layer.gate_product(x.clone(), x),
        unstated("two dense layers"), without(VARIANT, "a part of others")
    }
    let [batch, steps, features] = STEPS.test;
    for test in [[batch, steps, features], [1, steps, features], [batch, 1, features], [1, 1, features]] {
        macro_rules! of_shape {
            ($($name:literal, $gates:expr, |$nn:ident, $n:ident| $config:expr, |$layer:ident, $x:ident| $forward:expr;)+) => {$(
                row! {
                    visitor, format!(concat!($name, ", {:?}"), test), Shapes::only(test), gates($gates),
                    config_one_way(device) |$nn, [.., $n]| $config, forward |$nn, $layer, $x| $forward,
                    only_f32(STATES_IN_F32), without(VARIANT, OTHER_SIZES)
                }
            )+};
        }
        of_shape! {
            "lstm", 4, |nn, n| nn::LstmConfig::new(n, hidden(n), true), |layer, x| layer.forward(x, None).0;
            "lstm, coupled", 3,
                |nn, n| nn::LstmConfig::new(n, hidden(n), true).with_input_forget(true).with_clip(Some(0.5)),
                |layer, x| layer.forward(x, None).0;
            "gru", 3, |nn, n| nn::GruConfig::new(n, hidden(n), true), |layer, x| layer.forward(x, None);
            "gru, reset before", 3,
                |nn, n| nn::GruConfig::new(n, hidden(n), true).with_reset_after(false),
                |layer, x| layer.forward(x, None);
            "rnn", 1, |nn, n| nn::RnnConfig::new(n, hidden(n), true),
                |layer, x| layer.forward(x, None).0.sum_dim(2);
            "rnn, clipped", 1, |nn, n| nn::RnnConfig::new(n, hidden(n), true).with_clip(Some(0.5)),
                |layer, x| layer.forward(x, None).0;
        }
    }
    // Kept are the input and, in an LSTM, two states every three steps. Stock has no checkpoints.
    const INTERVAL: usize = 3;
    visitor.row(super::Row {
        name: "lstm with checkpoints".into(),
        shapes: STEPS,
        kept: Box::new(|case, x: Input<3>| {
            let [batch, steps, features] = x.shape;
            let states = Input { shape: [batch, (steps - 1) / INTERVAL, hidden(features)], ..x };
            if case.any() { x.floats() + 2 * states.floats() } else { 0 }
        }),
        stock: super::Twin {
            init: Box::new(|device, [.., n]| burn::nn::LstmConfig::new(n, hidden(n), true).init(device)),
            forward: Box::new(|layer: &burn::nn::Lstm, x| layer.forward(x, None).0),
        },
        ours: super::Twin {
            init: Box::new(|device, [.., n]| {
                burn_memsave::nn::LstmConfig::new(n, hidden(n), true).init(device)
            }),
            forward: Box::new(|layer: &burn_memsave::nn::Lstm, x| {
                layer.forward_checkpointed(x, None, INTERVAL).0
            }),
        },
        notes: super::Notes::default().only_f32(STATES_IN_F32).without(VARIANT, "a trade of time for memory"),
    });
}
