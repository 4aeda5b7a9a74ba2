//! Tests lazy weights, which stay in their file.
#![recursion_limit = "256"]
#![allow(deprecated)] // burn-ndarray is deprecated as a whole

mod archives;
mod changes;
mod experts;
mod files;
mod foreign;
mod head_losses;
mod hostile;
mod layouts;
mod lifecycle;
mod modules;
mod packed;
mod prepare;
mod residency;
mod training;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, FloatDType, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, LazyReport, WeightFile};
use burn_store::{ModuleSnapshot, SafetensorsStore};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The CPU backends.
fn devices() -> Vec<Device> {
    vec![
        Device::flex(),
        #[cfg(feature = "ndarray")]
        Device::ndarray(),
    ]
}

/// Every parameter that can be lazy is.
fn all() -> LazyOptions {
    LazyOptions::new().with_min_bytes(0)
}

/// A directory with the parameters of a module, as safetensors and as burnpack.
struct Saved {
    directory: TempDir,
}

impl Saved {
    fn new(module: &impl Module) -> Self {
        let saved = Self { directory: tempfile::tempdir().expect("a directory") };
        let mut store = SafetensorsStore::from_file(saved.path("model.safetensors"));
        module.save_into(&mut store).expect("safetensors");
        module.clone().save_file(saved.path("model.bpk")).expect("a burnpack");
        saved
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn safetensors(&self) -> WeightFile {
        open(&self.path("model.safetensors"))
    }
}

fn open(path: &Path) -> WeightFile {
    WeightFile::open(path).unwrap_or_else(|error| panic!("{error}"))
}

fn open_mapped(path: &Path) -> WeightFile {
    // SAFETY: the file is in a directory of its test, which does not write to it again.
    unsafe { WeightFile::open_mapped(path) }.unwrap_or_else(|error| panic!("{error}"))
}

fn load<M: Module>(module: M, file: &WeightFile, options: &LazyOptions) -> (M, LazyReport) {
    module.lazy_load(file, options).unwrap_or_else(|error| panic!("{error}"))
}

/// All floats of a module in another dtype.
fn cast<M: Module>(module: M, dtype: impl Into<FloatDType>) -> M {
    struct Cast(FloatDType);
    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            param.map(|tensor| tensor.cast(self.0))
        }
    }
    module.map(&mut Cast(dtype.into()))
}
