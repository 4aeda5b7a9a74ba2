// Vision transformers (arXiv 2010.11929), written once, with the topology of Hugging Face up to the last norm. The module that includes this
// file chooses `nn`.
use crate::features::check;
use crate::hugging_face::{HuggingFace, LoadError, load_file, replaced};
use crate::{FeatureEncoder, FeatureError, HiddenStates, VitSize};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_memsave::lazy::{LazyOptions, LazyReport, WeightFile};
use burn_memsave::plan;
use nn::conv::{Conv2d, Conv2dConfig};
use nn::transformer::{TransformerEncoder, TransformerEncoderConfig};
use nn::{Dropout, DropoutConfig, Initializer, LayerNorm, LayerNormConfig};
use std::path::Path;

/// An encoder of images of one size: patches, and layers that read their inputs through norms.
#[derive(Module, Debug)]
pub struct Vit {
    patches: Conv2d,
    /// The token before the patches, `[1, 1, width]`.
    class_token: Param<Tensor<3>>,
    /// `[1, tokens, width]`
    positions: Param<Tensor<3>>,
    dropout: Dropout,
    encoder: TransformerEncoder,
    norm: LayerNorm,
    /// Height and width of images.
    image: [usize; 2],
}

impl Vit {
    /// With random weights.
    pub fn new(size: &VitSize, device: &Device) -> Self {
        let &VitSize { channels, patch, width, .. } = size;
        let encoder = TransformerEncoderConfig::new(width, size.hidden, size.heads, size.layers)
            .with_dropout(size.dropout)
            .with_norm_first(true)
            .with_layer_norm_eps(size.epsilon);
        let mut encoder = encoder.init(device);
        for layer in &mut encoder.layers {
            // Burn's layer has a dropout between the two dense layers, too.
            layer.pwff.dropout = DropoutConfig::new(0.0).init();
            layer.mha.dropout = DropoutConfig::new(size.attention_dropout).init();
            if !size.input_biases {
                let attention = &mut layer.mha;
                for input in [&mut attention.query, &mut attention.key, &mut attention.value] {
                    input.bias = None;
                }
            }
        }
        let normal = Initializer::Normal { mean: 0.0, std: 0.02 };
        Self {
            patches: Conv2dConfig::new([channels, width], patch).with_stride(patch).init(device),
            class_token: normal.init([1, 1, width], device),
            positions: normal.init([1, size.tokens(), width], device),
            dropout: DropoutConfig::new(size.dropout).init(),
            encoder,
            norm: LayerNormConfig::new(width).with_epsilon(size.epsilon).init(device),
            image: size.image,
        }
    }

    /// The encoder in a directory of Hugging Face: the size in its `config.json`, and its weights, which stay in their file as far as the
    /// options say. What a checkpoint has on top of the encoder is not loaded.
    ///
    /// ```no_run
    /// use burn::tensor::{Device, Distribution, Tensor};
    /// use burn_memsave::lazy::LazyOptions;
    /// use burn_memsave_models::{FeatureOptions, Pooling, features, memsave::vit::Vit};
    ///
    /// let (model, _) = Vit::from_directory("vit-base-patch16-224", &LazyOptions::new(), &Device::flex())?;
    /// let images = Tensor::random([8, 3, 224, 224], Distribution::Default, &Device::flex());
    /// for rows in features(&model, [images], FeatureOptions::new(Pooling::First)) {
    ///     println!("{}", rows?); // [8, 768]
    /// }
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
        let size = VitSize::from_directory(directory.as_ref())?;
        Self::from_file(&size, WeightFile::open(directory)?, options, device)
    }

    /// An encoder of this size with the weights in a file that is open, or [mapped](WeightFile::open_mapped).
    ///
    /// # Errors
    ///
    /// If the weights cannot be loaded.
    pub fn from_file(
        size: &VitSize,
        file: WeightFile,
        options: &LazyOptions,
        device: &Device,
    ) -> Result<(Self, LazyReport), LoadError> {
        load_file(Self::new(size, device), file, options)
    }

    /// Features `[batch, tokens, width]` of images `[batch, channels, height, width]`: those of a token for the whole image, and then those of the
    /// patches, row by row.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<3> {
        self.norm.forward(self.through(self.encoder.layers.len(), images))
    }

    /// What so many layers make of images.
    fn through(&self, layers: usize, images: Tensor<4>) -> Tensor<3> {
        let patches = self.patches.forward(images).flatten::<3>(2, 3).swap_dims(1, 2);
        let [batch, _, width] = patches.dims();
        let class_token = self.class_token.val().expand([batch, 1, width]);
        let x = Tensor::cat(vec![class_token, patches], 1) + self.positions.val();
        self.encoder.layers.iter().take(layers).fold(self.dropout.forward(x), |x, layer| {
            plan::block(layer, x, |layer, x| layer.forward(x, None, None))
        })
    }
}

impl FeatureEncoder for Vit {
    type Batch = Tensor<4>;

    fn layers(&self) -> usize {
        self.encoder.layers.len()
    }

    fn device(&self) -> Device {
        self.norm.gamma.device()
    }

    fn hidden_states(&self, batch: &Self::Batch, layer: Option<usize>) -> Result<HiddenStates, FeatureError> {
        let [images, channels, height, width] = batch.dims();
        check(self, images, layer)?;
        let expected = [self.patches.weight.lazy_shape()[1], self.image[0], self.image[1]];
        if [channels, height, width] != expected {
            return Err(FeatureError::Images { found: [channels, height, width], expected });
        }
        let batch = batch.clone().to_device(&self.device()).cast(self.norm.gamma.val().dtype());
        let states = match layer {
            Some(layers) => self.through(layers, batch),
            None => self.forward(batch),
        };
        let [_, tokens, _] = states.dims();
        Ok(HiddenStates { states, lengths: vec![tokens; images] })
    }
}

impl HuggingFace for Vit {
    const NAMES: &'static [(&'static str, &'static str)] = &[
        (r"^vit\.", ""),
        // What is on top of the encoder, and what takes the place of patches that are to be guessed.
        (r"^(pooler|classifier|decoder)\.", "unused.$1."),
        (r"^embeddings\.mask_token$", "unused.mask_token"),
        (r"^embeddings\.cls_token$", "class_token"),
        (r"^embeddings\.position_embeddings$", "positions"),
        (r"^embeddings\.patch_embeddings\.projection\.", "patches."),
        (r"^layernorm\.", "norm."),
        // Before version 5 of `transformers`, and since then.
        (r"^(encoder\.layer|layers)\.", "encoder.layers."),
        (r"\.layernorm_before\.", ".norm_2."),
        (r"\.layernorm_after\.", ".norm_1."),
        (r"\.attention\.attention\.", ".mha."),
        (r"\.attention\.output\.dense\.", ".mha.output."),
        (r"\.intermediate\.dense\.", ".pwff.linear_inner."),
        (r"\.output\.dense\.", ".pwff.linear_outer."),
        (r"\.attention\.q_proj\.", ".mha.query."),
        (r"\.attention\.k_proj\.", ".mha.key."),
        (r"\.attention\.v_proj\.", ".mha.value."),
        (r"\.attention\.o_proj\.", ".mha.output."),
        (r"\.mlp\.fc1\.", ".pwff.linear_inner."),
        (r"\.mlp\.fc2\.", ".pwff.linear_outer."),
    ];

    /// As of version 5 of `transformers`.
    fn module_name(&self, path: &str) -> String {
        let here_and_there = [
            ("patches", "embeddings.patch_embeddings.projection"),
            (".norm_2", ".layernorm_before"),
            (".norm_1", ".layernorm_after"),
            ("encoder.layers.", "layers."),
            (".mha.query", ".attention.q_proj"),
            (".mha.key", ".attention.k_proj"),
            (".mha.value", ".attention.v_proj"),
            (".mha.output", ".attention.o_proj"),
            (".pwff.linear_inner", ".mlp.fc1"),
            (".pwff.linear_outer", ".mlp.fc2"),
        ];
        match path {
            "norm" => "layernorm".into(),
            _ => replaced(path, &here_and_there),
        }
    }
}
