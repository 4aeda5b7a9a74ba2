//! Networks for images compute what torchvision's do with the same weights, and load its checkpoints or say why not.
#![recursion_limit = "256"]
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor, TensorData};
use burn_memsave_paper::vision::torchvision::{LoadError, Torchvision, load};
use burn_memsave_paper::vision::{
    Classifier, ConvNext, DeepLab, EfficientNet, Fcn, MobileNet, ResNet, Segmenter, UNet, Vgg, Vit,
    memsave::{convnext, deeplab, efficientnet, fcn, mobilenet, resnet, unet, vgg, vit},
};
use serde::Deserialize;
use serde_json::json;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// What `vision_torchvision.py` writes, if there is torchvision.
fn written(mode: &str) -> Option<TempDir> {
    let python = std::env::var("PYTHON").unwrap_or_else(|_| "python3".into());
    let has_torchvision = Command::new(&python).args(["-c", "import torchvision"]).output();
    if !has_torchvision.is_ok_and(|output| output.status.success()) {
        // Not by a macro: what those print is captured, and not shown of a test that passes.
        let why = format!("skipped: {python} has no `torchvision` (`pip install torchvision`)\n");
        io::stderr().write_all(why.as_bytes()).unwrap();
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vision_torchvision.py");
    let output = Command::new(&python).arg(script).arg(mode).arg(directory.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Some(directory)
}

/// What a network of torchvision makes of images.
#[derive(Deserialize)]
struct Expected {
    size: [usize; 2],
    images: Vec<f32>,
    output: Vec<f32>,
}

fn compare<M: Torchvision>(directory: &Path, name: &str, model: M, forward: fn(&M, Tensor<4>) -> TensorData) {
    let expected = fs::read(directory.join(format!("{name}.json"))).unwrap();
    let Expected { size: [height, width], images, output } = serde_json::from_slice(&expected).unwrap();
    let model = load(model, directory.join(format!("{name}.pth"))).unwrap_or_else(|error| panic!("{error}"));
    let images = TensorData::new(images, [2, 3, height, width]);
    let found: Vec<f32> = forward(&model, Tensor::from_data(images, &Device::flex())).iter().collect();
    assert_eq!(found.len(), output.len(), "{name}");
    let largest = output.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    let differences = found.iter().zip(&output).map(|(found, expected)| (found - expected).abs());
    let difference = differences.max_by(f32::total_cmp).expect("there are numbers");
    assert!(difference <= 2e-5 * largest, "{name}: {difference:e} off, of {largest:e}");
    println!("{name}: {:.0e}", difference / largest);
}

fn classifier<M: Classifier + Torchvision>(directory: &Path, name: &str, variant: M::Variant) {
    let model = M::new(variant, &Device::flex());
    compare(directory, name, model, |model, images| model.forward(images).into_data());
}

fn segmenter<M: Segmenter + Torchvision>(directory: &Path, name: &str, variant: M::Variant) {
    let model = M::new(variant, &Device::flex());
    compare(directory, name, model, |model, images| model.forward(images).into_data());
}

const SEVEN: ResNet = ResNet { classes: 7, ..ResNet::D18 };

#[test]
fn outputs_are_those_of_torchvision() {
    let Some(directory) = written("small") else { return };
    let directory = directory.path();
    classifier::<resnet::Net>(directory, "resnet_basic", ResNet { blocks: [2, 1, 1, 1], ..SEVEN });
    let bottleneck = ResNet { bottleneck: true, blocks: [1, 2, 1, 1], ..SEVEN };
    classifier::<resnet::Net>(directory, "resnet_bottleneck", bottleneck);
    let next = ResNet { blocks: [1; 4], groups: 8, group_width: 16, ..bottleneck };
    classifier::<resnet::Net>(directory, "resnext", next);
    let plain = Vgg { stages: &[&[8, 12], &[16], &[24, 24]], hidden: 32, classes: 7, ..Vgg::D16 };
    classifier::<vgg::Net>(directory, "vgg", plain);
    classifier::<vgg::Net>(directory, "vgg_norm", Vgg { batch_norm: true, ..plain });
    classifier::<efficientnet::Net>(directory, "efficientnet_v2_s", EfficientNet::V2S);
    classifier::<mobilenet::Net>(directory, "mobilenet_v3_large", MobileNet::V3_LARGE);
    let convnext = ConvNext { widths: [8, 12, 16, 20], blocks: [1, 2, 1, 1], classes: 7, ..ConvNext::TINY };
    classifier::<convnext::Net>(directory, "convnext", convnext);
    let vit = Vit { image: 64, layers: 2, heads: 3, width: 24, hidden: 40, classes: 7, ..Vit::B16 };
    classifier::<vit::Net>(directory, "vit", vit);
    classifier::<vit::Net>(directory, "vit_legacy", vit);
    let backbone = ResNet { blocks: [1, 1, 2, 2], ..DeepLab::D101.backbone };
    segmenter::<deeplab::Net>(directory, "deeplab", DeepLab { backbone, classes: 5, ..DeepLab::D101 });
    segmenter::<fcn::Net>(directory, "fcn", Fcn { backbone, classes: 5, ..Fcn::D101 });
    segmenter::<unet::Net>(directory, "unet", UNet { width: 4, classes: 3, ..UNet::CLASSIC });

    // What does not belong together is named.
    let mismatch = |net: ResNet| {
        let error = load(resnet::Net::new(net, &Device::flex()), directory.join("resnet_basic.pth"));
        let error = error.map(|_| ()).expect_err("another network");
        let text = error.to_string();
        assert!(text.contains("resnet_basic.pth: not the parameters of this network"), "{text}");
        match error {
            LoadError::Mismatch { missing, unused, wrong, .. } => (text, [missing, unused, wrong]),
            other => panic!("{other}"),
        }
    };
    let (text, [missing, unused, wrong]) = mismatch(ResNet { blocks: [3, 1, 1, 1], ..SEVEN });
    assert_eq!((missing.len(), unused, wrong), (10, vec![], vec![]));
    assert!(missing.contains(&"layer1.2.convs.0.norm.running_mean".into()), "{missing:?}");
    assert!(text.contains("the file has none for: layer1.2.convs.0.conv.weight, "), "{text}");
    assert!(text.contains(", and 2 more"), "{text}");
    let (text, [missing, unused, wrong]) = mismatch(ResNet { blocks: [1; 4], ..SEVEN });
    assert_eq!((missing, unused.len(), wrong), (vec![], 10, vec![]));
    assert!(text.contains("the network has none for: layer1.1.convs.0.conv.weight, "), "{text}");
    let (text, [missing, unused, wrong]) = mismatch(ResNet { blocks: [2, 1, 1, 1], ..ResNet::D18 });
    assert_eq!((missing, unused, wrong.len()), (vec![], vec![], 2));
    assert!(text.contains("head.dense.weight ([512, 1000] in the network, [512, 7] in the file)"), "{text}");
}

/// The checkpoints that are published are those of the networks of their size.
#[test]
fn sizes_are_those_of_torchvision() {
    let Some(directory) = written("full") else { return };
    let device = Device::flex();
    fn fits<M: Torchvision>(directory: &TempDir, name: &str, model: M) {
        load(model, directory.path().join(format!("{name}.safetensors")))
            .unwrap_or_else(|error| panic!("{error}"));
    }
    for (name, net) in [
        ("resnet18", ResNet::D18),
        ("resnet50", ResNet::D50),
        ("resnet101", ResNet::D101),
        ("resnext101_64x4d", ResNet::NEXT101),
    ] {
        fits(&directory, name, resnet::Net::new(net, &device));
    }
    fits(&directory, "vgg16", vgg::Net::new(Vgg::D16, &device));
    fits(&directory, "vgg16_bn", vgg::Net::new(Vgg::D16_NORM, &device));
    fits(&directory, "efficientnet_v2_s", efficientnet::Net::new(EfficientNet::V2S, &device));
    fits(&directory, "efficientnet_v2_l", efficientnet::Net::new(EfficientNet::V2L, &device));
    fits(&directory, "mobilenet_v3_large", mobilenet::Net::new(MobileNet::V3_LARGE, &device));
    fits(&directory, "convnext_tiny", convnext::Net::new(ConvNext::TINY, &device));
    fits(&directory, "vit_b_16", vit::Net::new(Vit::B16, &device));
    fits(&directory, "deeplabv3_resnet101", deeplab::Net::new(DeepLab::D101, &device));
    fits(&directory, "fcn_resnet101", fcn::Net::new(Fcn::D101, &device));
    fits(&directory, "unet", unet::Net::new(UNet::CLASSIC, &device));
}

/// The values of parameters, by path.
#[derive(Default)]
struct Values {
    path: Vec<String>,
    found: BTreeMap<String, Vec<f32>>,
}

impl ModuleVisitor for Values {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.insert(self.path.join("."), param.val().into_data().iter().collect());
    }
}

/// Without torchvision: a file of 0, 1, 2, ... Dense weights are transposed, and the projections of attention are in one tensor.
#[test]
fn every_number_is_where_it_belongs() {
    let layer = "encoder.layers.encoder_layer_0";
    let tensors: [(String, &[usize]); 20] = [
        ("class_token".into(), &[1, 1, 2]),
        ("conv_proj.weight".into(), &[2, 3, 1, 1]),
        ("conv_proj.bias".into(), &[2]),
        ("encoder.pos_embedding".into(), &[1, 5, 2]),
        (format!("{layer}.ln_1.weight"), &[2]),
        (format!("{layer}.ln_1.bias"), &[2]),
        (format!("{layer}.self_attention.in_proj_weight"), &[6, 2]),
        (format!("{layer}.self_attention.in_proj_bias"), &[6]),
        (format!("{layer}.self_attention.out_proj.weight"), &[2, 2]),
        (format!("{layer}.self_attention.out_proj.bias"), &[2]),
        (format!("{layer}.ln_2.weight"), &[2]),
        (format!("{layer}.ln_2.bias"), &[2]),
        (format!("{layer}.mlp.0.weight"), &[3, 2]),
        (format!("{layer}.mlp.0.bias"), &[3]),
        (format!("{layer}.mlp.3.weight"), &[2, 3]),
        (format!("{layer}.mlp.3.bias"), &[2]),
        ("encoder.ln.weight".into(), &[2]),
        ("encoder.ln.bias".into(), &[2]),
        ("heads.head.weight".into(), &[1, 2]),
        ("heads.head.bias".into(), &[1]),
    ];
    let mut header = serde_json::Map::new();
    let mut bytes = vec![];
    for (name, shape) in &tensors {
        let start = bytes.len();
        let first = start / 4;
        let values = first..first + shape.iter().product::<usize>();
        bytes.extend(values.flat_map(|value| (value as f32).to_le_bytes()));
        let entry = json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, bytes.len()] });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &bytes].concat();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vit.safetensors");
    fs::write(&path, file).unwrap();

    let net = Vit { image: 2, patch: 1, layers: 1, heads: 1, width: 2, hidden: 3, classes: 1, ..Vit::B16 };
    let model = load(vit::Net::new(net, &Device::flex()), &path).unwrap_or_else(|error| panic!("{error}"));
    let mut values = Values::default();
    model.visit(&mut values);
    let found = |path: &str| &values.found[path][..];
    assert_eq!(found("positions"), [10., 11., 12., 13., 14., 15., 16., 17., 18., 19.]);
    assert_eq!(found("blocks.0.attention_norm.gamma"), [20., 21.]);
    assert_eq!(found("blocks.0.attention_norm.beta"), [22., 23.]);
    assert_eq!(found("blocks.0.attention.query.weight"), [24., 26., 25., 27.]);
    assert_eq!(found("blocks.0.attention.key.weight"), [28., 30., 29., 31.]);
    assert_eq!(found("blocks.0.attention.value.weight"), [32., 34., 33., 35.]);
    assert_eq!(found("blocks.0.attention.query.bias"), [36., 37.]);
    assert_eq!(found("blocks.0.attention.value.bias"), [40., 41.]);
    assert_eq!(found("blocks.0.attention.output.weight"), [42., 44., 43., 45.]);
    assert_eq!(found("blocks.0.inner.weight"), [52., 54., 56., 53., 55., 57.]);
    assert_eq!(found("head.bias").len(), 1);
    assert_eq!(values.found.len(), 24);
}

#[test]
fn what_is_no_checkpoint_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["weights.pth", "weights.safetensors"] {
        let path = directory.path().join(name);
        let refused = || {
            let model = resnet::Net::new(SEVEN, &Device::flex());
            let error = load(model, &path).map(|_| ()).expect_err("no checkpoint");
            assert!(matches!(error, LoadError::Read { .. }) && error.to_string().contains(name), "{error}");
        };
        refused();
        for damaged in [&b""[..], b"{}", &[255; 64]] {
            fs::write(&path, damaged).unwrap();
            refused();
        }
    }
}
