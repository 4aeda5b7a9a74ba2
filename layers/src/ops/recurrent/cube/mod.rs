//! Kernels for devices: one for each gate of a step, and one for its state.
//!
//! | | launches of a step besides the products: forward, backward | Burn's operations |
//! | --- | --- | --- |
//! | RNN | 2, 1 | 7 and more |
//! | GRU | 4, 2 | some thirty |
//! | GRU that resets before the product | 5, 2 | some thirty |
//! | LSTM | 5, 1 | some forty |
//! | coupled LSTM | 4, 1 | some forty |
//!
//! They are taken with fusion, too: Burn fuses what is computed with the rows of a step, but copies each gate's rows out of its tensor and
//! back by kernels of their own. With fusion, a step takes the tensors of the gates and returns them, since it writes in place.
use super::{Cell, RecurrentKernels, RecurrentState, RecurrentStep, Stage};
use crate::backend::cube::{Grid, empty, launch};
use crate::backend::optional::{MaybeTensor, UpToFour};
#[cfg(feature = "fusion")]
use crate::backend::optional::{MaybeTensorMetadata, UpToFourMetadata};
#[cfg(feature = "fusion")]
use burn::backend::fusion::custom::TensorSpec;
use burn::backend::{Backend, Cube, ExtensionType, backend_extension, tensor::FloatTensor};
use burn_cubecl::CubeBackend;
use burn_cubecl::cubecl::{prelude::*, std::tensor::layout::linear::LinearViewLaunch};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use kernels::{
    StepRowsLaunch, Update, gate_kernel, gated_backward_kernel, lstm_backward_kernel, lstm_state_kernel,
    mix_backward_kernel, reset_backward_kernel, rnn_backward_kernel, state_kernel,
};

mod kernels;

/// A [`RecurrentState`].
#[derive(ExtensionType)]
#[extension_type(fusion: cfg(feature = "fusion"))]
pub struct StateTensors<B: Backend> {
    #[extension_type]
    h: MaybeTensor<B>,
    #[extension_type]
    c: MaybeTensor<B>,
}

impl<B: Backend> From<RecurrentState<B>> for StateTensors<B> {
    fn from(RecurrentState { h, c }: RecurrentState<B>) -> Self {
        Self { h: h.into(), c: c.into() }
    }
}

impl<B: Backend> From<StateTensors<B>> for RecurrentState<B> {
    fn from(StateTensors { h, c }: StateTensors<B>) -> Self {
        Self { h: h.into_option(), c: c.into_option() }
    }
}

impl RecurrentKernels for Cube {
    fn recurrent_forward(
        step: &RecurrentStep,
        gates: &mut Vec<FloatTensor<Self>>,
        products: Vec<Option<FloatTensor<Self>>>,
        biases: &[[Option<FloatTensor<Self>>; 2]],
        state: RecurrentState<Self>,
    ) -> RecurrentState<Self> {
        let biases = [0, 1].map(|side| UpToFour::new(biases.iter().map(|biases| biases[side].clone())));
        let [input_biases, hidden_biases] = biases;
        let (written, next) = Self::cube_recurrent_forward(
            UpToFour::new(gates.drain(..).map(Some)),
            UpToFour::new(products),
            input_biases,
            hidden_biases,
            state.into(),
            *step,
        );
        gates.extend(written.into_options().into_iter().flatten());
        next.into()
    }

    fn recurrent_next_state(
        step: &RecurrentStep,
        gates: &[FloatTensor<Self>],
        state: RecurrentState<Self>,
    ) -> RecurrentState<Self> {
        let gates = UpToFour::new(gates.iter().cloned().map(Some));
        Self::cube_recurrent_next_state(gates, state.into(), *step).into()
    }

    fn recurrent_backward(
        step: &RecurrentStep,
        gates: &mut Vec<FloatTensor<Self>>,
        reset_product: &mut Option<FloatTensor<Self>>,
        state: RecurrentState<Self>,
        grads: RecurrentState<Self>,
    ) -> RecurrentState<Self> {
        let (written, product, before) = Self::cube_recurrent_backward(
            UpToFour::new(gates.drain(..).map(Some)),
            reset_product.take().into(),
            state.into(),
            grads.into(),
            *step,
        );
        gates.extend(written.into_options().into_iter().flatten());
        *reset_product = product.into_option();
        before.into()
    }
}

#[backend_extension(Cube, Fusion: cfg(feature = "fusion"))]
pub trait RecurrentCube: Backend {
    /// See [`RecurrentKernels::recurrent_forward`]. Also returns the tensors of the gates.
    #[fusion(meta = |gates, _products, _input_biases, _hidden_biases, _state, step| {
        (gates.clone(), described_state(gates, step, [true, step.has_cell()]))
    })]
    fn cube_recurrent_forward(
        #[extension_type] gates: UpToFour<Self>,
        #[extension_type] products: UpToFour<Self>,
        #[extension_type] input_biases: UpToFour<Self>,
        #[extension_type] hidden_biases: UpToFour<Self>,
        #[extension_type] state: StateTensors<Self>,
        step: RecurrentStep,
    ) -> (UpToFour<Self>, StateTensors<Self>);

    /// See [`RecurrentKernels::recurrent_next_state`].
    #[fusion(meta = |gates, _state, step| described_state(gates, step, [true, step.has_cell()]))]
    fn cube_recurrent_next_state(
        #[extension_type] gates: UpToFour<Self>,
        #[extension_type] state: StateTensors<Self>,
        step: RecurrentStep,
    ) -> StateTensors<Self>;

    /// See [`RecurrentKernels::recurrent_backward`]. Also returns the tensors of the gates, and the product.
    #[fusion(meta = |gates, reset_product, _state, _grads, step| {
        let of_h = !step.has_cell() && step.stage != Stage::Whole(Cell::Rnn);
        (gates.clone(), reset_product.clone(), described_state(gates, step, [of_h, step.has_cell()]))
    })]
    fn cube_recurrent_backward(
        #[extension_type] gates: UpToFour<Self>,
        #[extension_type] reset_product: MaybeTensor<Self>,
        #[extension_type] state: StateTensors<Self>,
        #[extension_type] grads: StateTensors<Self>,
        step: RecurrentStep,
    ) -> (UpToFour<Self>, MaybeTensor<Self>, StateTensors<Self>);
}

/// The shapes and dtypes of a state, which has `h`, `c` or both.
#[cfg(feature = "fusion")]
fn described_state(gates: &UpToFourMetadata, step: &RecurrentStep, has: [bool; 2]) -> StateTensorsMetadata {
    let MaybeTensorMetadata::Some(gate) = &gates.first else { unreachable!("a step has gates") };
    let described = |has| match has {
        true => MaybeTensorMetadata::Some(TensorSpec { shape: step.state_shape(), dtype: gate.dtype }),
        false => MaybeTensorMetadata::None,
    };
    let [h, c] = has.map(described);
    StateTensorsMetadata { h, c }
}

impl RecurrentCube for CubeBackend {
    fn cube_recurrent_forward(
        gates: UpToFour<Self>,
        products: UpToFour<Self>,
        input_biases: UpToFour<Self>,
        hidden_biases: UpToFour<Self>,
        state: StateTensors<Self>,
        step: RecurrentStep,
    ) -> (UpToFour<Self>, StateTensors<Self>) {
        let mut gates: Vec<_> = gates.into_options().into_iter().flatten().collect();
        let addends = products.into_options().into_iter().zip(input_biases.into_options());
        let addends = addends.zip(hidden_biases.into_options()).take(gates.len());
        for (index, ((product, input_bias), hidden_bias)) in addends.enumerate() {
            let (is_sigmoid, reset) = match (step.stage, index) {
                (Stage::New, 0) => continue, // z is there already
                (Stage::Whole(Cell::Rnn), _) | (Stage::Whole(Cell::Lstm { .. }), 2) | (Stage::New, _) => {
                    (false, None)
                }
                (Stage::Whole(Cell::Gru { .. }), 2) => (false, Some(gates[0].clone())),
                _ => (true, None),
            };
            let gate = step.writable(&mut gates[index]);
            if let Some(grid) = step.grid(&gate) {
                // SAFETY: the kernel compares every position with the number of elements of a step, whose rows all tensors have.
                unsafe {
                    launch!(
                        gate_kernel,
                        grid,
                        gate.into_buffer_arg(),
                        viewed(product).into(),
                        optional(input_bias).into(),
                        optional(hidden_bias).into(),
                        optional(reset).into(),
                        step.rows_of_gates(),
                        is_sigmoid,
                        grid.dtypes,
                    );
                }
            }
        }
        let next = next_state(&step, &gates, state.into());
        (UpToFour::new(gates.into_iter().map(Some)), next.into())
    }

    fn cube_recurrent_next_state(
        gates: UpToFour<Self>,
        state: StateTensors<Self>,
        step: RecurrentStep,
    ) -> StateTensors<Self> {
        let gates: Vec<_> = gates.into_options().into_iter().flatten().collect();
        next_state(&step, &gates, state.into()).into()
    }

    fn cube_recurrent_backward(
        gates: UpToFour<Self>,
        reset_product: MaybeTensor<Self>,
        state: StateTensors<Self>,
        grads: StateTensors<Self>,
        step: RecurrentStep,
    ) -> (UpToFour<Self>, MaybeTensor<Self>, StateTensors<Self>) {
        let gates = gates.into_options().into_iter().flatten();
        let gates: Vec<CubeTensor> = gates.map(|mut gate| step.writable(&mut gate)).collect();
        let mut product = reset_product.into_option();
        let (state, grads): (RecurrentState<Self>, RecurrentState<Self>) = (state.into(), grads.into());
        let before = || empty(&gates[0], step.state_shape(), gates[0].dtype);
        let is_clipped = step.clip.is_some();
        let grid = step.grid(&gates[0]);
        let (h, dh) = (state.h, grads.h);
        let before = match step.stage {
            Stage::Whole(Cell::Rnn) => {
                if let Some(grid) = grid {
                    // SAFETY: as above.
                    unsafe {
                        launch!(
                            rnn_backward_kernel,
                            grid,
                            arg(&gates[0]),
                            viewed(dh).into(),
                            step.rows_of_gates(),
                            step.clip_scalar(&grid),
                            is_clipped,
                            grid.dtypes,
                        );
                    }
                }
                RecurrentState { h: None, c: None }
            }
            Stage::Reset => {
                let before = before();
                if let Some(grid) = grid {
                    // SAFETY: as above.
                    unsafe {
                        launch!(
                            reset_backward_kernel,
                            grid,
                            arg(&gates[0]),
                            optional(h).into(),
                            viewed(dh).into(),
                            arg(&before),
                            step.rows_of_gates(),
                            grid.dtypes,
                        );
                    }
                }
                RecurrentState { h: Some(before), c: None }
            }
            Stage::New | Stage::Whole(Cell::Gru { .. }) => {
                let [z, n] = if step.stage == Stage::New { [0, 1] } else { [1, 2] };
                let before = before();
                if let Some(grid) = &grid {
                    // SAFETY: as above.
                    unsafe {
                        launch!(
                            mix_backward_kernel,
                            grid,
                            arg(&gates[z]),
                            arg(&gates[n]),
                            optional(h).into(),
                            viewed(dh).into(),
                            arg(&before),
                            step.rows_of_gates(),
                            step.clip_scalar(grid),
                            is_clipped,
                            grid.dtypes,
                        );
                    }
                }
                if let (Some(product), Some(grid)) = (&mut product, grid) {
                    let product = step.writable(product);
                    // SAFETY: as above.
                    unsafe {
                        launch!(
                            gated_backward_kernel,
                            grid,
                            arg(&gates[0]),
                            product.into_buffer_arg(),
                            arg(&gates[n]),
                            step.rows_of_gates(),
                            grid.dtypes,
                        );
                    }
                }
                RecurrentState { h: Some(before), c: None }
            }
            Stage::Whole(Cell::Lstm { .. }) => {
                let before = before();
                if let Some(grid) = grid {
                    // SAFETY: as above.
                    unsafe {
                        launch!(
                            lstm_backward_kernel,
                            grid,
                            arg(&gates[0]),
                            arg(&gates[1]),
                            arg(&gates[2]),
                            gates.get(3).map(arg).into(), // not if it is coupled with the first
                            optional(state.c).into(),
                            viewed(dh).into(),
                            optional(grads.c).into(),
                            arg(&before),
                            step.rows_of_gates(),
                            step.clip_scalar(&grid),
                            is_clipped,
                            grid.dtypes,
                        );
                    }
                }
                RecurrentState { h: None, c: Some(before) }
            }
        };
        (UpToFour::new(gates.into_iter().map(Some)), product.into(), before.into())
    }
}

/// A tensor as the argument of a launch.
fn arg(tensor: &CubeTensor) -> BufferArg {
    tensor.clone().into_buffer_arg()
}

/// An optional tensor, whose elements are read in order.
fn optional(tensor: Option<CubeTensor>) -> Option<BufferArg> {
    tensor.map(into_contiguous).map(CubeTensor::into_buffer_arg)
}

/// An optional product of matrices, which is read where it lies.
fn viewed(tensor: Option<CubeTensor>) -> Option<LinearViewLaunch> {
    tensor.map(CubeTensor::into_linear_view)
}

/// The state after a step, from the gates.
fn next_state(
    step: &RecurrentStep,
    gates: &[CubeTensor],
    state: RecurrentState<CubeBackend>,
) -> RecurrentState<CubeBackend> {
    let new = || empty(&gates[0], step.state_shape(), gates[0].dtype);
    let h = new();
    let Some(grid) = step.grid(&gates[0]) else {
        return RecurrentState { h: Some(h), c: step.has_cell().then(new) };
    };
    let clip = step.clip_scalar(&grid);
    let (a, b, kind) = match step.stage {
        Stage::Whole(Cell::Lstm { coupled }) => {
            let c = new();
            let forget = (!coupled).then(|| arg(&gates[3]));
            // SAFETY: as above.
            unsafe {
                launch!(
                    lstm_state_kernel,
                    grid,
                    arg(&gates[0]),
                    arg(&gates[1]),
                    arg(&gates[2]),
                    forget.into(),
                    optional(state.c).into(),
                    arg(&h),
                    arg(&c),
                    step.rows_of_gates(),
                    clip,
                    step.clip.is_some(),
                    grid.dtypes,
                );
            }
            return RecurrentState { h: Some(h), c: Some(c) };
        }
        Stage::Whole(Cell::Rnn) => (&gates[0], None, Update::Gate),
        Stage::Whole(Cell::Gru { .. }) => (&gates[1], Some(&gates[2]), Update::Mix),
        Stage::New => (&gates[0], Some(&gates[1]), Update::Mix),
        Stage::Reset => (&gates[0], None, Update::Reset),
    };
    // SAFETY: as above.
    unsafe {
        launch!(
            state_kernel,
            grid,
            arg(a),
            b.map(arg).into(),
            optional(state.h.filter(|_| kind != Update::Gate)).into(),
            arg(&h),
            step.rows_of_gates(),
            clip,
            // What is reset is not the state after the step.
            step.clip.is_some() && kind != Update::Reset,
            kind,
            grid.dtypes,
        );
    }
    RecurrentState { h: Some(h), c: None }
}

impl RecurrentStep {
    /// One unit for every element of the state; `None` if it has no elements.
    fn grid(&self, gate: &CubeTensor) -> Option<Grid> {
        Grid::of_units(self.batch * self.hidden, &[gate])
    }

    /// The rows of the step in the tensors of the gates.
    fn rows_of_gates(&self) -> StepRowsLaunch {
        let (first, stride) = match self.batch_first {
            true => (self.at, self.steps),
            false => (self.at * self.batch, 1),
        };
        let elements = self.batch * self.hidden;
        StepRowsLaunch::new(first * self.hidden, stride * self.hidden, self.hidden, elements)
    }

    /// The tensor of a gate, which nobody else reads while its rows are written.
    fn writable(&self, gate: &mut CubeTensor) -> CubeTensor {
        if !gate.can_mut() {
            *gate = gate.copy();
        }
        // A copy may have gaps between its rows (CUDA).
        *gate = into_contiguous(gate.clone());
        gate.clone()
    }

    fn clip_scalar(&self, grid: &Grid) -> InputScalar {
        grid.scalar(self.clip.unwrap_or(0.0))
    }
}
