//! The tokenizer that a GGUF file has, as one of the crate `tokenizers`.
use crate::ConfigError;
use crate::hugging_face::LoadError;
use burn_memsave::lazy::{LazyError, WeightFile};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use tokenizers::Tokenizer;

/// How Llama 3 divides a text into words.
const LLAMA_3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// What files call it.
const LLAMA_3_NAMES: [&str; 3] = ["llama-bpe", "llama3", "llama-v3"];
/// How Qwen2 does: every digit is a word.
const QWEN_2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The kinds of tokens.
const NORMAL: i64 = 1;
const CONTROL: i64 = 3;
const USER_DEFINED: i64 = 4;

/// The tokenizer in a GGUF file: byte-level pairs as those of GPT-2, Llama 3 or Qwen, or pairs of SentencePiece as those of Llama 2, Mistral and
/// Gemma. It neither pads nor truncates.
///
/// # Errors
///
/// If the file has none, or one of another kind.
pub fn tokenizer_of_gguf(file: &WeightFile) -> Result<Tokenizer, LoadError> {
    let malformed = |reason: String| LazyError::Malformed { file: file.path().to_path_buf(), reason };
    let Some(metadata) = file.read_metadata()? else {
        return Err(malformed("it is not in the format GGUF".into()).into());
    };
    let fields = Fields { file, metadata: &metadata };
    let tokens = fields.texts("tokens")?;
    let kinds: Vec<i64> = match fields.optional("token_type") {
        Some(kinds) => {
            kinds.as_array().into_iter().flatten().map(|kind| kind.as_i64().unwrap_or(NORMAL)).collect()
        }
        None => vec![NORMAL; tokens.len()],
    };
    if kinds.len() != tokens.len() {
        return Err(malformed(format!("{} tokens, and the kinds of {}", tokens.len(), kinds.len())).into());
    }
    let mut parts = match fields.require("model")?.as_str() {
        Some("gpt2") => byte_level(&fields, &tokens)?,
        Some("llama") => sentence_pieces(&fields, &tokens, &kinds)?,
        _ => return Err(fields.unsupported("model")),
    };
    let added =
        tokens.iter().zip(&kinds).enumerate().filter(|(_, (_, kind))| [CONTROL, USER_DEFINED].contains(kind));
    let added = added.map(|(id, (token, kind))| {
        json!({
            "id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            "special": *kind == CONTROL,
        })
    });
    parts.insert("added_tokens".into(), added.collect());
    parts.insert("post_processor".into(), first_and_last(&fields, &tokens)?);
    parts.extend(
        [("version", "1.0".into()), ("truncation", Value::Null), ("padding", Value::Null)]
            .map(|(name, value)| (name.to_owned(), value)),
    );
    let text = Value::Object(parts).to_string();
    Tokenizer::from_bytes(text).map_err(|error| malformed(format!("its tokenizer: {error}")).into())
}

/// What the file says of its tokenizer.
struct Fields<'a> {
    file: &'a WeightFile,
    metadata: &'a Map<String, Value>,
}

impl Fields<'_> {
    fn optional(&self, field: &str) -> Option<&Value> {
        self.metadata.get(&format!("tokenizer.ggml.{field}"))
    }

    fn require(&self, field: &str) -> Result<&Value, LoadError> {
        self.optional(field).ok_or_else(|| {
            let (file, field) = (self.file.path().to_path_buf(), format!("tokenizer.ggml.{field}"));
            ConfigError::Missing { file, field }.into()
        })
    }

    fn unsupported(&self, field: &str) -> LoadError {
        let value = self.optional(field).cloned().unwrap_or_default();
        let (file, field) = (self.file.path().to_path_buf(), format!("tokenizer.ggml.{field}"));
        ConfigError::Unsupported { file, field, value }.into()
    }

    /// A list of texts.
    fn texts(&self, field: &str) -> Result<Vec<&str>, LoadError> {
        let texts = self.require(field)?.as_array().map(|texts| texts.iter().map(Value::as_str).collect());
        texts.flatten().ok_or_else(|| self.unsupported(field))
    }

    fn is(&self, field: &str, usual: bool) -> bool {
        self.optional(field).and_then(Value::as_bool).unwrap_or(usual)
    }

    fn token(&self, field: &str) -> Option<usize> {
        self.optional(field)?.as_u64()?.try_into().ok()
    }
}

fn vocabulary(tokens: &[&str]) -> Map<String, Value> {
    tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), id.into())).collect()
}

/// Pairs of bytes, which are written as letters.
fn byte_level(fields: &Fields<'_>, tokens: &[&str]) -> Result<Map<String, Value>, LoadError> {
    let words = |pattern: &str| {
        json!({"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]})
    };
    let (words, normalizer, whole_words) = match fields.require("pre")?.as_str() {
        Some(name) if LLAMA_3_NAMES.contains(&name) => (words(LLAMA_3), Value::Null, true),
        Some("qwen2") => (words(QWEN_2), json!({"type": "NFC"}), false),
        Some("gpt-2") => {
            let words = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
            (words, Value::Null, false)
        }
        _ => return Err(fields.unsupported("pre")),
    };
    let merges = fields.texts("merges")?;
    let pairs: Option<Vec<Value>> = merges.iter().map(|merge| Some(pair(merge.split_once(' ')?))).collect();
    let pairs = pairs.ok_or_else(|| fields.unsupported("merges"))?;
    let parts = json!({
        "normalizer": normalizer,
        "pre_tokenizer": words,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": whole_words,
            "vocab": vocabulary(tokens), "merges": pairs,
        },
    });
    Ok(object(parts))
}

/// Pairs of pieces, the ones with the highest scores first, and bytes for what has no piece.
fn sentence_pieces(
    fields: &Fields<'_>,
    tokens: &[&str],
    kinds: &[i64],
) -> Result<Map<String, Value>, LoadError> {
    let scores = fields.require("scores")?.as_array();
    let scores: Option<Vec<f64>> = scores.and_then(|scores| scores.iter().map(Value::as_f64).collect());
    let scores = scores.filter(|scores| scores.len() == tokens.len());
    let scores = scores.ok_or_else(|| fields.unsupported("scores"))?;
    let unknown = fields.token("unknown_token_id").and_then(|id| tokens.get(id));
    let space = "\u{2581}";
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": space});
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": space}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    let normalizer = match fields.is("add_space_prefix", true) {
        true => {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
            json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": space}, replace]})
        }
        false => replace,
    };
    let parts = json!({
        "normalizer": normalizer,
        "pre_tokenizer": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocabulary(tokens), "merges": merges_of_scores(tokens, kinds, &scores),
        },
    });
    Ok(object(parts))
}

/// All pairs of pieces that are a piece together, in the order in which SentencePiece merges them.
fn merges_of_scores(tokens: &[&str], kinds: &[i64], scores: &[f64]) -> Vec<Value> {
    let pieces =
        tokens.iter().zip(kinds).enumerate().filter(|(_, (_, kind))| [NORMAL, USER_DEFINED].contains(kind));
    let ids: HashMap<&str, usize> = pieces.map(|(id, (token, _))| (*token, id)).collect();
    let mut merges = vec![];
    for (token, score) in tokens.iter().zip(scores).filter(|(token, _)| ids.contains_key(*token)) {
        let starts = token.char_indices().skip(1).map(|(start, _)| token.split_at(start));
        merges.extend(
            starts.filter_map(|(left, right)| Some((*score, *ids.get(left)?, *ids.get(right)?, left, right))),
        );
    }
    // Of pairs that make the same piece, the one with the pieces that come first.
    merges.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    merges.into_iter().map(|(.., left, right)| pair((left, right))).collect()
}

fn pair((left, right): (&str, &str)) -> Value {
    json!([left, right])
}

/// The tokens before and after every text.
fn first_and_last(fields: &Fields<'_>, tokens: &[&str]) -> Result<Value, LoadError> {
    // Files of Llama 3 need not say so.
    let is_llama = |pre: &Value| pre.as_str().is_some_and(|pre| LLAMA_3_NAMES.contains(&pre));
    let has_first = fields.require("model")? == "llama" || fields.optional("pre").is_some_and(is_llama);
    let token = |wanted: bool, field: &str| -> Result<Option<(usize, String)>, LoadError> {
        if !wanted {
            return Ok(None);
        }
        let id =
            fields.token(field).filter(|&id| id < tokens.len()).ok_or_else(|| fields.unsupported(field))?;
        Ok(Some((id, tokens[id].to_owned())))
    };
    let first = token(fields.is("add_bos_token", has_first), "bos_token_id")?;
    let last = token(fields.is("add_eos_token", false), "eos_token_id")?;
    let named = |(_, name): &(usize, String)| json!({"SpecialToken": {"id": name, "type_id": 0}});
    let around = |id: &str, kind: usize| -> Vec<Value> {
        let text = json!({"Sequence": {"id": id, "type_id": kind}});
        first.as_ref().map(named).into_iter().chain([text]).chain(last.as_ref().map(named)).collect()
    };
    let single = around("A", 0);
    let both: Vec<Value> = single.iter().cloned().chain(around("B", 1)).collect();
    let special = first
        .iter()
        .chain(&last)
        .map(|(id, name)| (name.clone(), json!({"id": name, "ids": [id], "tokens": [name]})));
    let special: Map<String, Value> = special.collect();
    Ok(json!({"type": "TemplateProcessing", "single": single, "pair": both, "special_tokens": special}))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(fields) => fields,
        _ => Map::new(),
    }
}
