// What only a model of burn-memsave's layers can do: weights as they lie in a directory of Hugging Face, and tokens one after the other.
use crate::cache::KeyValueCache;
use crate::generate::Generate;
use crate::hugging_face::{LoadError, lazy_load};
use burn::tensor::DType;
use burn_memsave::lazy::{LazyOptions, LazyReport};
use std::path::Path;

impl Llama {
    /// The model in a directory of Hugging Face: the size in its `config.json`, and its weights, which stay in their file as far as the options
    /// say.
    ///
    /// Rotations are tabulated for the longest sequence that the configuration allows. [`load`](Self::load) takes another size.
    ///
    /// ```no_run
    /// use burn::tensor::Device;
    /// use burn_memsave::lazy::LazyOptions;
    /// use burn_memsave_models::{GenerateOptions, generate, memsave::decoder::Llama};
    ///
    /// let options = LazyOptions::new().with_budget(2 << 30);
    /// let (model, _) = Llama::from_directory("Qwen2.5-7B-Instruct", &options, &Device::flex())?;
    /// let prompts = [vec![9707, 11]];
    /// generate(&model, &prompts, &GenerateOptions::new(20), |_, token| println!("{token}"))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the configuration asks for what this model does not have, or if the weights cannot be loaded.
    pub fn from_directory(
        directory: impl AsRef<Path>,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let size = DecoderSize::from_directory(directory.as_ref())?;
        Self::load(&size, directory, options, device)
    }

    /// A model of this size with the weights in a directory of Hugging Face, or in a file of one.
    ///
    /// Heads are rotated as in Hugging Face, so that no weight is reordered when it is read.
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded.
    pub fn load(
        size: &DecoderSize,
        path: impl AsRef<Path>,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let mut model = Self::new(size, device);
        model.blocks.iter_mut().for_each(|block| block.attention.halves = true);
        lazy_load(model, path, options)
    }
}

impl Generate for Llama {
    fn length(&self) -> usize {
        self.rotary.freq_complex.dims()[0]
    }

    fn device(&self) -> Device {
        self.rotary.freq_complex.device()
    }

    fn cache(&self, stored: Option<DType>) -> KeyValueCache {
        KeyValueCache::new(self.blocks.len(), stored)
    }

    /// One layer after the other computes all parts, so that its weights are read once.
    fn next_logits(&self, tokens: Tensor<2, Int>, at_once: usize, cache: &mut KeyValueCache) -> Tensor<2> {
        let ([_, length], device) = (tokens.dims(), tokens.device());
        let (start, padding) = (cache.tokens(), cache.padding().to_vec());
        let mut x = self.words.forward(tokens);
        for (block, before) in self.blocks.iter().zip(cache.layers_mut()) {
            let parts = (0..length).step_by(at_once).map(|first| {
                let count = at_once.min(length - first);
                let [first_token, end] = [start + first, start + first + count];
                let unseen = unseen([first_token, end], self.window, &padding, &device);
                let part = Part { start: first_token, unseen, before: Some(&mut *before) };
                block.forward(x.clone().narrow(1, first, count), &self.rotary, part)
            });
            x = Tensor::cat(parts.collect(), 1);
        }
        cache.advance(length);
        let x = self.norm.forward(x.narrow(1, length - 1, 1));
        let logits = match &self.head {
            Some(head) => head.forward(x),
            None => self.words.logits(x),
        };
        logits.squeeze_dim(1)
    }
}
