//! What would remove what a step keeps.
use crate::{RECORDS, alone, cpu_devices, settled};
use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use burn_memsave::functional::{self, linear_cross_entropy};
use burn_memsave::measure::{Measurement, Remedy, explain, ledger, measure_step};
use burn_memsave::nn::activation::{SwiGlu, SwiGluConfig};
use burn_memsave::nn::loss::CrossEntropyLossConfig;
use burn_memsave::nn::{Linear, LinearConfig, Relu};
use burn_memsave::plan::block;

#[derive(Module, Debug)]
struct Attention {
    query: Linear,
    key: Linear,
}

#[derive(Module, Debug)]
struct Network {
    stem: Linear,
    relu: Relu,
    attention: Attention,
    head: Linear,
}

const ROWS: usize = 64;
const WIDE: usize = 128;

impl Network {
    fn new(device: &Device) -> Self {
        let layer = |outputs| LinearConfig::new(WIDE, outputs).init(device);
        let attention = Attention { query: layer(WIDE), key: layer(WIDE) };
        Self { stem: layer(WIDE), relu: Relu::new(), attention, head: layer(4) }
    }

    fn loss(&self, x: Tensor<2>) -> Tensor<1> {
        let x = self.relu.forward(self.stem.forward(x));
        let x = self.attention.query.forward(x.clone()) + self.attention.key.forward(x);
        self.head.forward(x).mean()
    }
}

fn input(device: &Device) -> Tensor<2> {
    Tensor::ones([ROWS, WIDE], device)
}

/// Every number is that of a model in which the module is frozen by hand.
#[test]
fn freezing_gives_what_is_said() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = Network::new(&device);
        let explanation = explain(&model, input(&device), Network::loss);
        let suggested: Vec<_> =
            explanation.suggestions.iter().map(|one| (one.module.as_str(), one.bytes)).collect();
        let wide = (4 * ROWS * WIDE) as u64;
        // Neither the query nor the key alone gives anything, as they read one tensor.
        let expected = [("stem", wide + wide / 32), ("attention", wide), ("head", wide)]; // with the bits of the ReLU
        let modules = expected.map(|(module, _)| module);
        assert_eq!(suggested.iter().map(|(module, _)| *module).collect::<Vec<_>>(), modules, "{explanation}");
        for ((module, measured), (_, bytes)) in suggested.into_iter().zip(expected) {
            assert!(measured.abs_diff(bytes) < RECORDS, "{explanation}"); // but for records of the graph
            let mut frozen = model.clone();
            match module {
                "stem" => frozen.stem = frozen.stem.freeze(),
                "attention" => frozen.attention = frozen.attention.freeze(),
                "head" => frozen.head = frozen.head.freeze(),
                _ => panic!("{module}"),
            }
            let [(_, all), (_, less)] =
                [&model, &frozen].map(|model| ledger(model, input(&device), Network::loss));
            assert_eq!(all.total() - less.total(), bytes, "{module}");
            assert!(explanation.total.abs_diff(all.total()) < 2 * RECORDS, "{explanation}");
        }
        for suggestion in &explanation.suggestions {
            assert_eq!(suggestion.measured, Some(suggestion.bytes as i64));
            assert_eq!((suggestion.remedy, suggestion.extra_time), (Remedy::Freeze, None));
        }
        assert!(explanation.notes[0].contains("no `plan::block`"), "{explanation}");
    }
}

#[test]
fn rows_name_what_would_remove_them() {
    let _alone = alone();
    let Some(device) = cpu_devices().pop() else { return };
    let model = Network::new(&device);
    let explanation = explain(&model, input(&device), Network::loss);
    let row = |module: &str, tensor: &str| {
        let found = explanation.rows.iter().find(|row| row.module == module && row.tensor == tensor);
        found.unwrap_or_else(|| panic!("{module} {tensor}: {explanation}"))
    };
    let suggested = |module: &str| {
        let one = explanation.suggestions.iter().find(|one| one.module == module);
        one.map(|one| one.to_string())
    };
    assert_eq!(row("stem", "x").suggestion, suggested("stem"));
    assert_eq!(row("attention.key", "x").suggestion, suggested("attention"));
    assert!(row("attention.key", "x").shared);
    assert_eq!(row("relu", "mask").suggestion, suggested("stem"));
    assert_eq!(row("head", "weight").suggestion, None);

    let table = explanation.to_string();
    assert!(table.contains("| freeze head"), "{table}");
    let csv = explanation.to_csv();
    let head = "module,operation,tensor,bytes,reason,shared,parameter,suggestion";
    assert_eq!(csv.lines().next(), Some(head));
    assert_eq!(csv.lines().count(), explanation.rows.len() + 1);
    let csv = explanation.suggestions_to_csv();
    assert_eq!(csv.lines().next(), Some("remedy,module,bytes,measured,extra_seconds"));
    let of_head = explanation.suggestions.iter().find(|one| one.module == "head").expect("the head");
    assert!(csv.contains(&format!("freeze,head,{},", of_head.bytes)), "{csv}");
    let json: serde_json::Value = serde_json::from_str(&explanation.to_json()).expect("valid JSON");
    assert_eq!(json["suggestions"][0]["remedy"], "freeze");
    assert_eq!(json["total"], explanation.total);
}

#[allow(clippy::ptr_arg)] // a slice is no module
fn blocks(model: &Vec<Vec<Linear>>, x: Tensor<2>) -> Tensor<1> {
    let run = |layers: &Vec<Linear>, x: Tensor<2>| {
        layers.iter().fold(x, |x, layer| burn_memsave::functional::gelu(layer.forward(x)))
    };
    model.iter().fold(x, |x, layers| block(layers, x, run)).mean()
}

/// Blocks are measured; what costs time comes after what costs none, the best rate first.
#[test]
fn blocks_are_suggested_with_their_time() {
    let _alone = alone();
    let Some(device) = cpu_devices().pop() else { return };
    let layer = || LinearConfig::new(WIDE, WIDE).init(&device);
    let model: Vec<Vec<Linear>> = (0..4).map(|_| vec![layer(), layer()]).collect();
    let explanation = explain(&model, input(&device), blocks);
    assert!(explanation.notes.is_empty(), "{explanation}");
    let checkpoints: Vec<_> =
        explanation.suggestions.iter().filter(|one| one.remedy == Remedy::Checkpoint).collect();
    assert_eq!(checkpoints.len(), 4, "{explanation}");
    let kept = (4 * ROWS * WIDE) as u64;
    for one in &checkpoints {
        assert!(one.extra_time.is_some() && one.bytes >= kept, "{explanation}");
    }
    let rates: Vec<f64> = explanation.suggestions.iter().map(|one| one.bytes_per_ms()).collect();
    assert!(rates.is_sorted_by(|a, b| a >= b), "{rates:?}");
    assert!(explanation.suggestions[0].extra_time.is_none(), "{explanation}");
}

/// The number is that of the ledgers of both: with a head that is trained and one that is not, with logits that are reshaped and
/// without.
#[test]
fn a_head_and_its_loss_in_one_give_what_is_said() {
    let _alone = alone();
    for device in cpu_devices() {
        let [rows, classes] = [512, 1000];
        let layer = |outputs| LinearConfig::new(WIDE, outputs).init(&device);
        let trained = vec![layer(WIDE), layer(classes)];
        let frozen = vec![trained[0].clone(), trained[1].clone().freeze()];
        let targets = Tensor::<1, Int>::zeros([rows], &device);
        let cross_entropy = CrossEntropyLossConfig::new().init(&device);
        let flat = |model: &Vec<Linear>, x: Tensor<2>| {
            let logits = model[1].forward(model[0].forward(x));
            cross_entropy.forward(logits, targets.clone())
        };
        let reshaped = |model: &Vec<Linear>, x: Tensor<2>| {
            let logits = model[1].forward(model[0].forward(x.reshape([4, -1, WIDE as i32])));
            cross_entropy.forward(logits.reshape([rows, classes]), targets.clone())
        };
        let in_one = |model: &Vec<Linear>, x: Tensor<2>| {
            let bias = model[1].bias.as_ref().map(|bias| bias.val());
            let (x, weight) = (model[0].forward(x), model[1].weight.val());
            linear_cross_entropy(x, weight, bias, targets.clone(), Default::default())
        };
        for model in [&trained, &frozen] {
            let x = || Tensor::<2>::ones([rows, WIDE], &device);
            let [before, after] = [
                ledger(model, x(), |model, x| flat(model, x)).1.total(),
                ledger(model, x(), |model, x| in_one(model, x)).1.total(),
            ];
            assert!(before - after > (4 * rows * classes) as u64 / 2, "{before} {after}");
            for explanation in [explain(model, x(), flat), explain(model, x(), reshaped)] {
                let one = explanation.suggestions.iter().find(|one| one.remedy == Remedy::LinearCrossEntropy);
                let one = one.unwrap_or_else(|| panic!("{explanation}"));
                assert_eq!((one.module.as_str(), one.bytes), ("1", before - after), "{explanation}");
                assert!(one.to_string().starts_with("linear_cross_entropy for 1: -"), "{one}");
            }
            // A head after which this library computes something else is none, although the shapes would fit.
            let after = |model: &Vec<Linear>, x: Tensor<2>| {
                let logits = burn_memsave::functional::gelu(model[0].forward(x));
                cross_entropy.forward(logits, targets.clone())
            };
            let explanation = explain(model, x(), after);
            assert!(explanation.suggestions.iter().all(|one| one.remedy == Remedy::Freeze), "{explanation}");
            let explanation = explain(model, x(), in_one);
            assert!(explanation.suggestions.iter().all(|one| one.remedy == Remedy::Freeze), "{explanation}");
        }
    }
}

/// The number is that of the bytes that a step keeps with the layers apart and in one; with adapters and without.
#[test]
fn a_gate_in_one_gives_what_is_said() {
    let _alone = alone();
    for device in cpu_devices() {
        let layer = |inputs, outputs| LinearConfig::new(inputs, outputs).with_bias(false).init(&device);
        let apart = vec![layer(WIDE, 4 * WIDE), layer(WIDE, 4 * WIDE), layer(4 * WIDE, WIDE)];
        let gate = SwiGluConfig::new(WIDE, 4 * WIDE).with_bias(false).init(&device);
        let in_one = (gate, layer(4 * WIDE, WIDE));
        let x = || Tensor::<2>::ones([512, WIDE], &device);
        let apart_loss = |model: &Vec<Linear>, x: Tensor<2>| {
            let gate = functional::silu(model[0].forward(x.clone()));
            model[2].forward(gate * model[1].forward(x)).mean()
        };
        let loss = |model: &(SwiGlu, Linear), x: Tensor<2>| model.1.forward(model.0.forward(x)).mean();
        let kept = |step: Measurement| step.kept.expect("the allocator counts");
        let before = settled(|| kept(measure_step(&apart, x(), apart_loss)));
        let after = settled(|| kept(measure_step(&in_one, x(), loss)));
        let explanation = explain(&apart, x(), apart_loss);
        let one = explanation.suggestions.iter().find(|one| one.remedy == Remedy::SwiGlu);
        let one = one.unwrap_or_else(|| panic!("{explanation}"));
        assert_eq!((one.module.as_str(), one.bytes), ("0 and 1", (512 * 4 * WIDE * 4) as u64));
        assert!((before - after).abs_diff(one.bytes) < 16 << 10, "{before}, {after}");
        let row = explanation.rows.iter().find(|row| row.module == "2").expect("a row of the last layer");
        assert!(row.suggestion.is_some(), "{explanation}");
        let explanation = explain(&in_one, x(), loss);
        assert!(explanation.suggestions.iter().all(|one| one.remedy != Remedy::SwiGlu), "{explanation}");
        // Another sum of the same tensors is found only after a SiLU.
        let sum = |model: &Vec<Linear>, x: Tensor<2>| {
            let gate = functional::relu(model[0].forward(x.clone()));
            model[2].forward(gate * model[1].forward(x)).mean()
        };
        assert!(explain(&apart, x(), sum).suggestions.iter().all(|one| one.remedy != Remedy::SwiGlu));
    }
}
