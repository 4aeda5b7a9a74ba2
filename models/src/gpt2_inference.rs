// What only a model of burn-memsave's layers can do: tokens one after the other.
use crate::cache::KeyValueCache;
use crate::generate::Generate;
use crate::hugging_face::{LoadError, load_from, named};
use crate::tables::has_another_head;
use burn::tensor::DType;
use burn_memsave::lazy::{LazyOptions, LazyReport, WeightFile};
use std::path::Path;

impl Gpt2 {
    /// The model in a directory of Hugging Face: the size in its `config.json`, and its weights, which stay in their file as far as the options
    /// say.
    ///
    /// # Errors
    ///
    /// If the configuration asks for what this model does not have, if the weights cannot be loaded, or if the file has a head with other
    /// numbers than the embedding.
    pub fn from_directory(
        directory: impl AsRef<Path>,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let size = Gpt2Size::from_directory(directory.as_ref())?;
        Self::from_file(&size, WeightFile::open(directory)?, options, device)
    }

    /// A model of this size with the weights in a file that is open, or [mapped](WeightFile::open_mapped).
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded, or if the file has a head with other numbers than the embedding.
    pub fn from_file(
        size: &Gpt2Size,
        file: WeightFile,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let model = Self::new(size, device);
        let file = named(&model, file)?;
        let with_head = file.clone().with_key_remappings(&[(r"^unused\.lm_head\.", "head.")])?;
        if has_another_head(&with_head, [size.vocabulary, size.width], device)? {
            let file = file.path().to_path_buf();
            return Err(LoadError::Names { file, missing: vec![], unused: vec!["lm_head.weight".into()] });
        }
        load_from(model, &file, options, &[])
    }
}

impl Generate for Gpt2 {
    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn length(&self) -> usize {
        self.length
    }

    fn device(&self) -> Device {
        self.norm.gamma.device()
    }

    fn cache(&self, stored: Option<DType>) -> KeyValueCache {
        KeyValueCache::new(self.blocks.len(), stored)
    }

    fn next_logits(&self, tokens: Tensor<2, Int>, at_once: usize, cache: &mut KeyValueCache) -> Tensor<2> {
        let length = tokens.dims()[1];
        let places = cache.places(length, &tokens.device());
        let x = self.embedded(tokens, places);
        let x = cache.pass(&self.blocks, x, at_once, |_| None, Block::forward);
        self.words.logits(self.norm.forward(x.narrow(1, length - 1, 1))).squeeze_dim(1)
    }
}
