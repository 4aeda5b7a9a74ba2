//! Any bytes, as a weight file: an error or a file, and a file loads into a module or does not; no panic, nothing undefined.
#![no_main]
use burn::tensor::{Device, Tensor};
use burn_memsave::lazy::{LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn::{Linear, LinearConfig};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let path = std::env::temp_dir().join(format!("burn-memsave-fuzz-{}", std::process::id()));
    std::fs::write(&path, bytes).expect("a temporary file");
    let device = Device::flex();
    for lazy in [true, false] {
        let Ok(file) = WeightFile::open(&path) else { return };
        let options = LazyOptions::new().with_min_bytes(if lazy { 0 } else { usize::MAX }).with_prefetch(0);
        let loaded: Result<(Linear, _), _> = LinearConfig::new(6, 4).init(&device).lazy_load(&file, &options);
        if let Ok((linear, _)) = loaded {
            linear.forward(Tensor::<2>::ones([1, 6], &device)).into_data();
        }
    }
});
