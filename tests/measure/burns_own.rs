//! What operations of Burn keep beside those of this library, and what is written by hand with them.
use crate::{RECORDS, alone, cpu_devices, settled};
use burn::module::{Lora, Module};
use burn::nn;
use burn::tensor::{Device, Distribution, Tensor, activation};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::functional;
use burn_memsave::measure::{Explanation, Pattern, Remedy, explain, ledger, measure_step};
use burn_memsave::nn::activation::SwiGluConfig;
use burn_memsave::nn::conv::{Conv1dConfig, Conv2d, Conv2dConfig, ConvTranspose1dConfig};
use burn_memsave::nn::gru::GruConfig;
use burn_memsave::nn::transformer::{TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput};
use burn_memsave::nn::{
    BatchNorm, BatchNormConfig, GroupNormConfig, InstanceNormConfig, Linear, LinearConfig, LstmConfig,
    PReluConfig, RmsNormConfig,
};

const ROWS: usize = 64;
const WIDE: usize = 128;

/// Of a device, and of the same one with gradient checkpointing.
fn devices() -> Vec<Device> {
    cpu_devices().into_iter().flat_map(|device| [device.clone(), device.gradient_checkpointing()]).collect()
}

fn random<const D: usize>(shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), device)
}

fn linear(device: &Device) -> Linear {
    LinearConfig::new(WIDE, WIDE).init(device)
}

#[derive(Module, Debug)]
struct Mixed {
    ours: Linear,
    norm: nn::LayerNorm,
    burns: nn::Linear,
}

impl Mixed {
    fn new(device: &Device) -> Self {
        let (norm, burns) = (nn::LayerNormConfig::new(WIDE), nn::LinearConfig::new(WIDE, WIDE));
        Self { ours: linear(device), norm: norm.init(device), burns: burns.init(device) }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        self.burns.forward(self.norm.forward(self.ours.forward(x))).mean()
    }
}

#[test]
fn what_burn_keeps_has_a_row_and_the_names_of_its_modules() {
    let _alone = alone();
    for device in devices() {
        let model = Mixed::new(&device);
        let x = || random([ROWS, WIDE], &device);
        let kept = settled(|| measure_step(&model, x(), Mixed::loss).kept).expect("bytes are counted");
        let explanation = settled(|| explain(&model, x(), Mixed::loss).total);
        assert!(explanation.abs_diff(kept) < RECORDS, "{explanation} {kept}");
        let explanation = explain(&model, x(), Mixed::loss);
        let (_, ledger) = ledger(&model, x(), Mixed::loss);
        // Only the input of our layer is listed, of which Burn's own keep at least their inputs.
        let of_one = (4 * ROWS * WIDE) as u64;
        assert_eq!(ledger.total(), of_one);
        let [row] = explanation
            .rows
            .iter()
            .filter(|row| row.operation == "operations of Burn")
            .collect::<Vec<_>>()[..]
        else {
            panic!("one row: {explanation}")
        };
        assert!(row.bytes >= Some(2 * of_one), "{explanation}");
        assert_eq!(row.bytes, Some(explanation.total - ledger.total()));
        let counted = explanation.rows.iter().filter(|row| !row.shared && !row.parameter);
        assert_eq!(counted.filter_map(|row| row.bytes).sum::<u64>(), explanation.total);
        assert_eq!(ledger.clone().with_unlisted(explanation.total).total(), explanation.total);
        assert_eq!(ledger.clone().with_unlisted(0).rows.last().and_then(|row| row.bytes), Some(0));

        let note = explanation.notes.iter().find(|note| note.contains("Burn's own operations"));
        let note = note.unwrap_or_else(|| panic!("{explanation}"));
        assert!(
            note.contains("the modules whose parameters they use: burns (Linear), norm (LayerNorm)."),
            "{note}"
        );
        // The names of operations are shown by gradient checkpointing alone.
        let is_checkpointing =
            device.gradient_checkpointing_strategy() != cpu_devices()[0].gradient_checkpointing_strategy();
        assert_eq!(note.contains("among them"), is_checkpointing, "{note}");
    }
}

#[derive(Module, Debug)]
struct Ours {
    conv: Conv2d,
    norm: BatchNorm,
    encoder: TransformerEncoder,
    head: Linear,
}

#[test]
fn a_model_of_this_library_has_nothing_to_swap() {
    let _alone = alone();
    for device in devices() {
        let model = Ours {
            conv: Conv2dConfig::new([3, 16], [3, 3]).init(&device),
            norm: BatchNormConfig::new(16).init(&device),
            encoder: TransformerEncoderConfig::new(16, 64, 2, 1).init(&device),
            head: LinearConfig::new(16, 16).init(&device),
        };
        let loss = |model: &Ours, x: Tensor<4>| {
            let x = functional::relu(model.norm.forward(model.conv.forward(x)));
            let x = x.flatten::<3>(2, 3).swap_dims(1, 2);
            let x = model.encoder.forward(TransformerEncoderInput::new(x));
            checkpoint(&model.head, x, |head, x| functional::silu(head.forward(x))).mean()
        };
        let explanation = explain(&model, random([4, 3, 18, 18], &device), loss);
        assert!(
            explanation.notes.iter().all(|note| !note.contains("Burn's own operations")),
            "{explanation}"
        );
        assert_eq!(explanation.patterns, [], "{explanation}");
    }
}

/// Some layers reshape their parameters by Burn's operations, and are swapped all the same.
#[test]
fn layers_of_this_library_are_not_named() {
    let _alone = alone();
    for device in cpu_devices() {
        fn check<M: Module, const D: usize>(
            model: M,
            x: Tensor<D>,
            forward: impl Fn(&M, Tensor<D>) -> Tensor<1>,
        ) {
            for x in [x.clone(), x.require_grad()] {
                let explanation = explain(&model, x, |model, x| functional::relu(forward(model, x)).sum());
                let is_named = explanation.notes.iter().any(|note| note.contains("from_nn_"));
                assert!(!is_named, "{explanation}");
            }
        }
        let flat = |x: Tensor<3>| x.flatten::<1>(0, 2);
        let x = || random([2, 8, 16], &device);
        check(PReluConfig::new().with_num_parameters(8).init(&device), x(), |m, x| flat(m.forward(x)));
        check(GroupNormConfig::new(2, 8).init(&device), x(), |m, x| flat(m.forward(x)));
        check(InstanceNormConfig::new(8).init(&device), x(), |m, x| flat(m.forward(x)));
        check(RmsNormConfig::new(16).init(&device), x(), |m, x| flat(m.forward(x)));
        check(BatchNormConfig::new(8).init(&device), x(), |m, x| flat(m.forward(x)));
        check(Conv1dConfig::new(8, 4, 3).init(&device), x(), |m, x| flat(m.forward(x)));
        check(ConvTranspose1dConfig::new([8, 4], 3).init(&device), x(), |m, x| flat(m.forward(x)));
        check(LstmConfig::new(16, 4, true).init(&device), x(), |m, x| flat(m.forward(x, None).0));
        check(GruConfig::new(16, 4, true).init(&device), x(), |m, x| flat(m.forward(x, None)));
        check(SwiGluConfig::new(16, 4).init(&device), x(), |m, x| flat(m.forward(x)));
        let linear = || LinearConfig::new(16, 4).init(&device);
        check(linear().apply_lora(Lora::new(2, 4.0)), x(), |m, x| flat(m.forward(x)));
        check(linear(), x(), |m, x| flat(functional::linear(x, m.weight.val() * 1.0, None)));
    }
}

#[derive(Module, Debug)]
struct Fields {
    stem: nn::Linear,
    body: Vec<nn::Linear>,
    neck: Vec<Linear>,
    head: nn::Linear,
}

impl Fields {
    fn new(device: &Device) -> Self {
        let of_burn = |d_output| nn::LinearConfig::new(WIDE, d_output).init(device);
        let ours = || LinearConfig::new(WIDE, WIDE).init(device);
        let body = (0..7).map(|_| of_burn(WIDE)).collect();
        Self { stem: of_burn(WIDE), body, neck: (0..5).map(|_| ours()).collect(), head: of_burn(4) }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        // No two keep the same tensor.
        let apart = |x: Tensor<2>| functional::relu(x) * 2.0;
        let x = apart(self.stem.forward(x));
        let x = self.body.iter().fold(x, |x, layer| apart(layer.forward(x)));
        let x = self.neck.iter().fold(x, |x, layer| apart(layer.forward(x)));
        self.head.forward(x).mean()
    }

    fn freeze(mut self, module: &str) -> Self {
        let number = || module.split('.').nth(1).map(|number| number.parse::<usize>().expect("a number"));
        match (module.split('.').next(), number()) {
            (Some("stem"), _) => self.stem = self.stem.freeze(),
            (Some("head"), _) => self.head = self.head.freeze(),
            (Some("body"), None) => self.body = self.body.freeze(),
            (Some("neck"), None) => self.neck = self.neck.freeze(),
            (Some("body"), Some(number)) => self.body[number] = self.body[number].clone().freeze(),
            (Some("neck"), Some(number)) => self.neck[number] = self.neck[number].clone().freeze(),
            _ => panic!("{module}"),
        }
        self
    }
}

/// Also of modules of Burn, of which a ledger knows nothing.
#[test]
fn the_ten_best_to_freeze_come_first_and_give_what_is_measured() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = Fields::new(&device);
        let x = random([ROWS, WIDE], &device);
        let explanation = explain(&model, x.clone(), Fields::loss);
        let freezing: Vec<_> =
            explanation.suggestions.iter().filter(|one| one.remedy == Remedy::Freeze).collect();
        assert!(freezing.len() > 10, "{explanation}");
        let kept =
            |model: &Fields| settled(|| measure_step(model, x.clone(), Fields::loss).kept).expect("bytes");
        let all = kept(&model);
        for one in &freezing {
            let less = all - kept(&model.clone().freeze(&one.module));
            assert_eq!(one.measured, Some(one.bytes as i64));
            assert!(one.bytes.abs_diff(less) < RECORDS, "{} {less}\n{explanation}", one.module);
        }
        let (best, others) = freezing.split_at(10);
        let least = best.iter().map(|one| one.bytes).min();
        assert!(others.iter().all(|one| Some(one.bytes) <= least), "{explanation}");
        for part in [best, others] {
            let fields: Vec<&str> = part.iter().filter_map(|one| one.module.split('.').next()).collect();
            let mut groups = fields.clone();
            groups.dedup();
            let several = groups.len();
            groups.sort_unstable();
            groups.dedup();
            assert_eq!(groups.len(), several, "{fields:?}");
            for field in groups {
                let of_field = part.iter().filter(|one| one.module.split('.').next() == Some(field));
                assert!(of_field.map(|one| one.bytes).is_sorted_by(|a, b| a >= b), "{explanation}");
            }
        }
        let table = explanation.to_string();
        assert_eq!(table.lines().filter(|line| line.starts_with("| freeze ")).count(), 10, "{table}");
        assert!(table.contains(&format!("in `suggestions`: {}.", others.len())), "{table}");
    }
}

#[derive(Module, Debug)]
struct Layers {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
}

#[derive(Module, Debug)]
struct Model {
    attention: Layers,
    before: Linear,
    after: Linear,
}

impl Model {
    fn new(device: &Device) -> Self {
        let [query, key, value, output, before, after] = core::array::from_fn(|_| linear(device));
        Self { attention: Layers { query, key, value, output }, before, after }
    }
}

fn found(explanation: &Explanation) -> Vec<(Pattern, &str)> {
    explanation.patterns.iter().map(|found| (found.pattern, found.module.as_str())).collect()
}

/// What is computed between two layers.
fn between(device: &Device, f: fn(Tensor<2>) -> Tensor<2>) -> Explanation {
    let x = random([ROWS, WIDE], device) * 10.0; // some are above six
    explain(&Model::new(device), x, |model, x| model.after.forward(f(model.before.forward(x))).mean())
}

#[test]
fn activations_by_hand_are_named() {
    let _alone = alone();
    for device in devices() {
        for f in [
            |x: Tensor<2>| activation::relu(x).clamp_max(6.0),
            |x: Tensor<2>| x.clamp(0.0, 6.0),
            |x: Tensor<2>| x.clamp_min(0.0).clamp_max(6.0),
        ] {
            let explanation = between(&device, f);
            assert_eq!(found(&explanation), [(Pattern::Relu6, "before")], "{explanation}");
        }
        for f in [
            |x: Tensor<2>| x.clone() * activation::sigmoid(x),
            |x: Tensor<2>| activation::sigmoid(x.clone()) * x,
            |x: Tensor<2>| activation::silu(x),
        ] {
            let explanation = between(&device, f);
            assert_eq!(found(&explanation), [(Pattern::Silu, "before")], "{explanation}");
            assert!(explanation.to_string().contains("By hand in before: x f(x)"), "{explanation}");
        }
        let others: [fn(Tensor<2>) -> Tensor<2>; 13] = [
            functional::silu,
            functional::relu6,
            activation::relu,
            |x| activation::relu(x) * 0.5,
            |x| activation::relu(x).reshape([1, -1]).reshape([ROWS, WIDE]),
            |x| functional::relu6(x).reshape([1, -1]).reshape([ROWS, WIDE]),
            |x| activation::relu(x).clamp_max(5.0),
            |x| x.clone() * x.tanh(),
            |x| x.clone() + activation::sigmoid(x),
            |x| x.clone() * activation::sigmoid(x * 2.0),
            |x| x.clone() * x.mean_dim(1),
            |x| activation::softmax(x, 1),
            activation::gelu,
        ];
        for (number, f) in others.into_iter().enumerate() {
            let explanation = between(&device, f);
            assert_eq!(found(&explanation), [], "{number} {explanation}");
        }
    }
}

/// Attention of a model, given its queries, keys and values.
type Attention = fn([Tensor<3>; 3]) -> Tensor<3>;

fn attended(device: &Device, attention: Attention) -> Explanation {
    explain(&Model::new(device), random([2, 32, WIDE], device), |model, x: Tensor<3>| {
        let Layers { query, key, value, output } = &model.attention;
        let x = functional::relu(model.before.forward(x));
        let y = attention([query, key, value].map(|layer| layer.forward(x.clone())));
        model.after.forward(output.forward(y)).mean()
    })
}

#[test]
fn attention_by_hand_is_named() {
    let _alone = alone();
    for device in devices() {
        let by_hand: [Attention; 6] = [
            |[q, k, v]| activation::quiet_softmax(q.matmul(k.transpose()), 2).matmul(v),
            |[q, k, v]| activation::softmax(q.matmul(k.transpose()) / 8.0, 2).matmul(v),
            |[q, k, v]| {
                let scores = (q / 8.0).matmul(k.transpose());
                let mask = scores.clone().detach().greater_scalar(1.0);
                activation::softmax(scores.mask_fill(mask, -1e9), 2).matmul(v)
            },
            |[q, k, v]| {
                let weights = activation::softmax(q.matmul(k.transpose()), 2);
                let dropped = weights.clone().detach().greater_scalar(0.1).float() / 0.9;
                (weights * dropped).matmul(v)
            },
            |[q, k, v]| functional::softmax(q.matmul(k.transpose()), 2).matmul(v),
            |qkv| {
                let [q, k, v] = qkv.map(|x| x.reshape([2, 32, 4, -1]).swap_dims(1, 2));
                let y = burn::tensor::module::attention(q, k, v, None, None, Default::default());
                y.swap_dims(1, 2).reshape([2, 32, -1])
            },
        ];
        for (number, attention) in by_hand.into_iter().enumerate() {
            let explanation = attended(&device, attention);
            assert_eq!(found(&explanation), [(Pattern::Attention, "attention")], "{number} {explanation}");
        }
        let others: [Attention; 6] = [
            |[q, k, v]| functional::softmax(q + k.clone(), 2).matmul(v.transpose()).matmul(k),
            |qkv| {
                let [q, k, v] = qkv.map(|x| x.reshape([2, 32, 4, -1]).swap_dims(1, 2));
                let y = functional::attention(q, k, v, None, None, Default::default());
                y.swap_dims(1, 2).reshape([2, 32, -1])
            },
            |[q, k, v]| q.matmul(k.transpose()).matmul(v), // linear attention
            |[q, k, v]| activation::sigmoid(q.matmul(k.transpose())).matmul(v),
            |[q, k, v]| activation::softmax(q + k, 2) + v,
            |[q, k, v]| activation::softmax(q.matmul(k.transpose()), 2).sum_dim(2) + v,
        ];
        for (number, attention) in others.into_iter().enumerate() {
            let explanation = attended(&device, attention);
            assert_eq!(found(&explanation), [], "{number} {explanation}");
        }
    }
}

/// An unswapped model: what a swap gives is at most the row.
#[test]
fn a_swap_gives_at_most_the_row() {
    let _alone = alone();
    for device in cpu_devices() {
        let x = || random([2, 32, WIDE], &device);
        let burns = nn::transformer::TransformerEncoderConfig::new(WIDE, 256, 4, 1).init(&device);
        let ours: TransformerEncoder = burns.clone().into();
        let loss = |model: &nn::transformer::TransformerEncoder, x: Tensor<3>| {
            model.forward(nn::transformer::TransformerEncoderInput::new(x)).mean()
        };
        let swapped =
            |model: &TransformerEncoder, x: Tensor<3>| model.forward(TransformerEncoderInput::new(x)).mean();
        let explanation = explain(&burns, x(), loss);
        let [before, after] = [measure_step(&burns, x(), loss).kept, measure_step(&ours, x(), swapped).kept]
            .map(Option::unwrap);
        let row = explanation.rows.iter().find(|row| row.operation == "operations of Burn");
        let row = row.and_then(|row| row.bytes).unwrap_or_else(|| panic!("{explanation}"));
        assert_eq!(row, explanation.total, "nothing is listed");
        assert!(before - after <= row && before - after > row / 4, "{before} {after} {explanation}");
        assert_eq!(found(&explanation), [(Pattern::Attention, "layers.0.mha")], "{explanation}");
        let after = explain(&ours, x(), swapped);
        assert_eq!(found(&after), []);
    }
}
