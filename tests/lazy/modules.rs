//! Tests that outputs are bit-identical to those of weights in memory: for every module with parameters, Burn's and ours, on every
//! backend, from both formats.
use crate::{Saved, all, devices, load, open};
use burn::module::Module;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData};

fn check<M: Module>(
    name: &str,
    make: impl Fn(&Device) -> M,
    forward: impl Fn(&M, &Device) -> Vec<TensorData>,
) {
    for device in devices() {
        let eager = make(&device);
        let expected = forward(&eager, &device);
        let saved = Saved::new(&eager);
        for format in ["model.safetensors", "model.bpk"] {
            let file = open(&saved.path(format));
            let (lazy, report) = load(make(&device), &file, &all());
            assert!(!report.lazy.is_empty(), "{name} on {device:?}: {report}");
            assert!(report.unused.is_empty() && report.missing.is_empty(), "{name} on {device:?}: {report}");
            assert_eq!(lazy.num_params(), eager.num_params(), "{name}: counted");
            for pass in 0..2 {
                for (lazy, eager) in forward(&lazy, &device).iter().zip(&expected) {
                    assert!(lazy == eager, "{name} on {device:?} from {format}, pass {pass}");
                }
            }
            assert_eq!(forward(&lazy.materialize(), &device), expected, "{name} on {device:?}: materialized");
        }
    }
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    let values: usize = shape.iter().product();
    let values = (0..values).map(|index| ((index * 7919 % 1009) as f32 / 1009.0) - 0.5).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn data<const D: usize>(tensor: Tensor<D>) -> Vec<TensorData> {
    vec![tensor.into_data()]
}

macro_rules! every_module {
    ($test:ident, $nn:path) => {
        #[test]
        fn $test() {
            use nn::conv::*;
            use nn::transformer::*;
            use $nn as nn;
            let linear = nn::LinearConfig::new(6, 5);
            check("linear", |d| linear.init(d), |m, d| data(m.forward(random([2, 3, 6], d))));
            let by_columns = linear.clone().with_layout(burn::nn::LinearLayout::Col);
            check("linear by columns", |d| by_columns.init(d), |m, d| data(m.forward(random([2, 3, 6], d))));
            let embedding = nn::EmbeddingConfig::new(9, 4);
            check(
                "embedding",
                |d| embedding.init(d),
                |m, d| data(m.forward(Tensor::<2, Int>::from_ints([[0, 8, 3], [3, 4, 5]], d))),
            );
            let conv = Conv1dConfig::new(4, 6, 3).with_groups(2);
            check("conv1d", |d| conv.init(d), |m, d| data(m.forward(random([2, 4, 9], d))));
            let conv = Conv2dConfig::new([3, 4], [3, 2]);
            check("conv2d", |d| conv.init(d), |m, d| data(m.forward(random([2, 3, 7, 6], d))));
            let conv = Conv3dConfig::new([2, 3], [2, 2, 2]);
            check("conv3d", |d| conv.init(d), |m, d| data(m.forward(random([1, 2, 4, 4, 5], d))));
            let conv = ConvTranspose1dConfig::new([4, 3], 3);
            check("conv_transpose1d", |d| conv.init(d), |m, d| data(m.forward(random([2, 4, 5], d))));
            let conv = ConvTranspose2dConfig::new([4, 3], [3, 2]);
            check("conv_transpose2d", |d| conv.init(d), |m, d| data(m.forward(random([2, 4, 5, 4], d))));
            let conv = ConvTranspose3dConfig::new([2, 3], [2, 2, 2]);
            check("conv_transpose3d", |d| conv.init(d), |m, d| data(m.forward(random([1, 2, 3, 3, 3], d))));
            let conv = DeformConv2dConfig::new([2, 3], [3, 3]);
            check(
                "deform_conv2d",
                |d| conv.init(d),
                |m, d| data(m.forward(random([1, 2, 5, 5], d), random([1, 18, 3, 3], d), None)),
            );
            let swiglu = nn::SwiGluConfig::new(6, 4);
            check("swiglu", |d| swiglu.init(d), |m, d| data(m.forward(random([2, 6], d))));
            let encoder = TransformerEncoderConfig::new(8, 12, 2, 2).with_dropout(0.0);
            check(
                "encoder",
                |d| encoder.init(d),
                |m, d| data(m.forward(TransformerEncoderInput::new(random([2, 3, 8], d)))),
            );
            let decoder = TransformerDecoderConfig::new(8, 12, 2, 2).with_dropout(0.0);
            check(
                "decoder",
                |d| decoder.init(d),
                |m, d| {
                    data(m.forward(TransformerDecoderInput::new(random([2, 3, 8], d), random([2, 4, 8], d))))
                },
            );
            let cross = nn::attention::CrossAttentionConfig::new(8, 6, 2, 2, 4).with_dropout(0.0);
            check(
                "cross attention",
                |d| cross.init(d),
                |m, d| data(m.forward(random([2, 3, 8], d), random([2, 4, 6], d), None)),
            );
            let lstm = nn::LstmConfig::new(5, 4, true);
            check("lstm", |d| lstm.init(d), |m, d| data(m.forward(random([2, 3, 5], d), None).0));
            let lstm = nn::BiLstmConfig::new(5, 4, true);
            check("bilstm", |d| lstm.init(d), |m, d| data(m.forward(random([2, 3, 5], d), None).0));
            let gru = nn::GruConfig::new(5, 4, true);
            check("gru", |d| gru.init(d), |m, d| data(m.forward(random([2, 3, 5], d), None)));
            let gru = nn::BiGruConfig::new(5, 4, true);
            check("bigru", |d| gru.init(d), |m, d| data(m.forward(random([2, 3, 5], d), None).0));
            let rnn = nn::RnnConfig::new(5, 4, true);
            check("rnn", |d| rnn.init(d), |m, d| data(m.forward(random([2, 3, 5], d), None).0));
            let rnn = nn::BiRnnConfig::new(5, 4, true);
            check("birnn", |d| rnn.init(d), |m, d| data(m.forward(random([2, 3, 5], d), None).0));
        }
    };
}
every_module!(of_burn, burn::nn);
every_module!(of_this_library, burn_memsave::nn);

/// Parameters of one axis, running statistics, integers and flags.
#[derive(Module, Debug)]
struct Small {
    linear: burn::nn::Linear,
    batch: burn_memsave::nn::BatchNorm,
    layer: burn_memsave::nn::LayerNorm,
    rms: burn::nn::RmsNorm,
    group: burn_memsave::nn::GroupNorm,
    instance: burn::nn::InstanceNorm,
    prelu: burn_memsave::nn::PRelu,
    steps: burn::module::Param<Tensor<1, Int>>,
    mask: burn::module::Param<Tensor<2, burn::tensor::Bool>>,
}

impl Small {
    fn new(device: &Device) -> Self {
        let param = burn::module::Param::initialized;
        let id = burn::module::ParamId::new;
        let mut small = Self {
            linear: burn::nn::LinearConfig::new(4, 4).init(device),
            batch: burn_memsave::nn::BatchNormConfig::new(4).init(device),
            layer: burn_memsave::nn::LayerNormConfig::new(4).init(device),
            rms: burn::nn::RmsNormConfig::new(4).init(device),
            group: burn_memsave::nn::GroupNormConfig::new(2, 4).init(device),
            instance: burn::nn::InstanceNormConfig::new(4).init(device),
            prelu: burn_memsave::nn::PReluConfig::new().init(device),
            steps: param(id(), Tensor::from_ints([1, 2, 3], device)),
            mask: burn::module::Param::initialized(id(), Tensor::from_data([[true, false]], device)),
        };
        let noise = || Tensor::<1>::random([4], Distribution::Uniform(0.5, 1.5), device);
        small.batch.running_mean.update(noise());
        small.batch.running_mean.update(noise());
        small.layer.gamma = burn::module::Param::from_tensor(noise());
        small.rms.gamma = burn::module::Param::from_tensor(noise());
        small
    }
}

#[test]
fn small_parameters_are_read_at_once() {
    for device in devices() {
        let mut eager = Small::new(&device);
        eager.steps = burn::module::Param::initialized(eager.steps.id, Tensor::from_ints([7, 8, 9], &device));
        eager.mask =
            burn::module::Param::initialized(eager.mask.id, Tensor::from_data([[false, true]], &device));
        let saved = Saved::new(&eager);
        let (lazy, report) = load(Small::new(&device), &saved.safetensors(), &all());
        let paths: Vec<_> = report.lazy.iter().map(|parameter| &parameter.path[..]).collect();
        assert_eq!(paths, ["linear.weight"]);
        assert_eq!(report.resident.len(), 15, "{report}");
        let forward = |m: &Small| {
            let x = m.linear.forward(random([3, 4], &device));
            let x = m.rms.forward(m.layer.forward(m.batch.forward(x)));
            let x = m
                .prelu
                .forward(m.instance.forward(m.group.forward(x.unsqueeze_dim::<3>(2).repeat_dim(2, 3))));
            (x.into_data(), m.steps.val().into_data(), m.mask.val().into_data())
        };
        let ((x, steps, mask), expected) = (forward(&lazy), forward(&eager));
        assert_eq!(x, expected.0);
        steps.assert_eq(&expected.1, true);
        mask.assert_eq(&expected.2, false);
    }
}
