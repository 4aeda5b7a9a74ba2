//! One step of small models. What requires a gradient is as in the tables of the papers.
use crate::table::run::second;
use crate::{Measured, Needs};
use burn::module::{Lora, Module, ParamGroup};
use burn::tensor::{Device, Distribution, Int, Tensor};
use burn_memsave::measure::{Measurement, StepInput, ledger, measure_step};
use burn_memsave_paper::text::llama::{self, LanguageModel, Size};
use burn_memsave_paper::text::{
    Decoder, DecoderSize, Encoder, EncoderDecoder, EncoderSize, Gpt2Size, T5Size, memsave, stock,
};
use burn_memsave_paper::vision::{
    self, Classifier, ConvNext, DeepLab, EfficientNet, Fcn, MobileNet, ResNet, Segmenter, UNet, Vgg, Vit,
};
use burn_memsave_paper::{Case, Tracked};

/// Measures the models whose name contains `filter`.
pub fn measure(device: &Device, filter: &str) -> Result<Vec<Measured>, &'static str> {
    let mut models = Models { device, filter, measured: vec![] };
    use vision::{memsave as m, stock as s};
    models.classifier::<_, s::resnet::Net, m::resnet::Net>("ResNet-18", ResNet::D18, Case::all())?;
    models.classifier::<_, s::efficientnet::Net, m::efficientnet::Net>(
        "EfficientNetV2-S",
        EfficientNet::V2S,
        Case::all(),
    )?;
    let size = Vgg { stages: &[&[16, 16], &[32], &[32, 32]], hidden: 64, classes: 10, ..Vgg::D16_NORM };
    models.classifier::<_, s::vgg::Net, m::vgg::Net>("VGG", size, Case::all())?;
    models.classifier::<_, s::mobilenet::Net, m::mobilenet::Net>(
        "MobileNetV3",
        MobileNet::V3_LARGE,
        Case::all(),
    )?;
    let size = ConvNext { widths: [16, 32, 64, 128], blocks: [1, 1, 2, 1], classes: 10, ..ConvNext::TINY };
    models.classifier::<_, s::convnext::Net, m::convnext::Net>(
        "ConvNeXt",
        size,
        Case::without_batch_norm(),
    )?;
    let size = Vit { image: 64, patch: 8, layers: 2, heads: 4, width: 64, hidden: 256, ..Vit::B16 };
    models.classifier::<_, s::vit::Net, m::vit::Net>("ViT", size, Case::without_batch_norm())?;
    let backbone = ResNet { blocks: [2, 1, 1, 1], width: 8, dilated: [false, true, true], ..ResNet::D50 };
    let size = DeepLab { backbone, width: 12, classes: 3, ..DeepLab::D101 };
    models.segmenter::<_, s::deeplab::Net, m::deeplab::Net>("DeepLabV3", size)?;
    let size = Fcn { backbone, classes: 3, ..Fcn::D101 };
    models.segmenter::<_, s::fcn::Net, m::fcn::Net>("FCN", size)?;
    models.segmenter::<_, s::unet::Net, m::unet::Net>("U-Net", UNet { width: 8, ..UNet::CLASSIC })?;
    models.encoder::<stock::bert::Bert, memsave::bert::Bert>("BERT")?;
    let size = Gpt2Size { vocabulary: 500, width: 64, heads: 4, layers: 2, length: 64, dropout: 0.1 };
    models.decoder::<_, stock::gpt2::Gpt2, memsave::gpt2::Gpt2>("GPT-2", size)?;
    let size = DecoderSize { width: 64, heads: 4, hidden: 176, length: 64, ..DecoderSize::MISTRAL_7B.tiny() };
    models.decoder::<_, stock::decoder::Llama, memsave::decoder::Llama>("Mistral", size)?;
    models.encoder_decoder::<stock::t5::T5, memsave::t5::T5>("T5")?;
    models.language::<llama::stock::Llama, llama::memsave::Llama>("language model")?;
    Ok(models.measured)
}

/// A function that makes a network, and its loss.
type Network<'a, M, I> = (&'a dyn Fn() -> M, fn(&M, I) -> Tensor<1>);

struct Models<'a> {
    device: &'a Device,
    filter: &'a str,
    measured: Vec<Measured>,
}

impl Models<'_> {
    fn classifier<V: Copy, S: Classifier<Variant = V>, M: Classifier<Variant = V>>(
        &mut self,
        model: &str,
        variant: V,
        cases: impl Iterator<Item = Case>,
    ) -> Result<(), &'static str> {
        let device = self.device;
        self.in_cases(
            model,
            cases,
            |case| images(case, device),
            (&|| S::new(variant, device), |model: &S, images| model.forward(images).sum()),
            (&|| M::new(variant, device), |model: &M, images| model.forward(images).sum()),
        )
    }

    fn segmenter<V: Copy, S: Segmenter<Variant = V>, M: Segmenter<Variant = V>>(
        &mut self,
        model: &str,
        variant: V,
    ) -> Result<(), &'static str> {
        let device = self.device;
        self.in_cases(
            model,
            Case::all(),
            |case| images(case, device),
            (&|| S::new(variant, device), |model: &S, images| model.forward(images).sum()),
            (&|| M::new(variant, device), |model: &M, images| model.forward(images).sum()),
        )
    }

    /// Measures networks with their losses in several cases, on an input for each case.
    fn in_cases<S: Module, M: Module, I: StepInput>(
        &mut self,
        model: &str,
        cases: impl Iterator<Item = Case>,
        input: impl Fn(Case) -> I,
        (stock, stock_loss): Network<'_, S, I>,
        (ours, our_loss): Network<'_, M, I>,
    ) -> Result<(), &'static str> {
        for case in cases {
            self.model(
                format!("{model}, {}", case.name()),
                input(case),
                || case.prepare(stock()),
                || case.prepare(ours()),
                stock_loss,
                our_loss,
            )?;
        }
        Ok(())
    }

    /// The same on tokens, which have no gradient, for networks without batch norms and convolutions.
    fn on_tokens<S: Module, M: Module, I: StepInput>(
        &mut self,
        model: &str,
        input: I,
        stock: Network<'_, S, I>,
        ours: Network<'_, M, I>,
    ) -> Result<(), &'static str> {
        use Tracked::{All, FirstQuarter, LastQuarter, Norm};
        let cases = [All, Norm, FirstQuarter, LastQuarter].into_iter().map(Case::batch);
        self.in_cases(model, cases, |_| input.copy(), stock, ours)
    }

    fn encoder<S: Encoder, M: Encoder>(&mut self, model: &str) -> Result<(), &'static str> {
        let size = EncoderSize {
            vocabulary: 500,
            width: 128,
            hidden: 512,
            heads: 4,
            layers: 2,
            length: 128,
            ..EncoderSize::BERT_BASE
        };
        let tokens = tokens([4, 128], size.vocabulary, self.device);
        self.on_tokens(
            model,
            tokens,
            (&|| S::new(&size, self.device), |model: &S, tokens| model.forward(tokens).sum()),
            (&|| M::new(&size, self.device), |model: &M, tokens| model.forward(tokens).sum()),
        )
    }

    fn decoder<V: Copy, S: Decoder<Size = V>, M: Decoder<Size = V>>(
        &mut self,
        model: &str,
        size: V,
    ) -> Result<(), &'static str> {
        let [tokens, next] = [(); 2].map(|()| tokens([4, 64], 50, self.device));
        self.on_tokens(
            model,
            (tokens, next),
            (&|| S::new(&size, self.device), |model: &S, (tokens, next)| model.loss(tokens, next)),
            (&|| M::new(&size, self.device), |model: &M, (tokens, next)| model.loss(tokens, next)),
        )
    }

    fn encoder_decoder<S: EncoderDecoder, M: EncoderDecoder>(
        &mut self,
        model: &str,
    ) -> Result<(), &'static str> {
        let [source, tokens] = [(); 2].map(|()| tokens([4, 64], 50, self.device));
        self.on_tokens(
            model,
            (source, tokens),
            (&|| S::new(&T5Size::TINY, self.device), |model: &S, (source, tokens)| {
                model.loss(source, tokens.clone(), tokens)
            }),
            (&|| M::new(&T5Size::TINY, self.device), |model: &M, (source, tokens)| {
                model.loss(source, tokens.clone(), tokens)
            }),
        )
    }

    fn language<S: LanguageModel, M: LanguageModel>(&mut self, model: &str) -> Result<(), &'static str> {
        let size = Size { vocabulary: 2000, width: 128, heads: 4, hidden: 352, blocks: 2, length: 128 };
        let [tokens, next] = [(); 2].map(|()| tokens([4, size.length], size.vocabulary, self.device));
        self.on_tokens(
            model,
            (tokens.clone(), next.clone()),
            (&|| S::new(&size, self.device), |model: &S, (tokens, next)| model.loss(tokens, next)),
            (&|| M::new(&size, self.device), |model: &M, (tokens, next)| model.loss(tokens, next)),
        )?;
        fn adapted<L: LanguageModel>(size: &Size, device: &Device) -> L {
            let projections = ParamGroup::from_regex(r"^blocks\..*\.weight$").expect("a valid pattern");
            L::new(size, device).apply_lora(Lora::new(8, 16.0).set_param_group(projections))
        }
        self.model(
            format!("{model}, LoRA"),
            (tokens, next),
            || adapted::<S>(&size, self.device),
            || adapted::<M>(&size, self.device),
            |model: &S, (tokens, next)| model.loss(tokens, next),
            |model: &M, (tokens, next)| model.loss(tokens, next),
        )
    }

    fn model<S: Module, M: Module, I: StepInput>(
        &mut self,
        name: String,
        input: I,
        stock: impl Fn() -> S,
        ours: impl Fn() -> M,
        stock_loss: impl Fn(&S, I) -> Tensor<1>,
        our_loss: impl Fn(&M, I) -> Tensor<1>,
    ) -> Result<(), &'static str> {
        if !name.contains(self.filter) {
            return Ok(());
        }
        fn step<M: Module, I: StepInput>(
            device: &Device,
            model: &M,
            input: &I,
            loss: impl Fn(&M, I) -> Tensor<1>,
        ) -> Measurement {
            second(device, || measure_step(model, input.copy(), &loss))
        }
        let burn = step(self.device, &stock(), &input, stock_loss);
        let model = ours();
        let ours = step(self.device, &model, &input, &our_loss);
        let (_loss, ledger) = ledger(&model, input.copy(), &our_loss);
        let seconds = |step: &Measurement| (step.forward_time + step.backward_time).as_secs_f64();
        self.measured.push(Measured {
            name,
            burn: Needs::of_step(&burn)?,
            ours: Needs::of_step(&ours)?,
            ledger,
            time: seconds(&ours) / seconds(&burn),
            known_peak: None,
        });
        Ok(())
    }
}

/// Images, which require a gradient if the case says so.
fn images(case: Case, device: &Device) -> Tensor<4> {
    let images = Tensor::<4>::random([2, 3, 64, 64], Distribution::Default, device);
    if case.tracks_input() { images.require_grad() } else { images }
}

fn tokens(shape: [usize; 2], vocabulary: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::random(shape, Distribution::Uniform(0.0, vocabulary as f64), device)
}
