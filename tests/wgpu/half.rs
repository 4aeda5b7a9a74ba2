//! Half precision on the device, if it has it, beside f64 on Flex: both compute with the same numbers of f16.
use crate::table::activations::smooth;
use crate::{among_others, gpu, values};
use burn::module::{LoraAdapter, Module, ModuleMapper, Param, ParamId};
use burn::nn::loss::Reduction;
use burn::tensor::ops::{
    AttentionModuleOptions, AvgPoolOptions, ConvOptions, ConvTransposeOptions, InterpolateMode,
    InterpolateOptions, MaxPoolOptions,
};
use burn::tensor::{DType, Device, Gradients, Int, Tensor, TensorData};
use burn_memsave::functional as F;
use burn_memsave::nn::{self, loss::MseLoss};

/// Of a tensor `[batch, channels, row]`, and the parameters that it takes.
type Op = fn(Tensor<3>, &mut Parameters) -> Tensor<3>;

const OPS: [(&str, Op); 46] = [
    ("relu", |x, _| F::relu(x)),
    ("hardtanh", |x, _| F::hardtanh(x, -0.25, 0.25)),
    ("hard_sigmoid", |x, _| F::hard_sigmoid(x, 0.9, 0.4)),
    ("silu_gate", |x, _| F::silu_gate(x.clone() * 0.5, x)),
    ("glu", |x, _| F::glu(Tensor::cat(vec![x.clone() * 0.5, x], 2), 2)),
    ("swiglu", |x, p| {
        let swiglu = nn::SwiGluConfig::new(x.dims()[2], 7).with_bias(true).init(&x.device());
        p.of(swiglu).forward(x)
    }),
    ("prelu", |x, p| {
        let alpha = p.positive([x.dims()[1]]);
        F::prelu(x, alpha)
    }),
    ("batch_norm", |x, p| {
        let [gamma, beta] = p.affine(x.dims()[1]);
        F::batch_norm_train(x, gamma, beta, 1e-3).output
    }),
    ("group_norm", |x, p| {
        let [gamma, beta] = p.affine(x.dims()[1]);
        F::group_norm(x, Some(gamma), Some(beta), 1, 1e-3)
    }),
    ("layer_norm", |x, p| {
        let [gamma, beta] = p.affine(x.dims()[2]);
        F::layer_norm(x, gamma, Some(beta), 1e-3)
    }),
    ("rms_norm", |x, p| {
        let gamma = p.positive([x.dims()[2]]);
        F::rms_norm(x, gamma, 1e-3)
    }),
    ("local_response_norm", |x, _| F::local_response_norm(x, 4, 0.5, 0.75, 0.8)),
    ("softmax", |x, _| F::softmax(x * 4.0, 2)),
    ("max_pool1d", |x, _| F::max_pool1d(x, MaxPoolOptions::new([3]))),
    ("avg_pool1d", |x, _| F::avg_pool1d(x, AvgPoolOptions::new([3]))),
    ("adaptive_avg_pool1d", |x, _| F::adaptive_avg_pool1d(x, 4)),
    ("max_pool2d", |x, _| {
        let mut options = MaxPoolOptions::new([3, 2]);
        (options.stride, options.padding) = ([1, 2], [(1, 1), (1, 0)]);
        planes(x, |x| F::max_pool2d(x, options))
    }),
    ("avg_pool2d", |x, _| {
        let mut options = AvgPoolOptions::new([3, 2]);
        (options.stride, options.padding) = ([1, 2], [(1, 1), (1, 1)]);
        options.count_include_pad = false;
        planes(x, |x| F::avg_pool2d(x, options))
    }),
    ("adaptive_avg_pool2d", |x, _| planes(x, |x| F::adaptive_avg_pool2d(x, [2, 3]))),
    ("interpolate, nearest", |x, _| resized(x, InterpolateMode::Nearest)),
    ("interpolate, linear", |x, _| resized(x, InterpolateMode::Bilinear)),
    ("interpolate, cubic", |x, _| resized(x, InterpolateMode::Bicubic)),
    ("mse", |x, _| MseLoss::new().forward(x.clone() * 0.5, x + 1.0, Reduction::Mean).reshape([1, 1, 1])),
    ("cross_entropy", |x, _| {
        let [batch, rows, _] = x.dims();
        let (x, targets) = (by_rows(x), targets(batch * rows));
        let targets = Tensor::from_data(targets, &x.device());
        F::cross_entropy(x * 5.0, targets, None, Some(0.1)).reshape([batch, rows, 1])
    }),
    ("linear_cross_entropy", |x, p| {
        let weight = p.take([x.dims()[2], CLASSES]);
        let bias = p.take([CLASSES]);
        head_loss(x, weight, Some(bias))
    }),
    ("linear_cross_entropy, frozen", |x, p| {
        let weight = p.fixed([x.dims()[2], CLASSES]);
        head_loss(x, weight, None)
    }),
    ("linear", |x, p| {
        let weight = p.take([x.dims()[2], 7]);
        F::linear(x, weight, Some(p.take([7])))
    }),
    ("linear, frozen", |x, p| {
        let weight = p.fixed([x.dims()[2], 7]);
        F::linear(x, weight, None)
    }),
    ("linear, LoRA", |x, p| {
        let base = p.fixed([x.dims()[2], 7]);
        let adapter = p.adapter(x.dims()[2], 3, 7);
        F::linear_lora(x, base, &adapter, Some(p.take([7])))
    }),
    ("linear, LoRA of a high rank", |x, p| {
        let base = p.fixed([x.dims()[2], 45]);
        let adapter = p.adapter(x.dims()[2], 40, 45);
        F::linear_lora(x, base, &adapter, None)
    }),
    ("embedding", |x, p| {
        let [batch, rows, width] = x.dims();
        let indices = targets(batch * rows);
        let indices = Tensor::<1, Int>::from_data(indices, &x.device()).reshape([batch, rows]);
        F::embedding(p.take([CLASSES, width]), indices) * x
    }),
    ("embedding, LoRA", |x, p| {
        let [batch, rows, width] = x.dims();
        let indices = targets(batch * rows);
        let indices = Tensor::<1, Int>::from_data(indices, &x.device()).reshape([batch, rows]);
        let base = p.fixed([CLASSES, width]);
        F::embedding_lora(base, &p.adapter(CLASSES, 3, width), indices) * x
    }),
    ("rotary_encoding", |x, p| {
        let [_, rows, width] = x.dims();
        let even = width / 2 * 2;
        F::rotary_encoding(x.narrow(2, 0, even), p.fixed([rows, even, 2]))
    }),
    ("conv1d", |x, p| {
        let weight = p.take([6, x.dims()[1], 3]);
        F::conv1d(x, weight, Some(p.take([6])), ConvOptions::new([2], [1], [1], 1))
    }),
    ("conv1d, depthwise", |x, p| {
        let channels = x.dims()[1];
        let weight = p.take([channels, 1, 3]);
        F::conv1d(x, weight, Some(p.take([channels])), ConvOptions::new([1], [1], [1], channels))
    }),
    ("conv1d, LoRA", |x, p| {
        let channels = x.dims()[1];
        let base = p.fixed([6, channels, 3]);
        F::conv1d_lora(x, base, &p.adapter(6, 2, channels * 3), None, ConvOptions::new([1], [1], [1], 1))
    }),
    ("conv_transpose1d", |x, p| {
        let weight = p.take([x.dims()[1], 4, 3]);
        F::conv_transpose1d(x, weight, Some(p.take([4])), ConvTransposeOptions::new([2], [1], [1], [1], 1))
    }),
    ("conv2d", |x, p| {
        let weight = p.take([4, x.dims()[0], 3, 3]);
        let options = ConvOptions::new([1, 2], [1, 1], [1, 1], 1);
        planes(x, |x| F::conv2d(x, weight, Some(p.take([4])), options))
    }),
    ("conv2d, grouped", |x, p| {
        let groups = x.dims()[0];
        let weight = p.take([2 * groups, 1, 3, 3]);
        let options = ConvOptions::new([1, 1], [1, 1], [1, 1], groups);
        planes(x, |x| F::conv2d(x, weight, None, options))
    }),
    ("conv_transpose2d", |x, p| {
        let weight = p.take([x.dims()[0], 4, 3, 2]);
        let options = ConvTransposeOptions::new([2, 1], [1, 0], [1, 0], [1, 1], 1);
        planes(x, |x| F::conv_transpose2d(x, weight, Some(p.take([4])), options))
    }),
    ("rnn", |x, p| {
        let state = p.take([x.dims()[0], HIDDEN]);
        let layer = nn::RnnConfig::new(x.dims()[2], HIDDEN, true).init(&x.device());
        p.of(layer).forward(small(x), Some(nn::RnnState::new(state))).0
    }),
    ("gru", |x, p| {
        let state = p.take([x.dims()[0], HIDDEN]);
        let layer = nn::GruConfig::new(x.dims()[2], HIDDEN, true).init(&x.device());
        p.of(layer).forward(small(x), Some(state))
    }),
    ("lstm", |x, p| {
        let [cell, hidden] = [(); 2].map(|()| p.take([x.dims()[0], HIDDEN]));
        let layer = nn::LstmConfig::new(x.dims()[2], HIDDEN, true).init(&x.device());
        p.of(layer).forward(small(x), Some(nn::LstmState::new(cell, hidden))).0
    }),
    ("lstm, coupled", |x, p| {
        let layer = nn::LstmConfig::new(x.dims()[2], HIDDEN, true).with_input_forget(true);
        p.of(layer.init(&x.device())).forward(small(x), None).0
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

const MANY_ROWS: [usize; 3] = [3, 40, 16];

/// Their gradients of the weight are Burn's forward convolution, which sums in f16: `docs/burn-0.22.1.md`.
const SUMS_OF_BURN: [&str; 2] = ["conv2d, grouped", "conv_transpose2d"];

const CLASSES: usize = 9;
const HIDDEN: usize = 6;

/// Two images whose channels are the batch.
fn planes(x: Tensor<3>, f: impl FnOnce(Tensor<4>) -> Tensor<4>) -> Tensor<3> {
    let x = x.unsqueeze_dim(0);
    f(Tensor::cat(vec![x.clone(), x * -0.5], 0)).flatten(2, 3)
}

fn resized(x: Tensor<3>, mode: InterpolateMode) -> Tensor<3> {
    let [_, height, width] = x.dims();
    let options = InterpolateOptions::new(mode).with_align_corners(false);
    planes(x, |x| F::interpolate(x, options.with_output_size([height + 2, width.div_ceil(2)])))
}

/// Of saturated gates f16 has few digits of the slope, `1 - y^2`: Burn's are no better.
fn small(x: Tensor<3>) -> Tensor<3> {
    x * 0.25
}

fn by_rows(x: Tensor<3>) -> Tensor<2> {
    x.flatten(0, 1)
}

fn targets(rows: usize) -> TensorData {
    TensorData::new((0..rows).map(|row| (row * 7 + 3) as i64 % CLASSES as i64).collect::<Vec<_>>(), [rows])
}

fn head_loss(x: Tensor<3>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<3> {
    let x = by_rows(x);
    let targets = Tensor::from_data(targets(x.dims()[0]), &x.device());
    F::linear_cross_entropy(x, weight, bias, targets, Default::default()).reshape([1, 1, 1])
}

/// The gradient of a parameter.
type Gradient = Box<dyn Fn(&Gradients) -> TensorData>;

/// Makes parameters, each of the same numbers of f16 for every device and dtype.
struct Parameters {
    device: Device,
    dtype: DType,
    made: usize,
    gradients: Vec<Gradient>,
}

impl Parameters {
    /// One that is frozen, of numbers in -1..1.
    fn fixed<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        self.made += 1;
        self.tensor(values(shape, 4 + self.made))
    }

    /// One that is tracked, of numbers in -1..1.
    fn take<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        let tensor = self.fixed(shape);
        self.track(tensor)
    }

    /// One that is tracked, of numbers in 0.5..1.5.
    fn positive<const D: usize>(&mut self, shape: [usize; D]) -> Tensor<D> {
        self.made += 1;
        let positive: Vec<f32> = values(shape, 4 + self.made).iter::<f32>().map(|v| v.abs() + 0.5).collect();
        let tensor = self.tensor(TensorData::new(positive, shape));
        self.track(tensor)
    }

    fn affine(&mut self, len: usize) -> [Tensor<1>; 2] {
        [(); 2].map(|()| self.positive([len]))
    }

    fn adapter(&mut self, d_in: usize, rank: usize, d_out: usize) -> LoraAdapter {
        let [a, b] = [[d_in, rank], [rank, d_out]].map(|shape| self.take(shape));
        let [a, b] = [a, b].map(|factor| Param::initialized(ParamId::new(), factor));
        LoraAdapter { a, b, scale: 1.5 }
    }

    /// A module with parameters of these.
    fn of<M: Module>(&mut self, module: M) -> M {
        module.map(self)
    }

    fn tensor<const D: usize>(&self, data: TensorData) -> Tensor<D> {
        let data = data.convert_dtype(DType::F16).convert_dtype(self.dtype);
        Tensor::from_data(data, (&self.device, self.dtype))
    }

    fn track<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        let leaf = tensor.require_grad();
        let of = leaf.clone();
        self.gradients.push(Box::new(move |gradients| of.grad(gradients).expect("tracked").into_data()));
        leaf
    }
}

impl ModuleMapper for Parameters {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|tensor| self.take(tensor.dims()))
    }
}

/// Output and gradients, in f64.
fn run(
    op: &impl Fn(Tensor<3>, &mut Parameters) -> Tensor<3>,
    shape: [usize; 3],
    dtype: DType,
    device: Device,
) -> Vec<TensorData> {
    let device = device.autodiff();
    let mut parameters = Parameters { device, dtype, made: 0, gradients: vec![] };
    let x = parameters.tensor::<3>(values(shape, 1)).require_grad();
    let y = op(x.clone(), &mut parameters);
    let dy = parameters.tensor::<3>(values(y.dims(), 2));
    let gradients = (y.clone() * dy).sum().backward();
    let mut results = vec![y.inner().into_data(), x.grad(&gradients).expect("tracked").into_data()];
    results.extend(parameters.gradients.iter().map(|of| of(&gradients)));
    results.into_iter().map(|data| data.convert_dtype(DType::F64)).collect()
}

/// Two neighbouring numbers of f16, whose mean is none: normalized they are -1 and 1.
#[test]
fn batch_norm_normalizes_with_a_mean_that_f16_lacks() {
    let _shared = among_others();
    if !gpu().supports_dtype(DType::F16) {
        println!("left out: this device has no f16");
        return;
    }
    let device = gpu().autodiff();
    let of = |values: &[f32]| Tensor::<1>::from_data(values, (&device, DType::F16));
    let x = of(&[1024.0, 1025.0, 1024.0, 1025.0]).reshape([4, 1]).require_grad();
    let [gamma, beta] = [1.0, 0.0].map(|value| of(&[value]).require_grad());
    let y = F::batch_norm_train::<2>(x.clone(), gamma.clone(), beta.clone(), 1e-5).output;
    let grads = y.clone().slice([0..1, 0..1]).sum().backward();
    let near = |found: Tensor<1>, right: &[f64]| {
        for (found, right) in found.into_data().iter::<f64>().zip(right) {
            assert!((found - right).abs() <= 2e-3, "{found}, not {right}");
        }
    };
    near(y.inner().flatten(0, 1), &[-1.0, 1.0, -1.0, 1.0]);
    // gamma / std (dy - mean(dy) - x_hat mean(dy x_hat)) of dy = [1, 0, 0, 0], std = 0.5
    near(x.grad(&grads).expect("tracked").flatten(0, 1), &[1.0, 0.0, -1.0, 0.0]);
    near(gamma.grad(&grads).expect("tracked"), &[-1.0]);
    near(beta.grad(&grads).expect("tracked"), &[1.0]);
}

/// What is wrong with the results in f16, beside f64.
fn differences(
    name: &str,
    op: impl Fn(Tensor<3>, &mut Parameters) -> Tensor<3>,
    shape: [usize; 3],
) -> Vec<String> {
    let found = run(&op, shape, DType::F16, gpu());
    let exact = run(&op, shape, DType::F64, Device::flex());
    assert_eq!(found.len(), exact.len(), "{name}");
    let mut failures = vec![];
    for (which, (found, exact)) in found.iter().zip(&exact).enumerate() {
        assert_eq!(found.shape(), exact.shape(), "{name}, {shape:?}, result {which}");
        let scale = exact.iter::<f64>().fold(1e-3, |scale: f64, v| scale.max(v.abs()));
        // Eight units in the last place of the largest number: what surrounds the operation rounds, too.
        let close = |(found, exact): &(f64, f64)| (found - exact).abs() <= scale / 128.0;
        let differs = found.iter::<f64>().zip(exact.iter::<f64>()).find(|pair| !close(pair));
        failures.extend(differs.map(|(found, exact)| {
            format!("{name}, {shape:?}, result {which}: {found}, not {exact}; scale {scale}")
        }));
    }
    failures
}

/// Of all operations and shapes that `cases` lists, if the device has f16.
fn check<F: Fn(Tensor<3>, &mut Parameters) -> Tensor<3>>(
    cases: impl IntoIterator<Item = (&'static str, F, [usize; 3])>,
) {
    let _shared = among_others();
    if !gpu().supports_dtype(DType::F16) {
        println!("left out: this device has no f16");
        return;
    }
    let failures: Vec<_> =
        cases.into_iter().flat_map(|(name, op, shape)| differences(name, op, shape)).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

const SHAPES: [[usize; 3]; 3] = [[2, 5, 12], [3, 4, 31], MANY_ROWS];

#[test]
fn half_precision_equals_f64() {
    let cases = OPS.into_iter().flat_map(|(name, op)| SHAPES.map(|shape| (name, op, shape)));
    check(cases.filter(|(name, _, shape)| *shape != MANY_ROWS || !SUMS_OF_BURN.contains(name)));
}

#[test]
fn smooth_activations_of_half_precision_equal_f64() {
    let activations = smooth();
    check(activations.iter().flat_map(|activation| {
        let op = |x: Tensor<3>, _: &mut Parameters| activation.of_unit(x);
        SHAPES.map(|shape| (activation.name, op, shape))
    }));
}

/// Sums of many terms: queries of one head in several chunks, each of which adds to the gradients of keys and values, and adapters
/// of many inputs.
#[test]
fn long_sums_in_half_precision_equal_f64() {
    const LENGTH: usize = 4300; // its square has more weights than a chunk
    let shapes = [
        ("attention", [1, LENGTH, 4]),
        ("attention, grouped", [1, LENGTH, 4]),
        ("linear, LoRA", [1, 40, 4096]),
    ];
    check(shapes.map(|(name, shape)| {
        let (_, op) = OPS.into_iter().find(|(of, _)| *of == name).expect("an operation");
        (name, op, shape)
    }));
}
