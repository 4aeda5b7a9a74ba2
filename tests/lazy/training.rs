//! Training through lazy weights.
use crate::{Saved, all, devices, load};
use burn::module::{Lora, Module, Param, ParamId};
use burn::store::ModuleRecord;
use burn::tensor::{DType, Device, FloatDType, Gradients, Tensor, TensorData, Tolerance};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::lazy::LazyOptions;
use burn_memsave::lora::ConvLora;
use burn_memsave::measure::ledger;
use burn_memsave::nn;

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
