//! What differs between families of decoders.
use crate::size::Size;
use burn_memsave_models::DecoderSize;

/// A family of decoders.
pub struct Family {
    pub vocabulary: usize,
    /// The longest text.
    pub length: usize,
    /// The dense layers of a block for which Python's `peft` has adapters, a regular expression.
    pub targets: &'static str,
    /// Names of layers in Python, and these layers here, regular expressions.
    names: &'static [(&'static str, &'static str)],
    /// Whether layers here are parts of layers in Python.
    pub joined: bool,
}

impl Family {
    pub fn of(size: &Size) -> Self {
        let (targets, names) = match size {
            Size::Decoder(size) => (of_decoder(size), DECODER),
            Size::Gpt2(_) => (r"attention\.(qkv|output)|inner|outer", GPT2),
            Size::GptJ(_) => (r"attention\.(query|key|value|output)|inner|outer", GPTJ),
        };
        let (vocabulary, joined) = match size {
            Size::Decoder(size) => (size.vocabulary, size.joined),
            Size::Gpt2(size) => (size.vocabulary, false),
            Size::GptJ(size) => (size.vocabulary, false),
        };
        Self { vocabulary, length: size.length(), targets, names, joined }
    }

    /// Layers by their names here.
    pub fn named_here(&self, targets: &str) -> String {
        self.names.iter().fold(targets.to_string(), |targets, (there, here)| targets.replace(there, here))
    }
}

fn of_decoder(size: &DecoderSize) -> &'static str {
    match (size.joined, size.experts) {
        // Others are parts of layers there.
        (true, _) => r"attention\.output|down",
        (false, Some(_)) => r"attention\.(query|key|value|output)",
        (false, None) => r"attention\.(query|key|value|output)|gate\.linear_(inner|outer)|down",
    }
}

const DECODER: &[(&str, &str)] = &[
    ("q_proj", r"attention\.query"),
    ("k_proj", r"attention\.key"),
    ("v_proj", r"attention\.value"),
    ("o_proj", r"attention\.output"),
    ("gate_proj", r"gate\.linear_inner"),
    ("up_proj", r"gate\.linear_outer"),
    ("down_proj", "down"),
];

const GPT2: &[(&str, &str)] =
    &[("c_attn", r"attention\.qkv"), ("c_proj", r"(attention\.output|outer)"), ("c_fc", "inner")];

/// Of GPT-J and of Phi.
const GPTJ: &[(&str, &str)] = &[
    ("q_proj", r"attention\.query"),
    ("k_proj", r"attention\.key"),
    ("v_proj", r"attention\.value"),
    ("out_proj", r"attention\.output"),
    ("dense", r"attention\.output"),
    ("fc_in", "inner"),
    ("fc_out", "outer"),
    ("fc1", "inner"),
    ("fc2", "outer"),
];
