//! Networks for images of the two namespaces compute the same, forward and backward, from the same record.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Distribution, Gradients, Tensor, TensorData};
use burn_memsave_paper::vision::{
    Classifier, ConvNext, DeepLab, EfficientNet, EfficientStage, Fcn, InvertedResidual, MobileNet, ResNet,
    Segmenter, UNet, Vgg, Vit, memsave, stock,
};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Logits of any shape.
type Forward<M> = fn(&M, Tensor<4>) -> Tensor<1>;

/// Of another dtype.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let tracked = param.is_require_grad();
        param.map(|value| value.inner().cast(self.0).autodiff().set_require_grad(tracked))
    }
}

/// The gradients of parameters, by path.
struct Collect<'a> {
    gradients: &'a Gradients,
    path: Vec<String>,
    found: BTreeMap<String, TensorData>,
}

impl ModuleVisitor for Collect<'_> {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            let path = self.path.join(".");
            let gradient =
                param.val().grad(self.gradients).unwrap_or_else(|| panic!("{path} has no gradient"));
            self.found.insert(path, gradient.into_data());
        }
    }
}

/// The output and all gradients of a step.
fn step<M: Module>(model: &M, forward: Forward<M>, images: &Tensor<4>) -> BTreeMap<String, TensorData> {
    let images = images.clone().require_grad();
    let output = forward(model, images.clone());
    // Fixed and different weights, since the sum over what a norm made has no gradient.
    let count = output.dims()[0] as i64;
    let weights = Tensor::<1, burn::tensor::Int>::arange(0..count, &images.device());
    let weights = weights.float().mul_scalar(0.7).sin().cast(images.dtype());
    let gradients = (output.clone() * weights).sum().backward();
    let mut collect = Collect { gradients: &gradients, path: vec![], found: BTreeMap::new() };
    model.visit(&mut collect);
    let input = images.grad(&gradients).expect("the input is tracked");
    collect.found.insert("the input".into(), input.into_data());
    collect.found.insert("the output".into(), output.into_data());
    collect.found
}

/// The largest number.
fn largest(data: &TensorData) -> f64 {
    data.iter::<f64>().fold(0.0, |largest, value| largest.max(value.abs()))
}

/// Every difference is at most `within`, of the largest number of its tensor. That of a gradient counts as a hundredth of the largest
/// of all gradients at least: some are 0 but for rounding, such as that of a bias before a batch norm.
fn differences(
    found: &BTreeMap<String, TensorData>,
    expected: &BTreeMap<String, TensorData>,
    within: f64,
) -> Result<(), String> {
    assert!(found.keys().eq(expected.keys()));
    let least = 1e-2 * expected.values().map(largest).fold(0.0, f64::max);
    assert!(least > 0.0 && least.is_finite(), "nothing to compare");
    for (name, expected) in expected {
        assert_eq!(found[name].shape(), expected.shape(), "{name}");
        let pairs = found[name].iter::<f64>().zip(expected.iter::<f64>());
        let differences = pairs.map(|(found, expected)| (found - expected).abs());
        let difference = differences.max_by(f64::total_cmp).expect("there are numbers"); // NaN is the largest
        let scale = largest(expected).max(least);
        if difference.is_nan() || difference > within * scale {
            return Err(format!("{name}: {difference:e} off, of {scale:e}"));
        }
    }
    Ok(())
}

/// A network of one namespace.
struct Side<M> {
    new: Box<dyn Fn(&Device) -> M>,
    forward: Forward<M>,
}

/// Training, and then evaluation with the running statistics that the training left: outputs and all gradients are `within`; in f32
/// outputs only, since rounding puts a number on the other side of the kink of a relu now and then, in stock's as in ours, and all
/// gradients before it are others.
fn compare<S: Module, M: Module>(
    (stock, ours): (&Side<S>, &Side<M>),
    size: usize,
    (dtype, within): (DType, f64),
) {
    static GENERATOR: Mutex<()> = Mutex::new(());
    let device = Device::flex().autodiff();
    let turn = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
    device.seed(7);
    let theirs = (stock.new)(&device).map(&mut Cast(dtype));
    let images = Tensor::<4>::random([4, 3, size, size], Distribution::Normal(0.0, 1.0), &device);
    drop(turn);
    let images = images.cast(dtype);
    let model = (ours.new)(&device).load_record(theirs.clone().into_record());
    let agree = |model: &M, theirs: &S| {
        let (mut found, mut expected) =
            (step(model, ours.forward, &images), step(theirs, stock.forward, &images));
        let gradients = found.len() - 1;
        if dtype == DType::F32 {
            for results in [&mut found, &mut expected] {
                results.retain(|name, _| name == "the output");
            }
        }
        differences(&found, &expected, within).unwrap_or_else(|error| panic!("{dtype:?}: {error}"));
        gradients
    };
    assert!(agree(&model, &theirs) > 1);
    assert_eq!(agree(&model.freeze(), &theirs.freeze()), 1, "nothing but the input has a gradient");
}

fn networks<S: Module, M: Module>(stock: Side<S>, ours: Side<M>, size: usize, within: f64) {
    compare((&stock, &ours), size, (DType::F64, within));
    compare((&stock, &ours), size, (DType::F32, 1e-4));
}

fn classifier<M: Classifier<Variant: 'static>>(variant: M::Variant) -> Side<M> {
    let new = move |device: &Device| M::new(variant, device);
    Side { new: Box::new(new), forward: |model, images| model.forward(images).flatten(0, 1) }
}

fn segmenter<M: Segmenter<Variant: 'static>>(variant: M::Variant) -> Side<M> {
    let new = move |device: &Device| M::new(variant, device);
    Side { new: Box::new(new), forward: |model, images| model.forward(images).flatten(0, 3) }
}

const RESNET: ResNet = ResNet { blocks: [2, 1, 1, 1], width: 8, classes: 5, ..ResNet::D18 };
const BOTTLENECK: ResNet = ResNet { bottleneck: true, ..RESNET };

#[test]
fn residual_networks() {
    for net in [RESNET, BOTTLENECK, ResNet { groups: 4, group_width: 16, ..BOTTLENECK }] {
        let (stock, ours) = (classifier::<stock::resnet::Net>(net), classifier::<memsave::resnet::Net>(net));
        networks(stock, ours, 64, 1e-9);
    }
}

#[test]
fn vgg() {
    let net =
        Vgg { stages: &[&[4, 6], &[8], &[8, 8]], hidden: 12, dropout: 0.0, classes: 5, batch_norm: false };
    for net in [net, Vgg { batch_norm: true, ..net }] {
        networks(classifier::<stock::vgg::Net>(net), classifier::<memsave::vgg::Net>(net), 32, 1e-9);
    }
}

#[test]
fn efficient_networks() {
    const STAGES: &[EfficientStage] = &[
        EfficientStage::new(true, 1, 1, 8, 2),
        EfficientStage::new(true, 4, 2, 12, 2),
        EfficientStage::new(false, 4, 2, 16, 2),
    ];
    let net = EfficientNet { stages: STAGES, features: 24, dropout: 0.0, classes: 5 };
    let (stock, ours) =
        (classifier::<stock::efficientnet::Net>(net), classifier::<memsave::efficientnet::Net>(net));
    networks(stock, ours, 32, 1e-9);
}

#[test]
fn mobile_networks() {
    const BLOCKS: &[InvertedResidual] = &[
        InvertedResidual::new(3, 8, 8, [false, false], 1),
        InvertedResidual::new(5, 24, 12, [true, false], 2),
        InvertedResidual::new(3, 32, 12, [false, true], 1),
        InvertedResidual::new(5, 32, 16, [true, true], 2),
    ];
    let net = MobileNet { stem: 8, blocks: BLOCKS, features: 20, dropout: 0.0, classes: 5 };
    // Stock's hard sigmoid computes in f32 (0.22.1).
    let (stock, ours) =
        (classifier::<stock::mobilenet::Net>(net), classifier::<memsave::mobilenet::Net>(net));
    networks(stock, ours, 32, 1e-6);
}

#[test]
fn convnext() {
    let net = ConvNext { widths: [8, 12, 16, 20], blocks: [1, 2, 1, 1], scale: 0.5, classes: 5 };
    let (stock, ours) = (classifier::<stock::convnext::Net>(net), classifier::<memsave::convnext::Net>(net));
    networks(stock, ours, 64, 1e-9);
}

#[test]
fn vision_transformers() {
    let net = Vit { image: 32, patch: 8, layers: 2, heads: 6, width: 24, hidden: 40, classes: 5, ..Vit::B16 };
    let (stock, ours) = (classifier::<stock::vit::Net>(net), classifier::<memsave::vit::Net>(net));
    networks(stock, ours, 32, 1e-9);
}

#[test]
fn deeplab() {
    let backbone = ResNet { dilated: [false, true, true], ..BOTTLENECK };
    let net = DeepLab { backbone, width: 12, dropout: 0.0, classes: 3, ..DeepLab::D101 };
    let (stock, ours) = (segmenter::<stock::deeplab::Net>(net), segmenter::<memsave::deeplab::Net>(net));
    networks(stock, ours, 36, 1e-9);
}

#[test]
fn fully_convolutional_networks() {
    let backbone = ResNet { dilated: [false, true, true], ..BOTTLENECK };
    let net = Fcn { backbone, dropout: 0.0, classes: 3 };
    let (stock, ours) = (segmenter::<stock::fcn::Net>(net), segmenter::<memsave::fcn::Net>(net));
    networks(stock, ours, 36, 1e-9);
}

#[test]
fn unet() {
    let net = UNet { width: 4, depth: 3, classes: 3 };
    let (stock, ours) = (segmenter::<stock::unet::Net>(net), segmenter::<memsave::unet::Net>(net));
    networks(stock, ours, 32, 1e-9);
}
