//! [`features`]: what the layers of an encoder make of texts, images or sounds.
use burn::tensor::{Bool, DType, Device, Int, Tensor, TensorData};

/// A network that makes features of texts, images or sounds.
pub trait FeatureEncoder {
    /// Inputs that are computed at once.
    type Batch;

    /// The number of layers.
    fn layers(&self) -> usize;

    /// Where its weights are, or will be.
    fn device(&self) -> Device;

    /// The hidden states of a batch after so many layers. 0 are the embeddings, and `None` is what the network makes of the last layer's output,
    /// by a norm if it has one there: `hidden_states[layer]` and `last_hidden_state` in `transformers`, where those of the last layer of T5 and
    /// Whisper are normalized, too. Later layers are not computed, and their weights are not read, unless
    /// the cache reads ahead.
    ///
    /// # Errors
    ///
    /// Those of [`features`], except for numbers that are too large.
    fn hidden_states(&self, batch: &Self::Batch, layer: Option<usize>) -> Result<HiddenStates, FeatureError>;
}

/// The hidden states of a batch.
#[derive(Clone, Debug)]
pub struct HiddenStates {
    /// `[batch, tokens, width]`
    pub states: Tensor<3>,
    /// How many of the tokens of each input are its own. The others follow them, and are padding.
    pub lengths: Vec<usize>,
}

/// Which features an input gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Those of each of its tokens.
    All,
    /// Those of its first token.
    First,
    /// The mean of those of its tokens.
    Mean,
}

impl HiddenStates {
    /// Features `[rows, width]` in f32: a row for each input, or for each token of the first input, then of the second, and so on.
    pub fn pooled(self, pooling: Pooling) -> Tensor<2> {
        let Self { states, lengths } = self;
        let states = states.cast(DType::F32);
        let of_input = |(input, &tokens): (usize, &usize)| {
            let states = states.clone().narrow(0, input, 1).squeeze_dim::<2>(0).narrow(0, 0, tokens);
            match pooling {
                Pooling::Mean => states.mean_dim(0),
                Pooling::All | Pooling::First => states,
            }
        };
        match pooling {
            Pooling::First => states.narrow(1, 0, 1).squeeze_dim(1),
            Pooling::All | Pooling::Mean => {
                Tensor::cat(lengths.iter().enumerate().map(of_input).collect(), 0)
            }
        }
    }
}

/// What [`features`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FeatureOptions {
    layer: Option<usize>,
    pooling: Pooling,
}

impl FeatureOptions {
    /// Features of the last layer.
    pub fn new(pooling: Pooling) -> Self {
        Self { layer: None, pooling }
    }

    /// Features after so many layers, see [`FeatureEncoder::hidden_states`].
    pub fn with_layer(self, layer: usize) -> Self {
        Self { layer: Some(layer), ..self }
    }
}

/// Why there are no features.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FeatureError {
    /// A text without tokens.
    #[error("text {text} of the batch has no tokens")]
    NoTokens {
        /// Its number in the batch, from 0.
        text: usize,
    },
    /// A text with a token that the network does not have.
    #[error("text {text} of the batch has the token {token}, and the model has {vocabulary} tokens")]
    UnknownToken {
        /// Its number in the batch, from 0.
        text: usize,
        /// The token.
        token: u32,
        /// The network's number of tokens.
        vocabulary: usize,
    },
    /// A text that is longer than the network's longest.
    #[error("text {text} of the batch has {tokens} tokens, and the longest text of the model has {length}")]
    TooLong {
        /// Its number in the batch, from 0.
        text: usize,
        /// Its tokens.
        tokens: usize,
        /// The network's longest text.
        length: usize,
    },
    /// A batch of nothing.
    #[error("the batch is empty")]
    Empty,
    /// Images of another shape.
    #[error("images of {found:?} (channels, height and width), and the model has {expected:?}")]
    Images {
        /// Theirs.
        found: [usize; 3],
        /// That of the network's images.
        expected: [usize; 3],
    },
    /// Sounds of another shape.
    #[error("sounds of {found:?} (mels and frames), and the model has {expected:?}")]
    Sound {
        /// Theirs.
        found: [usize; 2],
        /// That of the network's sounds.
        expected: [usize; 2],
    },
    /// A layer that the network does not have.
    #[error("there is no layer {layer}: the model has {layers}")]
    Layer {
        /// The layer.
        layer: usize,
        /// The network's number of layers.
        layers: usize,
    },
    /// Every layer would keep what a backward pass reads, and drop features at random.
    #[error(
        "the model is on a device that tracks gradients; load it on one that does not, or use `model.valid()`"
    )]
    Tracked,
    /// Numbers became too large for their dtype, as those of some T5s do in f16.
    #[error("the features of batch {batch} are not numbers; try bf16 or f32")]
    NotFinite {
        /// The number of the batch, from 0.
        batch: usize,
    },
}

/// Features of batches of texts, images or sounds, `[rows, width]` in f32, as [`HiddenStates::pooled`] orders them. They are computed one batch after the
/// other, when the iterator is asked for them; nothing of a batch is in memory when it comes to the next one.
///
/// A text is a list of tokens, with the special tokens that the model was trained with. The texts of a batch are padded at their ends, and no token
/// sees padding, so that the features of a text do not depend on the others but for rounding. Padding takes time and memory: texts of similar
/// lengths belong together.
///
/// ```
/// use burn::tensor::Device;
/// use burn_memsave_models::{Encoder, EncoderSize, FeatureOptions, Pooling, features, memsave::bert::Bert};
///
/// let model = Bert::new(&EncoderSize::BERT_BASE.tiny(), &Device::flex());
/// let batches = [vec![vec![3, 1, 4], vec![1, 5]], vec![vec![9, 2]]];
/// let options = FeatureOptions::new(Pooling::Mean);
/// let rows: Vec<_> = features(&model, batches, options).collect::<Result<_, _>>()?;
/// assert_eq!([rows[0].dims(), rows[1].dims()], [[2, 24], [1, 24]]);
/// # Ok::<(), burn_memsave_models::FeatureError>(())
/// ```
///
/// # Errors
///
/// If a batch is empty; if a text has no tokens, too many, or one that the model does not have; if images or sounds have another shape than those of
/// the model; if there is no such layer; if the model is on a device that tracks gradients; or if numbers became too large for their dtype. The
/// batches after it are still computed.
pub fn features<E: FeatureEncoder + ?Sized>(
    encoder: &E,
    batches: impl IntoIterator<Item = E::Batch>,
    options: FeatureOptions,
) -> impl Iterator<Item = Result<Tensor<2>, FeatureError>> {
    let of_batch = move |(number, batch): (usize, E::Batch)| {
        let rows = encoder.hidden_states(&batch, options.layer)?.pooled(options.pooling);
        match rows.clone().is_finite().all().into_scalar::<bool>() {
            true => Ok(rows),
            false => Err(FeatureError::NotFinite { batch: number }),
        }
    };
    batches.into_iter().enumerate().map(of_batch)
}

/// Texts as tokens `[batch, length]`, shorter ones of which end with padding.
pub(crate) struct Padded {
    pub(crate) tokens: Tensor<2, Int>,
    /// True for padding, `[batch, length]`, if there is any.
    pub(crate) padding: Option<Tensor<2, Bool>>,
    pub(crate) lengths: Vec<usize>,
}

impl Padded {
    pub(crate) fn new(texts: &[Vec<u32>], device: &Device) -> Self {
        let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
        let longest = lengths.iter().copied().max().unwrap_or(0);
        // With a token of the text, since the features of other tokens may be too large for half precision.
        let padded = texts.iter().flat_map(|text| {
            let token = |at: usize| text.get(at).or(text.first()).copied().unwrap_or(0);
            (0..longest).map(move |at| i64::from(token(at)))
        });
        let shape = [texts.len(), longest];
        let tokens = Tensor::from_data(TensorData::new(padded.collect(), shape), device);
        Self { tokens, padding: padding(shape, &lengths, device), lengths }
    }
}

/// [`Padded::padding`] of texts of these lengths.
///
/// # Panics
///
/// If there is not a length for each text, or if one is longer than the longest, or empty.
pub(crate) fn padding(
    [batch, longest]: [usize; 2],
    lengths: &[usize],
    device: &Device,
) -> Option<Tensor<2, Bool>> {
    assert_eq!(lengths.len(), batch, "a length for each text");
    assert!(
        lengths.iter().all(|&length| (1..=longest).contains(&length)),
        "texts of {lengths:?} tokens are not {longest} tokens with padding"
    );
    if lengths.iter().all(|&length| length == longest) {
        return None;
    }
    let is_padding = lengths.iter().flat_map(|&length| (0..longest).map(move |at| at >= length));
    Some(Tensor::from_data(TensorData::new(is_padding.collect::<Vec<bool>>(), [batch, longest]), device))
}

/// What is wrong with any batch of so many inputs.
pub(crate) fn check(
    encoder: &impl FeatureEncoder,
    inputs: usize,
    layer: Option<usize>,
) -> Result<(), FeatureError> {
    let layers = encoder.layers();
    match layer.filter(|&layer| layer > layers) {
        Some(layer) => Err(FeatureError::Layer { layer, layers }),
        None if encoder.device().is_autodiff() => Err(FeatureError::Tracked),
        None if inputs == 0 => Err(FeatureError::Empty),
        None => Ok(()),
    }
}

/// What is wrong with texts, for a network of so many tokens, and texts of at most so many of them.
pub(crate) fn check_texts(
    texts: &[Vec<u32>],
    vocabulary: usize,
    longest: Option<usize>,
) -> Result<(), FeatureError> {
    for (text, tokens) in texts.iter().enumerate() {
        if tokens.is_empty() {
            return Err(FeatureError::NoTokens { text });
        }
        if let Some(length) = longest.filter(|&length| tokens.len() > length) {
            return Err(FeatureError::TooLong { text, tokens: tokens.len(), length });
        }
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(FeatureError::UnknownToken { text, token, vocabulary });
        }
    }
    Ok(())
}
