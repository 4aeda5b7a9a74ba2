// Vision transformers (arXiv 2010.11929), written once, with the topology of torchvision. The module that includes this file chooses `nn`.
use crate::vision::torchvision::{Keys, Torchvision};
use crate::vision::{Classifier, Vit};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use burn_memsave::plan;
use nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use nn::conv::{Conv2d, Conv2dConfig};
use nn::{
    Dropout, DropoutConfig, Gelu, Initializer, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};

fn layer_norm(width: usize, device: &Device) -> LayerNorm {
    LayerNormConfig::new(width).with_epsilon(1e-6).init(device)
}

/// Attention and a feed-forward block. Each reads the features through its norm, and its result is added to them.
#[derive(Module, Debug)]
pub struct Block {
    attention_norm: LayerNorm,
    attention: MultiHeadAttention,
    norm: LayerNorm,
    inner: Linear,
    gelu: Gelu,
    outer: Linear,
    dropout: Dropout,
}

impl Block {
    fn new(net: &Vit, device: &Device) -> Self {
        let attention = MultiHeadAttentionConfig::new(net.width, net.heads).with_dropout(net.attention_dropout);
        Self {
            attention_norm: layer_norm(net.width, device),
            attention: attention.init(device),
            norm: layer_norm(net.width, device),
            inner: LinearConfig::new(net.width, net.hidden).init(device),
            gelu: Gelu::new(),
            outer: LinearConfig::new(net.hidden, net.width).init(device),
            dropout: DropoutConfig::new(net.dropout).init(),
        }
    }

    fn forward(&self, x: Tensor<3>) -> Tensor<3> {
        let normalized = self.attention_norm.forward(x.clone());
        let attention = self.attention.forward(MhaInput::self_attn(normalized)).context;
        let x = self.dropout.forward(attention) + x;
        let inner = self.gelu.forward(self.inner.forward(self.norm.forward(x.clone())));
        self.dropout.forward(self.outer.forward(self.dropout.forward(inner))) + x
    }
}

/// A vision transformer that classifies images of one size.
#[derive(Module, Debug)]
pub struct Net {
    patches: Conv2d,
    class_token: Param<Tensor<3>>,
    positions: Param<Tensor<3>>,
    dropout: Dropout,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: Linear,
}

impl Classifier for Net {
    type Variant = Vit;

    fn new(net: Vit, device: &Device) -> Self {
        let patch = [net.patch; 2];
        let tokens = (net.image / net.patch).pow(2) + 1;
        let positions = Initializer::Normal { mean: 0.0, std: 0.02 };
        Self {
            patches: Conv2dConfig::new([3, net.width], patch).with_stride(patch).init(device),
            class_token: Initializer::Zeros.init([1, 1, net.width], device),
            positions: positions.init([1, tokens, net.width], device),
            dropout: DropoutConfig::new(net.dropout).init(),
            blocks: (0..net.layers).map(|_| Block::new(&net, device)).collect(),
            norm: layer_norm(net.width, device),
            head: LinearConfig::new(net.width, net.classes).init(device),
        }
    }

    fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let patches = self.patches.forward(images).flatten::<3>(2, 3).swap_dims(1, 2);
        let [batch, _, width] = patches.dims();
        let class_token = self.class_token.val().expand([batch, 1, width]);
        let x = Tensor::cat(vec![class_token, patches], 1) + self.positions.val();
        let x = self.dropout.forward(x);
        let x = self.blocks.iter().fold(x, |x, block| plan::block(block, x, Block::forward));
        self.head.forward(self.norm.forward(x).narrow(1, 0, 1).flatten(1, 2))
    }
}

impl Torchvision for Net {
    fn keys(&self) -> Keys {
        Keys::default()
            .replace(r"^conv_proj\.", "patches.")
            .replace(r"^encoder\.pos_embedding$", "positions")
            .replace(r"^encoder\.layers\.encoder_layer_(\d+)\.", "blocks.${1}.")
            .replace(r"\.ln_1\.", ".attention_norm.")
            .replace(r"\.self_attention\.", ".attention.")
            .replace(r"\.out_proj\.", ".output.")
            .replace(r"\.ln_2\.", ".norm.")
            // The second name is that of older checkpoints.
            .replace(r"\.mlp\.(0|linear_1)\.", ".inner.")
            .replace(r"\.mlp\.(3|linear_2)\.", ".outer.")
            .replace(r"^encoder\.ln\.", "norm.")
            .replace(r"^heads\.head\.", "head.")
    }
}
