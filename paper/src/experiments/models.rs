//! Whole models in the cases of [arXiv 2404.12406](https://arxiv.org/abs/2404.12406), beside what the paper published.
use super::step::{Step, in_turns, step};
use super::{Failure, Measured, Output, Part, Settings, Size as Sizes};
use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::tensor::{DType, Device, Distribution, Int, Tensor};
use burn_memsave_paper::text::llama::{LanguageModel, Size, swapped, written_out};
use burn_memsave_paper::text::{
    self, Decoder, DecoderSize, Encoder, EncoderDecoder, EncoderSize, Gpt2Size, T5Size,
};
use burn_memsave_paper::vision::{
    Classifier, ConvNext, DeepLab, EfficientNet, Fcn, MobileNet, ResNet, Segmenter, UNet, Vgg, Vit, memsave,
    stock,
};
use burn_memsave_paper::{Case, Tracked};
use serde::{Deserialize, Serialize};
use tables::{figure, peers_table, published_table, table};

mod tables;

pub use tables::lines;

pub struct Models;

/// A model in a case, with Burn's layers and with ours.
#[derive(Serialize, Deserialize)]
pub struct Row {
    model: String,
    input: String,
    case: String,
    parameter_bytes: u64,
    burn_kept_bytes: u64,
    ours_kept_bytes: u64,
    burn_peak_bytes: u64,
    ours_peak_bytes: u64,
    burn_seconds: f64,
    ours_seconds: f64,
}

/// Makes the step of one namespace in a case, on a device.
type Make = Box<dyn Fn(Case, &Device) -> Made>;

/// A step, and the bytes of the parameters of its model.
struct Made {
    step: Box<dyn Step>,
    parameter_bytes: u64,
}

/// A model to be measured, in both namespaces.
struct Subject {
    name: &'static str,
    input: String,
    cases: Vec<Case>,
    burn: Make,
    ours: Make,
    /// Whether a step takes so long that it is timed only once.
    is_slow: bool,
}

/// The models. To add one, add a line here.
fn subjects(settings: &Settings) -> Vec<Subject> {
    let images = settings.pick([2, 64], [8, 224], [8, 224]);
    let tokens = settings.pick([2, 32], [4, 128], [8, 128]);
    let bert = EncoderSize { vocabulary: 1000, layers: settings.pick(2, 6, 12), ..EncoderSize::BERT_BASE };
    let llama = Size {
        vocabulary: settings.pick(500, 8000, 32_000),
        width: settings.pick(64, 512, 1024),
        heads: settings.pick(2, 8, 16),
        hidden: settings.pick(176, 1408, 2816),
        blocks: settings.pick(2, 4, 8),
        length: settings.pick(32, 256, 512),
    };
    let llama_tokens = [settings.pick(2, 4, 4), llama.length];
    let mut subjects = vec![
        classifier::<_, stock::resnet::Net, memsave::resnet::Net>("ResNet-18", ResNet::D18, images),
        encoder::<text::stock::bert::Bert, text::memsave::bert::Bert>("BERT", bert, tokens),
        language::<written_out::Llama, swapped::Llama>("Llama-style", llama, llama_tokens),
    ];
    use {memsave as m, stock as s};
    if settings.size >= Sizes::Usual {
        let t5 = T5Size { vocabulary: 8000, layers: settings.pick(2, 6, 12), ..T5Size::BASE };
        // A quarter of the width, and a quarter of the blocks.
        let mistral = DecoderSize {
            vocabulary: 8000,
            width: 1024,
            hidden: 3584,
            heads: 8,
            key_heads: 2,
            layers: 8,
            length: 256,
            ..DecoderSize::MISTRAL_7B
        };
        let slow = |subject| Subject { is_slow: true, ..subject };
        subjects.extend([
            classifier::<_, s::resnet::Net, m::resnet::Net>("ResNet-101", ResNet::D101, images),
            slow(classifier::<_, s::resnet::Net, m::resnet::Net>("ResNeXt-101", ResNet::NEXT101, images)),
            slow(classifier::<_, s::efficientnet::Net, m::efficientnet::Net>(
                "EfficientNetV2-L",
                EfficientNet::V2L,
                images,
            )),
            slow(encoder_decoder::<text::stock::t5::T5, text::memsave::t5::T5>("T5", t5, tokens)),
            slow(decoder::<_, text::stock::decoder::Llama, text::memsave::decoder::Llama>(
                "Mistral-7B",
                mistral,
                [mistral.layers, mistral.width, mistral.vocabulary],
                [2, mistral.length],
            )),
        ]);
    }
    if settings.size == Sizes::Full {
        let (gpt2, roberta) =
            (Gpt2Size::SMALL, EncoderSize { vocabulary: 1000, ..EncoderSize::ROBERTA_BASE });
        subjects.extend([
            classifier::<_, s::resnet::Net, m::resnet::Net>("ResNet-50", ResNet::D50, images),
            without_norm(classifier::<_, s::vgg::Net, m::vgg::Net>("VGG-16", Vgg::D16, images)),
            classifier::<_, s::efficientnet::Net, m::efficientnet::Net>(
                "EfficientNetV2-S",
                EfficientNet::V2S,
                images,
            ),
            classifier::<_, s::mobilenet::Net, m::mobilenet::Net>(
                "MobileNetV3-L",
                MobileNet::V3_LARGE,
                images,
            ),
            of_layer_norm(classifier::<_, s::convnext::Net, m::convnext::Net>(
                "ConvNeXt-T",
                ConvNext::TINY,
                images,
            )),
            of_layer_norm(classifier::<_, s::vit::Net, m::vit::Net>("ViT-B/16", Vit::B16, images)),
            segmenter::<_, s::deeplab::Net, m::deeplab::Net>("DeepLabV3-ResNet-101", DeepLab::D101, images),
            segmenter::<_, s::fcn::Net, m::fcn::Net>("FCN-ResNet-101", Fcn::D101, images),
            segmenter::<_, s::unet::Net, m::unet::Net>("U-Net", UNet::CLASSIC, images),
            encoder::<text::stock::bert::Bert, text::memsave::bert::Bert>("RoBERTa", roberta, tokens),
            decoder::<_, text::stock::gpt2::Gpt2, text::memsave::gpt2::Gpt2>(
                "GPT-2",
                gpt2,
                [gpt2.layers, gpt2.width, gpt2.vocabulary],
                [tokens[0], 512],
            ),
        ]);
    }
    subjects
}

impl Subject {
    /// A model of text, in every case that exists without batch norms and convolutions.
    fn of_text(name: &'static str, input: String, burn: Make, ours: Make) -> Self {
        Self { name, input, cases: without_batch_norm_and(Tracked::Conv), burn, ours, is_slow: false }
    }

    /// A model of images `[batch, 3, size, size]`, in every case.
    fn of_images(name: &'static str, [batch, size]: [usize; 2], burn: Make, ours: Make) -> Self {
        Self {
            name,
            input: format!("{batch} x {size} x {size}"),
            cases: Case::all().collect(),
            burn,
            ours,
            is_slow: false,
        }
    }
}

/// The subject in the cases that exist without batch norms.
fn of_layer_norm(subject: Subject) -> Subject {
    Subject { cases: Case::without_batch_norm().collect(), ..subject }
}

/// The subject in the cases that exist without any norm.
fn without_norm(subject: Subject) -> Subject {
    Subject { cases: without_batch_norm_and(Tracked::Norm), ..subject }
}

/// A network that classifies images.
fn classifier<V, S, M>(name: &'static str, variant: V, images: [usize; 2]) -> Subject
where
    V: Copy + 'static,
    S: Classifier<Variant = V> + 'static,
    M: Classifier<Variant = V> + 'static,
{
    Subject::of_images(
        name,
        images,
        on_images(
            images,
            move |device| S::new(variant, device),
            |model: &S, images| model.forward(images).sum(),
        ),
        on_images(
            images,
            move |device| M::new(variant, device),
            |model: &M, images| model.forward(images).sum(),
        ),
    )
}

/// A network that classifies every pixel of images.
fn segmenter<V, S, M>(name: &'static str, variant: V, images: [usize; 2]) -> Subject
where
    V: Copy + 'static,
    S: Segmenter<Variant = V> + 'static,
    M: Segmenter<Variant = V> + 'static,
{
    Subject::of_images(
        name,
        images,
        on_images(
            images,
            move |device| S::new(variant, device),
            |model: &S, images| model.forward(images).sum(),
        ),
        on_images(
            images,
            move |device| M::new(variant, device),
            |model: &M, images| model.forward(images).sum(),
        ),
    )
}

/// Makes the step of a network and its loss.
fn on_images<M: Module + 'static>(
    [batch, size]: [usize; 2],
    new: impl Fn(&Device) -> M + 'static,
    loss: fn(&M, Tensor<4>) -> Tensor<1>,
) -> Make {
    Box::new(move |case, device| {
        let model = case.prepare(new(device));
        let images = Tensor::<4>::random([batch, 3, size, size], Distribution::Normal(0.0, 1.0), device);
        let images = if case.tracks_input() { images.require_grad() } else { images };
        made(model, images, loss)
    })
}

/// An encoder of tokens `[batch, length]`.
fn encoder<S, M>(name: &'static str, size: EncoderSize, tokens: [usize; 2]) -> Subject
where
    S: Encoder + 'static,
    M: Encoder + 'static,
{
    fn make<M: Encoder + 'static>(size: EncoderSize, [batch, length]: [usize; 2]) -> Make {
        Box::new(move |case, device| {
            let model = on_tokens(case, M::new(&size, device));
            let tokens = tokens_of([batch, length], size.vocabulary, device);
            made(model, tokens, |model, tokens| model.forward(tokens).powf_scalar(2.0).mean())
        })
    }
    let [batch, length] = tokens;
    let input = format!("{} layers, {batch} x {length} tokens of {}", size.layers, size.vocabulary);
    Subject::of_text(name, input, make::<S>(size, tokens), make::<M>(size, tokens))
}

/// A decoder of tokens `[batch, length]`, and its loss.
fn language<S, M>(name: &'static str, size: Size, tokens: [usize; 2]) -> Subject
where
    S: LanguageModel + 'static,
    M: LanguageModel + 'static,
{
    let Size { vocabulary, width, blocks, .. } = size;
    Subject::of_text(
        name,
        input_of_blocks(blocks, width, tokens, vocabulary),
        on_next_tokens(vocabulary, tokens, move |device| S::new(&size, device), S::loss),
        on_next_tokens(vocabulary, tokens, move |device| M::new(&size, device), M::loss),
    )
}

/// The same for decoders whose size has another type, with these layers, width and vocabulary.
fn decoder<V, S, M>(
    name: &'static str,
    size: V,
    [layers, width, vocabulary]: [usize; 3],
    tokens: [usize; 2],
) -> Subject
where
    V: Copy + 'static,
    S: Decoder<Size = V> + 'static,
    M: Decoder<Size = V> + 'static,
{
    Subject::of_text(
        name,
        input_of_blocks(layers, width, tokens, vocabulary),
        on_next_tokens(vocabulary, tokens, move |device| S::new(&size, device), S::loss),
        on_next_tokens(vocabulary, tokens, move |device| M::new(&size, device), M::loss),
    )
}

fn input_of_blocks(blocks: usize, width: usize, [batch, length]: [usize; 2], vocabulary: usize) -> String {
    format!("{blocks} blocks of {width}, {batch} x {length} tokens of {vocabulary}")
}

/// Makes the step of a network that predicts the next token, and its loss.
fn on_next_tokens<M: Module + 'static>(
    vocabulary: usize,
    tokens: [usize; 2],
    new: impl Fn(&Device) -> M + 'static,
    loss: fn(&M, Tensor<2, Int>, Tensor<2, Int>) -> Tensor<1>,
) -> Make {
    Box::new(move |case, device| {
        let model = on_tokens(case, new(device));
        let tokens = with_next(tokens_of(tokens, vocabulary, device), vocabulary);
        made(model, tokens, move |model, (tokens, next)| loss(model, tokens, next))
    })
}

/// An encoder with a decoder, which both read equally many tokens, and the loss.
fn encoder_decoder<S, M>(name: &'static str, size: T5Size, tokens: [usize; 2]) -> Subject
where
    S: EncoderDecoder + 'static,
    M: EncoderDecoder + 'static,
{
    fn make<M: EncoderDecoder + 'static>(size: T5Size, tokens: [usize; 2]) -> Make {
        Box::new(move |case, device| {
            let model = on_tokens(case, M::new(&size, device));
            let source = tokens_of(tokens, size.vocabulary, device);
            let tokens = with_next(source.clone().flip([1]), size.vocabulary);
            made(model, (source, tokens), |model, (source, (tokens, next))| model.loss(source, tokens, next))
        })
    }
    let [batch, length] = tokens;
    let input =
        format!("2 x {} layers, {batch} x {length} tokens of {}, twice", size.layers, size.vocabulary);
    Subject::of_text(name, input, make::<S>(size, tokens), make::<M>(size, tokens))
}

fn without_batch_norm_and(without: Tracked) -> Vec<Case> {
    Case::without_batch_norm().filter(|case| case.tracked != without).collect()
}

/// Tokens have no gradient. Where the input should require one, the embedding is trained, so that its output requires one.
fn on_tokens<M: Module>(case: Case, model: M) -> M {
    let model = case.prepare(model);
    if !case.tracks_input() {
        return model;
    }
    let embedding = ParamGroup::from_regex(r"^(words|embedding)\.").expect("a valid pattern");
    model.set_require_grad_group(embedding, true)
}

/// Tokens that differ.
pub fn tokens_of([batch, length]: [usize; 2], vocabulary: usize, device: &Device) -> Tensor<2, Int> {
    let tokens = Tensor::<1, Int>::arange(0..(batch * length) as i64, device);
    tokens.mul_scalar(7919).remainder_scalar(vocabulary as i64).reshape([batch, length])
}

/// Tokens, and those that follow them.
pub fn with_next(tokens: Tensor<2, Int>, vocabulary: usize) -> (Tensor<2, Int>, Tensor<2, Int>) {
    let next = tokens.clone().add_scalar(1).remainder_scalar(vocabulary as i64);
    (tokens, next)
}

fn made<M: Module + 'static, I: burn_memsave::measure::StepInput + 'static>(
    model: M,
    input: I,
    loss: impl Fn(&M, I) -> Tensor<1> + 'static,
) -> Made {
    Made { parameter_bytes: parameter_bytes(&model), step: step(model, input, loss) }
}

/// Bytes of the parameters of a model.
pub fn parameter_bytes<M: Module>(model: &M) -> u64 {
    struct Bytes(u64);
    impl ModuleVisitor for Bytes {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let packed = param.is_initialized().then(|| param.base());
            self.0 += match packed.filter(|tensor| matches!(tensor.dtype(), DType::QFloat(_))) {
                Some(packed) => packed.into_data().bytes().len() as u64, // its scales, too
                None => 4 * param.lazy_shape().num_elements() as u64,    // all others are f32
            };
        }
    }
    let mut bytes = Bytes(0);
    model.visit(&mut bytes);
    bytes.0
}

fn measure(subject: &Subject, case: Case, settings: &Settings) -> Result<Vec<Row>, Failure> {
    let device = settings.autodiff();
    let [burn, ours] = [&subject.burn, &subject.ours].map(|make| make(case, &device));
    let parameter_bytes = burn.parameter_bytes;
    let [burn, ours] = in_turns(if subject.is_slow { 1 } else { settings.turns() }, [burn.step, ours.step])?;
    Ok(vec![Row {
        model: subject.name.into(),
        input: subject.input.clone(),
        case: case.short_name(),
        parameter_bytes,
        burn_kept_bytes: burn.kept,
        ours_kept_bytes: ours.kept,
        burn_peak_bytes: burn.peak,
        ours_peak_bytes: ours.peak,
        burn_seconds: burn.seconds,
        ours_seconds: ours.seconds,
    }])
}

impl Measured for Models {
    type Row = Row;
    const NAME: &'static str = "models";
    const ABOUT: &'static str = "whole models by what requires a gradient, beside the published tables";

    fn parts(settings: &Settings) -> Vec<Part<Row>> {
        let mut parts = vec![];
        for subject in subjects(settings) {
            let subject = std::rc::Rc::new(subject);
            for case in subject.cases.clone() {
                let (subject, settings) = (subject.clone(), settings.clone());
                let name = format!("{}, {}", subject.name, case.short_name());
                parts.push(Part::new(name, move || measure(&subject, case, &settings)));
            }
        }
        parts
    }

    fn render(rows: &[Row]) -> Vec<Output> {
        vec![table(rows), published_table(rows), peers_table(rows), Output::Figure(figure(rows))]
    }
}
