//! The size of a decoder, in any family.
use burn_memsave_models::hugging_face::LoadError;
use burn_memsave_models::{ConfigError, DecoderSize, Gpt2Size, GptJSize};
use std::path::Path;

/// The size of a model.
pub enum Size {
    Decoder(DecoderSize),
    Gpt2(Gpt2Size),
    GptJ(GptJSize),
}

impl Size {
    pub fn read(directory: &Path) -> Result<Self, LoadError> {
        if directory.is_file() {
            return Ok(Self::Decoder(DecoderSize::from_gguf(directory)?));
        }
        match DecoderSize::from_directory(directory) {
            Err(ConfigError::Unsupported { field, value, .. })
                if field == "model_type" && value == "gpt2" =>
            {
                Ok(Self::Gpt2(Gpt2Size::from_directory(directory)?))
            }
            Err(ConfigError::Unsupported { field, value, .. })
                if field == "model_type" && (value == "gptj" || value == "phi") =>
            {
                Ok(Self::GptJ(GptJSize::from_directory(directory)?))
            }
            size => Ok(Self::Decoder(size?)),
        }
    }

    /// The longest text.
    pub fn length(&self) -> usize {
        match self {
            Self::Decoder(size) => size.length,
            Self::Gpt2(size) => size.length,
            Self::GptJ(size) => size.length,
        }
    }
}
