//! Tokenizers of GGUF files divide texts as Python's own do.
#![cfg(feature = "text")]
use burn_memsave::lazy::WeightFile;
use burn_memsave_models::tokenizer_of_gguf;
use serde::Deserialize;
use std::fs;

mod python;

#[derive(Deserialize)]
struct Expected {
    text: String,
    ids: Vec<u32>,
    decoded: String,
}

#[test]
fn texts_are_divided_as_in_python() {
    let Some(python) = python::with(&["gguf", "tokenizers", "sentencepiece"]) else { return };
    let directory = tempfile::tempdir().unwrap();
    python::run(&python, "gguf_tokenizers.py", &[], directory.path());
    for name in ["llama-bpe", "qwen2", "gpt-2", "pieces", "pieces_without_prefix"] {
        let file = WeightFile::open(directory.path().join(format!("{name}.gguf"))).unwrap();
        let tokenizer = tokenizer_of_gguf(&file).unwrap();
        let expected = fs::read(directory.path().join(format!("{name}.json"))).unwrap();
        for Expected { text, ids, decoded } in serde_json::from_slice::<Vec<Expected>>(&expected).unwrap() {
            let encoding = tokenizer.encode(&text[..], true).unwrap();
            assert_eq!(encoding.get_ids(), ids, "{name}: {text:?}, {:?}", encoding.get_tokens());
            assert_eq!(tokenizer.decode(&ids, true).unwrap(), decoded, "{name}: {text:?}");
        }
    }
}
