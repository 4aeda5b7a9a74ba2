//! Half precision on the device, if it has it, beside f64 on Flex: both compute with the same numbers of f16.
use crate::{among_others, gpu, values};
use burn::nn::loss::Reduction;
use burn::tensor::ops::{AttentionModuleOptions, AvgPoolOptions, MaxPoolOptions};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_memsave::functional as F;
use burn_memsave::nn::loss::MseLoss;

/// Of a tensor, and a parameter per channel.
type Op = fn(Tensor<3>, Tensor<1>) -> Tensor<3>;

const OPS: [(&str, Op); 21] = [
    ("relu", |x, _| F::relu(x)),
    ("hardtanh", |x, _| F::hardtanh(x, -0.25, 0.25)),
    ("hard_sigmoid", |x, _| F::hard_sigmoid(x, 0.9, 0.4)),
    ("gelu", |x, _| F::gelu(x)),
    ("silu", |x, _| F::silu(x)),
    ("mish", |x, _| F::mish(x)),
    ("silu_gate", |x, _| F::silu_gate(x.clone() * 0.5, x)),
    ("prelu", F::prelu),
    ("batch_norm", |x, p| F::batch_norm_train(x, p.clone(), p, 1e-3).output),
    ("group_norm", |x, p| F::group_norm(x, Some(p.clone()), Some(p), 1, 1e-3)),
    ("layer_norm", |x, p| {
        let [.., row] = x.dims();
        let gamma = p.mean().expand([row]);
        F::layer_norm(x, gamma, None, 1e-3)
    }),
    ("rms_norm", |x, p| {
        let [.., row] = x.dims();
        F::rms_norm(x, p.mean().expand([row]), 1e-3)
    }),
    ("local_response_norm", |x, _| F::local_response_norm(x, 4, 0.5, 0.75, 0.8)),
    ("softmax", |x, _| F::softmax(x * 4.0, 2)),
    ("max_pool1d", |x, _| F::max_pool1d(x, MaxPoolOptions::new([3]))),
    ("avg_pool1d", |x, _| F::avg_pool1d(x, AvgPoolOptions::new([3]))),
    ("adaptive_avg_pool1d", |x, _| F::adaptive_avg_pool1d(x, 4)),
    ("mse", |x, _| MseLoss::new().forward(x.clone() * 0.5, x + 1.0, Reduction::Mean).reshape([1, 1, 1])),
    ("cross_entropy", |x, _| {
        let [batch, rows, classes] = x.dims();
        let targets =
            Tensor::from_data(TensorData::new(vec![1i64; batch * rows], [batch * rows]), &x.device());
        F::cross_entropy(x.reshape([batch * rows, classes]) * 5.0, targets, None, Some(0.1))
            .reshape([batch, rows, 1])
    }),
    ("attention", |x, _| {
        let x = x.unsqueeze_dim::<4>(0);
        let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
        F::attention(x.clone(), x.clone() * 0.5, x + 1.0, None, None, options).squeeze_dim(0)
    }),
    ("attention, grouped", |x, _| {
        let x = x.unsqueeze_dim::<4>(0);
        let [_, heads, rows, width] = x.dims();
        let query =
            x.clone().expand([2, heads, rows, width]).swap_dims(0, 1).reshape([1, 2 * heads, rows, width]);
        let y = F::attention(query * 2.0, x.clone() * 0.5, x + 1.0, None, None, Default::default());
        y.slice_dim(1, 1..heads + 1).squeeze_dim(0)
    }),
];

/// Output and gradients, in f64.
fn run(op: Op, shape: [usize; 3], dtype: DType, device: Device) -> [TensorData; 3] {
    let device = device.autodiff();
    fn tensor<const D: usize>(data: TensorData, device: &Device, dtype: DType) -> Tensor<D> {
        Tensor::from_data(data.convert_dtype(DType::F16).convert_dtype(dtype), (device, dtype))
    }
    let positive = values([shape[1]], 5).iter::<f32>().map(|v| v.abs() + 0.5).collect::<Vec<_>>();
    let parameter = tensor::<1>(TensorData::new(positive, [shape[1]]), &device, dtype).require_grad();
    let x = tensor::<3>(values(shape, 1), &device, dtype).require_grad();
    let y = op(x.clone(), parameter.clone());
    let dy = tensor::<3>(values(y.dims(), 2), &device, dtype);
    let gradients = (y.clone() * dy).sum().backward();
    let of_parameter = parameter.grad(&gradients).unwrap_or_else(|| parameter.inner().zeros_like());
    [y.inner().into_data(), x.grad(&gradients).expect("tracked").into_data(), of_parameter.into_data()]
        .map(|data| data.convert_dtype(DType::F64))
}

#[test]
fn half_precision_equals_f64() {
    let _shared = among_others();
    if !gpu().supports_dtype(DType::F16) {
        println!("left out: this device has no f16");
        return;
    }
    for (name, op) in OPS {
        for shape in [[2, 5, 12], [3, 4, 31]] {
            let found = run(op, shape, DType::F16, gpu());
            let exact = run(op, shape, DType::F64, Device::flex());
            for (which, (found, exact)) in found.iter().zip(&exact).enumerate() {
                let scale = exact.iter::<f64>().fold(1e-3, |scale: f64, v| scale.max(v.abs()));
                for (found, exact) in found.iter::<f64>().zip(exact.iter::<f64>()) {
                    // Eight units in the last place of the largest number: what surrounds the operation rounds, too.
                    assert!(
                        (found - exact).abs() <= scale / 128.0,
                        "{name}, {shape:?}, result {which}: {found}, not {exact}"
                    );
                }
            }
        }
    }
}
