//! Runs a recurrent layer over a sequence in one operation.
use super::GateController;
use crate::nn::Linear;
use crate::nn::activation::Activation;
use crate::ops::{OptionalTensors, Recurrence, RecurrentOps, RecurrentOutput};
use burn::backend::Dispatch;
use burn::tensor::{DType, Tensor};

/// Hidden states, and hidden and cell state after the last step.
pub(super) type Outcome = (Tensor<3>, Tensor<2>, Tensor<2>);

/// The result, if the operation can compute it: the sequences are not empty, and the operands fit and have one
/// floating-point dtype.
pub(super) fn run(
    recurrence: Recurrence,
    x: &Tensor<3>,
    h: Option<&Tensor<2>>,
    c: Option<&Tensor<2>>,
    gates: &[&GateController],
) -> Option<Outcome> {
    let dtype = x.dtype();
    let [first, second, d_input] = x.dims();
    let batch = if recurrence.batch_first { first } else { second };
    let [_, hidden] = gates.first()?.input_transform.weight.shape().dims();
    let floats = matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16);
    let clips = recurrence.clip.is_none_or(|clip| clip >= 0.0);
    let fits_state = |state: &&Tensor<2>| state.dims() == [batch, hidden] && state.dtype() == dtype;
    let not_empty = first * second * d_input * hidden > 0;
    if !(floats && clips && not_empty && h.iter().chain(&c).all(fits_state)) {
        return None;
    }
    let dispatch = |state: Option<&Tensor<2>>| state.map(|state| state.clone().into_dispatch());
    let mut operands = vec![dispatch(h), dispatch(c)];
    for gate in gates {
        for (linear, d_input) in [(&gate.input_transform, d_input), (&gate.hidden_transform, hidden)] {
            let (weight, bias) = parameters(linear);
            let fits = weight.dims() == [d_input, hidden] && weight.dtype() == dtype;
            if !(fits && bias.iter().all(|bias| bias.dims() == [hidden] && bias.dtype() == dtype)) {
                return None;
            }
            operands.extend([Some(weight.into_dispatch()), bias.map(Tensor::into_dispatch)]);
        }
    }
    let x = x.clone().into_dispatch();
    let RecurrentOutput { y, h, c } = Dispatch::memsave_recurrent(x, OptionalTensors(operands), recurrence);
    Some((Tensor::from_dispatch(y), Tensor::from_dispatch(h), Tensor::from_dispatch(c)))
}

fn parameters(linear: &Linear) -> (Tensor<2>, Option<Tensor<1>>) {
    (linear.weight.val(), linear.bias.as_ref().map(|bias| bias.val()))
}

/// The two ways to run a layer over a sequence, which differ in what its `forward_with` keeps.
macro_rules! forward_methods {
    ($(#[$docs:meta])* $layer:ident: $state:ty => $output:ty) => {
        impl $layer {
            $(#[$docs])*
            pub fn forward(&self, batched_input: Tensor<3>, state: Option<$state>) -> $output {
                self.forward_with(batched_input, state, None)
            }

            /// [`forward`](Self::forward), but keeps one state for `every` steps instead of the gates. The backward pass
            /// computes the gates again, for one stretch of steps at a time: there is less to keep, for the time of one more
            /// forward pass. With `every` near the square root of the number of steps the peak is lowest. The input and the
            /// parameters are kept, too (no copies).
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

/// Whether the activations are the usual ones: sigmoids for the gates, hyperbolic tangents for the others.
pub(super) fn are_sigmoid_and_tanh(gates: &[&Activation], others: &[&Activation]) -> bool {
    gates.iter().all(|activation| matches!(activation, Activation::Sigmoid(_)))
        && others.iter().all(|activation| matches!(activation, Activation::Tanh(_)))
}

/// One direction of a state `[2, batch, hidden]`.
pub(super) fn direction(state: &Tensor<3>, index: usize) -> Tensor<2> {
    state.clone().narrow(0, index, 1).squeeze_dim(0)
}
