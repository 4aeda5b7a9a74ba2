//! Tests training through lazy weights.
use crate::{Saved, all, devices, load};
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamId};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Gradients, Tensor, TensorData, Tolerance};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::lazy::LazyOptions;
use burn_memsave::lora::{self, ConvLora, Dora, DoraAdapter};
use burn_memsave::measure::ledger;
use burn_memsave::nn;
use std::collections::BTreeMap;

#[derive(Module, Debug)]
struct Net {
    embedding: nn::Embedding,
    conv: nn::conv::Conv1d,
    first: nn::Linear,
    lstm: nn::Lstm,
    head: nn::Linear,
}

impl Net {
    fn new(device: &Device) -> Self {
        Self {
            embedding: nn::EmbeddingConfig::new(10, 8).init(device),
            conv: nn::conv::Conv1dConfig::new(8, 8, 3)
                .with_padding(burn::nn::PaddingConfig1d::Same)
                .init(device),
            first: nn::LinearConfig::new(8, 6).init(device),
            lstm: nn::LstmConfig::new(6, 4, true).init(device),
            head: nn::LinearConfig::new(4, 3).init(device),
        }
    }

    fn forward(&self, shift: Tensor<3>) -> Tensor<3> {
        let x = self.embedding.forward(Tensor::from_ints([[1, 2, 3, 4], [9, 8, 7, 1]], &shift.device()));
        let x = self.conv.forward((x + shift).swap_dims(1, 2)).swap_dims(1, 2);
        self.head.forward(self.lstm.forward(self.first.forward(x), None).0)
    }
}

fn gradient(net: &Net, device: &Device) -> (TensorData, TensorData, Gradients) {
    gradient_of(net, device, Net::forward)
}

/// All of it computed again in the backward pass.
fn gradient_of_segment(net: &Net, device: &Device) -> (TensorData, TensorData, Gradients) {
    gradient_of(net, device, |net, shift| checkpoint(net, shift, Net::forward))
}

fn gradient_of(
    net: &Net,
    device: &Device,
    forward: impl Fn(&Net, Tensor<3>) -> Tensor<3>,
) -> (TensorData, TensorData, Gradients) {
    let shift = Tensor::<3>::full([2, 4, 8], 0.1, device).require_grad();
    let y = forward(net, shift.clone());
    let output = y.clone().into_data();
    let gradients = y.powf_scalar(2.0).sum().backward();
    (output, shift.grad(&gradients).unwrap().into_data(), gradients)
}

#[test]
fn gradients_flow_through_and_weights_are_read_again() {
    for device in devices() {
        for device in [device.clone().autodiff(), device.autodiff().gradient_checkpointing()] {
            let eager = Net::new(&device).freeze();
            let saved = Saved::new(&eager);
            let (y, dx, _) = gradient(&eager, &device);
            let (lazy, report) = load(Net::new(&device), &saved.safetensors(), &all().with_budget(0));
            // Biases are resident, and frozen by hand.
            let lazy = lazy.freeze();
            for gradient in [gradient, gradient, gradient_of_segment] {
                let (lazy_y, lazy_dx, _) = gradient(&lazy, &device);
                assert_eq!((lazy_y, lazy_dx), (y.clone(), dx.clone()), "{device:?}");
            }
            assert_eq!(report.cache.cached_bytes(), 0);

            let shift = Tensor::<3>::zeros([2, 4, 8], &device).require_grad();
            let (y, kept) = ledger(&lazy, shift, |lazy, shift| lazy.forward(shift));
            assert_eq!(report.cache.cached_bytes(), 0, "nothing holds a weight between the passes");
            assert!(kept.rows.iter().any(|row| row.reason == "read again" && row.bytes == Some(0)), "{kept}");
            drop(y);
        }
    }
}

#[test]
fn stock_layers_are_told_of() {
    let device = Device::flex().autodiff();
    let config = burn::nn::LinearConfig::new(8, 8);
    let saved = Saved::new(&config.init(&device));
    for budget in [0, 1 << 20] {
        stock_layers_hold_their_weights(&device, &config, &saved, &all().with_budget(budget));
    }
}

fn stock_layers_hold_their_weights(
    device: &Device,
    config: &burn::nn::LinearConfig,
    saved: &Saved,
    options: &LazyOptions,
) {
    let (stock, report) = load(config.init(device), &saved.safetensors(), options);
    let x = Tensor::<2>::ones([2, 8], device).require_grad();
    let y = stock.forward(x.clone());
    assert_eq!(report.cache.held(), ["weight"]);
    assert!(report.cache.to_string().contains("held by somebody"));
    y.sum().backward();

    let (ours, report) = load(nn::LinearConfig::new(8, 8).init(device), &saved.safetensors(), options);
    let _y = ours.forward(x);
    assert!(report.cache.held().is_empty());
}

/// The factors of the adapters of one model in another.
fn with_adapters(net: Net, of: &Net) -> Net {
    let record = of.clone().into_record_group(burn::module::ParamGroup::from_regex("lora").unwrap());
    let bytes = record.into_bytes().unwrap();
    net.load_record(ModuleRecord::from_bytes(bytes).unwrap().allow_partial(true))
}

#[test]
fn adapters_train_on_lazy_weights() {
    for device in devices().into_iter().map(Device::autodiff) {
        let eager = Net::new(&device);
        let saved = Saved::new(&eager);
        let eager = eager.apply_lora(Lora::new(2, 4.0));
        let (lazy, _) = load(Net::new(&device), &saved.safetensors(), &all().with_budget(0));
        let lazy = lazy.apply_lora(Lora::new(2, 4.0));
        assert_eq!(lazy.num_params(), eager.num_params());
        let b = |net: &Net| -> Param<Tensor<2>> {
            let lazy = net.head.weight.reparameterization::<burn_memsave::frozen::LazyWeight>();
            let adapter = lazy.map_or_else(|| net.head.weight.adapter(), |lazy| lazy.adapter());
            adapter.expect("an adapter").b.clone()
        };
        assert_eq!(b(&lazy).dims(), [2, 3]);

        // The same adapters on both: their records have the same paths.
        let lazy = with_adapters(lazy, &eager);
        let (y, dx, of_eager) = gradient(&eager, &device);
        let db = b(&eager).grad(&of_eager).expect("b is trained").into_data();
        for gradient in [gradient, gradient_of_segment] {
            let (lazy_y, lazy_dx, of_lazy) = gradient(&lazy, &device);
            y.assert_approx_eq::<f32>(&lazy_y, Tolerance::default());
            dx.assert_approx_eq::<f32>(&lazy_dx, Tolerance::default());
            let lazy_db = b(&lazy).grad(&of_lazy).expect("b is trained").into_data();
            db.assert_approx_eq::<f32>(&lazy_db, Tolerance::default());
        }

        let merged = lazy.valid().materialize();
        let x = Tensor::<3>::full([2, 4, 8], 0.1, &device.clone().inner());
        merged.forward(x).into_data().assert_approx_eq::<f32>(&y, Tolerance::default());
    }
}

/// Values of the trainable parameters that are other ones than the first.
struct Trained;

impl burn::module::ModuleMapper for Trained {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match param.is_require_grad() {
            true => param.map(|value| (value.inner() * 1.5 + 0.25).autodiff().require_grad()),
            false => param,
        }
    }
}

/// Every gradient of a model, by the paths of its parameters.
fn gradients_of(net: &Net, gradients: &Gradients) -> BTreeMap<String, TensorData> {
    struct Collect<'a> {
        path: Vec<String>,
        gradients: &'a Gradients,
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
            if let Some(gradient) = param.base().grad(self.gradients) {
                self.found.insert(self.path.join("."), gradient.into_data());
            }
        }
    }
    let mut collect = Collect { path: vec![], gradients, found: BTreeMap::new() };
    net.visit(&mut collect);
    collect.found
}

/// Also on an embedding and on the gates of a recurrent layer, which make the effective weight.
#[test]
fn magnitudes_train_on_lazy_weights() {
    for device in devices().into_iter().map(Device::autodiff) {
        let base = Net::new(&device);
        let saved = Saved::new(&base);
        let dora = || Dora::new(Lora::new(2, 4.0));
        let (lazy, report) = load(Net::new(&device), &saved.safetensors(), &all().with_budget(0));
        let lazy = lazy.apply_reparameterization(dora());
        assert!(report.cache.held().is_empty() && report.cache.cached_bytes() == 0, "{report}");
        // The magnitudes are the norms of what was read: those of the weight in memory.
        let first = base.clone().apply_reparameterization(dora());
        let magnitude = |net: &Net| {
            let lazy = net.head.weight.reparameterization::<burn_memsave::frozen::LazyWeight>();
            let adapter =
                lazy.map_or_else(|| net.head.weight.reparameterization(), |lazy| lazy.dora_adapter());
            adapter.map(|adapter: &DoraAdapter| adapter.magnitude.val().into_data())
        };
        assert!(magnitude(&lazy).is_some());
        assert_eq!(magnitude(&lazy), magnitude(&first));

        // The same adapters on both: their records have the same paths.
        let eager = first.map(&mut Trained);
        assert_eq!(lazy.num_params(), eager.num_params());
        let record = eager.clone().into_record_group(burn::module::ParamGroup::from_regex("dora").unwrap());
        let bytes = record.into_bytes().unwrap();
        let lazy = lazy.load_record(ModuleRecord::from_bytes(bytes).unwrap().allow_partial(true));
        let (y, dx, of_eager) = gradient(&eager, &device);
        assert_ne!(y, gradient(&base, &device).0);
        let expected = gradients_of(&eager, &of_eager);
        // Three of each of eleven matrices: the table, two dense layers, and the eight of four gates.
        assert_eq!(expected.len(), 3 * 11, "{:?}", expected.keys());
        for gradient in [gradient, gradient_of_segment] {
            let (lazy_y, lazy_dx, of_lazy) = gradient(&lazy, &device);
            assert_eq!((&lazy_y, &lazy_dx), (&y, &dx), "{device:?}");
            assert_eq!(gradients_of(&lazy, &of_lazy), expected, "{device:?}");
        }
        assert!(report.cache.held().is_empty(), "{report}");

        let merged = lazy.valid().materialize();
        let x = Tensor::<3>::full([2, 4, 8], 0.1, &device.clone().inner());
        merged.forward(x).into_data().assert_approx_eq::<f32>(&y, Tolerance::default());
    }
}

/// What a layer with a magnitude on a lazy weight keeps: what it keeps on a weight in memory, and not the weight.
#[test]
fn a_lazy_weight_with_a_magnitude_is_read_again() {
    let device = Device::flex().autodiff();
    let new = || nn::LinearConfig::new(16, 12).with_bias(false).init(&device);
    let base = new();
    let saved = Saved::new(&base);
    let dora = || Dora::new(Lora::new(2, 4.0));
    let eager = base.apply_reparameterization(dora());
    // Of fewer rows than columns, of which the product is kept, and of more, of which it is computed again from x.
    for (rows, product) in [(5, 12), (40, 0)] {
        let (lazy, report) = load(new(), &saved.safetensors(), &all().with_budget(0));
        let lazy = lazy.apply_reparameterization(dora());
        let x = || Tensor::<2>::ones([rows, 16], &device).require_grad();
        let (y, kept) = ledger(&lazy, x(), |lazy, x| lazy.forward(x));
        assert_eq!(
            kept.total(),
            4 * (rows as u64 * (16 + product) + 12),
            "x, the product and the factor: {kept}"
        );
        assert!(kept.rows.iter().any(|row| row.reason == "read again" && row.bytes == Some(0)), "{kept}");
        assert_eq!(kept.total(), ledger(&eager, x(), |eager, x| eager.forward(x)).1.total());
        let reads = report.cache.statistics().reads;
        y.sum().backward();
        assert_eq!(report.cache.statistics().reads, reads + 1, "one read in the backward pass");
        assert!(report.cache.held().is_empty(), "{report}");
    }
}

/// The base model, of lazy weights, too, with adapters of both kinds; and the adapters are still there.
#[test]
fn a_lazy_model_without_its_adapters_is_the_one_before() {
    for device in devices().into_iter().map(Device::autodiff) {
        let saved = Saved::new(&Net::new(&device));
        let lazy = || load(Net::new(&device), &saved.safetensors(), &all().with_budget(0)).0;
        let before = gradient(&lazy(), &device).0;
        for adapted in [
            lazy().apply_lora(Lora::new(2, 4.0)),
            lazy().apply_reparameterization(Dora::new(Lora::new(2, 4.0))),
        ] {
            let adapted = adapted.map(&mut Trained);
            let after = gradient(&adapted, &device).0;
            assert_ne!(after, before);
            let x = Tensor::<3>::full([2, 4, 8], 0.1, &device);
            for (reference, x) in [
                (lora::without_adapters(&adapted), x.clone()),
                (lora::without_adapters(&adapted.valid()), x.inner()),
            ] {
                let y = reference.forward(x);
                assert!(!y.is_tracked());
                y.into_data().assert_eq(&before, true);
            }
            let (again, _, gradients) = gradient(&adapted, &device);
            assert_eq!(again, after);
            assert!(gradients_of(&adapted, &gradients).keys().any(|path| path.contains("head.weight")));
        }
    }
}

/// A lazy weight in another dtype than its adapter is read again and cast again.
#[test]
fn a_lazy_convolution_keeps_no_converted_weight() {
    let device = Device::flex().autodiff();
    let config = nn::conv::Conv1dConfig::new(8, 8, 3).with_bias(false);
    let new = || crate::cast(config.init(&device), DType::F16);
    let saved = Saved::new(&new());
    let adapter = || ConvLora::new(Lora::new(2, 4.0).set_dtype(FloatDType::F32));
    let (lazy, report) = load(new(), &saved.safetensors(), &all().with_budget(0));
    let lazy = lazy.apply_reparameterization(adapter());
    let x = Tensor::<3>::ones([2, 8, 5], &device).require_grad();
    let (y, kept) = ledger(&lazy, x, |lazy, x| lazy.forward(x));
    let weight = kept.rows.iter().find(|row| row.operation == "conv1d" && row.reason == "read again");
    assert!(weight.is_some_and(|row| row.bytes == Some(0)), "{kept}");
    assert!(report.cache.held().is_empty(), "{report}");
    y.sum().backward();
}

#[test]
fn records_hold_the_weights() {
    for device in devices() {
        let eager = Net::new(&device);
        let saved = Saved::new(&eager);
        let (lazy, _) = load(Net::new(&device), &saved.safetensors(), &all());
        let record = lazy.clone().into_record().into_bytes().unwrap();
        let restored = Net::new(&device).load_record(ModuleRecord::from_bytes(record).unwrap());
        let x = Tensor::<3>::ones([2, 4, 8], &device);
        let expected = eager.forward(x.clone()).into_data();
        assert_eq!(restored.forward(x.clone()).into_data(), expected);

        // A record replaces lazy weights.
        let other = Net::new(&device);
        let replaced = lazy.clone().load_record(other.clone().into_record());
        assert_eq!(replaced.forward(x.clone()).into_data(), other.forward(x.clone()).into_data());
        assert_eq!(lazy.forward(x.clone()).into_data(), expected, "the original is as it was");

        // Also one of another dtype.
        let half = crate::cast(other, DType::F64);
        let replaced = lazy.load_record(half.clone().into_record());
        let x = x.cast(burn::tensor::FloatDType::F64);
        assert_eq!(replaced.forward(x.clone()).into_data(), half.forward(x).into_data());
    }
}

#[test]
fn a_lazy_weight_is_frozen() {
    let device = Device::flex().autodiff();
    let config = nn::LinearConfig::new(8, 8);
    let saved = Saved::new(&config.init(&device));
    let (lazy, _) = load(config.init(&device), &saved.safetensors(), &all());
    let id: ParamId = lazy.weight.id;
    let x = Tensor::<2>::ones([1, 8], &device);
    // A clone of a parameter that nobody used yet is the same parameter.
    let another = || load(config.init(&device), &saved.safetensors(), &all()).0;
    for unfrozen in [another().unfreeze(), another().valid().unfreeze().train(), {
        let used = another();
        used.forward(x.clone());
        used.unfreeze()
    }] {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| unfrozen.forward(x.clone())));
        assert!(result.unwrap_err().downcast::<String>().unwrap().contains("is frozen"));
    }
    assert!(!lazy.weight.base().is_require_grad());
    let trained = lazy.materialize().unfreeze();
    assert_eq!(trained.weight.id, id);
    let gradients = trained.forward(x).sum().backward();
    assert!(trained.weight.grad(&gradients).is_some());
}

#[test]
fn validation_and_back() {
    let device = Device::flex().autodiff();
    let eager = Net::new(&device).freeze();
    let saved = Saved::new(&eager);
    let (lazy, report) = load(Net::new(&device), &saved.safetensors(), &LazyOptions::new().with_min_bytes(0));
    let lazy = lazy.freeze().valid().train();
    let (y, dx, _) = gradient(&lazy, &device);
    let expected = gradient(&eager, &device);
    assert_eq!((y, dx), (expected.0, expected.1));
    assert!(report.cache.held().is_empty());
}
