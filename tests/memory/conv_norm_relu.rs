//! Tests the fused convolution, batch norm with running statistics, and ReLU.
use crate::meter::{RECORDS, alone, bytes, measure};
use crate::table::Input;
use burn::module::Module;
use burn::nn::Relu;
use burn::tensor::{DType, Device, Tensor};
use burn_memsave::measure::ledger;
use burn_memsave::nn::{BatchNormConfig, conv::Conv2dConfig};

/// What is kept per image is the input of a trainable convolution and a bit per element of the result; the peak is below that of
/// the three layers, of ours as of stock's.
#[test]
fn keeps_a_bit_per_element_of_the_result() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let shapes = [4, 8].map(|batch| [batch, 8, 24, 20]);
    let norm = BatchNormConfig::new(16).init(&device).freeze();
    for frozen in [true, false] {
        let conv = Conv2dConfig::new([8, 16], [3, 3]).init(&device);
        let conv = if frozen { conv.freeze() } else { conv };
        let (stock_conv, stock_norm) = (conv.clone().into_nn_conv2d(), norm.clone().into_nn_batch_norm());
        let at_once = |x: Tensor<4>| conv.forward_norm_relu(x, &norm);
        let one_by_one = |x: Tensor<4>| burn_memsave::functional::relu(norm.forward(conv.forward(x)));
        let stock = |x: Tensor<4>| Relu::new().forward(stock_norm.forward(stock_conv.forward(x)));
        for tracked in [true, false] {
            if frozen && !tracked {
                continue;
            }
            let run = |forward: &dyn Fn(Tensor<4>) -> Tensor<4>| {
                shapes.map(|shape| {
                    let x = || Input { shape, dtype: DType::F32 }.random(&device);
                    let x = || if tracked { x().require_grad() } else { x() };
                    let measured = measure(&device, x, forward);
                    let counted = ledger(&Relu::new(), x(), |_, x| forward(x)).1.total();
                    (bytes(measured.kept), bytes(measured.peak), counted as i64)
                })
            };
            let case = format!("frozen {frozen}, input tracked {tracked}");
            let [(small, _, few), (large, peak, many)] = run(&at_once);
            let input = Input { shape: shapes[0], dtype: DType::F32 };
            let result = Input { shape: [4, 16, 22, 18], dtype: DType::F32 };
            let kept = if frozen { 0 } else { input.floats() } + result.bits();
            assert_eq!([large - small, many - few], [kept as i64; 2], "{case}: measured and in the ledger");
            for (other, forward) in [("stock", &stock as &dyn Fn(_) -> _), ("one by one", &one_by_one)] {
                let [_, (kept, peak_of_others, _)] = run(forward);
                assert!(large <= kept + RECORDS, "{case}: keeps {large}, {other} {kept}");
                assert!(peak <= peak_of_others + RECORDS, "{case}: peak {peak}, {other} {peak_of_others}");
            }
        }
    }
}
