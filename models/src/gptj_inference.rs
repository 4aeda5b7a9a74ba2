// What only a model of burn-memsave's layers can do: weights as they lie in a directory of Hugging Face, and tokens one after the other.
use crate::cache::KeyValueCache;
use crate::generate::Generate;
use crate::hugging_face::{LoadError, load_file};
use burn::tensor::DType;
use burn_memsave::lazy::{LazyOptions, LazyReport, WeightFile};
use std::path::Path;

impl GptJ {
    /// The model in a directory of Hugging Face: the size in its `config.json`, and its weights, which stay in their file as far as the options
    /// say.
    ///
    /// # Errors
    ///
    /// If the configuration asks for what this model does not have, or if the weights cannot be loaded.
    pub fn from_directory(
        directory: impl AsRef<Path>,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let size = GptJSize::from_directory(directory.as_ref())?;
        Self::from_file(&size, WeightFile::open(directory)?, options, device)
    }

    /// A model of this size with the weights in a file that is open, or [mapped](WeightFile::open_mapped).
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded.
    pub fn from_file(
        size: &GptJSize,
        file: WeightFile,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        load_file(Self::new(size, device), file, options)
    }
}

impl Generate for GptJ {
    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn length(&self) -> usize {
        self.rotary.freq_complex.dims()[0]
    }

    fn device(&self) -> Device {
        self.rotary.freq_complex.device()
    }

    fn cache(&self, stored: Option<DType>) -> KeyValueCache {
        KeyValueCache::new(self.blocks.len(), stored)
    }

    fn next_logits(&self, tokens: Tensor<2, Int>, at_once: usize, cache: &mut KeyValueCache) -> Tensor<2> {
        let length = tokens.dims()[1];
        let x = cache.pass(
            &self.blocks,
            self.embedded(tokens),
            at_once,
            |_| None,
            |block, x, part| block.forward(x, &self.rotary, part),
        );
        self.head.forward(self.norm.forward(x.narrow(1, length - 1, 1))).squeeze_dim(1)
    }
}
