//! What the ledger says.
use crate::{RECORDS, alone, cpu_devices, settled};
use burn::module::Module;
use burn::nn;
use burn::tensor::{Device, Tensor, quantization::QuantValue};
use burn_memsave::functional;
use burn_memsave::measure::{ledger, measure_layer, measure_step};

/// Two layers that read the same x; the second one's ReLU.
#[derive(Module, Debug)]
struct TwoLayers {
    left: nn::Linear,
    right: Vec<nn::Linear>,
}

impl TwoLayers {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let linear = |layer: &nn::Linear, x| {
            functional::linear(x, layer.weight.val(), layer.bias.as_ref().map(|bias| bias.val()))
        };
        linear(&self.left, x.clone()) + functional::relu(linear(&self.right[0], x))
    }
}

#[test]
fn the_ledger_names_modules_and_counts_what_is_shared_once() {
    let _alone = alone();
    for device in cpu_devices() {
        let layer = || nn::LinearConfig::new(64, 32).init(&device);
        let model = TwoLayers { left: layer(), right: vec![layer()] };
        let make = || Tensor::<2>::ones([100, 64], &device).require_grad();
        let x = make();
        let (y, ledger) = ledger(&model, x, TwoLayers::forward);
        assert_eq!(y.dims(), [100, 32]);

        let rows: Vec<_> = ledger
            .rows
            .iter()
            .map(|row| (row.module.as_str(), row.tensor, row.bytes.expect("ours"), row.shared, row.parameter))
            .collect();
        let (x_bytes, weight_bytes, mask_bytes) = (4 * 100 * 64, 4 * 64 * 32, 100 * 32 / 8);
        assert_eq!(
            rows,
            [
                ("left", "x", x_bytes, false, false),
                ("left", "weight", weight_bytes, false, true),
                ("right.0", "x", x_bytes, true, false),
                ("right.0", "weight", weight_bytes, false, true),
                ("relu", "mask", mask_bytes, false, false),
            ]
        );
        assert_eq!(ledger.total(), x_bytes + mask_bytes);

        // The counting allocator agrees, but for the graph's records.
        drop(y);
        let layer = settled(|| measure_layer(make, |x| model.forward(x)));
        let kept = layer.kept.expect("the allocator is installed");
        assert!((ledger.total()..ledger.total() + RECORDS).contains(&kept), "{kept} {ledger}");

        assert_table_is_sorted(&ledger.to_string());
        let csv = ledger.to_csv().expect("plain text");
        assert_eq!(csv.lines().count(), 6);
        assert!(csv.contains("right.0,linear,x,25600,weight is tracked,true,false"), "{csv}");
        let json: serde_json::Value =
            serde_json::from_str(&ledger.to_json().expect("plain text")).expect("valid JSON");
        assert_eq!(json["rows"][4]["bytes"], mask_bytes);
    }
}

/// Largest first, then what takes no memory, then the total.
fn assert_table_is_sorted(table: &str) {
    let lines: Vec<_> = table.lines().skip(2).collect();
    let expected = ["25.00 KiB", "400 B", "shared", "parameter", "parameter", "25.39 KiB"];
    assert_eq!(lines.len(), expected.len(), "{table}");
    assert!(lines.iter().zip(expected).all(|(line, text)| line.contains(text)), "{table}");
}

#[test]
fn a_tied_weight_is_a_parameter_under_its_first_path() {
    let _alone = alone();
    let Some(device) = cpu_devices().pop() else { return };
    let layer = nn::LinearConfig::new(8, 8).with_bias(false).init(&device);
    let model = vec![layer.clone(), layer];
    let x = Tensor::<2>::ones([2, 8], &device).require_grad();
    let (y, ledger) = ledger(&model, x, |model, x| functional::linear(x, model[1].weight.val(), None));
    assert!(ledger.rows.iter().all(|row| row.module == "0"), "{ledger}");
    assert_eq!(ledger.total(), 2 * 8 * 4);

    let step = measure_step(&model, y.detach(), |model, x| model[1].forward(model[0].forward(x)).sum());
    assert_eq!(step.gradients, 8 * 8 * 4);
}

#[derive(Module, Debug)]
struct Block {
    rise: nn::Linear,
    fall: nn::Linear,
}

impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let linear = |layer: &nn::Linear, x| functional::linear(x, layer.weight.val(), None);
        let hidden = functional::relu(linear(&self.rise, x));
        let hidden = functional::tanh(linear(&self.rise, hidden));
        linear(&self.fall, hidden)
    }
}

#[derive(Module, Debug)]
struct Stack {
    blocks: Vec<Block>,
    head: nn::Linear,
}

/// What has no weight is in the innermost module around: that of the weights used before and after.
#[test]
fn operations_without_a_weight_are_in_the_module_around() {
    let _alone = alone();
    for device in cpu_devices() {
        let layer = || nn::LinearConfig::new(8, 8).init(&device);
        let block = || Block { rise: layer(), fall: layer() };
        let model = Stack { blocks: vec![block(), block()], head: layer() };
        let x = Tensor::<2>::ones([4, 8], &device).require_grad();
        let (_y, ledger) = ledger(&model, x, |model, x| {
            let x = model.blocks[0].forward(functional::sigmoid(x));
            let x = model.blocks[1].forward(functional::relu6(x));
            let x = functional::linear(functional::softmax(x, 1), model.head.weight.val(), None);
            functional::hardtanh(x, -1.0, 1.0)
        });
        let mut modules: Vec<_> =
            ledger.rows.iter().map(|row| (row.operation, row.module.as_str())).collect();
        modules.retain(|(operation, _)| *operation != "linear");
        let expected = [
            ("sigmoid", "sigmoid"), // nothing is known before
            ("relu", "blocks.0"),   // between two uses of one layer
            ("tanh", "blocks.0"),
            ("hardtanh", "blocks"), // a ReLU6 is one
            ("relu", "blocks.1"),
            ("tanh", "blocks.1"),
            ("softmax", "softmax"), // in the model itself
            ("hardtanh", "hardtanh"),
        ];
        assert_eq!(modules, expected, "{ledger}");
    }
}

#[derive(Module, Debug)]
struct Norms {
    layer: burn_memsave::nn::LayerNorm,
    batch: nn::BatchNorm,
}

/// Where arguments do not fit, Burn's own operation is recorded, and the ledger says which and why.
#[test]
fn the_ledger_says_where_burns_own_operation_runs() {
    let _alone = alone();
    for device in cpu_devices() {
        let model = Norms {
            layer: burn_memsave::nn::LayerNormConfig::new(8).init(&device),
            batch: nn::BatchNormConfig::new(8).init(&device),
        };
        let fallback = |x: Tensor<2>, forward: &dyn Fn(&Norms, Tensor<2>) -> Tensor<2>| {
            let (_y, ledger) = ledger(&model, x, forward);
            let row = ledger.fallbacks().next().cloned()?;
            let table = ledger.to_string();
            assert!(table.contains("unknown") && table.contains("not counted"), "{table}");
            assert!(!row.counts() && ledger.fallbacks().count() == 1, "{table}");
            assert!(table.contains(row.reason), "{table}");
            Some((row.module, row.operation, row.reason))
        };
        let fallback = |x, forward| {
            let row = fallback(x, forward);
            row.map(|(module, operation, reason)| format!("{module}: {operation}: {reason}"))
        };
        let x = || Tensor::<2>::ones([4, 8], &device);
        let vector = || Tensor::<1>::ones([8], &device);

        let batch_norm = |model: &Norms, x: Tensor<2>| {
            let mean = x.clone().mean_dim(0).squeeze_dim::<1>(0);
            let (gamma, beta) = (model.batch.gamma.val(), model.batch.beta.val());
            functional::batch_norm(x, gamma, beta, mean, vector(), 1e-5)
        };
        let row = fallback(x().require_grad(), &batch_norm);
        assert_eq!(row.as_deref(), Some("batch: batch_norm: the statistics are tracked"));
        assert_eq!(fallback(x(), &batch_norm), None, "{device:?}: the statistics are not tracked");

        let layer_norm =
            |model: &Norms, x: Tensor<2>| functional::layer_norm(x, model.layer.gamma.val(), None, 1e-5);
        let row = fallback(quantized(x()), &layer_norm);
        assert_eq!(row.as_deref(), Some("layer: layer_norm: a quantized input"));

        let gate = |_: &Norms, x: Tensor<2>| functional::silu_gate(x.clone(), x.slice(0..1));
        let row = fallback(x().require_grad(), &gate);
        assert_eq!(row.as_deref(), Some("silu_gate: silu_gate: the shapes do not fit"));
        assert_eq!(fallback(x(), &gate), None, "{device:?}: nothing is recorded");
    }
}

/// Burn's function takes no mixture of dtypes, but its module does.
#[cfg(feature = "flex")]
#[test]
fn the_ledger_says_where_dtypes_differ() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let layer = || burn_memsave::nn::LayerNormConfig::new(8).init(&device);
    let x = Tensor::<2>::ones([4, 8], &device).cast(burn::tensor::DType::F16).require_grad();
    let (_y, ledger) = ledger(&vec![layer(), layer()], x, |layers, x| layers[1].forward(x));
    let rows: Vec<_> = ledger.rows.iter().map(|row| (row.module.as_str(), row.bytes, row.reason)).collect();
    assert_eq!(rows, [("1", None, "the dtypes differ")], "{ledger}");
}

fn quantized(x: Tensor<2>) -> Tensor<2> {
    let scheme = x.device().settings().quantization.scheme.with_value(QuantValue::Q8S);
    x.quantize_dynamic(&scheme)
}
