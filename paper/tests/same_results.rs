//! Models of the two namespaces compute the same from the same record.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData, Tolerance};
use burn_memsave_paper::text::{self, Encoder, EncoderSize};

fn assert_close(ours: TensorData, stock: &TensorData) {
    ours.assert_approx_eq::<f32>(stock, Tolerance::rel_abs(1e-3, 1e-4));
}

/// Without autodiff nothing is dropped out.
#[test]
fn encoders() {
    let device = Device::flex();
    let size =
        EncoderSize { vocabulary: 50, width: 24, hidden: 40, heads: 3, layers: 2, length: 12, dropout: 0.1 };
    let stock = text::stock::bert::Bert::new(&size, &device);
    let ours = text::memsave::bert::Bert::new(&size, &device).load_record(stock.clone().into_record());
    let tokens = Tensor::<2, Int>::random([3, 10], Distribution::Uniform(0.0, 50.0), &device);
    assert_close(ours.forward(tokens.clone()).into_data(), &stock.forward(tokens).into_data());
}
