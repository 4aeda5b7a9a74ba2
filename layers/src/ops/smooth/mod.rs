//! Smooth activations: GELU, SiLU, sigmoid and their kin.
//!
//! | | |
//! | --- | --- |
//! | computes | `y = f(x)`, `f` a [`Smooth`] function |
//! | keeps | `x` (a handle); for sigmoid and tanh `y`, unless `x` is available anyway |
//! | backward | `dx = dy * f'(x)`, in place |
//!
//! Where `x` is kept, the output is offered for [recomputation](crate::graph): the next layer then keeps nothing. Stock Burn
//! records up to six operations for one function, each of which keeps a tensor.
//!
//! `functions.rs` is the table of all functions: a new one is an entry there.
use crate::backend::fusing_backends;
use crate::graph::{BackwardPass, Inputs, KeepPlan, Operation, Recorder, Run, Tracking, extension, given};
use burn::backend::{Backend, tensor::FloatTensor};
use functions::smooth_functions;

mod composed;
#[cfg(any(feature = "flex", feature = "ndarray"))]
pub mod cpu;
#[cfg(all(any(feature = "wgpu", feature = "cuda"), not(feature = "fusion")))]
pub mod cube;
mod functions;

pub(super) use composed::slope;

macro_rules! variants {
    ($(
        $(#[$doc:meta])*
        $variant:ident $({ $($(#[$of_field:meta])* $field:ident = $tested:literal,)+ })?, $name:literal, slope from $read:ident:
            cpu $cpu:tt
            #[cube] $cube:tt
            composed $composed:tt
    )+) => {
        /// A function of one variable whose slope (derivative) is computed from its input, or from its output.
        ///
        /// Each variant is computed in f32 or in f64 as the tensor is, in one pass. Those that Burn has, too, have the names that they
        /// have in [`burn::tensor::activation`].
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[non_exhaustive]
        pub enum Smooth {$(
            $(#[$doc])*
            $variant $({ $($(#[$of_field])* $field: f64,)+ })?,
        )+}

        impl Smooth {
            /// Whether the slope is computed from the output; else from the input.
            pub fn reads_output(self) -> bool {
                match self {$(Self::$variant { .. } => variants!(@is_output $read),)+}
            }

            /// The name in the ledger.
            fn name(self) -> &'static str {
                match self {$(Self::$variant { .. } => $name,)+}
            }
        }

        /// Every function, for tests.
        #[cfg(all(test, feature = "flex"))]
        pub(super) const ALL: [Smooth; [$($name),+].len()] = [$(Smooth::$variant $({ $($field: $tested),+ })?),+];
    };
    (@is_output input) => { false };
    (@is_output output) => { true };
}
smooth_functions!(variants);

extension! {
    /// Smooth activations.
    pub trait SmoothOps(SmoothKernels) {
        /// `f(x)`, element by element; any shape.
        fn memsave_smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
            Self::run(f, [Some(x)])
        }
    }
}

const X: usize = 0;

impl<B: SmoothKernels> Operation<B, 1> for Smooth {
    const INPUTS: [&'static str; 1] = ["x"];
    type Saved = SavedSmooth<FloatTensor<B>>;

    fn name(&self) -> &'static str {
        (*self).name()
    }

    fn plan(&self, inputs: &Tracking<B, 1>) -> KeepPlan<1> {
        let reads_x = !self.reads_output() || inputs.available(X);
        KeepPlan::nothing().keep_if(reads_x, X, "x is tracked").offer_if(reads_x)
    }

    fn forward(&self, [x]: Inputs<B, 1>) -> FloatTensor<B> {
        B::smooth(given(x), *self)
    }

    fn forward_saving(&self, inputs: Inputs<B, 1>, recorder: &Recorder<1>) -> (FloatTensor<B>, Self::Saved) {
        let y = Operation::<B, 1>::forward(self, inputs);
        let output = (!recorder.keeps(X)).then(|| recorder.report().tensor("y", y.clone(), "x is tracked"));
        (y, SavedSmooth { f: *self, output })
    }

    fn backward(SavedSmooth { f, output }: Self::Saved, dy: FloatTensor<B>, pass: &mut BackwardPass<B, 1>) {
        let read = output.unwrap_or_else(|| match (f.reads_output(), given(pass.take(X))) {
            (true, x) => B::smooth(x, f),
            (false, x) => x,
        });
        pass.give(X, B::smooth_backward(read, f, dy));
    }
}

/// What the backward pass reads.
#[derive(Clone, Debug)]
pub struct SavedSmooth<T> {
    f: Smooth,
    /// The output, if the slope reads it and the input is not kept.
    output: Option<T>,
}

/// The kernels.
pub trait SmoothKernels: Backend {
    /// `f(x)`; in place of `x`, if that is the only handle of its tensor.
    fn smooth(x: FloatTensor<Self>, f: Smooth) -> FloatTensor<Self> {
        composed::value::<Self>(x, f)
    }

    /// `dy * f'`, with the slope computed from `read`: the input of `f`, or its [output](Smooth::reads_output).
    fn smooth_backward(read: FloatTensor<Self>, f: Smooth, dy: FloatTensor<Self>) -> FloatTensor<Self> {
        Self::float_mul(slope::<Self>(read, f), dy)
    }
}
fusing_backends!(SmoothKernels);

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;
    use crate::backend::testing::{Composed, assert_close, composed, random};
    use burn::backend::{Flex, ops::FloatTensorOps};

    #[test]
    fn default_bodies_equal_the_kernels() {
        for f in ALL {
            let [x, dy] = [(); 2].map(|()| Flex::float_mul_scalar(random(&[5, 13]), 3.0.into()));
            let x = Flex::float_mask_fill(
                x.clone(),
                composed::above::<Flex>(Flex::float_neg(Flex::float_abs(x)), -0.5),
                0.0.into(),
            );
            let y = Flex::smooth(x.clone(), f);
            assert_close("y", Composed::smooth(composed(&x), f), y.clone());
            let read = if f.reads_output() { y } else { x };
            let body = Composed::smooth_backward(composed(&read), f, composed(&dy));
            assert_close("dx", body, Flex::smooth_backward(read, f, dy));
        }
    }
}
