//! What the ledger says.
use crate::{RECORDS, alone, cpu_devices, settled};
use burn::module::Module;
use burn::nn;
use burn::tensor::{Device, Int, Tensor, quantization::QuantValue};
use burn_memsave::functional;
use burn_memsave::measure::{ledger, measure_layer, measure_step};
use burn_memsave::nn as ours;
use std::panic::{AssertUnwindSafe, catch_unwind};

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
        let csv = ledger.to_csv();
        assert_eq!(csv.lines().count(), 6);
        assert!(csv.contains("right.0,linear,x,25600,weight is tracked,true,false"), "{csv}");
        let json: serde_json::Value = serde_json::from_str(&ledger.to_json()).expect("valid JSON");
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

/// The rows for operations of Burn of a module that is tracked, or not; some of them refuse what does not fit.
fn fallbacks<M: Module>(tracked: bool, model: M, forward: impl Fn(&M)) -> Vec<String> {
    let model = if tracked { model } else { model.no_grad() };
    let run = |model: &M, ()| drop(catch_unwind(AssertUnwindSafe(|| forward(model))));
    let ((), ledger) = ledger(&model, (), run);
    ledger.fallbacks().map(|row| format!("{}: {}: {}", row.module, row.operation, row.reason)).collect()
}

/// Modules that leave their input to the stock module say so where something is tracked, and only there.
#[test]
fn the_ledger_says_where_a_stock_module_runs() {
    use ours::activation::ActivationConfig::Relu;
    use ours::loss::{
        BinaryCrossEntropyLossConfig, CrossEntropyLossConfig, FusedLinearCrossEntropyConfig, HuberLossConfig,
        KLDivLossConfig, MseLoss,
    };
    let _alone = alone();
    for device in cpu_devices() {
        let given = |x: Tensor<2>, tracked: bool| if tracked { x.require_grad() } else { x };
        let ones = |shape: [usize; 2], tracked| given(Tensor::ones(shape, &device), tracked);
        let weights = |tracked| Some(given(Tensor::ones([1, 4], &device), tracked).squeeze_dim::<1>(0));
        let classes = || Tensor::<2, Int>::ones([3, 4], &device);
        let sequence = || Tensor::<3>::ones([3, 2, 4], &device);
        let states = |count| Tensor::<3>::ones([count, 3, 5], &device);

        type Case<'a> = (&'static str, &'a dyn Fn(bool) -> Vec<String>);
        let cases: &[Case] = &[
            ("mse_loss: mse_loss: there are no elements", &|tracked| {
                let x = ones([0, 4], tracked);
                fallbacks(tracked, MseLoss::new(), |loss| {
                    drop(loss.forward_no_reduction(x.clone(), x.clone()))
                })
            }),
            ("huber_loss: huber_loss: there are no elements", &|tracked| {
                let x = ones([0, 4], tracked);
                let loss = HuberLossConfig::new(1.0).init();
                fallbacks(tracked, loss, |loss| drop(loss.forward_residuals(x.clone())))
            }),
            ("kl_div_loss: kl_div_loss: the shapes do not fit", &|tracked| {
                let (x, targets) = (ones([3, 4], tracked), ones([1, 4], false));
                let loss = KLDivLossConfig::new().init();
                fallbacks(tracked, loss, |loss| drop(loss.forward_no_reduction(x.clone(), targets.clone())))
            }),
            (
                "binary_cross_entropy: binary_cross_entropy: the weights of the classes are tracked",
                &|tracked| {
                    let mut loss = BinaryCrossEntropyLossConfig::new().with_logits(true).init(&device);
                    loss.weights = weights(tracked);
                    fallbacks(tracked, loss, |loss| drop(loss.forward(ones([3, 4], false), classes())))
                },
            ),
            ("cross_entropy: cross_entropy: the weights of the classes are tracked", &|tracked| {
                let mut loss = CrossEntropyLossConfig::new().init(&device);
                loss.weights = weights(tracked);
                let targets = || Tensor::<1, Int>::ones([3], &device);
                fallbacks(tracked, loss, |loss| drop(loss.forward(ones([3, 4], tracked), targets())))
            }),
            ("linear_cross_entropy: linear_cross_entropy: a quantized input", &|tracked| {
                let mut head = ours::LinearConfig::new(4, 5).with_bias(false).init(&device);
                head.weight = head.weight.no_grad().map(quantized);
                let loss = FusedLinearCrossEntropyConfig::new().init(&device);
                let targets = || Tensor::<1, Int>::ones([3], &device);
                fallbacks(tracked, loss, |loss| drop(loss.forward(&head, ones([3, 4], tracked), targets())))
            }),
            ("group_norm: group_norm: a parameter is missing", &|tracked| {
                let mut norm = ours::GroupNormConfig::new(2, 4).init(&device);
                norm.gamma = None;
                fallbacks(tracked, norm, |norm| drop(norm.forward(ones([3, 4], tracked))))
            }),
            ("instance_norm: instance_norm: the shapes do not fit", &|tracked| {
                let norm = ours::InstanceNormConfig::new(2).with_affine(false).init(&device);
                fallbacks(tracked, norm, |norm| drop(norm.forward(ones([1, 2], tracked))))
            }),
            ("gate.input_transform: rnn: the activations are not sigmoid and tanh", &|tracked| {
                let rnn = ours::RnnConfig::new(4, 5, true).with_hidden_activation(Relu).init(&device);
                fallbacks(tracked, rnn, |rnn| drop(rnn.forward(sequence(), None)))
            }),
            ("reset_gate.input_transform: gru: the bounds are not in order", &|tracked| {
                let gru = ours::GruConfig::new(4, 5, true).with_clip(Some(f64::NAN)).init(&device);
                fallbacks(tracked, gru, |gru| drop(gru.forward(sequence(), None)))
            }),
            ("input_gate.input_transform: lstm: a parameter is missing", &|tracked| {
                let mut lstm = ours::LstmConfig::new(4, 5, true).init(&device);
                lstm.forget_gate = None;
                fallbacks(tracked, lstm, |lstm| drop(lstm.forward(sequence(), None)))
            }),
            ("input_gate.input_transform: lstm: the steps come one by one", &|tracked| {
                let lstm = ours::LstmConfig::new(4, 5, true).init(&device);
                fallbacks(tracked, lstm, |lstm| {
                    let steps = sequence().iter_dim(1).enumerate();
                    drop(lstm.forward_iter(steps, None, 3, 2, &device));
                })
            }),
            ("forward.gate.input_transform: rnn: a direction is not batch first", &|tracked| {
                let mut rnn = ours::BiRnnConfig::new(4, 5, true).init(&device);
                rnn.forward.batch_first = false;
                fallbacks(tracked, rnn, |rnn| drop(rnn.forward(sequence(), None)))
            }),
            ("forward.reset_gate.input_transform: gru: the shapes do not fit", &|tracked| {
                let gru = ours::BiGruConfig::new(4, 5, true).init(&device);
                fallbacks(tracked, gru, |gru| drop(gru.forward(sequence(), Some(states(1)))))
            }),
            (
                "forward.input_gate.input_transform: lstm: the activations are not sigmoid and tanh",
                &|tracked| {
                    let lstm = ours::BiLstmConfig::new(4, 5, true).with_cell_activation(Relu).init(&device);
                    fallbacks(tracked, lstm, |lstm| drop(lstm.forward(sequence(), None)))
                },
            ),
        ];
        for (row, case) in cases {
            assert_eq!(case(true), [*row], "{device:?}");
            assert_eq!(case(false), [""; 0], "{device:?}: {row}: nothing is tracked");
        }
    }
}

/// A state that is tracked alone, before frozen layers: Burn's operations are recorded.
#[test]
fn a_tracked_state_is_recorded() {
    let _alone = alone();
    for device in cpu_devices() {
        let lstm = ours::LstmConfig::new(4, 5, true).with_clip(Some(f64::NAN)).init(&device);
        let rows = |tracked: bool| {
            fallbacks(false, lstm.clone(), |lstm| {
                let state = || Tensor::<2>::ones([3, 5], &device);
                let cell = if tracked { state().require_grad() } else { state() };
                drop(lstm.forward(Tensor::ones([3, 2, 4], &device), Some(nn::LstmState::new(cell, state()))))
            })
        };
        let row = "input_gate.input_transform: lstm: the bounds are not in order";
        assert_eq!(rows(true), [row], "{device:?}");
        assert_eq!(rows(false), [""; 0], "{device:?}");
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
