//! Random networks, cut into segments at random places.
use super::*;
use burn::module::Lora;
use burn::tensor::Int;
use burn_memsave::nn::activation::{Gelu, RRelu, RReluConfig, Relu};
use burn_memsave::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn_memsave::nn::{
    BatchNorm, BatchNormConfig, Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig,
    SwiGlu, SwiGluConfig,
};
use burn_memsave_paper::text::llama::{LanguageModel, Size, checkpointed, memsave};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

const TOKENS: usize = 4;
const WIDTH: usize = 8;

#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
enum Layer {
    Linear(Linear),
    Norm(LayerNorm),
    BatchNorm(BatchNorm),
    Attention(MultiHeadAttention),
    Gate(SwiGlu),
    Dropout(Dropout),
    Slopes(RRelu),
    Relu(Relu),
    Gelu(Gelu),
}

const KINDS: usize = 9;

impl Layer {
    fn new(kind: usize, dropout: f64, device: &Device) -> Self {
        match kind {
            0 => Self::Linear(LinearConfig::new(WIDTH, WIDTH).init(device)),
            1 => Self::Norm(LayerNormConfig::new(WIDTH).init(device)),
            2 => Self::BatchNorm(BatchNormConfig::new(TOKENS).init(device)),
            3 => Self::Attention(MultiHeadAttentionConfig::new(WIDTH, 2).with_dropout(dropout).init(device)),
            4 => Self::Gate(SwiGluConfig::new(WIDTH, WIDTH).init(device)),
            5 => Self::Dropout(DropoutConfig::new(dropout).init()),
            6 => Self::Slopes(RReluConfig::new().init()),
            7 => Self::Relu(Relu::new()),
            _ => Self::Gelu(Gelu::new()),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Linear(layer) => x.clone() + layer.forward(x),
            Self::Norm(layer) => layer.forward(x),
            Self::BatchNorm(layer) => layer.forward(x),
            Self::Attention(layer) => x.clone() + layer.forward(MhaInput::self_attn(x)).context,
            Self::Gate(layer) => x.clone() * layer.forward(x),
            Self::Dropout(layer) => layer.forward(x),
            Self::Slopes(layer) => layer.forward(x),
            Self::Relu(layer) => layer.forward(x),
            Self::Gelu(layer) => layer.forward(x),
        }
    }
}

#[derive(Module, Debug)]
struct Network {
    layers: Vec<Layer>,
}

impl Network {
    fn run(&self, [start, end]: [usize; 2], x: Tensor<3>) -> Tensor<3> {
        self.layers[start..end].iter().fold(x, |x, layer| layer.forward(x))
    }
}

/// The layers: of what kind, whether frozen, whether a segment begins there. Which strategy; whether the input is tracked, whether
/// layers drop, whether segments are in segments.
type Case = (Vec<(usize, bool, bool)>, usize, bool, bool, bool);

#[test]
fn gradients_are_those_of_the_network() {
    let _alone = alone();
    let layer = (0..KINDS, any::<bool>(), any::<bool>());
    let strategy =
        (prop::collection::vec(layer, 1..9), 0..2usize, any::<bool>(), any::<bool>(), any::<bool>());
    let mut runner = TestRunner::new(Config { cases: 96, ..Config::default() });
    let run = |(kinds, strategy, tracked, drops, nested): Case| {
        let device = &devices()[strategy];
        let dropout = if drops { 0.4 } else { 0.0 };
        let layers = kinds.iter().map(|&(kind, is_frozen, _)| {
            let layer = Layer::new(kind, dropout, device);
            if is_frozen { layer.freeze() } else { layer }
        });
        let network = Network { layers: layers.collect() };
        let mut ends: Vec<usize> = (1..kinds.len()).filter(|&at| kinds[at].2).collect();
        ends.push(kinds.len());
        let x = random([3, TOKENS, WIDTH], device);
        same(
            &network,
            x,
            tracked,
            |network, x| network.run([0, network.layers.len()], x),
            |network, x| {
                let all = |network: &Network, x| {
                    let mut start = 0;
                    ends.iter().fold(x, |x, &end| {
                        let range = [start, end];
                        start = end;
                        checkpoint(network, x, move |network, x| network.run(range, x))
                    })
                };
                match nested {
                    false => all(network, x),
                    true => checkpoint(network, x, |network, x| {
                        let middle = network.layers.len() / 2;
                        let x = checkpoint(network, x, move |network, x| network.run([0, middle], x));
                        network.run([middle, network.layers.len()], x)
                    }),
                }
            },
        );
        Ok(())
    };
    runner.run(&strategy, run).unwrap();
}

/// Of adapters, in blocks that are computed again.
#[test]
fn a_language_model() {
    let _alone = alone();
    for device in devices() {
        let size = Size { vocabulary: 31, width: 16, heads: 2, hidden: 24, blocks: 3, length: 8 };
        let plain = memsave::Llama::new(&size, &device).apply_lora(Lora::new(2, 4.0));
        let tokens = Tensor::<1, Int>::arange(0..16, &device).reshape([2, 8]);
        drop(plain.loss(tokens.clone(), tokens.clone()));
        let record = plain.clone().into_record();
        let checked =
            checkpointed::Llama::new(&size, &device).apply_lora(Lora::new(2, 4.0)).load_record(record);
        fn run<M: LanguageModel>(
            model: &M,
            tokens: &Tensor<2, Int>,
        ) -> (TensorData, Vec<Option<TensorData>>) {
            let loss = model.loss(tokens.clone(), tokens.clone());
            let gradients = gradients_of(model, &loss.clone().backward()).into_iter();
            (loss.into_data(), gradients.map(|(_, gradient)| gradient).collect())
        }
        assert_eq!(run(&plain, &tokens), run(&checked, &tokens));
    }
}
