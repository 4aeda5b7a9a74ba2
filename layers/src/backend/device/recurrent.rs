//! One step of a recurrent layer by Burn's operations.
//!
//! A step writes its rows in place, which a backend can do only while nobody else holds the tensor. A slice may be a view,
//! which holds it: no view of a gate may be alive when that gate is written, or every step copies all steps.
use crate::backend::{Cell, RecurrentState, RecurrentStep, Stage};
use burn::backend::{
    Backend, Scalar, TensorMetadata, get_or_init_device_settings,
    tensor::{BoolTensor, FloatTensor},
};
use burn::tensor::{Shape, Slice};

type Float<B> = FloatTensor<B>;

impl RecurrentStep {
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

    /// The rows of this step in the tensor of a gate: a view where the backend has them.
    fn read<B: Backend>(&self, values: &Float<B>) -> Float<B> {
        let values = B::float_reshape(values.clone(), self.sequence());
        B::float_reshape(B::float_slice(values, &self.slices()), Shape::new([self.batch, self.hidden]))
    }

    fn write<B: Backend>(&self, values: &mut Float<B>, rows: Float<B>) {
        let shape = values.shape();
        let [batch, step] = [self.batch, 1];
        let of_rows = if self.batch_first { [batch, step, self.hidden] } else { [step, batch, self.hidden] };
        let rows = B::float_reshape(rows, Shape::new(of_rows));
        // Nobody else holds the tensor while it is written to.
        let sequence = B::float_reshape(core::mem::replace(values, rows.clone()), self.sequence());
        *values = B::float_reshape(B::float_slice_assign(sequence, &self.slices(), rows), shape);
    }

    fn zeros<B: Backend>(&self, like: &Float<B>) -> Float<B> {
        B::float_zeros(Shape::new([self.batch, self.hidden]), &like.device(), like.dtype().into())
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

    /// The gradient of what was clipped.
    fn clip_gradient<B: Backend>(&self, x: Float<B>, dy: Float<B>) -> Float<B> {
        match self.outside::<B>(x) {
            Some(outside) => B::float_mask_fill(dy, outside, 0.0.into()),
            None => dy,
        }
    }
}

/// `1 - x`
fn rest<B: Backend>(x: Float<B>) -> Float<B> {
    B::float_add_scalar(B::float_neg(x), 1.0.into())
}

/// `x (1 - x)`, the slope of a sigmoid.
fn sigmoid_slope<B: Backend>(x: &Float<B>) -> Float<B> {
    B::float_mul(x.clone(), rest::<B>(x.clone()))
}

/// `1 - x^2`, the slope of a hyperbolic tangent.
fn tanh_slope<B: Backend>(x: &Float<B>) -> Float<B> {
    rest::<B>(B::float_mul(x.clone(), x.clone()))
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
    gates.get(3).cloned().unwrap_or_else(|| rest::<B>(gates[0].clone()))
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
        step.clip::<B>(sum::<B>([n, &rest::<B>(z.clone())], [z, &h]))
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

/// See [`MemBackend::recurrent_forward`](crate::backend::MemBackend::recurrent_forward).
pub fn recurrent_forward<B: Backend>(
    step: &RecurrentStep,
    gates: &mut [FloatTensor<B>],
    products: Vec<Option<FloatTensor<B>>>,
    biases: &[[Option<FloatTensor<B>>; 2]],
    state: RecurrentState<B>,
) -> RecurrentState<B> {
    let add = |x: Float<B>, bias: &Option<Float<B>>| match bias {
        Some(bias) => B::float_add(x, B::float_reshape(bias.clone(), Shape::new([1, step.hidden]))),
        None => x,
    };
    let sides = gates.iter().zip(products).zip(biases).map(|((gate, product), [of_input, of_hidden])| {
        let product = product.unwrap_or_else(|| step.zeros::<B>(gate));
        [add(step.read::<B>(gate), of_input), add(product, of_hidden)]
    });
    let sides: Vec<_> = sides.collect();
    let both = |[x, h]: [Float<B>; 2]| B::float_add(x, h);
    let sigmoid = |sides: [Float<B>; 2]| B::sigmoid(both(sides));
    let tanh = |sides: [Float<B>; 2]| B::float_tanh(both(sides));
    let mut values: Vec<Float<B>> = vec![];
    for (index, sides) in sides.into_iter().enumerate() {
        let value = match (step.stage, index) {
            (Stage::Whole(Cell::Rnn), _) | (Stage::Whole(Cell::Lstm { .. }), 2) | (Stage::New, 1) => {
                tanh(sides)
            }
            (Stage::New, _) => sides[0].clone(), // z is there already
            (Stage::Whole(Cell::Gru { .. }), 2) => {
                let [x, h] = sides;
                B::float_tanh(B::float_add(x, B::float_mul(values[0].clone(), h)))
            }
            _ => sigmoid(sides),
        };
        values.push(value);
    }
    let next = update::<B>(step, &values, state);
    // A view of what is there already is not written again.
    let unchanged = usize::from(step.stage == Stage::New);
    for (gate, value) in gates.iter_mut().zip(values).skip(unchanged) {
        step.write::<B>(gate, value);
    }
    next
}

/// See [`MemBackend::recurrent_replay`](crate::backend::MemBackend::recurrent_replay).
pub fn recurrent_replay<B: Backend>(
    step: &RecurrentStep,
    gates: &[FloatTensor<B>],
    state: RecurrentState<B>,
) -> RecurrentState<B> {
    let gates: Vec<_> = gates.iter().map(|gate| step.read::<B>(gate)).collect();
    update::<B>(step, &gates, state)
}

/// See [`MemBackend::recurrent_backward`](crate::backend::MemBackend::recurrent_backward).
pub fn recurrent_backward<B: Backend>(
    step: &RecurrentStep,
    gates: &mut [FloatTensor<B>],
    extra: Option<&mut FloatTensor<B>>,
    state: RecurrentState<B>,
    grads: RecurrentState<B>,
) -> RecurrentState<B> {
    let values: Vec<_> = gates.iter().map(|gate| step.read::<B>(gate)).collect();
    let or_zeros = |x: Option<Float<B>>| x.unwrap_or_else(|| step.zeros::<B>(&values[0]));
    let (h, dh) = (or_zeros(state.h), or_zeros(grads.h));
    // Of z and n, beside that of the state.
    let unmix = |z: &Float<B>, n: &Float<B>| {
        let raw = sum::<B>([n, &rest::<B>(z.clone())], [z, &h]);
        let dh = step.clip_gradient::<B>(raw, dh.clone());
        let dn = B::float_mul(product::<B>(&dh, &rest::<B>(z.clone())), tanh_slope::<B>(n));
        let dz = B::float_mul(product::<B>(&dh, &sigmoid_slope::<B>(z)), B::float_sub(h.clone(), n.clone()));
        (dz, dn, product::<B>(&dh, z))
    };
    let (of_gates, before) = match step.stage {
        Stage::Whole(Cell::Rnn) => {
            let dh = step.clip_gradient::<B>(values[0].clone(), dh.clone());
            (vec![B::float_mul(dh, tanh_slope::<B>(&values[0]))], RecurrentState { h: None, c: None })
        }
        Stage::Whole(Cell::Gru { .. }) => {
            let (dz, dn, dh) = unmix(&values[1], &values[2]);
            let extra = extra.expect("the product that r gates");
            let of_r = product::<B>(&dn, &step.read::<B>(extra));
            step.write::<B>(extra, product::<B>(&dn, &values[0]));
            (
                vec![B::float_mul(of_r, sigmoid_slope::<B>(&values[0])), dz, dn],
                RecurrentState { h: Some(dh), c: None },
            )
        }
        Stage::New => {
            let (dz, dn, dh) = unmix(&values[0], &values[1]);
            (vec![dz, dn], RecurrentState { h: Some(dh), c: None })
        }
        Stage::Reset => {
            let dr = B::float_mul(product::<B>(&dh, &h), sigmoid_slope::<B>(&values[0]));
            (vec![dr], RecurrentState { h: Some(product::<B>(&dh, &values[0])), c: None })
        }
        Stage::Whole(Cell::Lstm { coupled }) => {
            let (c, f) = (or_zeros(state.c), forget::<B>(&values));
            let (i, o, g) = (&values[0], &values[1], &values[2]);
            let raw = sum::<B>([&f, &c], [i, g]);
            let tanh = B::float_tanh(step.clip::<B>(raw.clone()));
            let of_c = B::float_mul(product::<B>(&dh, o), tanh_slope::<B>(&tanh));
            let dc = step.clip_gradient::<B>(raw, B::float_add(or_zeros(grads.c), of_c));
            let of_o = B::float_mul(product::<B>(&dh, &tanh), sigmoid_slope::<B>(o));
            let of_g = B::float_mul(product::<B>(&dc, i), tanh_slope::<B>(g));
            let before = RecurrentState { h: None, c: Some(product::<B>(&dc, &f)) };
            let of_gates = match coupled {
                true => {
                    let of_i = B::float_mul(dc, B::float_sub(g.clone(), c));
                    vec![B::float_mul(of_i, sigmoid_slope::<B>(i)), of_o, of_g]
                }
                false => {
                    let of_i = B::float_mul(product::<B>(&dc, g), sigmoid_slope::<B>(i));
                    let of_f = B::float_mul(B::float_mul(dc, c), sigmoid_slope::<B>(&f));
                    vec![of_i, of_o, of_g, of_f]
                }
            };
            (of_gates, before)
        }
    };
    drop(values);
    for (gate, grad) in gates.iter_mut().zip(of_gates) {
        step.write::<B>(gate, grad);
    }
    before
}
