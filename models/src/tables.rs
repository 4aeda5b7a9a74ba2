//! Tables that are in a file beside the embedding that they are tied to.
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_memsave::lazy::{LazyError, LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn::{Embedding, EmbeddingConfig};

#[derive(Module, Debug)]
struct Tables {
    words: Embedding,
    other: Embedding,
}

/// Rows that are read at a time.
const ROWS: usize = 1 << 10;

/// The weight of a head that is not the embedding.
pub(crate) const HEAD: &str = "head.weight";

/// Whether a file has a [`HEAD`] with other numbers than `words.weight`, `[count, width]`.
pub(crate) fn has_another_head(
    file: &WeightFile,
    shape: [usize; 2],
    device: &Device,
) -> Result<bool, LazyError> {
    has_another_table(file, HEAD, shape, device)
}

/// Whether a file has a tensor of this name with other numbers than `words.weight`, `[count, width]`.
pub(crate) fn has_another_table(
    file: &WeightFile,
    name: &str,
    [count, width]: [usize; 2],
    device: &Device,
) -> Result<bool, LazyError> {
    if !file.has(name) {
        return Ok(false);
    }
    let name = format!("^{}$", name.replace('.', r"\."));
    let file = file.clone().with_key_remappings(&[(&name, "other.weight")])?;
    let device = device.clone().without_autodiff();
    let table = || EmbeddingConfig::new(count, width).init(&device);
    let tables = Tables { words: table(), other: table() };
    let options = LazyOptions::new().with_min_bytes(0).with_prefetch(0).with_dtype(DType::F32);
    let (Tables { words, other }, _) = tables.lazy_load(&file, &options)?;
    Ok((0..count).step_by(ROWS).any(|first| {
        let rows = first as i64..(first + ROWS).min(count) as i64;
        let rows = Tensor::<1, Int>::arange(rows, &device).unsqueeze::<2>();
        words.forward(rows.clone()).into_data() != other.forward(rows).into_data()
    }))
}
