//! What the recurrent layers share: running over a sequence in one operation.
use super::GateController;
use crate::backend::optional::OptionalTensors;
use crate::functional::guard::{BURNS_OPERATION, Fit, Misfit, report_misfit, require, require_floats};
use crate::graph::ledger;
use crate::nn::Linear;
use crate::nn::activation::Activation;
use crate::ops::{Recurrence, RecurrentOps, RecurrentOutput};
use burn::backend::Dispatch;
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};

/// The hidden states of all steps, and the hidden and the cell state after the last.
pub(super) type Outcome = (Tensor<3>, Tensor<2>, Tensor<2>);

/// Runs the operation, if it can compute the result: the sequences must not be empty, and the operands must fit and have one
/// floating-point dtype.
pub(super) fn run(
    recurrence: Recurrence,
    x: &Tensor<3>,
    h: Option<&Tensor<2>>,
    c: Option<&Tensor<2>>,
    gates: &[&GateController],
) -> Result<Outcome, Misfit> {
    let dtype = x.dtype();
    let [first, second, d_input] = x.dims();
    let batch = if recurrence.batch_first { first } else { second };
    let [_, hidden] = gates[0].input_transform.weight.shape().dims();
    let floats = matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    require_floats(x)?;
    require(floats, Misfit::UnsupportedDtype)?;
    require(hidden > 0, Misfit::Empty)?;
    require(recurrence.clip.is_none_or(|clip| clip >= 0.0), Misfit::Bounds)?;
    for state in h.into_iter().chain(c) {
        require_operand(state, [batch, hidden], dtype)?;
    }
    let dispatch = |state: Option<&Tensor<2>>| state.map(|state| state.clone().into_dispatch());
    let mut operands = vec![dispatch(h), dispatch(c)];
    for gate in gates {
        for (linear, d_input) in [(&gate.input_transform, d_input), (&gate.hidden_transform, hidden)] {
            let (weight, bias) = parameters(linear);
            require_operand(&weight, [d_input, hidden], dtype)?;
            bias.iter().try_for_each(|bias| require_operand(bias, [hidden], dtype))?;
            operands.extend([Some(weight.into_dispatch()), bias.map(Tensor::into_dispatch)]);
        }
    }
    let x = x.clone().into_dispatch();
    let RecurrentOutput { y, h, c } = Dispatch::memsave_recurrent(x, OptionalTensors(operands), recurrence);
    Ok((Tensor::from_dispatch(y), Tensor::from_dispatch(h), Tensor::from_dispatch(c)))
}

/// Requires that a state or a parameter has this shape and dtype.
fn require_operand<const D: usize>(operand: &Tensor<D>, shape: [usize; D], dtype: DType) -> Fit {
    require(operand.dims() == shape, Misfit::Shapes)?;
    match operand.dtype() {
        found if found == dtype => Ok(()),
        DType::QFloat(_) => Err(Misfit::Quantized),
        _ => Err(Misfit::Dtypes),
    }
}

fn parameters(linear: &Linear) -> (Tensor<2>, Option<Tensor<1>>) {
    (linear.weight.val(), linear.bias.as_ref().map(|bias| bias.val()))
}

/// The outcome, or `None` if the stock layer has to run. In that case, if the input, the state or a parameter of the layer is
/// tracked, the ledger says why, under the module of `gate`.
pub(super) fn accepted<T>(
    operation: &'static str,
    outcome: Result<T, Misfit>,
    inputs_tracked: bool,
    layer: &impl Module,
    gate: &GateController,
) -> Option<T> {
    if let Err(misfit) = outcome
        && ledger::is_recording() // otherwise no parameter needs to be read
        && (inputs_tracked || is_any_parameter_tracked(layer))
    {
        report_misfit(operation, BURNS_OPERATION, misfit, Some(&gate.input_transform.weight.val()));
    }
    outcome.ok()
}

fn is_any_parameter_tracked(layer: &impl Module) -> bool {
    struct Tracked(bool);
    impl ModuleVisitor for Tracked {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0 |= param.val().is_tracked();
        }
    }
    let mut tracked = Tracked(false);
    layer.visit(&mut tracked);
    tracked.0
}

/// Defines the two ways to run a layer over a sequence, which differ in what `forward_with` keeps.
macro_rules! forward_methods {
    ($(#[$docs:meta])* $layer:ident: $state:ty => $output:ty) => {
        impl $layer {
            $(#[$docs])*
            pub fn forward(&self, batched_input: Tensor<3>, state: Option<$state>) -> $output {
                self.forward_with(batched_input, state, None)
            }

            /// [`forward`](Self::forward) with checkpoints. Instead of the gates it keeps one state per `every` steps, and
            /// handles of the input and the parameters. The backward pass recomputes the gates, `every` steps at a time: this
            /// takes less memory, and the time of one more forward pass. The peak is lowest with `every` near the square root
            /// of the number of steps.
            ///
            /// # Panics
            ///
            /// Panics if `every` is 0.
            pub fn forward_checkpointed(
                &self,
                batched_input: Tensor<3>,
                state: Option<$state>,
                every: usize,
            ) -> $output {
                assert!(every > 0, "forward_checkpointed: a checkpoint every 0 steps");
                self.forward_with(batched_input, state, Some(every))
            }
        }
    };
}
pub(super) use forward_methods;

/// Requires the usual activations: sigmoid for the gates, tanh for the others.
pub(super) fn require_sigmoid_and_tanh(gates: &[&Activation], others: &[&Activation]) -> Fit {
    let usual = gates.iter().all(|activation| matches!(activation, Activation::Sigmoid(_)))
        && others.iter().all(|activation| matches!(activation, Activation::Tanh(_)));
    require(usual, Misfit::Activations)
}

/// One direction of a state `[2, batch, hidden]`.
pub(super) fn direction(state: &Tensor<3>, index: usize) -> Tensor<2> {
    state.clone().narrow(0, index, 1).squeeze_dim(0)
}
