//! Chains of layers keep only what the first one reads, because the outputs of normalizations and activations are recomputed.
use crate::meter::{RECORDS, alone, bytes, devices, measure};
use crate::table::Input;
use burn::module::Module;
use burn::nn::Relu;
use burn::tensor::{DType, Device, GradientCheckpointingStrategy, Tensor};
use burn_memsave::functional;
use burn_memsave::measure::{LayerMeasurement, ledger};

const ROWS: [usize; 3] = [4, 32, 64];
const IMAGES: [usize; 4] = [4, 8, 24, 20];

fn measure_tracked<const D: usize>(
    device: &Device,
    input: Input<D>,
    forward: &dyn Fn(Tensor<D>) -> Tensor<D>,
) -> LayerMeasurement {
    measure(device, || input.random(device).require_grad(), forward)
}

/// Under gradient checkpointing stock computes the input of a ReLU again if it can; a mask would be more than it keeps.
#[test]
fn a_mask_is_not_kept_where_stock_keeps_nothing() {
    let _alone = alone();
    let device = Device::flex().autodiff().gradient_checkpointing();
    let kept = |relu: fn(Tensor<2>) -> Tensor<2>, rows: usize| {
        let input = Input { shape: [rows, 1024], dtype: DType::F32 };
        bytes(measure_tracked(&device, input, &|x| relu(x * 2.0).sum_dim(1)).kept)
    };
    let stock = |x| burn::tensor::activation::relu(x);
    let ours = |x| functional::relu(x);
    let (ours, stock) = (kept(ours, 64) - kept(ours, 32), kept(stock, 64) - kept(stock, 32));
    assert_eq!(ours, stock, "a recomputed input of relu");
}

/// Bytes of what grows with the batch, if everything is tracked.
struct Kept {
    plain: usize,
    /// Under gradient checkpointing Burn's own operations hold what they read, and Burn drops what it can compute again.
    checkpointing: usize,
    /// What our operations ask Burn for under gradient checkpointing, whether it holds that or not.
    ledger_of_checkpointing: usize,
}

/// Each chain is written once, and built once of stock layers and once of ours; `kept` says what ours keeps.
macro_rules! chains {
    ($($test:ident: $shape:expr, |$nn:ident, $device:ident| $make:expr, |$layers:ident, $x:ident| $forward:expr, $kept:expr;)+) => {$(
        #[test]
        fn $test() {
            let _alone = alone();
            for $device in &devices() {
                let $layers = {
                    use burn::nn as $nn;
                    $make
                };
                let stock = |$x: Tensor<{ $shape.len() }>| -> Tensor<{ $shape.len() }> { $forward };
                let $layers = {
                    use burn_memsave::nn as $nn;
                    $make
                };
                let ours = |$x: Tensor<{ $shape.len() }>| -> Tensor<{ $shape.len() }> { $forward };
                compare_chains($device, $shape, [&stock, &ours], &$kept);
            }
        }
    )+};
}

chains! {
    layer_norm_and_linear: ROWS,
        |nn, device| (nn::LayerNormConfig::new(64).init(device), nn::LinearConfig::new(64, 48).init(device)),
        |layers, x| layers.1.forward(layers.0.forward(x)),
        |x: Input<3>| Kept {
            plain: x.floats(),
            checkpointing: x.floats(),
            ledger_of_checkpointing: x.floats(),
        };
    rms_norm_and_three_linear: ROWS,
        |nn, device| {
            let linear = || nn::LinearConfig::new(64, 48).init(device);
            (nn::RmsNormConfig::new(64).init(device), linear(), linear(), linear())
        },
        |layers, x| {
            let x = layers.0.forward(x);
            layers.1.forward(x.clone()) + layers.2.forward(x.clone()) + layers.3.forward(x)
        },
        // Beside it, the three outputs that are added.
        |x: Input<3>| Kept {
            plain: x.floats(),
            checkpointing: x.floats() + 3 * Input { shape: [x.shape[0], 32, 48], ..x }.floats(),
            ledger_of_checkpointing: x.floats(),
        };
    batch_norm_relu_conv: IMAGES,
        |nn, device| {
            let conv = nn::conv::Conv2dConfig::new([8, 8], [3, 3]).init(device);
            (nn::BatchNormConfig::new(8).init(device), nn::Relu::new(), conv)
        },
        |layers, x| layers.2.forward(layers.1.forward(layers.0.forward(x))),
        // The mask, or the input of the ReLU, which is computed again.
        |x: Input<4>| Kept {
            plain: x.floats() + x.bits(),
            checkpointing: x.floats(),
            ledger_of_checkpointing: 2 * x.floats(),
        };
    batch_norm_with_running_statistics_relu_conv: IMAGES,
        |nn, device| {
            let conv = nn::conv::Conv2dConfig::new([8, 8], [3, 3]).init(device);
            let norm = nn::BatchNormConfig::new(8).init(device).freeze().set_require_grad(true);
            (norm, nn::Relu::new(), conv)
        },
        |layers, x| layers.2.forward(layers.1.forward(layers.0.forward(x))),
        // The mask, or the input of the ReLU, which is computed again.
        |x: Input<4>| Kept {
            plain: x.floats() + x.bits(),
            checkpointing: x.floats(),
            ledger_of_checkpointing: 2 * x.floats(),
        };
    conv_beside_relu_and_conv: IMAGES,
        |nn, device| {
            let conv = || nn::conv::Conv2dConfig::new([8, 8], [3, 3]).init(device);
            (conv(), nn::Relu::new(), conv())
        },
        |layers, x| {
            let beside = layers.0.forward(x.clone());
            beside + layers.2.forward(layers.1.forward(x))
        },
        // Beside it, the two outputs that are added.
        |x: Input<4>| Kept {
            plain: x.floats() + x.bits(),
            checkpointing: x.floats() + x.bits() + 2 * Input { shape: [x.shape[0], 8, 22, 18], ..x }.floats(),
            ledger_of_checkpointing: x.floats() + x.bits(),
        };
}

/// A chain of ours keeps exactly `kept` with everything tracked, as the ledger says, and never more than the same chain of
/// stock's; under gradient checkpointing up to a bit per element more, where stock holds a ReLU's input for it.
fn compare_chains<const D: usize>(
    device: &Device,
    shape: [usize; D],
    [stock, ours]: [&dyn Fn(Tensor<D>) -> Tensor<D>; 2],
    kept: &dyn Fn(Input<D>) -> Kept,
) {
    let mut doubled = shape;
    doubled[0] *= 2;
    let inputs = [shape, doubled].map(|shape| Input { shape, dtype: DType::F32 });
    let strategy = device.gradient_checkpointing_strategy();
    let checkpointing = strategy == Some(GradientCheckpointingStrategy::Balanced);
    let said = inputs.map(kept).map(|kept| match checkpointing {
        false => [kept.plain; 2],
        true => [kept.checkpointing, kept.ledger_of_checkpointing],
    });
    let said = [0, 1].map(|at| said[1][at] as i64 - said[0][at] as i64);
    let [small, large] = inputs.map(|input| bytes(measure_tracked(device, input, ours).kept));
    let total = |input: Input<D>| {
        let x = input.random(device).require_grad();
        ledger(&Relu::new(), x, |_, x| ours(x)).1.total() as i64
    };
    let counted = inputs.map(total);
    let growth = [large - small, counted[1] - counted[0]];
    assert_eq!(growth, said, "measured and in the ledger, {strategy:?}");
    let stock = bytes(measure_tracked(device, inputs[1], stock).kept);
    let masks = if checkpointing { inputs[1].bits() as i64 } else { 0 };
    assert!(large <= stock + masks + RECORDS, "{strategy:?}: keeps {large} bytes, stock {stock}");
}
