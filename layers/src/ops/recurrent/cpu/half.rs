//! Steps of recurrent layers in half precision: their rows go through the loops for f32, and are rounded once. (Loops for half precision
//! would double the compile time of the loops.)
use super::{RecurrentState, RecurrentStep};
use crate::backend::{cpu::CpuBackend, widen};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::DType;

/// The same step, in a sequence that has only this one.
fn alone(step: &RecurrentStep) -> RecurrentStep {
    RecurrentStep { steps: 1, at: 0, ..*step }
}

fn widen_rows<B: CpuBackend>(step: &RecurrentStep, gates: &[FloatTensor<B>]) -> Vec<FloatTensor<B>> {
    gates.iter().map(|gate| widen::<B>(step.read::<B>(gate))).collect()
}

fn widen_state<B: CpuBackend>(RecurrentState { h, c }: RecurrentState<B>) -> RecurrentState<B> {
    RecurrentState { h: h.map(widen::<B>), c: c.map(widen::<B>) }
}

fn narrow_state<B: CpuBackend>(state: RecurrentState<B>, dtype: DType) -> RecurrentState<B> {
    let narrow = |state| B::float_cast(state, dtype.into());
    RecurrentState { h: state.h.map(narrow), c: state.c.map(narrow) }
}

pub(super) fn forward<B: CpuBackend>(
    step: &RecurrentStep,
    gates: &mut [FloatTensor<B>],
    products: Vec<Option<FloatTensor<B>>>,
    biases: &[[Option<FloatTensor<B>>; 2]],
    state: RecurrentState<B>,
) -> RecurrentState<B> {
    let dtype = gates[0].dtype();
    let mut rows = widen_rows::<B>(step, gates);
    let products = products.into_iter().map(|product| product.map(widen::<B>)).collect();
    let biases: Vec<_> = biases.iter().map(|sides| sides.clone().map(|bias| bias.map(widen::<B>))).collect();
    let state = widen_state(state);
    super::forward::<B, f32>(&alone(step), &mut rows, products, &biases, state.clone());
    for (gate, rows) in gates.iter_mut().zip(rows) {
        step.write::<B>(gate, B::float_cast(rows, dtype.into()));
    }
    // From the rounded gates, as the backward pass will read them.
    let rows = widen_rows::<B>(step, gates);
    narrow_state(super::next_state::<B, f32>(&alone(step), &rows, state), dtype)
}

pub(super) fn next_state<B: CpuBackend>(
    step: &RecurrentStep,
    gates: &[FloatTensor<B>],
    state: RecurrentState<B>,
) -> RecurrentState<B> {
    let rows = widen_rows::<B>(step, gates);
    narrow_state(super::next_state::<B, f32>(&alone(step), &rows, widen_state(state)), gates[0].dtype())
}

pub(super) fn backward<B: CpuBackend>(
    step: &RecurrentStep,
    gates: &mut [FloatTensor<B>],
    reset_product: Option<&mut FloatTensor<B>>,
    state: RecurrentState<B>,
    grads: RecurrentState<B>,
) -> RecurrentState<B> {
    let dtype = gates[0].dtype();
    let mut rows = widen_rows::<B>(step, gates);
    let mut product_rows = reset_product.as_deref().map(|product| widen::<B>(step.read::<B>(product)));
    let (state, grads) = (widen_state(state), widen_state(grads));
    let before = super::backward::<B, f32>(&alone(step), &mut rows, product_rows.as_mut(), state, grads);
    let tensors = gates.iter_mut().chain(reset_product);
    for (tensor, rows) in tensors.zip(rows.into_iter().chain(product_rows)) {
        step.write::<B>(tensor, B::float_cast(rows, dtype.into()));
    }
    narrow_state(before, dtype)
}
