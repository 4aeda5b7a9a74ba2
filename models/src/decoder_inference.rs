// What only a model of burn-memsave's layers can do: weights as they lie in a directory of Hugging Face, and tokens one after the other.
use crate::cache::KeyValueCache;
use crate::generate::Generate;
use crate::gguf;
use crate::hugging_face::{LoadError, load_from, named, with_names_of};
use crate::tables::{HEAD, has_another_head};
use burn_memsave::lazy::{LazyOptions, LazyReport};
use std::path::Path;

impl Llama {
    /// The model in a directory of Hugging Face: the size in its `config.json`, and its weights, which stay in their file as far as the options
    /// say.
    ///
    /// Rotations are tabulated for the longest sequence that the configuration allows, which takes 64 MiB for Llama 3.2 1B and 128 MiB for
    /// Gemma 3 1B. With another [length](DecoderSize::with_length), [`load`](Self::load) takes less.
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

    /// The model in a GGUF file, or in the first of several that it was split into. Its weights stay in the file as far as the options say, and are
    /// unpacked whenever they are read: to f32, if the options do not say another dtype.
    ///
    /// # Errors
    ///
    /// If the file asks for what this model does not have, or if the weights cannot be loaded.
    pub fn from_gguf(
        path: impl AsRef<Path>,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let size = DecoderSize::from_gguf(path.as_ref())?;
        Self::load(&size, path, options, device)
    }

    /// A model of this size with the weights in a directory of Hugging Face, or in a file of one, or in a GGUF file.
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
        Self::from_file(size, WeightFile::open(path)?, options, device)
    }

    /// A model of this size with the weights in a file that is open, or [mapped](WeightFile::open_mapped).
    ///
    /// Heads are rotated as in Hugging Face, or as in GGUF, so that no weight is reordered when it is read. If the head is the embedding, and the file has a
    /// head all the same, both are compared; a head with other numbers is used, as `transformers` does.
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded.
    pub fn from_file(
        size: &DecoderSize,
        file: WeightFile,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        // In GGUF, the heads of Llamas are in the other order, and norms are f32 beside matrices of f16.
        let architecture = gguf::architecture(&file)?;
        let (is_gguf, halves) = (architecture.is_some(), architecture != Some("llama"));
        let options = &match options.dtype() {
            None if is_gguf => options.clone().with_dtype(DType::F32),
            _ => options.clone(),
        };
        let new = |size: &DecoderSize| {
            let mut model = Self::new(size, device);
            model.blocks.iter_mut().for_each(|block| block.attention.halves = halves);
            model
        };
        let (model, has_one_added) = (new(size), architecture.is_some_and(gguf::is_gemma));
        let file = match architecture.map(str::to_owned) {
            Some(name) => with_names_of(&model, gguf::with_usual_names(file, &name)?)?.with_pytorch_adapter(),
            None => named(&model, file)?,
        };
        let (model, report) = match size.tied {
            false => load_from(model, &file, options, &[]),
            true => match has_another_head(&file, [size.vocabulary, size.width], device)? {
                true => load_from(new(&DecoderSize { tied: false, ..*size }), &file, options, &[]),
                false => load_from(model, &file, options, &[HEAD]),
            },
        }?;
        Ok((if has_one_added { model.with_norms_less_one() } else { model }, report))
    }

    /// With norms from a file in which 1 is added to them.
    fn with_norms_less_one(mut self) -> Self {
        let less_one = |norm: &mut RmsNorm| {
            norm.gamma = norm.gamma.clone().map(|gamma| {
                let is_trained = gamma.is_require_grad();
                (gamma.detach().set_require_grad(false) - 1.0).set_require_grad(is_trained)
            });
        };
        less_one(&mut self.norm);
        for block in &mut self.blocks {
            let Block { attention_norm, feed_forward_norm, attention, .. } = block;
            [attention_norm, feed_forward_norm].into_iter().for_each(less_one);
            let others = [&mut block.attention_output_norm, &mut block.feed_forward_output_norm];
            others.into_iter().flatten().for_each(less_one);
            [&mut attention.query_norm, &mut attention.key_norm].into_iter().flatten().for_each(less_one);
        }
        self
    }
}

impl Generate for Llama {
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
        let window = |block: &Block| block.attention.window;
        let x = cache.pass(&self.blocks, self.embedded(tokens), at_once, window, |block, x, part| {
            block.forward(x, self.rotary(block), part)
        });
        let x = self.normalized(x.narrow(1, length - 1, 1));
        let logits = match &self.head {
            Some(head) => head.forward(x),
            None => self.words.logits(x),
        };
        self.capped(logits).squeeze_dim(1)
    }
}
