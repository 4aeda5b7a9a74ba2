//! Rows of attention and transformers.
use super::{Case, Check, Input, Notes, QUERIES, Shapes, TOKENS, Visitor, kept, row};
use burn::tensor::{Bool, Tensor};

const VARIANT: &[Check] = &[Check::Time];
const LUCK: &str = "gradients of a few numbers after many layers have one error; the parts are compared";
const ERF: &str = "it approximates the error function (0.22.1)";
const ROOT: &str = "stock rounds the root of the width of a head to f32";
const SUM_OF_PARTS: &str = "the sum of its parts";

fn heads(width: usize) -> usize {
    (width / 2).min(16)
}

pub fn visit(visitor: &mut impl Visitor) {
    for dropout in [0.0, 0.1] {
        // Heads keep queries, keys and values, and with dropout one bit per weight. The dense layers keep their inputs.
        let attended = move |case: Case, x: Input<3>| {
            let [batch, length, width] = x.shape;
            let queries = batch * heads(width) * length;
            let bits = 8 * (queries * length).div_ceil(64);
            let attention = 3 * x.floats() + if dropout > 0.0 { bits } else { 0 };
            match case {
                Case::Trainable | Case::InputUntracked => attention + 2 * x.floats(),
                Case::Frozen | Case::BiasOnly => attention,
                Case::Untracked => 0,
            }
        };
        row! {
            visitor, format!("multi-head attention, dropout {dropout}"), TOKENS, attended,
            config(device) |nn, [.., n]| {
                let attention = nn::attention::MultiHeadAttentionConfig::new(n, heads(n));
                attention.with_dropout(dropout)
            },
            forward |nn, layer, x| layer.forward(nn::attention::MhaInput::self_attn(x)).context,
            within(1e-6, ROOT), when(dropout > 0.0, Notes::draws)
        }
    }
    for dropout in [0.0, 0.1] {
        row! {
            visitor, format!("transformer encoder, dropout {dropout}"), TOKENS, kept::nothing,
            config_one_way(device) |nn, [.., n]| {
                let encoder = nn::transformer::TransformerEncoderConfig::new(n, 4 * n, heads(n), 1);
                encoder.with_norm_first(true).with_dropout(dropout)
            },
            forward |nn, layer, x| layer.forward(nn::transformer::TransformerEncoderInput::new(x)),
            unstated(SUM_OF_PARTS), within(1e-6, ROOT), not_on_ndarray(ERF), not_in_half(LUCK), when(dropout > 0.0, Notes::draws)
        }
    }
    row! {
        visitor, "multi-head attention, quiet", TOKENS, kept::nothing,
        config(device) |nn, [.., n]| {
            let attention = nn::attention::MultiHeadAttentionConfig::new(n, heads(n)).with_quiet_softmax(true);
            attention.with_dropout(0.0).with_key_bias(false)
        },
        forward |nn, layer, x| layer.forward(nn::attention::MhaInput::self_attn(x)).context,
        unstated(SUM_OF_PARTS), within(1e-6, ROOT), without(VARIANT, "as multi-head attention")
    }
    row! {
        visitor, "transformer decoder", TOKENS, kept::nothing,
        config_one_way(device) |nn, [.., n]|
            nn::transformer::TransformerDecoderConfig::new(n, 2 * n, heads(n), 2).with_dropout(0.0),
        forward |nn, layer, x| {
            let memory = x.clone();
            layer.forward(nn::transformer::TransformerDecoderInput::new(x, memory))
        },
        unstated(SUM_OF_PARTS), within(1e-6, ROOT), not_on_ndarray(ERF), not_in_half(LUCK),
        cancels("a bias of the keys moves all scores of a query alike"), without(VARIANT, "as the encoder")
    }
    row! {
        visitor, "transformer encoder layer", TOKENS, kept::nothing,
        module(device) |nn, [.., n]| {
            let encoder = nn::transformer::TransformerEncoderConfig::new(n, 2 * n, heads(n), 2);
            nn::transformer::TransformerEncoderLayer::new(&encoder.with_dropout(0.0), device)
        },
        forward |nn, layer, x| layer.forward(x, None, None),
        unstated(SUM_OF_PARTS), within(1e-6, ROOT), not_on_ndarray(ERF), not_in_half(LUCK), unlike("what is inside is named"), without(VARIANT, "as the encoder")
    }
    row! {
        visitor, "transformer decoder layer", TOKENS, kept::nothing,
        module(device) |nn, [.., n]| {
            let decoder = nn::transformer::TransformerDecoderConfig::new(n, 2 * n, heads(n), 2);
            nn::transformer::TransformerDecoderLayer::new(&decoder.with_dropout(0.0), device)
        },
        forward |nn, _layer, x| x,
        unlike("what is inside is named"), without(VARIANT, "as the encoder"),
        without(&[Check::Bytes, Check::Gradients, Check::Wgpu], "its output cannot be read: as the decoder")
    }
    row! {
        // A whole number of lanes. Other operands are packed first, and ours packs different ones than stock.
        visitor, "position-wise feed-forward", TOKENS.test([4, 32, 16]), kept::nothing,
        config_one_way(device) |nn, [.., n]|
            nn::transformer::PositionWiseFeedForwardConfig::new(n, 2 * n).with_dropout(0.0),
        unstated(SUM_OF_PARTS), not_on_ndarray(ERF),
        without(VARIANT, "as the encoder")
    }
    for quiet in [false, true] {
        let name = if quiet { "cross attention, quiet" } else { "cross attention" };
        row! {
            visitor, name, TOKENS, kept::nothing,
            config(device) |nn, [.., n]| {
                let attention = nn::attention::CrossAttentionConfig::new(n, n, 4, 2, 5).with_dropout(0.0);
                attention.with_quiet_softmax(quiet).with_min_float(-1e3)
            },
            forward |nn, layer, x| {
                let context = x.clone();
                layer.forward(x, context, None::<Tensor<2, Bool>>)
            },
            unstated(SUM_OF_PARTS), within(1e-6, ROOT), unlike("its scale is one of ours"),
            cancels("a bias of the keys moves all scores of a query alike"),
            without(VARIANT, "as multi-head attention")
        }
    }
    row! {
        visitor, "rotary encoding", QUERIES.test([2, 3, 9, 8]), kept::nothing,
        config(device) |nn, [.., length, width]| nn::RotaryEncodingConfig::new(length, width),
        only_f32("its table of frequencies is in f32, and no parameter"),
        unstated("a handle of the table, which the layer has, counts as kept"), without(VARIANT, "no part of the README's table")
    }
    row! {
        visitor, "rotary encoding of rows", Shapes::only([2, 9, 8]), kept::nothing,
        config(device) |nn, [.., length, width]| nn::RotaryEncodingConfig::new(length, width),
        only_f32("its table of frequencies is in f32, and no parameter"),
        unstated("a handle of the table, which the layer has, counts as kept"), without(VARIANT, "no part of the README's table")
    }
}
