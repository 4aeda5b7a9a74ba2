//! Whole models in the cases of [arXiv 2404.12406](https://arxiv.org/abs/2404.12406), beside what the paper published.
use super::step::{Step, in_turns, step};
use super::{Failure, Measured, Output, Part, Settings, Size as Sizes, Table, in_mib, mib, ratio};
use crate::figures::{Axis, Figure, Marker, Panel, Series, Style, Whose};
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

fn table(rows: &[Row]) -> Output {
    let mut table = Table::new(
        &[
            "model, input",
            "gradients of",
            "Burn kept (MiB)",
            "ours kept (MiB)",
            "ratio",
            "Burn peak (MiB)",
            "ours peak (MiB)",
            "ratio",
            "Burn step (s)",
            "ours step (s)",
            "ratio",
        ],
        2,
    );
    for row in rows {
        table.add([
            format!("{}, {}", row.model, row.input),
            row.case.clone(),
            mib(row.burn_kept_bytes),
            mib(row.ours_kept_bytes),
            ratio(row.ours_kept_bytes as f64, row.burn_kept_bytes as f64),
            mib(row.burn_peak_bytes),
            mib(row.ours_peak_bytes),
            ratio(row.ours_peak_bytes as f64, row.burn_peak_bytes as f64),
            format!("{:.3}", row.burn_seconds),
            format!("{:.3}", row.ours_seconds),
            ratio(row.ours_seconds, row.burn_seconds),
        ]);
    }
    table.output("models-table")
}

/// What others published: a row of `paper/published.csv`.
#[derive(Deserialize)]
struct Published {
    model: String,
    case: String,
    pytorch_gb: f64,
    memsave_gb: f64,
    pytorch_seconds: f64,
    memsave_seconds: f64,
}

/// What PyTorch and memsave_torch keep: a row of `paper/peers.csv`.
#[derive(Deserialize)]
struct Peer {
    model: String,
    input: String,
    case: String,
    pytorch_mib: f64,
    memsave_mib: f64,
}

/// The rows of a file. Its first lines, with `#`, say where they are from.
pub fn lines<R: serde::de::DeserializeOwned>(text: &str) -> Vec<R> {
    let mut reader = csv::ReaderBuilder::new().comment(Some(b'#')).from_reader(text.as_bytes());
    reader.deserialize().map(|row| row.expect("a test reads it")).collect()
}

fn published() -> Vec<Published> {
    lines(include_str!("../../published.csv"))
}

fn peers() -> Vec<Peer> {
    lines(include_str!("../../peers.csv"))
}

/// What is kept, beside PyTorch on the same input, and relative to PyTorch with everything trained.
fn peers_table(rows: &[Row]) -> Output {
    let header = [
        "model, input",
        "gradients of",
        "PyTorch kept (MiB)",
        "memsave_torch kept (MiB)",
        "of PyTorch, all",
        "Burn kept (MiB)",
        "of PyTorch, all",
        "ours kept (MiB)",
        "of PyTorch, all",
    ];
    let mut table = Table::new(&header, 2);
    let peers = peers();
    for peer in &peers {
        let is_same =
            |row: &&Row| (&row.model, &row.input, &row.case) == (&peer.model, &peer.input, &peer.case);
        let Some(row) = rows.iter().find(is_same) else { continue };
        let all = peers.iter().find(|all| all.model == peer.model && all.case == "all");
        let all = all.map_or(f64::NAN, |all| all.pytorch_mib);
        table.add([
            format!("{}, {}", peer.model, peer.input),
            peer.case.clone(),
            format!("{:.0}", peer.pytorch_mib),
            format!("{:.0}", peer.memsave_mib),
            ratio(peer.memsave_mib, all),
            mib(row.burn_kept_bytes),
            ratio(in_mib(row.burn_kept_bytes), all),
            mib(row.ours_kept_bytes),
            ratio(in_mib(row.ours_kept_bytes), all),
        ]);
    }
    table.output("models-peers")
}

/// The published numbers beside ours. Both are relative to "all" of the framework that they build on: PyTorch, and Burn.
fn published_table(rows: &[Row]) -> Output {
    let mut table = Table::new(
        &[
            "model",
            "gradients of",
            "PyTorch, memory",
            "memsave_torch, memory",
            "Burn, memory",
            "ours, memory",
            "PyTorch, time",
            "memsave_torch, time",
            "Burn, time",
            "ours, time",
        ],
        2,
    );
    let published = published();
    let (mut models, mut pairs): (Vec<&str>, Vec<(&str, &str)>) = (vec![], vec![]);
    for pair in published
        .iter()
        .map(|row| (row.model.as_str(), row.case.as_str()))
        .chain(rows.iter().map(|row| (row.model.as_str(), row.case.as_str())))
    {
        if !models.contains(&pair.0) {
            models.push(pair.0);
        }
        if !pairs.contains(&pair) {
            pairs.push(pair);
        }
    }
    // Models that both measured come first.
    let is_ours = |model: &str| rows.iter().any(|row| row.model == model);
    let is_theirs = |model: &str| published.iter().any(|row| row.model == model);
    models.sort_by_key(|model| !(is_ours(model) && is_theirs(model)));
    for model in models {
        for &(_, case) in pairs.iter().filter(|pair| pair.0 == model) {
            let theirs = |case: &str| published.iter().find(|row| row.model == model && row.case == case);
            let ours = |case: &str| rows.iter().find(|row| row.model == model && row.case == case);
            let of = |value: Option<f64>, all: Option<f64>| match (value, all) {
                (Some(value), Some(all)) => ratio(value, all),
                _ => String::new(),
            };
            let theirs = |value: fn(&Published) -> f64, all: fn(&Published) -> f64| {
                of(theirs(case).map(value), theirs("all").map(all))
            };
            let ours = |value: fn(&Row) -> f64, all: fn(&Row) -> f64| {
                of(ours(case).map(value), ours("all").map(all))
            };
            let burn_bytes = |row: &Row| (row.parameter_bytes + row.burn_kept_bytes) as f64;
            let our_bytes = |row: &Row| (row.parameter_bytes + row.ours_kept_bytes) as f64;
            table.add([
                model.into(),
                case.into(),
                theirs(|row| row.pytorch_gb, |row| row.pytorch_gb),
                theirs(|row| row.memsave_gb, |row| row.pytorch_gb),
                ours(burn_bytes, burn_bytes),
                ours(our_bytes, burn_bytes),
                theirs(|row| row.pytorch_seconds, |row| row.pytorch_seconds),
                theirs(|row| row.memsave_seconds, |row| row.pytorch_seconds),
                ours(|row| row.burn_seconds, |row| row.burn_seconds),
                ours(|row| row.ours_seconds, |row| row.burn_seconds),
            ]);
        }
    }
    table.output("models-published")
}

const RUNNING: &str = ", running statistics";

/// What requires a gradient in a case, and the suffix of cases with running statistics.
fn of_case(row: &Row) -> (&str, &'static str) {
    row.case.strip_suffix(RUNNING).map_or((&row.case, ""), |tracked| (tracked, RUNNING))
}

/// A panel for each model, and beside it one for the same model with running statistics.
fn figure(rows: &[Row]) -> Figure {
    let name = |row: &Row| format!("{}, {}{}", row.model, row.input, of_case(row).1);
    // Each with the place of its model, by which they are sorted.
    let mut names: Vec<(Option<usize>, String)> = vec![];
    for row in rows {
        let named = (rows.iter().position(|first| first.model == row.model), name(row));
        if !names.contains(&named) {
            names.push(named);
        }
    }
    names.sort_by_key(|(place, _)| *place);
    let panel = |(_, title): &(Option<usize>, String)| {
        let of: Vec<&Row> = rows.iter().filter(|row| name(row) == *title).collect();
        let series = |name: &str, whose, bytes: fn(&Row) -> u64| Series {
            name: name.into(),
            style: Style { whose, marker: Marker::Circle },
            points: of.iter().enumerate().map(|(at, row)| (at as f64, in_mib(bytes(row)))).collect(),
        };
        Panel {
            title: title.clone(),
            x: Axis::linear(""),
            y: Axis::linear("kept (MiB)"),
            series: vec![
                series("Burn", Whose::Burn, |row| row.burn_kept_bytes),
                series("ours", Whose::Ours, |row| row.ours_kept_bytes),
            ],
            bars: of.iter().map(|row| of_case(row).0.into()).collect(),
        }
    };
    Figure {
        name: "models".into(),
        title: "What a step keeps, by what requires a gradient".into(),
        columns: 2,
        panels: names.iter().map(panel).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every published case is one of ours, and the published ratios are those of the file.
    #[test]
    fn what_was_published_is_read() {
        let published = published();
        let names: Vec<String> = Case::all().map(Case::short_name).collect();
        assert!(published.iter().all(|row| names.contains(&row.case)));
        assert!(peers().iter().all(|row| names.contains(&row.case)));
        let all = published.iter().find(|row| row.model == "ResNet-101" && row.case == "all").unwrap();
        assert_eq!(ratio(all.memsave_gb, all.pytorch_gb), "1.09");
        let Output::Table(_, table) = published_table(&[]) else { panic!("a table") };
        assert!(table.lines().any(|line| line.contains("ResNet-101") && line.contains("1.09")), "{table}");
    }
}
