//! The kernels of recurrent layers: what a backend computes in a step, element by element, between the matrix products.
use super::Cell;
use crate::backend::composing_backends;
use burn::backend::{
    Backend, Scalar, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{Shape, Slice};

type Float<B> = FloatTensor<B>;

/// Which part of a step is computed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    /// All of it, for any cell but a GRU that resets before the product.
    Whole(Cell),
    /// Of a GRU that resets before the product, the gates r and z (in the backward pass only r); the new state is `r h`.
    Reset,
    /// Of the same GRU, the gate n; its gate z is there already.
    New,
}

/// One step of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RecurrentStep {
    /// What to compute.
    pub stage: Stage,
    /// As in [`Recurrence`](super::Recurrence).
    pub clip: Option<f64>,
    /// As in [`Recurrence`](super::Recurrence).
    pub batch_first: bool,
    /// The size of the batch.
    pub batch: usize,
    /// The number of steps in the tensors of the gates.
    pub steps: usize,
    /// The size of the hidden state.
    pub hidden: usize,
    /// The number of the step in the sequence.
    pub at: usize,
}

impl RecurrentStep {
    /// Whether there is a cell state.
    #[cfg(any(feature = "flex", feature = "ndarray", feature = "wgpu", feature = "cuda"))]
    pub(super) fn has_cell(&self) -> bool {
        matches!(self.stage, Stage::Whole(Cell::Lstm { .. }))
    }

    pub(super) fn state_shape(&self) -> Shape {
        Shape::new([self.batch, self.hidden])
    }

    fn sequence(&self) -> Shape {
        match self.batch_first {
            true => Shape::new([self.batch, self.steps, self.hidden]),
            false => Shape::new([self.steps, self.batch, self.hidden]),
        }
    }

    fn slices(&self) -> [Slice; 3] {
        let [all, at] = [Slice::from(0..self.batch), Slice::from(self.at..self.at + 1)];
        let features = Slice::from(0..self.hidden);
        if self.batch_first { [all, at, features] } else { [at, all, features] }
    }

    /// The rows of this step in the tensor of a gate: a view if the backend has views.
    pub(super) fn read<B: Backend>(&self, values: &Float<B>) -> Float<B> {
        let values = B::float_reshape(values.clone(), self.sequence());
        B::float_reshape(B::float_slice(values, &self.slices()), self.state_shape())
    }

    /// Writes the rows of this step, in place if nothing else holds the tensor.
    pub(super) fn write<B: Backend>(&self, values: &mut Float<B>, rows: Float<B>) {
        let shape = values.shape();
        let [batch, step] = [self.batch, 1];
        let in_sequence =
            if self.batch_first { [batch, step, self.hidden] } else { [step, batch, self.hidden] };
        let rows = B::float_reshape(rows, Shape::new(in_sequence));
        // `rows` takes the place of the tensor meanwhile, so that nothing else holds it while it is written.
        let sequence = B::float_reshape(core::mem::replace(values, rows.clone()), self.sequence());
        *values = B::float_reshape(B::float_slice_assign(sequence, &self.slices(), rows), shape);
    }

    fn zeros<B: Backend>(&self, like: &Float<B>) -> Float<B> {
        B::float_zeros(self.state_shape(), &like.device(), like.dtype().into())
    }

    fn outside<B: Backend>(&self, x: Float<B>) -> Option<BoolTensor<B>> {
        let clip = self.clip?;
        let bools = get_or_init_device_settings::<B>(&x.device()).bool_dtype;
        Some(B::float_greater_elem(B::float_abs(x), clip.into(), bools))
    }

    fn clip<B: Backend>(&self, x: Float<B>) -> Float<B> {
        match self.clip {
            Some(clip) => B::float_clamp(x, Scalar::Float(-clip), Scalar::Float(clip)),
            None => x,
        }
    }

    /// The gradient of `x`, from that of the clipped `x`.
    fn clip_gradient<B: Backend>(&self, x: Float<B>, dy: Float<B>) -> Float<B> {
        match self.outside::<B>(x) {
            Some(outside) => B::float_mask_fill(dy, outside, 0.0.into()),
            None => dy,
        }
    }
}

/// Hidden and cell state, `[batch, hidden]`, or their gradients; `None` counts as zeros.
#[derive(Clone, Debug)]
pub struct RecurrentState<B: Backend> {
    /// The hidden state.
    pub h: Option<FloatTensor<B>>,
    /// The cell state, which only an LSTM has.
    pub c: Option<FloatTensor<B>>,
}

/// The kernels.
///
/// The tensors of the gates, `[batch * steps, hidden]`, hold the rows of all steps. A step writes its rows in place, which a backend can
/// do only while nothing else holds the tensor. A slice may be a view, which holds it. So no view of a gate may be alive when that gate
/// is written, or every step copies the rows of all steps. Gates are in a vector because, where operations are fused, a step takes the
/// tensors and gives back others.
pub trait RecurrentKernels: Backend {
    /// The product of states or gradients `[batch, hidden]` with the weight of a gate, or with its transpose.
    fn hidden_product(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        transposed: bool,
    ) -> FloatTensor<Self> {
        product_by_burn::<Self>(x, weight, transposed)
    }

    /// One step. Its rows in the tensors of the gates hold the products with the input, which it replaces by the gates. `products`:
    /// those with the hidden state, zeros if there are none. `biases`: those of both products. `state`: before the step. Returns the
    /// state after it.
    fn recurrent_forward(
        step: &RecurrentStep,
        gates: &mut Vec<FloatTensor<Self>>,
        products: Vec<Option<FloatTensor<Self>>>,
        biases: &[[Option<FloatTensor<Self>>; 2]],
        state: RecurrentState<Self>,
    ) -> RecurrentState<Self> {
        let add = |x: Float<Self>, bias: &Option<Float<Self>>| match bias {
            Some(bias) => Self::float_add(x, Self::float_reshape(bias.clone(), Shape::new([1, step.hidden]))),
            None => x,
        };
        let sides =
            gates.iter().zip(products).zip(biases).map(|((gate, product), [input_bias, hidden_bias])| {
                let product = product.unwrap_or_else(|| step.zeros::<Self>(gate));
                [add(step.read::<Self>(gate), input_bias), add(product, hidden_bias)]
            });
        let sides: Vec<_> = sides.collect();
        let both = |[x, h]: [Float<Self>; 2]| Self::float_add(x, h);
        let sigmoid = |sides: [Float<Self>; 2]| Self::sigmoid(both(sides));
        let tanh = |sides: [Float<Self>; 2]| Self::float_tanh(both(sides));
        let mut values: Vec<Float<Self>> = vec![];
        for (index, sides) in sides.into_iter().enumerate() {
            let value = match (step.stage, index) {
                (Stage::Whole(Cell::Rnn), _) | (Stage::Whole(Cell::Lstm { .. }), 2) | (Stage::New, 1) => {
                    tanh(sides)
                }
                (Stage::New, _) => sides[0].clone(), // z is already there
                (Stage::Whole(Cell::Gru { .. }), 2) => {
                    let [x, h] = sides;
                    Self::float_tanh(Self::float_add(x, Self::float_mul(values[0].clone(), h)))
                }
                _ => sigmoid(sides),
            };
            values.push(value);
        }
        let next = update::<Self>(step, &values, state);
        // z is already there, and must not be written: its value is a view of the gate.
        let unchanged = usize::from(step.stage == Stage::New);
        for (gate, value) in gates.iter_mut().zip(values).skip(unchanged) {
            step.write::<Self>(gate, value);
        }
        next
    }

    /// The state after a step, from the gates.
    fn recurrent_next_state(
        step: &RecurrentStep,
        gates: &[FloatTensor<Self>],
        state: RecurrentState<Self>,
    ) -> RecurrentState<Self> {
        let gates: Vec<_> = gates.iter().map(|gate| step.read::<Self>(gate)).collect();
        update::<Self>(step, &gates, state)
    }

    /// One step back. Its rows in the tensors of the gates become gradients of what went into the gates. `reset_product`: in a GRU that
    /// resets after the product, the product that r gates, whose rows become its gradient. `state`: before the step. `grads`: of the state
    /// after it. Returns the gradient of the state before the step, without the part through the products.
    fn recurrent_backward(
        step: &RecurrentStep,
        gates: &mut Vec<FloatTensor<Self>>,
        reset_product: &mut Option<FloatTensor<Self>>,
        state: RecurrentState<Self>,
        grads: RecurrentState<Self>,
    ) -> RecurrentState<Self> {
        let values: Vec<_> = gates.iter().map(|gate| step.read::<Self>(gate)).collect();
        let or_zeros = |x: Option<Float<Self>>| x.unwrap_or_else(|| step.zeros::<Self>(&values[0]));
        let (h, dh) = (or_zeros(state.h), or_zeros(grads.h));
        // The gradients of z and n, and of the state before.
        let unmix = |z: &Float<Self>, n: &Float<Self>| {
            let raw = sum::<Self>([n, &one_minus::<Self>(z.clone())], [z, &h]);
            let dh = step.clip_gradient::<Self>(raw, dh.clone());
            let dn =
                Self::float_mul(product::<Self>(&dh, &one_minus::<Self>(z.clone())), tanh_slope::<Self>(n));
            let dz = Self::float_mul(
                product::<Self>(&dh, &sigmoid_slope::<Self>(z)),
                Self::float_sub(h.clone(), n.clone()),
            );
            (dz, dn, product::<Self>(&dh, z))
        };
        let (gate_grads, before) = match step.stage {
            Stage::Whole(Cell::Rnn) => {
                let dh = step.clip_gradient::<Self>(values[0].clone(), dh.clone());
                (
                    vec![Self::float_mul(dh, tanh_slope::<Self>(&values[0]))],
                    RecurrentState { h: None, c: None },
                )
            }
            Stage::Whole(Cell::Gru { .. }) => {
                let (dz, dn, dh) = unmix(&values[1], &values[2]);
                let reset_product = reset_product.as_mut().expect("the product that r gates");
                let dr = product::<Self>(&dn, &step.read::<Self>(reset_product));
                step.write::<Self>(reset_product, product::<Self>(&dn, &values[0]));
                (
                    vec![Self::float_mul(dr, sigmoid_slope::<Self>(&values[0])), dz, dn],
                    RecurrentState { h: Some(dh), c: None },
                )
            }
            Stage::New => {
                let (dz, dn, dh) = unmix(&values[0], &values[1]);
                (vec![dz, dn], RecurrentState { h: Some(dh), c: None })
            }
            Stage::Reset => {
                let dr = Self::float_mul(product::<Self>(&dh, &h), sigmoid_slope::<Self>(&values[0]));
                (vec![dr], RecurrentState { h: Some(product::<Self>(&dh, &values[0])), c: None })
            }
            Stage::Whole(Cell::Lstm { coupled }) => {
                let (c, f) = (or_zeros(state.c), forget::<Self>(&values));
                let (i, o, g) = (&values[0], &values[1], &values[2]);
                let raw = sum::<Self>([&f, &c], [i, g]);
                let tanh = Self::float_tanh(step.clip::<Self>(raw.clone()));
                let through_h = Self::float_mul(product::<Self>(&dh, o), tanh_slope::<Self>(&tanh));
                let dc = step.clip_gradient::<Self>(raw, Self::float_add(or_zeros(grads.c), through_h));
                let grad_o = Self::float_mul(product::<Self>(&dh, &tanh), sigmoid_slope::<Self>(o));
                let grad_g = Self::float_mul(product::<Self>(&dc, i), tanh_slope::<Self>(g));
                let before = RecurrentState { h: None, c: Some(product::<Self>(&dc, &f)) };
                let gate_grads = match coupled {
                    true => {
                        let grad_i = Self::float_mul(dc, Self::float_sub(g.clone(), c));
                        vec![Self::float_mul(grad_i, sigmoid_slope::<Self>(i)), grad_o, grad_g]
                    }
                    false => {
                        let grad_i = Self::float_mul(product::<Self>(&dc, g), sigmoid_slope::<Self>(i));
                        let grad_f = Self::float_mul(Self::float_mul(dc, c), sigmoid_slope::<Self>(&f));
                        vec![grad_i, grad_o, grad_g, grad_f]
                    }
                };
                (gate_grads, before)
            }
        };
        drop(values);
        for (gate, grad) in gates.iter_mut().zip(gate_grads) {
            step.write::<Self>(gate, grad);
        }
        before
    }
}
composing_backends!(RecurrentKernels);

/// [`RecurrentKernels::hidden_product`] by Burn's product.
pub(super) fn product_by_burn<B: Backend>(x: Float<B>, weight: Float<B>, transposed: bool) -> Float<B> {
    B::float_matmul(x, if transposed { B::float_swap_dims(weight, 0, 1) } else { weight })
}

/// `1 - x`
fn one_minus<B: Backend>(x: Float<B>) -> Float<B> {
    B::float_add_scalar(B::float_neg(x), 1.0.into())
}

/// `x (1 - x)`, the slope of a sigmoid.
fn sigmoid_slope<B: Backend>(x: &Float<B>) -> Float<B> {
    B::float_mul(x.clone(), one_minus::<B>(x.clone()))
}

/// `1 - x^2`, the slope of a hyperbolic tangent.
fn tanh_slope<B: Backend>(x: &Float<B>) -> Float<B> {
    one_minus::<B>(B::float_mul(x.clone(), x.clone()))
}

fn product<B: Backend>(a: &Float<B>, b: &Float<B>) -> Float<B> {
    B::float_mul(a.clone(), b.clone())
}

/// `a b + c d`
fn sum<B: Backend>([a, b]: [&Float<B>; 2], [c, d]: [&Float<B>; 2]) -> Float<B> {
    B::float_add(product::<B>(a, b), product::<B>(c, d))
}

/// The forget gate of an LSTM.
fn forget<B: Backend>(gates: &[Float<B>]) -> Float<B> {
    gates.get(3).cloned().unwrap_or_else(|| one_minus::<B>(gates[0].clone()))
}

/// The next state, from the gates of this step.
fn update<B: Backend>(
    step: &RecurrentStep,
    gates: &[Float<B>],
    state: RecurrentState<B>,
) -> RecurrentState<B> {
    let zeros = || step.zeros::<B>(&gates[0]);
    let RecurrentState { h, c } = state;
    let mix = |z: &Float<B>, n: &Float<B>, h: Option<Float<B>>| {
        let h = h.unwrap_or_else(zeros);
        step.clip::<B>(sum::<B>([n, &one_minus::<B>(z.clone())], [z, &h]))
    };
    match step.stage {
        Stage::Whole(Cell::Rnn) => RecurrentState { h: Some(step.clip::<B>(gates[0].clone())), c: None },
        Stage::Whole(Cell::Gru { .. }) => RecurrentState { h: Some(mix(&gates[1], &gates[2], h)), c: None },
        Stage::New => RecurrentState { h: Some(mix(&gates[0], &gates[1], h)), c: None },
        Stage::Reset => {
            RecurrentState { h: Some(product::<B>(&gates[0], &h.unwrap_or_else(zeros))), c: None }
        }
        Stage::Whole(Cell::Lstm { .. }) => {
            let c = c.unwrap_or_else(zeros);
            let c = step.clip::<B>(sum::<B>([&forget::<B>(gates), &c], [&gates[0], &gates[2]]));
            let h = B::float_mul(gates[1].clone(), B::float_tanh(c.clone()));
            RecurrentState { h: Some(h), c: Some(c) }
        }
    }
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::cpu::CpuBackend;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::ops::FloatTensorOps;
    use burn::backend::{Flex, flex::FlexDevice, ops::ActivationOps};
    use burn::tensor::FloatDType;

    type Float = FloatTensor<Flex>;

    #[test]
    fn composed_steps_equal_the_kernels() {
        composed_steps_equal_the_kernels_of([3, 4, 5], &[None, Some(0.3)]);
    }

    /// Threads cut few long rows.
    #[cfg(feature = "rayon")]
    #[test]
    fn composed_steps_equal_the_kernels_of_many_threads() {
        let compare = || composed_steps_equal_the_kernels_of([2, 2, 40_007], &[Some(0.3)]);
        crate::backend::cpu::parallel::pool(16).install(compare);
    }

    fn composed_steps_equal_the_kernels_of([batch, steps, hidden]: [usize; 3], clips: &[Option<f64>]) {
        let cells = [
            Cell::Rnn,
            Cell::Gru { reset_after: true },
            Cell::Lstm { coupled: false },
            Cell::Lstm { coupled: true },
        ];
        for batch_first in [true, false] {
            for &clip in clips {
                let at = steps / 2;
                let step = |stage| RecurrentStep { stage, clip, batch_first, batch, steps, hidden, at };
                for cell in cells {
                    composed_step_equals_the_kernels(&step(Stage::Whole(cell)), [cell.gates(); 2]);
                }
                composed_step_equals_the_kernels(&step(Stage::Reset), [2, 1]);
                composed_step_equals_the_kernels(&step(Stage::New), [2, 2]);
            }
        }
    }

    /// A slice may be a view: a gate that is written while a view of it is alive is copied, with the rows of all steps.
    #[test]
    fn composed_steps_write_in_place() {
        let stages = [
            (Stage::Whole(Cell::Rnn), [1, 1]),
            (Stage::Whole(Cell::Gru { reset_after: true }), [3, 3]),
            (Stage::Reset, [2, 1]),
            (Stage::New, [2, 2]),
            (Stage::Whole(Cell::Lstm { coupled: false }), [4, 4]),
            (Stage::Whole(Cell::Lstm { coupled: true }), [3, 3]),
        ];
        for (stage, [forwards, backwards]) in stages {
            // In a batch of one sequence the rows of a step are a view.
            let step =
                RecurrentStep { stage, clip: None, batch_first: true, batch: 1, steps: 4, hidden: 5, at: 2 };
            let gates = |count: usize| -> Vec<_> { (0..count).map(|_| fresh(&[4, 5])).collect() };
            let state = || RecurrentState { h: Some(fresh(&[1, 5])), c: Some(fresh(&[1, 5])) };
            let places = |gates: &[FloatTensor<Composed>]| -> Vec<*const f32> {
                gates.iter().map(|gate| Flex::as_slice::<f32>(gate.primitive()).as_ptr()).collect()
            };

            let mut written = gates(forwards);
            let before = places(&written);
            let biases = vec![[None, None]; forwards];
            Composed::recurrent_forward(&step, &mut written, vec![None; forwards], &biases, state());
            assert_eq!(places(&written), before, "{stage:?}");

            let (mut written, mut product) = (gates(backwards), gates(1).pop());
            let before = [places(&written), places(product.as_slice())];
            Composed::recurrent_backward(&step, &mut written, &mut product, state(), state());
            assert_eq!([places(&written), places(product.as_slice())], before, "{stage:?}, backwards");
        }
    }

    /// A tensor that nothing else holds.
    fn fresh(shape: &[usize]) -> FloatTensor<Composed> {
        composed(&random(shape))
    }

    fn composed_all(tensors: &[Float]) -> Vec<FloatTensor<Composed>> {
        tensors.iter().map(composed).collect()
    }

    fn composed_state(state: &RecurrentState<Flex>) -> RecurrentState<Composed> {
        RecurrentState { h: state.h.as_ref().map(composed), c: state.c.as_ref().map(composed) }
    }

    /// The numbers of gates in the forward and in the backward step.
    fn composed_step_equals_the_kernels(step: &RecurrentStep, [forwards, backwards]: [usize; 2]) {
        let matrix = || random(&[step.batch, step.hidden]);
        let state = || RecurrentState::<Flex> { h: Some(matrix()), c: Some(matrix()) };
        let gates = |count| -> Vec<Float> {
            let values = (0..count).map(|_| random(&[step.batch * step.steps, step.hidden]));
            values.map(<Flex as ActivationOps<Flex>>::sigmoid).collect()
        };
        let compare = |what: &str, ours: RecurrentState<Composed>, cpu: RecurrentState<Flex>| {
            for (ours, cpu) in [(ours.h, cpu.h), (ours.c, cpu.c)] {
                let zeros = || Flex::float_zeros(step.state_shape(), &FlexDevice, FloatDType::F32);
                let ours = ours.unwrap_or_else(|| composed(&zeros()));
                assert_close(&format!("{what}, {step:?}"), ours, cpu.unwrap_or_else(zeros));
            }
        };
        let compare_all = |what: &str, ours: Vec<FloatTensor<Composed>>, cpu: Vec<Float>| {
            for (ours, cpu) in ours.into_iter().zip(cpu) {
                assert_close(&format!("{what}, {step:?}"), ours, cpu);
            }
        };

        for state in [state(), RecurrentState { h: None, c: None }] {
            let mut of_cpu = gates(forwards);
            let mut ours = composed_all(&of_cpu);
            let products: Vec<_> = (0..forwards).map(|_| state.h.is_some().then(matrix)).collect();
            let biases: Vec<_> = (0..forwards)
                .map(|gate| [0, 1].map(|_| (gate > 0).then(|| random(&[step.hidden]))))
                .collect();
            let our_products = products.iter().map(|product| product.as_ref().map(composed)).collect();
            let our_biases: Vec<_> =
                biases.iter().map(|sides| sides.each_ref().map(|bias| bias.as_ref().map(composed))).collect();
            let our_state = composed_state(&state);
            let next =
                Composed::recurrent_forward(step, &mut ours, our_products, &our_biases, our_state.clone());
            let of_kernel = Flex::recurrent_forward(step, &mut of_cpu, products, &biases, state.clone());
            compare("state", next, of_kernel);
            compare_all("gates", ours, of_cpu.clone());
            let next = Composed::recurrent_next_state(step, &composed_all(&of_cpu), our_state);
            compare("next state", next, Flex::recurrent_next_state(step, &of_cpu, state));
        }

        let (before, grads) = (state(), state());
        let mut of_cpu = gates(backwards);
        let mut ours = composed_all(&of_cpu);
        let mut product = matches!(step.stage, Stage::Whole(Cell::Gru { .. })).then(|| gates(1).remove(0));
        let mut our_product = product.as_ref().map(composed);
        let (our_before, our_grads) = (composed_state(&before), composed_state(&grads));
        let next = Composed::recurrent_backward(step, &mut ours, &mut our_product, our_before, our_grads);
        let of_kernel = Flex::recurrent_backward(step, &mut of_cpu, &mut product, before, grads);
        compare("gradient of the state", next, of_kernel);
        ours.extend(our_product);
        of_cpu.extend(product);
        compare_all("gradients of gates", ours, of_cpu);
    }
}
