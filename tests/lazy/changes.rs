//! Tests files that change while a module reads them. The result is an error or the file as it was, never two versions in one pass.
use crate::{Saved, all, load, open, open_mapped};
use burn::module::Module;
use burn::tensor::{Device, Tensor, TensorData};
use burn_memsave::lazy::ReadMode;
use burn_memsave::nn::{Linear, LinearConfig};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

#[derive(Module, Debug)]
struct Pair {
    first: Linear,
    second: Linear,
}

impl Pair {
    fn new(device: &Device) -> Self {
        let layer = LinearConfig::new(4, 4).with_bias(false);
        Self { first: layer.init(device), second: layer.init(device) }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.second.forward(self.first.forward(x))
    }
}

fn input(device: &Device) -> Tensor<2> {
    Tensor::ones([2, 4], device)
}

/// The file of another module, of the same length, written over the one of `saved`.
fn rewrite(saved: &Saved, name: &str, device: &Device) {
    let other = std::fs::read(Saved::new(&Pair::new(device)).path(name)).unwrap();
    std::thread::sleep(Duration::from_millis(50)); // beyond the resolution of the file system's clock
    std::fs::write(saved.path(name), other).unwrap();
}

fn message(result: std::thread::Result<TensorData>) -> String {
    *result.expect_err("the file was changed").downcast::<String>().expect("a message")
}

#[test]
fn a_file_that_is_rewritten_in_place_is_an_error() {
    let device = Device::flex();
    for name in ["model.safetensors", "model.bpk"] {
        // With a budget of both weights, too: the first pass reads one of them only.
        for budget in [0, 2 * 4 * 4 * 4] {
            let saved = Saved::new(&Pair::new(&device));
            let options = all().with_budget(budget).with_prefetch(0);
            let (lazy, _) = load(Pair::new(&device), &open(&saved.path(name)), &options);
            lazy.first.forward(input(&device));
            rewrite(&saved, name, &device);
            let error = message(catch_unwind(AssertUnwindSafe(|| lazy.forward(input(&device)).into_data())));
            assert!(error.contains(name) && error.contains("was changed after it was opened"), "{error}");
        }
    }
}

/// The weights of the backward pass are those of the forward pass, or there is no gradient.
#[test]
fn a_file_that_is_rewritten_before_the_backward_pass_is_an_error() {
    let device = Device::flex().autodiff();
    let saved = Saved::new(&Pair::new(&device));
    let file = saved.safetensors();
    let (lazy, _) = load(Pair::new(&device), &file, &all().with_budget(0).with_prefetch(0));
    let x = input(&device).require_grad();
    let y = lazy.forward(x.clone());
    rewrite(&saved, "model.safetensors", &device);
    let backward = || x.grad(&y.sum().backward()).expect("a gradient").into_data();
    let error = message(catch_unwind(AssertUnwindSafe(backward)));
    assert!(error.contains("was changed after it was opened"), "{error}");
}

#[test]
fn a_file_that_is_replaced_stays_what_it_was() {
    let device = Device::flex();
    for mode in [ReadMode::Copy, ReadMode::Map] {
        let eager = Pair::new(&device);
        let saved = Saved::new(&eager);
        let path = saved.path("model.bpk");
        let file = if mode == ReadMode::Map { open_mapped(&path) } else { open(&path) };
        assert_eq!(file.read_mode(), mode);
        let (lazy, _) = load(Pair::new(&device), &file, &all().with_budget(0).with_prefetch(0));
        let other = Pair::new(&device);
        if cfg!(windows) && mode == ReadMode::Map {
            continue; // Windows may refuse to replace a file that is mapped
        }
        other.clone().save_file(&path).unwrap(); // renames
        assert_eq!(lazy.forward(input(&device)).into_data(), eager.forward(input(&device)).into_data());
        let (lazy, _) = load(Pair::new(&device), &open(&path), &all());
        assert_eq!(lazy.forward(input(&device)).into_data(), other.forward(input(&device)).into_data());
    }
}

/// The open archive is still read. For checkpoints of older formats, whose reader is burn-store's, it is an error.
#[test]
fn a_checkpoint_of_pytorch_that_is_replaced_is_read_or_an_error() {
    let device = Device::flex();
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/lazy/data");
    let directory = tempfile::tempdir().unwrap();
    let [path, archive] = ["model.pt", "archive.pt"].map(|name| directory.path().join(name));
    let copy = |from: &str, to: &Path| std::fs::write(to, std::fs::read(data.join(from)).unwrap()).unwrap();
    copy("legacy.pt", &path);
    copy("model.pt", &archive);
    let config = LinearConfig::new(6, 6);
    let [forward, of_archive] = [&path, &archive].map(|path| {
        let file = open(path).with_key_remapping(r"^first\.", "").unwrap().with_pytorch_adapter();
        let (lazy, _) = load(config.init(&device), &file, &all().with_budget(0).with_prefetch(0));
        move || lazy.forward(Tensor::<2>::ones([1, 6], &Device::flex())).into_data()
    });
    let y = of_archive();
    assert_eq!(forward(), y, "the same model");
    let other = directory.path().join("other.pt");
    for path in [&path, &archive] {
        copy("half.pt", &other);
        std::fs::rename(&other, path).unwrap();
    }
    assert_eq!(of_archive(), y);
    let error = message(catch_unwind(AssertUnwindSafe(forward)));
    assert!(error.contains("model.pt") && error.contains("was changed after it was opened"), "{error}");
}
