//! What a copy in half precision has in common with its module, and what is refused.
use super::{BOTH, Fill, Language, WORDS, Widen, compare, indices, rounding, values};
use crate::meter::alone;
use burn::module::{Lora, Module, ModuleVisitor, Param, ParamGroup, QLora, Quantizer};
use burn::optim::GradientsParams;
use burn::tensor::{
    DType, Device, FloatDType, Int, Tensor,
    quantization::{Calibration, QuantValue},
};
use burn_memsave::checkpoint::checkpoint;
use burn_memsave::lazy::{LazyLoad, LazyOptions, PrepareOptions, PrepareSource, WeightFile, prepare};
use burn_memsave::lora::Dora;
use burn_memsave::mixed::{MixedError, Precision};
use burn_memsave::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn_memsave::plan::micro_batched;

/// The types of all parameters.
fn types(module: &impl Module) -> Vec<DType> {
    struct Types(Vec<DType>);
    impl ModuleVisitor for Types {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            self.0.push(param.base().dtype());
        }
    }
    let mut types = Types(vec![]);
    module.visit(&mut types);
    types.0
}

#[test]
fn frozen_parameters_are_cast_once() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = Language::new(&device);
    let model = Language { attention: model.attention.freeze(), ..model };
    let wide = model.clone().map(&mut Widen);
    let exact = GradientsParams::from_grads(wide.loss(indices([4, 12], WORDS, &device)).backward(), &wide);
    for precision in BOTH.map(|precision| precision()) {
        let half: DType = precision.dtype().into();
        let model = precision.narrow_frozen(model.clone()).unwrap();
        assert!(types(&model.attention).iter().all(|&dtype| dtype == half));
        assert!(types(&model.swiglu).iter().all(|&dtype| dtype == DType::F32));
        let loss = precision.half_copy(&model).unwrap().loss(indices([4, 12], WORDS, &device));
        let found = GradientsParams::from_grads(loss.backward(), &model);
        assert_eq!(found.len(), exact.len());
        compare(&model.swiglu, &found, &exact, 4.0 * rounding(&precision));
        compare(&model.norms, &found, &exact, 4.0 * rounding(&precision));
        compare(&model.tokens, &found, &exact, 4.0 * rounding(&precision));
    }
}

#[test]
fn adapters_have_masters() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    for quantizes in [false, true] {
        let model = LinearConfig::new(32, 16).init(&device);
        let lora = Lora::new(4, 8.0).set_dtype(FloatDType::F32);
        let model = match quantizes {
            false => model.apply_lora(lora),
            true => {
                let scheme = device.settings().quantization.scheme.with_value(QuantValue::Q8S);
                let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
                quantizer.set_param_group(ParamGroup::from_regex("weight$").unwrap());
                model.apply_qlora(QLora::new(lora, quantizer))
            }
        };
        let adapter = model.weight.adapter().unwrap();
        let b = adapter.b.clone().map(|_| values([4, 16], 3, &device).require_grad());
        let mut model = model.clone();
        struct WithB(Param<Tensor<2>>);
        impl burn::module::ModuleMapper for WithB {
            fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
                let is_b = param.id == self.0.id;
                param.map(|value| match is_b {
                    true => Tensor::from_data(self.0.val().into_data(), &value.device()).require_grad(),
                    false => value,
                })
            }
        }
        model = model.map(&mut WithB(b));
        let x = values([7, 32], 1, &device);
        let gradients = |model: &Linear, of: &Linear, dtype: FloatDType| {
            let loss = model.forward(x.clone().cast(dtype)).powf_scalar(2.0).sum();
            GradientsParams::from_grads(loss.backward(), of)
        };
        let exact = gradients(&model, &model, FloatDType::F32);
        for precision in BOTH.map(|precision| precision()) {
            let model = precision.narrow_frozen(model.clone()).unwrap();
            let base = model.weight.base().dtype();
            assert_eq!(matches!(base, DType::QFloat(_)), quantizes);
            assert!(quantizes || base == precision.dtype().into());
            let half = precision.half_copy(&model).unwrap();
            assert_eq!(half.weight.adapter().unwrap().a.val().dtype(), precision.dtype().into());
            let found = gradients(&half, &model, precision.dtype());
            let (_, count) = compare(&model, &found, &exact, 4.0 * rounding(&precision));
            assert_eq!(count, 2);
        }
    }
}

#[test]
fn magnitudes_have_masters() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(32, 16).init(&device).map(&mut Fill::default());
    let dora = Dora::new(Lora::new(4, 8.0).set_dtype(FloatDType::F32));
    let model = model.apply_reparameterization(dora).map(&mut Fill::default());
    let x = values([7, 32], 1, &device);
    let gradients = |of: &Linear, dtype: FloatDType| {
        let loss = of.forward(x.clone().cast(dtype)).powf_scalar(2.0).sum();
        GradientsParams::from_grads(loss.backward(), &model)
    };
    let exact = gradients(&model, FloatDType::F32);
    for precision in BOTH.map(|precision| precision()) {
        let found = gradients(&precision.half_copy(&model).unwrap(), precision.dtype());
        assert_eq!(compare(&model, &found, &exact, 4.0 * rounding(&precision)).1, 3);
    }
}

#[derive(Module, Debug)]
struct Tied {
    tokens: Embedding,
    head: Linear,
}

impl Tied {
    /// The same parameter in two places.
    fn new(device: &Device) -> Self {
        let (tokens, head) = (EmbeddingConfig::new(9, 9), LinearConfig::new(9, 9).with_bias(false));
        let (tokens, mut head) = (tokens.init(device).map(&mut Fill::default()), head.init(device));
        head.weight = tokens.weight.clone();
        Self { tokens, head }
    }

    fn loss(&self, text: Tensor<2, Int>) -> Tensor<1> {
        self.head.forward(self.tokens.forward(text)).powf_scalar(2.0).mean()
    }
}

#[test]
fn tied_parameters_have_one_gradient() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let (model, text) = (Tied::new(&device), || indices([3, 5], 9, &device));
    let exact = GradientsParams::from_grads(model.loss(text()).backward(), &model);
    for precision in BOTH.map(|precision| precision()) {
        let half = precision.half_copy(&model).unwrap();
        let found = GradientsParams::from_grads(half.loss(text()).backward(), &model);
        let (_, count) = compare(&model, &found, &exact, 4.0 * rounding(&precision));
        assert_eq!((count, found.len()), (2, 1));
    }
}

/// The copy is inside of what is computed in parts, and what is computed again is inside of the copy.
#[test]
fn segments_and_parts_of_a_batch_are_in_half_precision() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(8, 6).init(&device);
    let x = values([10, 8], 1, &device);
    let loss = |model: &Linear, x: Tensor<2>| model.forward(x).powf_scalar(2.0).mean();
    for precision in BOTH.map(|precision| precision()) {
        let x = x.clone().cast(precision.dtype());
        let whole = loss(&precision.half_copy(&model).unwrap(), x.clone());
        let whole = GradientsParams::from_grads(whole.backward(), &model);
        let again = checkpoint(&precision.half_copy(&model).unwrap(), x.clone(), loss);
        let again = GradientsParams::from_grads(again.backward(), &model);
        assert_eq!(compare(&model, &again, &whole, 1e-6).1, 2);
        let parts = x.split(4, 0).into_iter().map(|part| (part.clone(), part.dims()[0]));
        let (_, parts) =
            micro_batched(&model, parts, |model, x| loss(&precision.half_copy(model).unwrap(), x)).unwrap();
        assert_eq!(compare(&model, &parts, &whole, 2.0 * rounding(&precision)).1, 2);
    }
}

#[test]
fn lazy_weights_are_of_the_type_of_their_file() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let model = || LinearConfig::new(8, 4).init(&device);
    for (name, dtype) in [("wide", DType::F32), ("half", DType::BF16)] {
        let options = PrepareOptions::new().with_dtype(dtype);
        prepare(PrepareSource::of_module(&model()), path(&format!("{name}.bpk")), &options).unwrap();
    }
    let lazy = |name: &str| {
        let file = WeightFile::open(path(&format!("{name}.bpk"))).unwrap();
        model()
            .lazy_load(&file, &LazyOptions::new().with_min_bytes(0))
            .unwrap()
            .0
            .apply_lora(Lora::new(2, 2.0).set_dtype(FloatDType::F32))
    };
    let precision = Precision::bf16();
    let error = precision.half_copy(&lazy("wide")).expect_err("of f32").to_string();
    assert_eq!(error, "weight is lazy, and of F32 in its file: write one of BF16 with `lazy::prepare`");
    let model = precision.narrow_frozen(lazy("half")).unwrap();
    let half = precision.half_copy(&model).unwrap();
    let y = half.forward(values([3, 8], 1, &device).cast(precision.dtype()));
    assert_eq!(y.dtype(), DType::BF16);
    let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
    assert_eq!(gradients.len(), 2);
}

#[test]
fn what_cannot_be_is_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let precision = Precision::bf16();
    let half = precision.half_copy(&LinearConfig::new(2, 2).init(&device)).unwrap();
    let error = precision.half_copy(&half).expect_err("of bf16");
    assert!(
        matches!(&error, MixedError::NarrowMaster { path, dtype: DType::BF16 } if path == "weight"),
        "{error}"
    );
    let plain = LinearConfig::new(2, 2).init(&Device::flex());
    let error = precision.narrow_frozen(plain.clone()).expect_err("without autodiff");
    assert!(matches!(&error, MixedError::NotAutodiff { path } if path == "weight"), "{error}");
    // For inference.
    assert_eq!(types(&precision.half_copy(&plain).unwrap()), [DType::BF16; 2]);
    assert_eq!(types(&precision.narrow_frozen(plain.train().freeze()).unwrap()), [DType::BF16; 2]);
}

/// WGSL has no bf16, and on many adapters no f16.
#[cfg(feature = "wgpu")]
#[test]
fn a_device_says_what_it_lacks() {
    let _alone = alone();
    let device = Device::wgpu(burn::tensor::DeviceKind::DefaultDevice);
    let model = LinearConfig::new(2, 2).init(&device);
    for precision in BOTH.map(|precision| precision()) {
        let dtype = precision.dtype();
        match precision.half_copy(&model) {
            Ok(half) => {
                assert!(device.supports_dtype(dtype));
                let y = half.forward(Tensor::<2>::ones([3, 2], &device).cast(dtype));
                assert_eq!(y.dtype(), dtype.into());
            }
            Err(error) => {
                assert!(!device.supports_dtype(dtype));
                let error = error.to_string();
                assert!(
                    error.contains("does not compute in") && error.contains(&format!("{dtype:?}")),
                    "{error}"
                );
            }
        }
    }
    assert!(!device.supports_dtype(FloatDType::BF16), "then this test shows no error");
}
