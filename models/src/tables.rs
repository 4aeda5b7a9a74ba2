//! Heads that are in a file beside the embedding that they are tied to.
use burn::module::Module;
use burn::tensor::{DType, Device, Int, Tensor};
use burn_memsave::lazy::{LazyError, LazyLoad, LazyOptions, WeightFile};
use burn_memsave::nn::{Embedding, EmbeddingConfig};

#[derive(Module, Debug)]
struct Tables {
    words: Embedding,
    head: Embedding,
}

/// Rows that are read at a time.
const ROWS: usize = 1 << 10;

/// Whether `words.weight` and the tensor `head` of a file, `[count, width]`, have the same numbers.
pub(crate) fn are_equal(
    file: &WeightFile,
    head: &str,
    [count, width]: [usize; 2],
    device: &Device,
) -> Result<bool, LazyError> {
    let device = device.clone().without_autodiff();
    let table = || EmbeddingConfig::new(count, width).init(&device);
    let tables = Tables { words: table(), head: table() };
    let options = LazyOptions::new().with_min_bytes(0).with_prefetch(0).with_dtype(DType::F32);
    let file = match head {
        "head.weight" => file.clone(),
        _ => file.clone().with_key_remapping(&format!("^{}$", head.replace('.', r"\.")), "head.weight")?,
    };
    let (Tables { words, head }, _) = tables.lazy_load(&file, &options)?;
    Ok((0..count).step_by(ROWS).all(|first| {
        let rows = first as i64..(first + ROWS).min(count) as i64;
        let rows = Tensor::<1, Int>::arange(rows, &device).unsqueeze::<2>();
        words.forward(rows.clone()).into_data() == head.forward(rows).into_data()
    }))
}
