//! Tests modules whose adapters are merged for Python: loaded again as PyTorch's files are, they compute the same.
use crate::{Shake, alone};
use burn::module::{Lora, Module, ParamGroup};
use burn::nn::LinearLayout;
use burn::tensor::{DType, Device, Int, Tensor, Tolerance};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::lora::{ConvLora, Dora};
use burn_memsave::nn::conv::{Conv2d, Conv2dConfig};
use burn_memsave::nn::{Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn_memsave::peft::{PeftError, save_merged};

#[derive(Module, Debug)]
struct Model {
    embedding: Embedding,
    norm: LayerNorm,
    rows: Linear,
    columns: Linear,
    conv: Conv2d,
}

impl Model {
    /// With this layout of `columns`.
    fn new(layout: LinearLayout, device: &Device) -> Self {
        Self {
            embedding: EmbeddingConfig::new(9, 6).init(device),
            norm: LayerNormConfig::new(6).init(device),
            rows: LinearConfig::new(6, 5).init(device),
            columns: LinearConfig::new(5, 8).with_layout(layout).init(device),
            conv: Conv2dConfig::new([1, 4], [3, 2]).init(device),
        }
    }

    fn forward(&self, device: &Device) -> Tensor<4> {
        let x = self.embedding.forward(Tensor::<2, Int>::from_data([[3, 0, 8, 5]], device));
        let x = self.columns.forward(self.rows.forward(self.norm.forward(x)));
        self.conv.forward(x.unsqueeze_dim(1))
    }
}

fn lora(layers: &str) -> Lora {
    Lora::new(2, 4.0).set_param_group(ParamGroup::from_regex(layers).unwrap())
}

#[test]
fn merged_modules_compute_the_same() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    device.seed(5);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let base = || Model::new(LinearLayout::Col, &device).map(&mut Shake);
    // Burn's adapter of PyTorch's files knows rows only.
    let rows = || Model::new(LinearLayout::Row, &device);
    let names = |path: &str| path.replace("rows", "there.rows");
    let here = |file: WeightFile| file.with_pytorch_adapter().with_key_remapping("^there.", "").unwrap();
    let compare = |model: &Model| {
        let expected = model.forward(&device).into_data();
        for options in [LazyOptions::new().exclude("*"), LazyOptions::new().with_min_bytes(0)] {
            let file = here(WeightFile::open(&path).unwrap());
            let (loaded, _) = rows().lazy_load(&file, &options).unwrap();
            let found = loaded.forward(&device).into_data();
            found.assert_approx_eq::<f32>(&expected, Tolerance::rel_abs(1e-3, 1e-3));
        }
    };
    let matrices = || lora("^(embedding|rows|columns).weight$");
    let adapted = [
        base().apply_lora(matrices()),
        base().apply_reparameterization(ConvLora::new(lora("^conv.weight$"))),
        base().apply_reparameterization(Dora::new(lora("^(rows|columns).weight$"))),
        base(),
    ];
    for model in adapted.map(|model| model.map(&mut Shake)) {
        save_merged(&model, &matrices(), &path, names, DType::F32).unwrap();
        compare(&model);
    }
    // Of lazy weights, too: the file that was just written, with new adapters.
    let file = here(WeightFile::open(&path).unwrap());
    let (lazy, _) = rows().lazy_load(&file, &LazyOptions::new().with_min_bytes(0)).unwrap();
    for model in [
        lazy.clone().apply_lora(matrices()),
        lazy.apply_reparameterization(Dora::new(lora("^(rows|columns).weight$"))),
    ] {
        let model = model.map(&mut Shake);
        save_merged(&model, &matrices(), &path, names, DType::F32).unwrap();
        compare(&model);
    }
}

#[test]
fn what_cannot_be_merged_is_refused() {
    let _alone = alone();
    let device = Device::flex().autodiff();
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("model.safetensors");
    let lora = lora("^rows.weight$");
    let model = Model::new(LinearLayout::Row, &device).apply_lora(lora.clone());
    let refused = |result: Result<(), PeftError>, says: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
        assert!(!path.exists());
    };
    let names = |path: &str| path.to_owned();
    refused(save_merged(&model, &lora, &path, names, DType::I32), "I32 is no dtype of merged weights");
    refused(save_merged(&model, &Lora::new(3, 4.0), &path, names, DType::F32), "has the rank 2");
    refused(save_merged(&model, &lora, &path, |_: &str| "one".into(), DType::F32), "is there twice");
    let nowhere = directory.path().join("nowhere/model.safetensors");
    assert!(save_merged(&model, &lora, nowhere, names, DType::F32).is_err());
}
