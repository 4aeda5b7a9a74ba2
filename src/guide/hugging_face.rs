//! A Hugging Face model larger than memory: generate text with it, fine-tune it, and take the adapter back to Python.
//!
//! The crate `burn-memsave-models` has models of Hugging Face in our layers. `from_directory` reads `config.json`, and the weights
//! stay in their safetensors, as [offload](super::offload) describes. If a configuration asks for something that is not implemented, the
//! error names the field.
//!
//! | models | `generate` | `finetune_model` | `features` |
//! | --- | --- | --- | --- |
//! | Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3 (text) | yes | yes | |
//! | Mixtral, Qwen2-MoE, Qwen3-MoE | yes | attentions | |
//! | Phi-3, Phi-3.5, Phi-4 | yes | outputs of attentions and of feed-forward layers | |
//! | GPT-2, GPT-J, Phi-1, Phi-1.5, Phi-2 | yes | yes, without dropout of attention weights | |
//! | BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ViT | | | yes |
//! | T5 1.0, T5 1.1, FLAN-T5 | `T5::reader`, in code | not yet | of the encoder |
//! | Whisper | `Whisper::listener`, in code | not yet | of the encoder, in code |
//!
//! Two programs work on a directory from the hub (config.json, tokenizer.json, safetensors, and tokenizer_config.json for chats):
//!
//! ```sh
//! cargo run --release -p burn-memsave-models --features text --example generate -- \
//!     --model Qwen2.5-7B-Instruct --chat --prompt "What is a tensor?" --budget 2GiB --dtype bf16
//! cargo run --release -p burn-memsave-models --features text --example finetune_model -- \
//!     --model Qwen2.5-0.5B --data texts.jsonl --budget 1GiB --step-budget 512MiB --output adapter
//! ```
//!
//! The weights may be packed, in the four bits of bitsandbytes, in float8, or in a GGUF file of a Llama, Mistral, Qwen2, Qwen3, Gemma 2 or
//! Gemma 3: `generate --model model.gguf`, with the tokenizer of the file, or `finetune_model --model model.gguf --tokenizer DIRECTORY`, where
//! the directory is that of the same model in Python. Packed weights are unpacked whenever they are read. With the default of
//! `generate`, `--dtype f32`, a token unpacks a part of a weight at a time, and nothing of it is cached in memory: the budget is then for prompts of more
//! than 32 tokens. Fine-tuning adapters on such weights is QLoRA.
//!
//! `finetune_model` trains LoRA or DoRA. It recomputes as many blocks as the budget of a step requires, computes logits in chunks,
//! and keeps the state of AdamW in 8 bits. A run that was stopped resumes exactly where it was
//! saved. Python loads the result with `AutoPeftModelForCausalLM.from_pretrained("adapter")`, and `generate --adapter adapter` runs it.
//! `--export merged` also writes the whole model with the adapter merged into its weights, one weight at a time (not for Phi-3). Adapters that
//! Python could not load are refused before the first step: those of experts, and of the layers of Phi-3 that are parts of one in Python.
//!
//! # Features
//!
//! Encoders load in the same way: `Bert` (BERT, RoBERTa, XLM-RoBERTa, CamemBERT), `T5Encoder`, `Vit` and the encoder of `Whisper`. `features` computes
//! their hidden states, of any layer, for each token, for the first, or their mean. The texts of a batch may have different lengths: they are
//! padded, and no token sees padding. `T5` and `Whisper` also generate text, by `T5::reader` and `Whisper::listener`.
//!
//! ```no_run
//! use burn::tensor::Device;
//! use burn_memsave::lazy::LazyOptions;
//! use burn_memsave_models::{FeatureOptions, Pooling, features, memsave::bert::Bert};
//!
//! let options = LazyOptions::new().with_budget(512 << 20);
//! let (model, _) = Bert::from_directory("multilingual-e5-large", &options, &Device::flex())?;
//! let batch = vec![vec![0, 41, 1294, 12, 2], vec![0, 33600, 2]]; // from the crate `tokenizers`
//! for rows in features(&model, [batch], FeatureOptions::new(Pooling::Mean)) {
//!     println!("{}", rows?); // [2, 1024]
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The example `features` does this with the lines of a file, or with images, and writes a safetensors file:
//!
//! ```sh
//! cargo run --release -p burn-memsave-models --features text --example features -- \
//!     --model multilingual-e5-large --data texts.txt --pool mean --budget 512MiB --output features.safetensors
//! ```
//!
//! Texts of similar lengths are computed together. Every batch reads the weights beyond the budget once, so that larger batches (`--at-once`) read
//! fewer bytes for a text, and take more memory.
//!
//! # What it saves
//!
//! All weights beyond the budget stay in the file. `cargo bench -p burn-memsave-models --bench generate` generates with a Llama of
//! 1626 MiB in bf16 (16 blocks, width 2048, batch 1), whose files are in the page cache, on two cores of an Intel Xeon with AVX-512:
//!
//! | weights in memory | tokens/s | heap peak (MiB) | read per token (MiB) |
//! | --- | --- | --- | --- |
//! | all, read when the model is loaded | 7.1 | 1633 | 0 |
//! | all that were used | 8.2 | 1629 | 0 |
//! | half | 3.1 | 816 | 827 |
//! | a quarter | 3.0 | 409 | 1337 |
//! | a quarter, mapped | 7.4 | 3 (and the page cache) | 1138 |
//! | `transformers`, all | 7.7 | | |
//! | `transformers` with `disk_offload` | 1.9 | | |
//!
//! Models of the same size in GGUF, with no budget. The products of `llama.cpp` round activations to 8 bits; ours are exact.
//!
//! | format | copied (tokens/s) | mapped | `llama.cpp` |
//! | --- | --- | --- | --- |
//! | Q8_0 | 4.2 | 5.8 | 11.9 |
//! | Q6_K | 5.0 | 6.9 | 15.5 |
//! | Q4_K | 4.8 | 7.2 | 22.1 |
//! | Q4_0 | 5.8 | 8.1 | 21.9 |
//!
//! `ulimit -v 2097152` (2 GiB) is enough for a model of 24.2 GB in f32 with `--budget 1GiB`, whose heap peaks at 1010 MiB.
//!
//! # What it costs
//!
//! Every token needs every weight once, so a token takes at least the time to read the bytes beyond the budget. Three options of
//! `generate` help:
//!
//! - `--dtype` with the dtype of the file: in bf16, half as many bytes as in f32 are in memory, and nothing is converted. Products are
//!   summed in f32.
//! - `--mapped`: weights are used where they lie in the page cache, without a copy. No process may write to the file meanwhile.
//! - Several prompts at once: a weight that was read serves all of them.
//!
//! In training, each part of a batch (`--at-once`) reads every weight twice, or three times where its block is recomputed. The head is
//! read once, in blocks of 16 MiB if it is larger than the budget or is the embedding.
//!
//! # When to use it
//!
//! Use it if a model does not fit. With a budget of all weights, only the first token waits for the file.
//!
//! # Example
//!
//! ```no_run
//! use burn::tensor::Device;
//! use burn_memsave::lazy::LazyOptions;
//! use burn_memsave_models::{GenerateOptions, generate, memsave::decoder::Llama};
//!
//! let options = LazyOptions::new().with_budget(2 << 30); // the dtype is that of the file
//! let (model, report) = Llama::from_directory("Qwen2.5-7B-Instruct", &options, &Device::flex())?;
//! let prompts = [vec![9707, 11, 1879]]; // from the crate `tokenizers`
//! generate(&model, &prompts, &GenerateOptions::new(20), |_, token| println!("{token}"))?;
//! println!("{}", report.cache);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # In PyTorch
//!
//! `accelerate`'s `disk_offload` and `AirLLM` for inference; `peft` for the adapters.
