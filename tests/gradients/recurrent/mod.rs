//! Compares recurrent layers with the same recurrences, written step by step with tensors, and with the stock layers.
use crate::common::*;
use burn::module::{Param, ParamId};
use burn::nn::GateController;
use burn::tensor::Tensor;
use proptest::prelude::*;

mod cost;
mod layers;
mod precision;
mod steps;
mod stock;

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
use forward;

/// Output and states as one tensor, so that gradients come from all of them.
fn together(y: Tensor<3>, states: Vec<Tensor<2>>) -> Tensor<1> {
    let states = states.into_iter().map(|state| state.flatten(0, 1));
    Tensor::cat(std::iter::once(y.flatten(0, 2)).chain(states).collect(), 0)
}

fn state(t: &Operands, index: usize) -> Tensor<2> {
    t.get::<3>(STATE).narrow(0, index, 1).squeeze_dim(0)
}

fn check(options: &Options, gates: usize, setting: Setting) -> Check {
    Check::new(options.inputs(gates, 1), setting)
}

/// A small sequence with all that a layer may have.
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
