//! Networks for text of the two namespaces compute the same from the same record: outputs, losses and all gradients.
#![recursion_limit = "256"]
use burn::module::{Lora, Module, ModuleMapper, ModuleVisitor, Param, ParamGroup};
use burn::tensor::{Device, Distribution, Gradients, Int, Tensor, TensorData};
use burn_memsave::measure::{TrackingAllocator, measure_step};
use burn_memsave::plan::{ProfileOptions, profile};
use burn_memsave_paper::text::{
    Decoder, DecoderSize, Encoder, EncoderDecoder, EncoderSize, Gpt2Size, T5Size, fused, memsave, stock,
};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
static ALLOCATOR: TrackingAllocator = TrackingAllocator::new();

/// Numbers are drawn from one generator, and memory is counted for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A network as a test sees it.
trait Network: Module {
    fn loss(&self, tokens: Tokens) -> Tensor<1>;
    fn outputs(&self, tokens: Tokens) -> Tensor<3>;
}

/// Those that go in, and those that follow.
type Tokens = (Tensor<2, Int>, Tensor<2, Int>);

macro_rules! network {
    ($($model:path),*: $loss:expr, $outputs:expr) => {
        $(impl Network for $model {
            fn loss(&self, tokens: Tokens) -> Tensor<1> {
                $loss(self, tokens)
            }
            fn outputs(&self, tokens: Tokens) -> Tensor<3> {
                $outputs(self, tokens)
            }
        })*
    };
}

network!(
    stock::bert::Bert, memsave::bert::Bert:
    |model: &Self, (tokens, weights): Tokens| {
        // Norms come last: the sum of squares does not depend on what is before them.
        let weights = weights.float().unsqueeze_dim::<3>(2);
        (model.forward(tokens).powi_scalar(3) * weights).mean()
    },
    |model: &Self, (tokens, _): Tokens| model.forward(tokens)
);
network!(
    stock::gpt2::Gpt2, memsave::gpt2::Gpt2, fused::gpt2::Gpt2,
    stock::decoder::Llama, memsave::decoder::Llama, fused::decoder::Llama:
    |model: &Self, (tokens, next): Tokens| Decoder::loss(model, tokens, next),
    |model: &Self, (tokens, _): Tokens| model.logits(tokens)
);
network!(
    stock::t5::T5, memsave::t5::T5, fused::t5::T5:
    // The other text is longer.
    |model: &Self, (tokens, next): Tokens| {
        EncoderDecoder::loss(model, Tensor::cat(vec![tokens.clone(), next.clone()], 1), tokens, next)
    },
    |model: &Self, (tokens, next): Tokens| model.logits(Tensor::cat(vec![tokens.clone(), next], 1), tokens)
);

/// So that norms, biases and adapters do something.
struct Shake(f64);

impl ModuleMapper for Shake {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.is_require_grad() {
            true => param.map(|value| {
                let value = value.inner();
                let noise = value.random_like(Distribution::Normal(0.0, self.0));
                (value + noise).autodiff().require_grad()
            }),
            false => param,
        }
    }
}

/// Bytes that are kept, and the most of a step; the least of four, since threads that begin to work take memory, too.
fn step<M: Network>(model: &M, tokens: &Tokens) -> [u64; 2] {
    let steps = [(); 4].map(|()| {
        let step = measure_step(model, tokens.clone(), |model, tokens| model.loss(tokens));
        [step.kept, step.peak].map(|bytes| bytes.expect("the allocator counts"))
    });
    steps.into_iter().reduce(|least, step| [least[0].min(step[0]), least[1].min(step[1])]).expect("four")
}

/// The gradients of all parameters that are trained.
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
        let gradient = param.val().grad(self.gradients);
        assert!(gradient.is_some() == param.is_require_grad(), "{:?}", self.path);
        self.found.extend(gradient.map(|gradient| (self.path.join("."), gradient.into_data())));
    }
}

fn gradients<M: Network>(model: &M, tokens: Tokens) -> BTreeMap<String, TensorData> {
    gradients_of(model, model.loss(tokens))
}

fn gradients_of(model: &impl Module, loss: Tensor<1>) -> BTreeMap<String, TensorData> {
    let gradients = loss.backward();
    let mut collect = Collect { gradients: &gradients, path: vec![], found: BTreeMap::new() };
    model.visit(&mut collect);
    collect.found
}

fn largest(data: &TensorData) -> f32 {
    data.iter::<f32>().map(f32::abs).fold(0.0, f32::max)
}

/// Relative to the largest element, and some of the largest of all, since some gradients are 0 but for rounding: those of the
/// biases of keys.
fn assert_close(what: &str, ours: &TensorData, stock: &TensorData, of_all: f32) {
    assert_eq!(ours.shape(), stock.shape(), "{what}");
    let tolerance = 2e-5 * largest(stock) + 1e-6 * of_all;
    for (ours, stock) in ours.iter::<f32>().zip(stock.iter::<f32>()) {
        assert!((ours - stock).abs() <= tolerance, "{what}: {ours}, {stock}");
    }
}

fn assert_all_close(ours: &BTreeMap<String, TensorData>, stock: &BTreeMap<String, TensorData>) {
    assert!(ours.keys().eq(stock.keys()));
    let of_all = stock.values().map(largest).fold(0.0, f32::max);
    for (path, stock) in stock {
        assert!(largest(stock) > 0.0, "{path}");
        assert_close(path, &ours[path], stock, of_all);
    }
}

fn tokens(device: &Device) -> Tokens {
    let draw = || Tensor::<2, Int>::random([32, 10], Distribution::Uniform(0.0, 50.0), device);
    (draw(), draw())
}

/// A record of `stock`, and what it computes from it, in training and in inference.
struct Expected<S> {
    stock: S,
    tokens: Tokens,
    outputs: TensorData,
    loss: TensorData,
    gradients: BTreeMap<String, TensorData>,
}

impl<S: Network> Expected<S> {
    fn new(new: impl Fn(&Device) -> S) -> Self {
        let device = Device::flex().autodiff();
        device.seed(7);
        let stock = new(&device).map(&mut Shake(0.2));
        let tokens = tokens(&device);
        let outputs = stock.outputs(tokens.clone()).into_data();
        let loss = stock.loss(tokens.clone()).into_data();
        let gradients = gradients(&stock, tokens.clone());
        Self { stock, tokens, outputs, loss, gradients }
    }

    fn compare<M: Network>(&self, new: impl Fn(&Device) -> M) -> M {
        let device = Device::flex().autodiff();
        let model = new(&device).load_record(self.stock.clone().into_record());
        let of = largest(&self.outputs);
        assert_close("outputs", &model.outputs(self.tokens.clone()).into_data(), &self.outputs, of);
        let loss = model.loss(self.tokens.clone()).into_data();
        assert_close("loss", &loss, &self.loss, largest(&self.loss));
        assert_all_close(&gradients(&model, self.tokens.clone()), &self.gradients);
        let [ours, stock] = [step(&model, &self.tokens), step(&self.stock, &self.tokens)];
        println!("{}: {ours:?}, stock {stock:?}", std::any::type_name::<M>());
        assert!(ours[0] <= stock[0] && ours[1] <= stock[1], "{ours:?} bytes, stock {stock:?}");
        // And back.
        let stock = self.stock.clone().load_record(model.clone().into_record());
        assert_eq!(stock.outputs(self.tokens.clone()).into_data(), self.outputs);
        model
    }

    /// The same with blocks that are computed again.
    fn compare_planned<M: Network>(&self, model: &M, blocks: usize) {
        let loss = |model: &M, tokens: Tokens| model.loss(tokens);
        let profile = profile(model, self.tokens.clone(), &ProfileOptions::new(), loss).expect("blocks");
        let plan = profile.plan(profile.least()).expect("the least that is possible");
        let again = plan.blocks().filter(|(_, treatment)| treatment.recompute).count();
        assert!(plan.blocks().count() == blocks && again > 0, "{plan}");
        let loss = plan.scope(|| model.loss(self.tokens.clone()));
        assert_all_close(&gradients_of(model, loss), &self.gradients);
    }
}

#[test]
fn bert_and_roberta() {
    let _alone = alone();
    for size in [EncoderSize::BERT_BASE.tiny(), EncoderSize::ROBERTA_BASE.tiny()] {
        let expected = Expected::new(|device| stock::bert::Bert::new(&size, device));
        let ours = expected.compare(|device| memsave::bert::Bert::new(&size, device));
        expected.compare_planned(&ours, 2);
    }
}

#[test]
fn gpt2() {
    let _alone = alone();
    let size = Gpt2Size::TINY;
    let expected = Expected::new(|device| stock::gpt2::Gpt2::new(&size, device));
    let ours = expected.compare(|device| memsave::gpt2::Gpt2::new(&size, device));
    expected.compare_planned(&ours, 2);
    expected.compare(|device| fused::gpt2::Gpt2::new(&size, device));
}

#[test]
fn t5() {
    let _alone = alone();
    let size = T5Size::TINY;
    let expected = Expected::new(|device| stock::t5::T5::new(&size, device));
    let ours = expected.compare(|device| memsave::t5::T5::new(&size, device));
    expected.compare_planned(&ours, 4);
    expected.compare(|device| fused::t5::T5::new(&size, device));
}

#[test]
fn llama_and_mistral() {
    let _alone = alone();
    for size in [DecoderSize::LLAMA_3_2_1B.tiny(), DecoderSize::MISTRAL_7B.tiny()] {
        let expected = Expected::new(|device| stock::decoder::Llama::new(&size, device));
        let ours = expected.compare(|device| memsave::decoder::Llama::new(&size, device));
        expected.compare_planned(&ours, 2);
        expected.compare(|device| fused::decoder::Llama::new(&size, device));
    }
}

/// With the same seed both drop the same.
#[test]
fn dropout() {
    let _alone = alone();
    fn run<M: Network>(model: &M, tokens: &Tokens) -> BTreeMap<String, TensorData> {
        tokens.0.device().seed(11);
        gradients(model, tokens.clone())
    }
    fn compare<S: Network, M: Network>(stock: impl Fn(&Device) -> S, ours: impl Fn(&Device) -> M) {
        let expected = Expected::new(stock);
        let ours = ours(&expected.tokens.0.device()).load_record(expected.stock.clone().into_record());
        let [first, second] = [run(&expected.stock, &expected.tokens), run(&ours, &expected.tokens)];
        assert_all_close(&second, &first);
        assert!(first.iter().any(|(path, gradient)| *gradient != expected.gradients[path]));
    }
    let size = EncoderSize { dropout: 0.1, ..EncoderSize::BERT_BASE.tiny() };
    compare(|device| stock::bert::Bert::new(&size, device), |device| memsave::bert::Bert::new(&size, device));
    let size = Gpt2Size { dropout: 0.1, ..Gpt2Size::TINY };
    compare(|device| stock::gpt2::Gpt2::new(&size, device), |device| memsave::gpt2::Gpt2::new(&size, device));
    let size = T5Size { dropout: 0.1, ..T5Size::TINY };
    compare(|device| stock::t5::T5::new(&size, device), |device| memsave::t5::T5::new(&size, device));
}

/// Adapters of all projections; nothing else is trained.
#[test]
fn adapters() {
    let _alone = alone();
    fn adapted<M: Network>(model: M, tokens: &Tokens) -> BTreeMap<String, TensorData> {
        let projections = ParamGroup::from_regex(r"^(encoder\.|decoder\.)?blocks\..*\.weight$").unwrap();
        let lora = Lora::new(2, 4.0).set_param_group(projections);
        tokens.0.device().seed(13);
        let model = model.apply_lora(lora).map(&mut Shake(0.05));
        gradients(&model, tokens.clone())
    }
    fn compare<S: Network, M: Network>(
        adapters: usize,
        stock: impl Fn(&Device) -> S,
        ours: impl Fn(&Device) -> M,
    ) {
        let Expected { stock, tokens, .. } = Expected::new(stock);
        let ours = ours(&tokens.0.device()).load_record(stock.clone().into_record());
        let [ours, stock] = [adapted(ours, &tokens), adapted(stock, &tokens)];
        assert_eq!(stock.len(), 2 * adapters);
        assert_all_close(&ours, &stock);
    }
    let size = Gpt2Size::TINY;
    compare(
        8,
        |device| stock::gpt2::Gpt2::new(&size, device),
        |device| fused::gpt2::Gpt2::new(&size, device),
    );
    let size = DecoderSize::LLAMA_3_2_1B.tiny();
    let stock = |device: &Device| stock::decoder::Llama::new(&size, device);
    compare(14, stock, |device| fused::decoder::Llama::new(&size, device));
    let size = T5Size::TINY;
    compare(
        2 * 6 + 2 * 10,
        |device| stock::t5::T5::new(&size, device),
        |device| fused::t5::T5::new(&size, device),
    );
}

/// As many as `transformers` counts, but for what is after encoders. None of them is in memory: parameters are made when they are
/// used.
#[test]
fn numbers_of_parameters() {
    let _alone = alone();
    let device = Device::flex();
    let bert = |size| memsave::bert::Bert::new(&size, &device).num_params();
    assert_eq!(bert(EncoderSize::BERT_BASE), 108_891_648);
    assert_eq!(bert(EncoderSize::ROBERTA_BASE), 124_055_040);
    let gpt2 = |size| memsave::gpt2::Gpt2::new(&size, &device).num_params();
    assert_eq!(gpt2(Gpt2Size::SMALL), 124_439_808);
    assert_eq!(gpt2(Gpt2Size::XL), 1_557_611_200);
    assert_eq!(memsave::t5::T5::new(&T5Size::BASE, &device).num_params(), 222_903_552);
    let decoder = |size: DecoderSize| {
        let size = DecoderSize { length: 8, ..size };
        memsave::decoder::Llama::new(&size, &device).num_params()
    };
    assert_eq!(decoder(DecoderSize::LLAMA_3_2_1B), 1_235_814_400);
    assert_eq!(decoder(DecoderSize::MISTRAL_7B), 7_241_732_096);
}
