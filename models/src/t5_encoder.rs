// The encoder of a T5 by itself. A part of `t5.rs`.

/// The encoder of a [`T5`], for features. Checkpoints may have a decoder or not.
#[derive(Module, Debug)]
pub struct T5Encoder {
    words: Embedding,
    encoder: Stack,
}

impl T5Encoder {
    /// With random weights.
    pub fn new(size: &T5Size, device: &Device) -> Self {
        let words = EmbeddingConfig::new(size.vocabulary, size.width).init(device);
        Self { words, encoder: Stack::new(size, false, device) }
    }

    /// The encoder in a directory of Hugging Face, as [`T5::from_directory`].
    ///
    /// # Errors
    ///
    /// If the configuration asks for what this model does not have, or if the weights cannot be loaded.
    pub fn from_directory(
        directory: impl AsRef<Path>,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let size = T5Size::from_directory(directory.as_ref())?;
        Self::from_file(&size, WeightFile::open(directory)?, options, device)
    }

    /// An encoder of this size with the weights in a file that is open, or [mapped](WeightFile::open_mapped).
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded, or if the file has two tables of words for it, with different numbers.
    pub fn from_file(
        size: &T5Size,
        file: WeightFile,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        let model = Self::new(size, device);
        let file = named(&model, file)?;
        check_tables(&file, &TABLES[..1], size, device)?;
        load_from(model, &file, options, &[])
    }
}

impl FeatureEncoder for T5Encoder {
    type Batch = Vec<Vec<u32>>;

    fn layers(&self) -> usize {
        self.encoder.blocks.len()
    }

    fn device(&self) -> Device {
        self.encoder.norm.gamma.device()
    }

    fn hidden_states(&self, batch: &Self::Batch, layer: Option<usize>) -> Result<HiddenStates, FeatureError> {
        check(self, batch.len(), layer)?;
        self.encoder.hidden_states(&self.words, batch, layer)
    }
}

impl HuggingFace for T5Encoder {
    const NAMES: &'static [(&'static str, &'static str)] = T5::NAMES;

    fn first_names(&self) -> &'static [(&'static str, &'static str)] {
        // Without `layer`, so that no other replacement is made in them.
        &[(r"^decoder\.block\.(\d+)\.layer\.", "unused.decoder.$1."), (r"^decoder\.", "unused.decoder.")]
    }

    fn tied_table(&self) -> Option<&'static str> {
        Some("words") // Python reads the table of the encoder
    }

    fn module_name(&self, path: &str) -> String {
        self.encoder.module_name(path)
    }

    fn split(&self, file: WeightFile) -> Result<WeightFile, LazyError> {
        with_words(file)
    }
}
