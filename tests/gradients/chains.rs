//! Chains of layers whose outputs are recomputed in the backward pass: gradients must not depend on what asks for these outputs, how
//! often, or whether anything does.
use crate::batch_norm::with_gradient;
use crate::common::*;
use burn::tensor::{DType, Tensor, activation, module, ops::ConvOptions};
use burn_memsave::functional as F;
use proptest::prelude::*;

const EPSILON: f64 = 1e-3;

fn conv_options() -> ConvOptions<2> {
    ConvOptions::new([1, 1], [1, 1], [1, 1], 1)
}

/// Leaves: what a layer is given. Other forms are for the layers by themselves.
fn leaves() -> impl Strategy<Value = Setting> {
    settings().prop_map(|setting| with_gradient(Setting { form: Form::Leaf, ..setting }))
}

/// Compares for some shapes of `inputs(sizes)` in f64 and f32.
macro_rules! chains {
    ($($test:ident, $rank:literal: |$sizes:ident| $inputs:expr, |$t:ident, $f:ident| $chain:expr;)+) => {$(
        #[test]
        fn $test() {
            for_all(8, ([2..4usize, 2..4, 8..12], leaves()), |($sizes, setting)| {
                let ours = |$t: &Operands| -> Tensor<$rank> {
                    use ours as $f;
                    $chain
                };
                let stock = |$t: &Operands| -> Tensor<$rank> {
                    use stock as $f;
                    $chain
                };
                let check = Check::new($inputs, setting);
                let check = if setting.dtype == DType::F32 { check.within(2e-5) } else { check };
                check.compare::<$rank>(&ours, &stock);
            });
        }
    )+};
}

/// The layers of a chain, by this library.
mod ours {
    use super::*;
    pub use burn_memsave::functional::relu;

    pub fn linear(x: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
        F::linear(x, weight, None)
    }
    pub fn layer_norm(x: Tensor<3>, gamma: Tensor<1>, beta: Tensor<1>) -> Tensor<3> {
        F::layer_norm(x, gamma, Some(beta), EPSILON)
    }
    pub fn rms_norm(x: Tensor<3>, gamma: Tensor<1>) -> Tensor<3> {
        F::rms_norm(x, gamma, EPSILON)
    }
    pub fn batch_norm(x: Tensor<4>, gamma: Tensor<1>, beta: Tensor<1>) -> Tensor<4> {
        F::batch_norm_train(x, gamma, beta, EPSILON).output
    }
    pub fn batch_norm_given(x: Tensor<4>, gamma: Tensor<1>, beta: Tensor<1>) -> Tensor<4> {
        let [mean, variance] = statistics(&gamma);
        F::batch_norm(x, gamma, beta, mean, variance, EPSILON)
    }
    pub fn conv(x: Tensor<4>, weight: Tensor<4>) -> Tensor<4> {
        F::conv2d(x, weight, None, conv_options())
    }
}

/// The same by Burn.
mod stock {
    use super::*;
    pub use burn::tensor::activation::relu;

    pub fn linear(x: Tensor<3>, weight: Tensor<2>) -> Tensor<3> {
        module::linear(x, weight, None)
    }
    pub fn layer_norm(x: Tensor<3>, gamma: Tensor<1>, beta: Tensor<1>) -> Tensor<3> {
        module::layer_norm(x, gamma, Some(beta), EPSILON)
    }
    pub fn rms_norm(x: Tensor<3>, gamma: Tensor<1>) -> Tensor<3> {
        let rms = (x.clone().square().mean_dim(2) + EPSILON).sqrt();
        x / rms * gamma.unsqueeze::<3>()
    }
    pub fn batch_norm(x: Tensor<4>, gamma: Tensor<1>, beta: Tensor<1>) -> Tensor<4> {
        module::batch_norm_train(x, gamma, beta, EPSILON).output
    }
    pub fn batch_norm_given(x: Tensor<4>, gamma: Tensor<1>, beta: Tensor<1>) -> Tensor<4> {
        let [mean, variance] = statistics(&gamma);
        module::batch_norm(x, gamma, beta, mean, variance, EPSILON)
    }
    pub fn conv(x: Tensor<4>, weight: Tensor<4>) -> Tensor<4> {
        module::conv2d(x, weight, None, conv_options())
    }
}

fn statistics(like: &Tensor<1>) -> [Tensor<1>; 2] {
    let of = |seed, range| {
        tensor(uniform(like.dims()[0], seed, range), &like.dims(), &like.device(), like.dtype())
    };
    [of(7, -0.5..0.5), of(8, 0.5..1.5)]
}

/// `[batch, rows, features]`, a scale, and weights of dense layers.
fn rows([batch, rows, features]: [usize; 3], weights: usize) -> Vec<Input> {
    let fixed = [Input::random([batch, rows, features]), Input::between([features], 0.5..1.5)];
    fixed.into_iter().chain((0..weights).map(|_| Input::random([features, 5]))).collect()
}

/// `[batch, channels, 6, size]`, a scale, a shift, and weights of convolutions.
fn images([batch, channels, size]: [usize; 3], weights: usize) -> Vec<Input> {
    let fixed = [
        Input::random([batch, channels, 6, size]),
        Input::between([channels], 0.5..1.5),
        Input::random([channels]),
    ];
    fixed.into_iter().chain((0..weights).map(|_| Input::random([channels, channels, 3, 3]))).collect()
}

chains! {
    layer_norm_linear, 3: |sizes| [rows(sizes, 1), vec![Input::random([sizes[2]])]].concat(),
        |t, f| f::linear(f::layer_norm(t.get(0), t.get(1), t.get(3)), t.get(2));
    rms_norm_and_three_consumers, 3: |sizes| rows(sizes, 3),
        |t, f| {
            let x = f::rms_norm(t.get(0), t.get(1));
            let of = |weight| f::linear(x.clone(), t.get(weight));
            of(2) * of(3) + of(4)
        };
    norm_read_by_other_operations, 3: |sizes| rows(sizes, 1),
        |t, f| {
            let x = f::rms_norm(t.get(0), t.get(1));
            let y = f::linear(x.clone(), t.get(2));
            y * x.clone().sum_dim(2) + (x.clone() * x).mean_dim(2)
        };
    norm_of_a_norm, 3: |sizes| rows(sizes, 1),
        |t, f| f::linear(f::rms_norm(f::rms_norm(t.get(0), t.get(1)), t.get(1)), t.get(2));
    norm_nobody_asks_for, 3: |sizes| rows(sizes, 1),
        |t, f| {
            let x = f::rms_norm(t.get(0), t.get(1));
            let dropped = f::linear(x.clone(), t.get(2));
            drop(dropped);
            x + 1.0
        };
    conv_norm_relu_conv, 4: |sizes| images(sizes, 2),
        |t, f| {
            let x = f::conv(t.get(0), t.get(3));
            f::conv(f::relu(f::batch_norm(x, t.get(1), t.get(2))), t.get(4))
        };
    conv_norm_with_given_statistics_relu_conv, 4: |sizes| images(sizes, 2),
        |t, f| {
            let x = f::conv(t.get(0), t.get(3));
            f::conv(f::relu(f::batch_norm_given(x, t.get(1), t.get(2))), t.get(4))
        };
    a_residual_block, 4: |sizes| images(sizes, 2),
        |t, f| {
            let x = f::relu(f::batch_norm(f::conv(t.get(0), t.get(3)), t.get(1), t.get(2)));
            let y = f::batch_norm(f::conv(x.clone(), t.get(4)), t.get(1), t.get(2));
            f::relu(x + y)
        };
    relu_of_what_another_layer_keeps, 4: |sizes| images(sizes, 2),
        |t, f| {
            let x = f::batch_norm(t.get(0), t.get(1), t.get(2)) * 2.0;
            let beside = f::conv(x.clone(), t.get(3));
            beside * f::conv(f::relu(x), t.get(4))
        };
    relu_of_what_a_dropped_layer_kept, 4: |sizes| images(sizes, 2),
        |t, f| {
            let x = f::batch_norm(t.get(0), t.get(1), t.get(2)) * 2.0;
            let dropped = f::conv(x.clone(), t.get(3));
            let y = f::relu(x);
            drop(dropped);
            f::conv(y, t.get(4))
        };
}

/// Gradient checkpointing is one strategy for a device: layers of Burn between ours must find what they ask for.
#[test]
fn layers_of_burn_between_ours() {
    let chain =
        |t: &Operands, norm: fn(Tensor<3>, Tensor<1>) -> Tensor<3>, relu: fn(Tensor<3>) -> Tensor<3>| {
            let x = activation::sigmoid(norm(t.get(0), t.get(1)));
            relu(module::linear(x.clone(), t.get::<2>(2), None))
                .matmul(module::linear(x, t.get(3), None).transpose())
        };
    for_all(8, ([2..4usize, 2..4, 8..12], leaves()), |(sizes, setting)| {
        let check = Check::new(rows(sizes, 2), setting);
        check.compare::<3>(&|t| chain(t, ours::rms_norm, ours::relu), &|t| {
            chain(t, stock::rms_norm, stock::relu)
        });
    });
}
