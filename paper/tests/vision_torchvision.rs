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
use std::path::{Path, PathBuf};
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

/// A network of torchvision, and what it makes of images.
#[derive(Deserialize)]
struct Expected {
    size: [usize; 2],
    tensors: Vec<Described>,
    /// Of the output, one element in so many.
    every: usize,
    output: Vec<f32>,
}

/// Name, type and shape of a tensor, and between which numbers its own are.
#[derive(Deserialize)]
struct Described(String, String, Vec<usize>, f64, f64);

/// What `numbers` of the script makes, too.
fn numbers(position: usize, count: usize, low: f64, high: f64) -> impl Iterator<Item = f32> {
    let start = (position as u32).wrapping_mul(0x9E37_79B9);
    (0..count as u32).map(move |index| {
        let x = start.wrapping_add(index);
        let x = (x ^ (x >> 16)).wrapping_mul(0x85EB_CA6B);
        let x = (x ^ (x >> 13)).wrapping_mul(0xC2B2_AE35);
        let x = x ^ (x >> 16);
        (low + (high - low) * (f64::from(x) / 4_294_967_296.0)) as f32
    })
}

impl Expected {
    fn read(directory: &Path, name: &str) -> Self {
        serde_json::from_slice(&fs::read(directory.join(format!("{name}.json"))).unwrap()).unwrap()
    }

    fn images(&self) -> Tensor<4> {
        let [height, width] = self.size;
        let shape = [2, 3, height, width];
        let images: Vec<f32> = numbers(self.tensors.len(), shape.iter().product(), -1.7, 1.7).collect();
        Tensor::from_data(TensorData::new(images, shape), &Device::flex())
    }

    /// Writes the tensors to a file.
    fn write(&self, path: &Path) {
        let tensors = self.tensors.iter().enumerate().map(|(position, tensor)| {
            let Described(name, dtype, shape, low, high) = tensor;
            let numbers = numbers(position, shape.iter().product(), *low, *high);
            let bytes: Vec<u8> = match dtype.as_str() {
                "I64" => numbers.flat_map(|value| (value as i64).to_le_bytes()).collect(),
                _ => numbers.flat_map(f32::to_le_bytes).collect(),
            };
            (name.as_str(), dtype.as_str(), &shape[..], bytes)
        });
        write_safetensors(path, tensors);
    }
}

/// Writes tensors to a file: their names, types, shapes and bytes.
fn write_safetensors<'a>(
    path: &Path,
    tensors: impl Iterator<Item = (&'a str, &'a str, &'a [usize], Vec<u8>)>,
) {
    let (mut header, mut data) = (serde_json::Map::new(), vec![]);
    for (name, dtype, shape, bytes) in tensors {
        let start = data.len();
        data.extend(bytes);
        let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.into(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
}

/// Networks, and where their checkpoints are.
struct Networks<'a> {
    /// Of what is expected.
    directory: &'a Path,
    /// The file of a network, in which its weights are then.
    checkpoint: &'a dyn Fn(&str, &Expected) -> PathBuf,
}

fn compare<M: Torchvision>(
    networks: &Networks<'_>,
    name: &str,
    model: M,
    forward: fn(&M, Tensor<4>) -> TensorData,
) {
    let expected = Expected::read(networks.directory, name);
    let checkpoint = (networks.checkpoint)(name, &expected);
    let model = load(model, checkpoint).unwrap_or_else(|error| panic!("{error}"));
    let (every, output) = (expected.every, &expected.output);
    let found: Vec<f32> = forward(&model, expected.images()).iter().step_by(every).collect();
    assert_eq!(found.len(), output.len(), "{name}");
    let largest = output.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    let differences = found.iter().zip(output).map(|(found, expected)| (found - expected).abs());
    let difference = differences.max_by(f32::total_cmp).expect("there are numbers");
    assert!(difference <= 2e-5 * largest, "{name}: {difference:e} off, of {largest:e}");
    println!("{name}: {:.0e}", difference / largest);
}

fn classifier<M: Classifier + Torchvision>(networks: &Networks<'_>, name: &str, variant: M::Variant) {
    let model = M::new(variant, &Device::flex());
    compare(networks, name, model, |model, images| model.forward(images).into_data());
}

fn segmenter<M: Segmenter + Torchvision>(networks: &Networks<'_>, name: &str, variant: M::Variant) {
    let model = M::new(variant, &Device::flex());
    compare(networks, name, model, |model, images| model.forward(images).into_data());
}

const SEVEN: ResNet = ResNet { classes: 7, ..ResNet::D18 };

/// Torchvision's outputs are committed, for numbers that are made here again.
#[test]
fn outputs_are_those_of_torchvision() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = |name: &str, expected: &Expected| {
        let path = directory.path().join(format!("{name}.safetensors"));
        expected.write(&path);
        path
    };
    let expected = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/torchvision");
    outputs_are_as_expected(&Networks { directory: &expected, checkpoint: &checkpoint });
}

/// The torchvision that is installed computes the same, and its files are read.
#[test]
fn outputs_are_those_of_the_torchvision_here() {
    let Some(directory) = written("small") else { return };
    let directory = directory.path();
    let checkpoint = |name: &str, _: &Expected| directory.join(format!("{name}.pth"));
    outputs_are_as_expected(&Networks { directory, checkpoint: &checkpoint });
}

fn outputs_are_as_expected(networks: &Networks<'_>) {
    classifier::<resnet::Net>(networks, "resnet_basic", ResNet { blocks: [2, 1, 1, 1], ..SEVEN });
    let bottleneck = ResNet { bottleneck: true, blocks: [1, 2, 1, 1], ..SEVEN };
    classifier::<resnet::Net>(networks, "resnet_bottleneck", bottleneck);
    let next = ResNet { blocks: [1; 4], groups: 8, group_width: 16, ..bottleneck };
    classifier::<resnet::Net>(networks, "resnext", next);
    let plain = Vgg { stages: &[&[8, 12], &[16], &[24, 24]], hidden: 32, classes: 7, ..Vgg::D16 };
    classifier::<vgg::Net>(networks, "vgg", plain);
    classifier::<vgg::Net>(networks, "vgg_norm", Vgg { batch_norm: true, ..plain });
    classifier::<efficientnet::Net>(networks, "efficientnet_v2_s", EfficientNet::V2S);
    classifier::<mobilenet::Net>(networks, "mobilenet_v3_large", MobileNet::V3_LARGE);
    let convnext = ConvNext { widths: [8, 12, 16, 20], blocks: [1, 2, 1, 1], classes: 7, ..ConvNext::TINY };
    classifier::<convnext::Net>(networks, "convnext", convnext);
    let vit = Vit { image: 64, layers: 2, heads: 3, width: 24, hidden: 40, classes: 7, ..Vit::B16 };
    classifier::<vit::Net>(networks, "vit", vit);
    classifier::<vit::Net>(networks, "vit_legacy", vit);
    let backbone = ResNet { blocks: [1, 1, 2, 2], ..DeepLab::D101.backbone };
    segmenter::<deeplab::Net>(networks, "deeplab", DeepLab { backbone, classes: 5, ..DeepLab::D101 });
    segmenter::<fcn::Net>(networks, "fcn", Fcn { backbone, classes: 5, ..Fcn::D101 });
    segmenter::<unet::Net>(networks, "unet", UNet { width: 4, classes: 3, ..UNet::CLASSIC });

    // What does not belong together is named.
    let expected = Expected::read(networks.directory, "resnet_basic");
    let path = (networks.checkpoint)("resnet_basic", &expected);
    let mismatch = |net: ResNet| {
        let error = load(resnet::Net::new(net, &Device::flex()), &path);
        let error = error.map(|_| ()).expect_err("another network");
        let text = error.to_string();
        let begin = format!("{}: not the parameters of this network", path.display());
        assert!(text.contains(&begin), "{text}");
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
    let starts = tensors.iter().scan(0, |end, (_, shape)| {
        *end += shape.iter().product::<usize>();
        Some(*end - shape.iter().product::<usize>())
    });
    let written = tensors.iter().zip(starts).map(|((name, shape), start)| {
        let values = start..start + shape.iter().product::<usize>();
        (name.as_str(), "F32", *shape, values.flat_map(|value| (value as f32).to_le_bytes()).collect())
    });
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("vit.safetensors");
    write_safetensors(&path, written);

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
