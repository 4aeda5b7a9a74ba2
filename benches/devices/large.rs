//! Models and layers large enough to fill a GPU. `--batch`, `--image`, `--classes` and `--tokens` make them smaller.
use crate::Devices;
use burn::module::{Lora, Module, ParamGroup};
use burn::nn::{BatchNormConfig, loss::CrossEntropyLossConfig};
use burn::tensor::{Device, Distribution, FloatDType, Int, Tensor, module, ops::AttentionModuleOptions};
use burn_memsave::functional::{self as F, LinearCrossEntropyOptions};
use burn_memsave::mixed::Precision;
use burn_memsave_paper::text::llama::{self, LanguageModel, Size};
use burn_memsave_paper::vision::{Classifier, ResNet, memsave, stock};
use burn_memsave_paper::{Case, Tracked};
use clap::Args;

/// The sizes of models and layers.
#[derive(Args, Clone, Copy)]
pub struct Sizes {
    /// Images per step.
    #[arg(long, default_value_t = 64)]
    pub batch: usize,
    /// Height and width of an image.
    #[arg(long, default_value_t = 224)]
    pub image: usize,
    /// Classes of the head; the language model has a quarter of them, up to 32,000.
    #[arg(long, default_value_t = 128_000)]
    pub classes: usize,
    /// The longest sequence.
    #[arg(long, default_value_t = 16_384)]
    pub tokens: usize,
    /// Features.
    #[arg(long, default_value_t = 1024)]
    pub width: usize,
}

impl Devices {
    /// ResNet-101 in the cases of the paper, a language model with LoRA, head and loss, attention, batch norm in half precision.
    pub fn large(&mut self, sizes: Sizes) {
        self.resnet_101(sizes);
        self.large_language_model(sizes);
        self.head_and_loss(sizes);
        self.long_attention(sizes);
        self.batch_norm_in_half_precision(sizes);
    }

    fn resnet_101(&mut self, Sizes { batch, image, .. }: Sizes) {
        let name = format!("ResNet-101, {batch} x {image}");
        if !self.wants(&name) {
            return;
        }
        let device = self.device.clone();
        for case in Case::without_batch_norm().chain([Case::running(Tracked::Input)]) {
            let burn = case.prepare(stock::resnet::Net::new(ResNet::D101, &device).fork(&device));
            let ours = case.prepare(memsave::resnet::Net::new(ResNet::D101, &device).fork(&device));
            let sides: [&dyn Fn(Tensor<4>) -> Tensor<2>; 2] = [&|x| burn.forward(x), &|x| ours.forward(x)];
            self.measure(&name, &case.name(), ([batch, 3, image, image], case.tracks_input()), sides);
        }
    }

    fn large_language_model(&mut self, Sizes { classes, tokens, width, .. }: Sizes) {
        let length = tokens.min(512);
        let name = format!("language model, 8 blocks of {width}, 4 x {length}");
        if !self.wants(&name) {
            return;
        }
        let vocabulary = (classes / 4).clamp(1, 32_000);
        let size = Size { vocabulary, width, heads: width / 64, hidden: width * 11 / 4, blocks: 8, length };
        fn of<M: LanguageModel>(size: &Size, device: &Device) -> M {
            let projections = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a valid pattern");
            let lora = Lora::new(16, 16.0).set_param_group(projections);
            M::new(size, device).apply_lora(lora).fork(device)
        }
        let device = self.device.clone();
        let (burn, ours): (llama::stock::Llama, llama::memsave::Llama) =
            (of(&size, &device), of(&size, &device));
        let [tokens, next] = [(); 2].map(|()| {
            let uniform = Distribution::Uniform(0.0, vocabulary as f64);
            Tensor::<2, Int>::random([4, length], uniform, &device)
        });
        // The input stands for the tokens, which require no gradient.
        let sides: [&dyn Fn(Tensor<1>) -> Tensor<1>; 2] =
            [&|_| burn.loss(tokens.clone(), next.clone()), &|_| ours.loss(tokens.clone(), next.clone())];
        self.measure(&name, "LoRA", ([1], true), sides);
    }

    fn head_and_loss(&mut self, Sizes { classes, tokens, width, .. }: Sizes) {
        let rows = tokens.min(2048);
        let name = format!("head and loss, {rows} x {width} x {classes}");
        if !self.wants(&name) {
            return;
        }
        let device = self.device.clone();
        let normal = Distribution::Normal(0.0, 0.02);
        let targets = Tensor::<1, Int>::random([rows], Distribution::Uniform(0.0, classes as f64), &device);
        for (parameters, tracked) in [("trainable", true), ("frozen", false)] {
            let weight = Tensor::<2>::random([width, classes], normal, &device).set_require_grad(tracked);
            let (burn, ours) = ((weight.clone(), targets.clone()), (weight, targets.clone()));
            let sides: [&dyn Fn(Tensor<2>) -> Tensor<1>; 2] = [
                &|x| {
                    let (weight, targets) = burn.clone();
                    CrossEntropyLossConfig::new().init(&x.device()).forward(x.matmul(weight), targets)
                },
                &|x| {
                    let (weight, targets) = ours.clone();
                    F::linear_cross_entropy(x, weight, None, targets, LinearCrossEntropyOptions::default())
                },
            ];
            self.measure(&name, parameters, ([rows, width], true), sides);
        }
    }

    fn long_attention(&mut self, Sizes { tokens, .. }: Sizes) {
        const HEADS: usize = 8;
        for tokens in [tokens / 16, tokens / 4, tokens] {
            for is_causal in [false, true] {
                let options = AttentionModuleOptions { is_causal, ..Default::default() };
                let name = format!("attention, {HEADS} heads of 64, {tokens} tokens");
                if !self.wants(&name) {
                    continue;
                }
                let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] =
                    [&|x| module::attention(x.clone(), x.clone() * 0.5, x, None, None, options), &|x| {
                        F::attention(x.clone(), x.clone() * 0.5, x, None, None, options)
                    }];
                let mask = if is_causal { "causal" } else { "-" };
                self.measure(&name, mask, ([1, HEADS, tokens, 64], true), sides);
            }
        }
    }

    /// Batch norm in half precision. Both sides also cast from f32 and back.
    fn batch_norm_in_half_precision(&mut self, Sizes { batch, image, .. }: Sizes) {
        let (channels, image) = (256, image / 4);
        let name = format!("batch norm, {batch} x {channels} x {image} x {image}");
        if !self.wants(&name) {
            return;
        }
        let device = self.device.clone();
        let burn = BatchNormConfig::new(channels).init(&device).freeze();
        let burn = Precision::f16().narrow_frozen(burn).expect("f16 holds ones and zeros");
        let ours = burn_memsave::nn::BatchNorm::from(burn.clone());
        let [half, single] = [FloatDType::F16, FloatDType::F32];
        let sides: [&dyn Fn(Tensor<4>) -> Tensor<4>; 2] =
            [&|x| burn.forward(x.cast(half)).cast(single), &|x| ours.forward(x.cast(half)).cast(single)];
        self.measure(&name, "f16, frozen", ([batch, channels, image, image], true), sides);
    }
}
