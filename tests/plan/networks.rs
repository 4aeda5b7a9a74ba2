//! Networks of blocks that the tests plan.
use burn::module::{Lora, Module, ParamGroup};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_memsave::measure::StepInput;
use burn_memsave::nn::activation::{Gelu, Relu, Sigmoid};
use burn_memsave::nn::transformer::{TransformerEncoderConfig, TransformerEncoderLayer};
use burn_memsave::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_memsave::plan::block;
use burn_memsave_paper::text::llama::{LanguageModel, Size, planned};
use burn_memsave_paper::vision::memsave::resnet;
use burn_memsave_paper::vision::{self, Classifier};
use burn_memsave_paper::{Case, Tracked};
use rand::{RngExt, SeedableRng, rngs::StdRng};

pub fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

/// A model whose forward pass runs blocks, and its input.
pub trait Planned: Sized {
    type Input: StepInput;
    type Model: Module;
    fn loss(model: &Self::Model, input: Self::Input) -> Tensor<1>;
}

pub struct Encoder;

#[derive(Module, Debug)]
pub struct Layers {
    pub layers: Vec<TransformerEncoderLayer>,
}

impl Encoder {
    pub fn model(layers: usize, device: &Device) -> Layers {
        let config = TransformerEncoderConfig::new(32, 128, 4, layers).with_dropout(0.1);
        Layers { layers: config.init(device).layers }
    }
}

impl Planned for Encoder {
    type Input = Tensor<3>;
    type Model = Layers;
    fn loss(model: &Layers, x: Tensor<3>) -> Tensor<1> {
        let run =
            |x, layer| block(layer, x, |layer: &TransformerEncoderLayer, x| layer.forward(x, None, None));
        model.layers.iter().fold(x, run).powf_scalar(2.0).mean()
    }
}

/// ResNet-101 whose norms are trained.
pub struct ResNet;

impl ResNet {
    pub fn model(device: &Device) -> resnet::Net {
        Case::batch(Tracked::Norm).prepare(resnet::Net::new(vision::ResNet::D101, device))
    }
}

impl Planned for ResNet {
    type Input = Tensor<4>;
    type Model = resnet::Net;
    fn loss(model: &resnet::Net, images: Tensor<4>) -> Tensor<1> {
        model.forward(images).powf_scalar(2.0).mean()
    }
}

/// A language model with LoRA.
pub struct Language;

impl Language {
    pub fn model(device: &Device) -> planned::Llama {
        let size = Size { vocabulary: 256, width: 64, heads: 4, hidden: 176, blocks: 6, length: 32 };
        let projections = ParamGroup::from_regex(r"^blocks\..*\.weight$").unwrap();
        planned::Llama::new(&size, device).apply_lora(Lora::new(4, 8.0).set_param_group(projections))
    }

    pub fn tokens(device: &Device) -> (Tensor<2, Int>, Tensor<2, Int>) {
        let tokens = Tensor::<1, Int>::arange(0..8 * 32, device).remainder_scalar(251).reshape([8, 32]);
        (tokens.clone(), tokens)
    }
}

impl Planned for Language {
    type Input = (Tensor<2, Int>, Tensor<2, Int>);
    type Model = planned::Llama;
    fn loss(model: &planned::Llama, (tokens, next): Self::Input) -> Tensor<1> {
        model.loss(tokens, next)
    }
}

/// A chain of blocks of different kinds, drawn at random.
pub struct Chain;

#[derive(Module, Debug)]
pub struct Links {
    links: Vec<Link>,
}

#[derive(Module, Debug)]
pub struct Link {
    norm: Option<LayerNorm>,
    wide: Linear,
    narrow: Option<Linear>,
    dropout: Dropout,
    /// How it ends.
    ends: usize,
    /// Whether its input is added outside of the block.
    is_residual: bool,
}

impl Link {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let x = match &self.norm {
            Some(norm) => norm.forward(x),
            None => x,
        };
        let x = self.dropout.forward(Gelu::new().forward(self.wide.forward(x)));
        let x = match &self.narrow {
            Some(narrow) => narrow.forward(x),
            None => x,
        };
        match self.ends {
            0 => Sigmoid::new().forward(x),
            1 => Relu::new().forward(x),
            _ => x,
        }
    }
}

impl Chain {
    pub fn model(seed: u64, blocks: usize, device: &Device) -> Links {
        let mut draw = StdRng::seed_from_u64(seed);
        let mut width = 64;
        let links = (0..blocks).map(|_| {
            let is_residual = draw.random_bool(0.3);
            let wide = 32 * draw.random_range(1..8usize);
            let narrow = is_residual
                .then_some(width)
                .or(draw.random_bool(0.5).then(|| 32 * draw.random_range(1..5usize)));
            let next = narrow.unwrap_or(wide);
            let linear = |input, output| LinearConfig::new(input, output).init(device);
            let mut link = Link {
                norm: draw.random_bool(0.5).then(|| LayerNormConfig::new(width).init(device)),
                wide: linear(width, wide),
                narrow: narrow.map(|narrow| linear(wide, narrow)),
                dropout: DropoutConfig::new(if draw.random_bool(0.3) { 0.1 } else { 0.0 }).init(),
                ends: draw.random_range(0..4),
                is_residual,
            };
            if draw.random_bool(0.4) {
                link.wide = link.wide.freeze();
            }
            width = next;
            link
        });
        Links { links: links.collect() }
    }
}

impl Planned for Chain {
    type Input = Tensor<2>;
    type Model = Links;
    fn loss(model: &Links, x: Tensor<2>) -> Tensor<1> {
        let run = |x: Tensor<2>, link: &Link| {
            let residual = link.is_residual.then(|| x.clone());
            let y = block(link, x, Link::forward);
            match residual {
                Some(x) => x + y,
                None => y,
            }
        };
        model.links.iter().fold(x, run).mean()
    }
}
