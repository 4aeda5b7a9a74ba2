//! Any bytes, as a weight file: an error or a file, and a file loads into a module or does not; no panic, nothing undefined.
#![no_main]
use burn::tensor::{DType, Device, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn::{Linear, LinearConfig};
use libfuzzer_sys::fuzz_target;
use std::panic::{self, AssertUnwindSafe};
use std::{path::PathBuf, sync::LazyLock};

static FILE: LazyLock<PathBuf> =
    LazyLock::new(|| std::env::temp_dir().join(format!("burn-memsave-fuzz-{}", std::process::id())));

fuzz_target!(
    init: {
        // libFuzzer's hook ends the process at any panic. Panics of the readers we use are caught and become errors:
        // only one that comes out of the target is a finding, and `fuzz_target!` aborts at it.
        panic::set_hook(Box::new(|_| {}));
    },
    |bytes: &[u8]| {
        std::fs::write(&*FILE, bytes).expect("a temporary file");
        let device = Device::flex();
        for lazy in [true, false] {
            let Ok(file) = WeightFile::open(&*FILE) else { return };
            let min_bytes = if lazy { 0 } else { usize::MAX };
            let options = LazyOptions::new().with_min_bytes(min_bytes).with_dtype(DType::F32).with_prefetch(0);
            let loaded: Result<(Linear, _), _> = LinearConfig::new(2, 32).init(&device).lazy_load(&file, &options);
            if let Ok((linear, _)) = loaded {
                let x = Tensor::<2>::ones([1, 2], &device);
                // Compressed data are seen when they are read: a forward pass panics, and names the file.
                let forward = panic::catch_unwind(AssertUnwindSafe(|| linear.forward(x).into_data()));
                if let Err(panic) = forward {
                    let error = panic.downcast::<String>().expect("a message");
                    assert!(error.contains("burn-memsave-fuzz"), "{error}");
                }
            }
        }
    }
);
