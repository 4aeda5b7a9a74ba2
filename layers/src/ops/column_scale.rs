//! Columns times a factor each, plus a bias: what DoRA does to the output of a dense layer with an adapter.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = x * factor + bias`, `factor` and `bias` one number per column |
//! | keeps | `x` if `factor` is tracked; `factor`, `[columns]`, if `x` is |
//! | backward | `dx = dy * factor`, `dfactor = sum(dy * x)`, `dbias = sum(dy)` |
//!
//! Products take the place of `dy` and `x`, where nobody else holds them.
use super::{
    MaybeTensor,
    extension::extension,
    linear::LinearKernels,
    step::{BackwardPass, Inputs, Operation, Plan, Recorder, Run, Tracking, given},
};
use burn::backend::{TensorMetadata, tensor::FloatTensor};
use burn::tensor::Shape;

extension! {
    /// Columns times a factor each.
    pub trait ColumnScaleOps(LinearKernels) {
        /// `x * factor + bias`; x `[..., columns]`, factor and bias `[columns]`.
        fn memsave_column_scale(
            x: FloatTensor<Self>,
            factor: FloatTensor<Self>,
            #[extension_type] bias: MaybeTensor<Self>,
        ) -> FloatTensor<Self> {
            Self::run(ColumnScale, [Some(x), Some(factor), bias.into_option()])
        }
    }
}

const X: usize = 0;
const FACTOR: usize = 1;
const BIAS: usize = 2;

/// `x * factor + bias`
#[derive(Clone, Debug)]
pub struct ColumnScale;

/// A row in front of which there are as many axes as in front of those of `x`.
fn as_row<B: LinearKernels>(row: FloatTensor<B>, x: &FloatTensor<B>) -> FloatTensor<B> {
    let mut shape = vec![1; x.rank()];
    shape[x.rank() - 1] = row.shape()[0];
    B::float_reshape(row, Shape::from(shape))
}

impl<B: LinearKernels> Operation<B, 3> for ColumnScale {
    const INPUTS: [&'static str; 3] = ["x", "factor", "bias"];
    type Saved = ();

    fn name(&self) -> &'static str {
        "column_scale"
    }

    fn plan(&self, inputs: &Tracking<B, 3>) -> Plan<3> {
        Plan::nothing().keep_if(inputs.tracked(FACTOR), X, "factor is tracked").keep_if(
            inputs.tracked(X),
            FACTOR,
            "x is tracked",
        )
    }

    fn forward(&self, [x, factor, bias]: Inputs<B, 3>) -> FloatTensor<B> {
        let (x, factor) = (given(x), given(factor));
        let factor = as_row::<B>(factor, &x);
        let y = B::float_mul(x, factor);
        match bias {
            Some(bias) => {
                let bias = as_row::<B>(bias, &y);
                B::float_add(y, bias)
            }
            None => y,
        }
    }

    fn forward_saving(&self, inputs: Inputs<B, 3>, _: &Recorder<3>) -> (FloatTensor<B>, ()) {
        (Operation::<B, 3>::forward(self, inputs), ())
    }

    fn backward((): (), dy: FloatTensor<B>, pass: &mut BackwardPass<B, 3>) {
        if pass.wants(BIAS) {
            pass.give(BIAS, B::linear_bias_backward(dy.clone()));
        }
        if let Some(x) = pass.take(X) {
            pass.give(FACTOR, B::linear_bias_backward(B::float_mul(x, dy.clone())));
        }
        if let Some(factor) = pass.take(FACTOR) {
            let factor = as_row::<B>(factor, &dy);
            pass.give(X, B::float_mul(dy, factor));
        }
    }
}
