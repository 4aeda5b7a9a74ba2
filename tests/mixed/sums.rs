//! Sums of many parts are made in f32 inside of layers: in half precision a sum of ones stops at 256 (bf16) or 2048 (f16).
use super::{BOTH, Precision};
use crate::meter::alone;
use burn::module::{Lora, Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{Device, FloatDType, Int, Tensor, ops::AvgPoolOptions};
use burn_memsave::functional as F;
use burn_memsave::lora::Dora;
use burn_memsave::nn::conv::{Conv1dConfig, Conv2dConfig, Conv3dConfig, ConvTranspose2dConfig};
use burn_memsave::nn::loss::{
    BinaryCrossEntropyLossConfig, CrossEntropyLossConfig, FusedLinearCrossEntropyConfig, HuberLossConfig,
    KLDivLossConfig, MseLoss, Reduction,
};
use burn_memsave::nn::*;

/// More than either type counts to, and a number of both.
const MANY: usize = 1 << 13;

/// Of all parameters, the sum of the magnitudes.
struct Magnitudes<'a>(&'a GradientsParams, Vec<(String, f64)>, Vec<String>);

impl ModuleVisitor for Magnitudes<'_> {
    fn enter_module(&mut self, name: &str, _: &str) {
        self.2.push(name.into());
    }
    fn exit_module(&mut self, _: &str, _: &str) {
        self.2.pop();
    }
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.0.get::<D>(param.id) {
            let sum = gradient.into_data().iter::<f64>().map(f64::abs).sum();
            self.1.push((self.2.join("."), sum));
        }
    }
}

/// The gradients of a layer over many equal rows are those in f32, to rounding.
fn check<M: Module>(name: &str, model: &M, forward: impl Fn(&M, FloatDType) -> Tensor<1>) {
    let magnitudes = |loss: Tensor<1>| {
        let gradients = GradientsParams::from_grads(loss.backward(), model);
        let mut magnitudes = Magnitudes(&gradients, vec![], vec![]);
        model.visit(&mut magnitudes);
        magnitudes.1
    };
    let exact = magnitudes(forward(model, FloatDType::F32));
    assert!(!exact.is_empty());
    for precision in BOTH.map(|precision: fn() -> Precision| precision()) {
        let found = magnitudes(forward(&precision.half_copy(model).unwrap(), precision.dtype()));
        for ((path, found), (_, exact)) in found.iter().zip(&exact) {
            // Slopes of saturated gates are a few roundings off; a sum that stops is off by a factor.
            let bound = 0.02 * exact.abs() + 1e-2;
            assert!(
                (found - exact).abs() <= bound,
                "{name} {path}, {:?}: {found}, f32 {exact}",
                precision.dtype()
            );
        }
    }
}

#[test]
fn gradients_of_parameters_are_summed_in_f32() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    device.seed(0);
    // Sums are made of a loss in f32, so that the sum of outputs is none of the layer's.
    fn sum<const D: usize>(y: Tensor<D>) -> Tensor<1> {
        y.cast(FloatDType::F32).sum()
    }
    let rows = |width: usize, dtype: FloatDType| {
        let row = Tensor::<1>::from_floats([1.0, -0.5, 0.25, 0.75], &device).cast(dtype);
        row.slice(0..width).unsqueeze::<2>().repeat_dim(0, MANY)
    };
    check("linear", &LinearConfig::new(4, 3).init(&device), |m, t| sum(m.forward(rows(4, t))));
    let lora = LinearConfig::new(4, 3).init(&device).apply_lora(Lora::new(2, 2.0));
    check("lora", &lora, |m, t| sum(m.forward(rows(4, t))));
    check("layer norm", &LayerNormConfig::new(4).init(&device), |m, t| sum(m.forward(rows(4, t))));
    check("rms norm", &RmsNormConfig::new(4).init(&device), |m, t| sum(m.forward(rows(4, t))));
    check("group norm", &GroupNormConfig::new(2, 4).init(&device), |m, t| {
        sum(m.forward(rows(4, t).reshape([MANY as i32, 4, 1])))
    });
    check("batch norm", &BatchNormConfig::new(4).init(&device), |m, t| {
        let x = rows(4, t)
            * Tensor::<1>::from_floats([1.0, 2.0], &device)
                .cast(t)
                .repeat_dim(0, MANY / 2)
                .unsqueeze_dim::<2>(1);
        sum(m.forward(x))
    });
    check("prelu", &PReluConfig::new().init(&device), |m, t| sum(m.forward(-rows(4, t).abs())));
    check("embedding", &EmbeddingConfig::new(3, 4).init(&device), |m, _| {
        sum(m.forward(Tensor::<2, Int>::ones([2, MANY as i32 / 2], &device)))
    });
    check("large embedding", &EmbeddingConfig::new(40_000, 5).init(&device), |m, _| {
        sum(m.forward(Tensor::<2, Int>::ones([2, MANY as i32 / 2], &device)))
    });
    check("conv1d", &Conv1dConfig::new(1, 2, 3).init(&device), |m, t| {
        sum(m.forward(rows(1, t).reshape([1, 1, MANY as i32])))
    });
    check("conv2d", &Conv2dConfig::new([1, 2], [3, 3]).init(&device), |m, t| {
        sum(m.forward(rows(1, t).reshape([1, 1, 64, MANY as i32 / 64])))
    });
    check("conv2d of many images", &Conv2dConfig::new([1, 2], [1, 1]).init(&device), |m, t| {
        sum(m.forward(rows(1, t).reshape([MANY as i32, 1, 1, 1])))
    });
    check("conv_transpose2d", &ConvTranspose2dConfig::new([1, 2], [2, 2]).init(&device), |m, t| {
        sum(m.forward(rows(1, t).reshape([1, 1, 64, MANY as i32 / 64])))
    });
    check("gru", &gru::GruConfig::new(4, 2, true).init(&device), |m, t| {
        sum(m.forward(rows(4, t).reshape([MANY as i32 / 4, 4, 4]), None))
    });
    check("lstm", &LstmConfig::new(4, 2, true).init(&device), |m, t| {
        sum(m.forward(rows(4, t).reshape([MANY as i32 / 4, 4, 4]), None).0)
    });
    check("rnn", &RnnConfig::new(4, 2, true).init(&device), |m, t| {
        sum(m.forward(rows(4, t).reshape([MANY as i32 / 4, 4, 4]), None).0)
    });
    check("instance norm", &InstanceNormConfig::new(4).init(&device), |m, t| {
        sum(m.forward(rows(4, t).reshape([MANY as i32 / 8, 4, 8])))
    });
    check(
        "dora",
        &LinearConfig::new(4, 3).init(&device).apply_reparameterization(Dora::new(Lora::new(2, 2.0))),
        |m, t| sum(m.forward(rows(4, t))),
    );
    check("conv3d", &Conv3dConfig::new([1, 2], [1, 1, 1]).init(&device), |m, t| {
        sum(m.forward(rows(1, t).reshape([8, 1, 16, 8, 8])))
    });
    check(
        "attention",
        &attention::MultiHeadAttentionConfig::new(4, 2).with_dropout(0.0).init(&device),
        |m, t| {
            let x = rows(4, t).reshape([MANY as i32 / 64, 64, 4]);
            sum(m.forward(attention::MhaInput::self_attn(x)).context)
        },
    );
    check("a head and its loss", &LinearConfig::new(4, 3).init(&device), |m, t| {
        let targets = Tensor::<1, Int>::zeros([MANY], &device).reshape([1, MANY]);
        let loss = FusedLinearCrossEntropyConfig::new().init(&device);
        loss.forward(m, rows(4, t).reshape([1, MANY, 4]), targets).cast(FloatDType::F32) * MANY as f64
    });
    check(
        "swiglu",
        &SwiGluConfig::new(4, 3).with_bias(true).init(&device),
        |m, t| sum(m.forward(rows(4, t))),
    );
}

#[test]
fn outputs_are_summed_in_f32() {
    let _alone = alone();
    let device = Device::flex();
    for precision in BOTH.map(|precision: fn() -> Precision| precision()) {
        let dtype = precision.dtype();
        let ones = |shape: [usize; 2]| Tensor::<2>::ones(shape, &device).cast(dtype);
        let scalar = |x: Tensor<1>| x.into_scalar::<f64>();
        let is = |what: &str, found: f64, exact: f64| {
            assert!((found - exact).abs() <= 0.01 * exact.abs(), "{what}, {dtype:?}: {found}, not {exact}");
        };
        let product = F::linear(ones([1, MANY]), ones([MANY, 1]), None);
        is("linear", product.into_scalar::<f64>(), MANY as f64);
        let softmax = F::softmax(ones([1, MANY]), 1).cast(FloatDType::F32).sum();
        is("softmax", scalar(softmax), 1.0);
        let row = F::layer_norm(
            Tensor::cat(vec![ones([1, MANY]), -ones([1, MANY])], 1) + 2.0,
            Tensor::<1>::ones([2 * MANY], &device).cast(dtype),
            None,
            1e-5,
        );
        is("layer norm", row.slice([0..1, 0..1]).into_scalar::<f64>(), 1.0);
        let row = F::rms_norm(ones([1, MANY]), Tensor::<1>::ones([MANY], &device).cast(dtype), 1e-5);
        is("rms norm", row.slice([0..1, 0..1]).into_scalar::<f64>(), 1.0);
        let targets = Tensor::<1, Int>::zeros([MANY], &device);
        let loss = CrossEntropyLossConfig::new().init(&device).forward(ones([MANY, 7]), targets);
        is("cross entropy of many rows", scalar(loss), 7f64.ln());
        let loss =
            CrossEntropyLossConfig::new().init(&device).forward(ones([1, MANY]), Tensor::zeros([1], &device));
        is("cross entropy of many classes", scalar(loss), (MANY as f64).ln());
        let loss = MseLoss::new().forward(ones([1, MANY]), -ones([1, MANY]), Reduction::Mean);
        is("mse", scalar(loss), 4.0);
        let loss =
            HuberLossConfig::new(0.5).init().forward(ones([1, MANY]), -ones([1, MANY]), Reduction::Mean);
        is("huber", scalar(loss), 0.5 * (2.0 - 0.25));
        let loss = KLDivLossConfig::new().init().forward(-ones([1, MANY]), ones([1, MANY]), Reduction::Mean);
        is("kl divergence", scalar(loss), 1.0);
        let loss = BinaryCrossEntropyLossConfig::new().with_logits(true).init(&device);
        let loss = loss.forward(ones([MANY, 1]), Tensor::<2, Int>::ones([MANY, 1], &device));
        let weighted =
            CrossEntropyLossConfig::new().with_weights(Some(vec![1.0; 7])).with_smoothing(Some(0.1));
        let found = weighted.init(&device).forward(ones([MANY, 7]), Tensor::<1, Int>::zeros([MANY], &device));
        is("weighted and smoothed cross entropy", scalar(found), 7f64.ln());
        is("binary cross entropy", scalar(loss), (1.0 + (-1f64).exp()).ln());
        let [one, gamma] = [ones([1, MANY]), ones([1, MANY])];
        let (_, norm) = F::add_rms_norm(one.clone(), one, gamma.reshape([MANY]), 1e-5);
        is("residual sum and its norm", norm.slice([0..1, 0..1]).into_scalar::<f64>(), 1.0);
        let qkv = || ones([1, MANY]).reshape([1, 1, MANY, 1]);
        let one = Tensor::<4>::ones([1, 1, 1, 1], &device).cast(dtype);
        let context = F::attention(one, qkv(), qkv(), None, None, Default::default());
        let wide = ones([1, MANY]).reshape([1, 1, 1, MANY]);
        let pooled = F::avg_pool2d(wide.clone(), AvgPoolOptions::new([1, MANY]));
        is("average pool", pooled.into_scalar::<f64>(), 1.0);
        is("adaptive average pool", F::adaptive_avg_pool2d(wide, [1, 1]).into_scalar::<f64>(), 1.0);
        is("attention", context.into_scalar::<f64>(), 1.0);
    }
}

/// That the numbers here are large enough to tell: Burn's own gradient of an embedding is summed in its type.
#[test]
fn a_sum_in_half_precision_would_be_seen() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    for (precision, most) in
        BOTH.map(|precision: fn() -> Precision| precision()).into_iter().zip([256.0, 2048.0])
    {
        let table = Tensor::<2>::ones([3, 4], &device).cast(precision.dtype()).detach().require_grad();
        let rows = burn::tensor::module::embedding(table.clone(), Tensor::ones([1, MANY], &device));
        let gradient = table.grad(&rows.cast(FloatDType::F32).sum().backward()).unwrap();
        assert_eq!(gradient.max().into_scalar::<f64>(), most);
    }
}
