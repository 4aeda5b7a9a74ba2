// The U-Net (arXiv 1505.04597), written once, with its widths, two 3x3 convolutions per size, and 2x2 transposed convolutions on the way
// up. torchvision has no U-Net, so this one loads the checkpoints of https://github.com/milesial/Pytorch-UNet: of
// `UNet(3, classes, bilinear=False)`. As there, convolutions are padded and have batch norms. The module that includes this file
// chooses `nn`.
use super::conv_norm::ConvNorm;
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{Segmenter, UNet};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::Relu;
use nn::conv::{Conv2d, Conv2dConfig, ConvTranspose2d, ConvTranspose2dConfig};
use nn::pool::{MaxPool2d, MaxPool2dConfig};

/// Two convolutions, each with its batch norm and a relu.
#[derive(Module, Debug)]
pub struct Double {
    convs: [ConvNorm; 2],
    relu: Relu,
}

impl Double {
    fn new([input, output]: [usize; 2], device: &Device) -> Self {
        let conv = |input| ConvNorm::new(Conv2dConfig::new([input, output], [3, 3]), device);
        Self { convs: [input, output].map(conv), relu: Relu::new() }
    }

    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.convs.iter().fold(x, |x, conv| self.relu.forward(conv.forward(x)))
    }
}

/// On the way down: halves the size of images.
#[derive(Module, Debug)]
pub struct Down {
    pool: MaxPool2d,
    double: Double,
}

impl Down {
    fn forward(&self, x: Tensor<4>) -> Tensor<4> {
        self.double.forward(self.pool.forward(x))
    }
}

/// On the way up: doubles the size of images, and joins those that had this size on the way down.
#[derive(Module, Debug)]
pub struct Up {
    up: ConvTranspose2d,
    double: Double,
}

impl Up {
    fn forward(&self, (x, skipped): (Tensor<4>, Tensor<4>)) -> Tensor<4> {
        self.double.forward(Tensor::cat(vec![skipped, self.up.forward(x)], 1))
    }
}

/// A U-Net. The height and width of images have to be multiples of 2 to the number of halvings: of 16 for four.
#[derive(Module, Debug)]
pub struct Net {
    first: Double,
    downs: Vec<Down>,
    ups: Vec<Up>,
    classes: Conv2d,
}

impl Segmenter for Net {
    type Variant = UNet;

    fn new(net: UNet, device: &Device) -> Self {
        let width = |depth: usize| net.width << depth;
        let down = |depth| Down {
            pool: MaxPool2dConfig::new([2, 2]).init(),
            double: Double::new([width(depth), width(depth + 1)], device),
        };
        let up = |depth| {
            let channels = [width(depth + 1), width(depth)];
            let up = ConvTranspose2dConfig::new(channels, [2, 2]).with_stride([2, 2]);
            Up { up: up.init(device), double: Double::new(channels, device) }
        };
        Self {
            first: Double::new([3, net.width], device),
            downs: (0..net.depth).map(down).collect(),
            ups: (0..net.depth).rev().map(up).collect(),
            classes: Conv2dConfig::new([net.width, net.classes], [1, 1]).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<4> {
        let mut x = plan::block(&self.first, images, Double::forward);
        let mut skipped = Vec::new();
        for down in &self.downs {
            skipped.push(x.clone());
            x = plan::block(down, x, Down::forward);
        }
        let ups = self.ups.iter().zip(skipped.into_iter().rev());
        let x = ups.fold(x, |x, (up, skipped)| plan::block(up, (x, skipped), Up::forward));
        self.classes.forward(x)
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        let mut keys = Keys::default().replace(r"^inc\.", "first.");
        for at in 0..self.downs.len() {
            keys = keys
                .replace(format!(r"^down{}\.maxpool_conv\.1\.", at + 1), format!("downs.{at}.double."))
                .replace(format!(r"^up{}\.up\.", at + 1), format!("ups.{at}.up."))
                .replace(format!(r"^up{}\.conv\.", at + 1), format!("ups.{at}.double."));
        }
        keys.replace(r"\.double_conv\.0\.", ".convs.0.conv.")
            .replace(r"\.double_conv\.1\.", ".convs.0.norm.")
            .replace(r"\.double_conv\.3\.", ".convs.1.conv.")
            .replace(r"\.double_conv\.4\.", ".convs.1.norm.")
            .replace(r"^outc\.conv\.", "classes.")
    }
}
