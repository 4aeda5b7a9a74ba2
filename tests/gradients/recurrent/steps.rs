//! Outputs and gradients must be those of the recurrences written step by step.
use super::layers::*;
use super::*;
use burn::nn::LstmState;
use burn::tensor::DType;
use burn_memsave::layers::MemSaveLstm;

#[test]
fn lstm_equals_its_steps() {
    for_all(12, (options(), settings()), |(options, setting)| {
        check(&options, lstm_gates(&options), setting).compare::<1>(&lstm(options), &lstm_by_steps(options));
    });
}

#[test]
fn gru_equals_its_steps() {
    for_all(12, (options(), settings()), |(options, setting)| {
        let options = Options { batch_first: true, reverse: false, ..options };
        check(&options, 3, setting).compare::<1>(&gru(options), &gru_by_steps(options));
    });
}

#[test]
fn rnn_equals_its_steps() {
    for_all(12, (options(), settings()), |(options, setting)| {
        check(&options, 1, setting).compare::<1>(&rnn(options), &rnn_by_steps(options));
    });
}

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
