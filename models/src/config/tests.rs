use super::*;
use crate::{GptJSize, LongRope, RotaryStretch};
use serde_json::json;
use std::fs;

fn size(changes: Value) -> Result<DecoderSize, String> {
    let mut config = json!({
        "model_type": "llama", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40,
        "num_attention_heads": 6, "num_hidden_layers": 2, "max_position_embeddings": 64,
        "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "use_cache": true, "hidden_act": "silu",
    });
    for (field, value) in changes.as_object().expect("fields") {
        config[field] = value.clone();
    }
    let directory = tempfile::tempdir().expect("a directory");
    fs::write(directory.path().join("config.json"), config.to_string()).expect("a file");
    DecoderSize::from_directory(directory.path()).map_err(|error| {
        let error = error.to_string();
        error.split_once("config.json: ").map_or(error.clone(), |(_, what)| what.into())
    })
}

#[test]
fn sizes_are_those_of_the_configuration() {
    let llama = DecoderSize {
        vocabulary: 50,
        width: 24,
        hidden: 40,
        heads: 6,
        key_heads: 6,
        head: None,
        layers: 2,
        length: 64,
        window: None,
        theta: 10_000.0,
        stretch: None,
        rotated: None,
        biases: Biases::NONE,
        joined: false,
        normalizes_heads: false,
        epsilon: 1e-6,
        tied: false,
        gemma: None,
        experts: None,
    };
    assert_eq!(size(json!({})), Ok(llama));
    let changes =
        json!({"num_key_value_heads": 3, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "head_dim": 6});
    let changed = DecoderSize { key_heads: 3, epsilon: 1e-5, tied: true, head: Some(6), ..llama };
    assert_eq!(size(changes), Ok(changed));
    let biases = Biases { inputs: true, output: true, feed_forward: true };
    assert_eq!(size(json!({"attention_bias": true, "mlp_bias": true})), Ok(DecoderSize { biases, ..llama }));
    let mistral = |window| Ok(DecoderSize { window, key_heads: 2, ..llama });
    assert_eq!(
        size(json!({"model_type": "mistral", "num_key_value_heads": 2})),
        mistral(Some(Window::new(4096)))
    );
    let changes = json!({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": null});
    assert_eq!(size(changes), mistral(None));
    let inputs = Biases { inputs: true, ..Biases::NONE };
    let unused = json!({
        "model_type": "qwen2", "num_key_value_heads": null, "use_sliding_window": false, "sliding_window": 8,
        "max_window_layers": 1
    });
    assert_eq!(size(unused), Ok(DecoderSize { biases: inputs, ..llama }));
    let layers = ["full_attention", "full_attention"];
    let qwen3 = json!({"model_type": "qwen3", "num_key_value_heads": 6, "layer_types": layers});
    assert_eq!(size(qwen3), Ok(DecoderSize { head: Some(128), normalizes_heads: true, ..llama }));
}

#[test]
fn gemmas_have_options_of_their_own() {
    let of = |changes: Value| {
        let mut gemma = json!({"num_key_value_heads": 6, "hidden_act": "gelu_pytorch_tanh"});
        for (field, value) in changes.as_object().expect("fields") {
            gemma[field] = value.clone();
        }
        size(gemma)
    };
    let first = of(json!({"model_type": "gemma", "hidden_act": "gelu"})).expect("a Gemma");
    assert_eq!((first.head, first.tied, first.gemma), (Some(256), true, Some(Gemma::default())));
    let second =
        of(json!({"model_type": "gemma2", "query_pre_attn_scalar": 64, "final_logit_softcapping": null}));
    let gemma = Gemma {
        normalizes_outputs: true,
        attention_scale: Some(0.125),
        attention_softcap: Some(50.0),
        logit_softcap: None,
    };
    let window = Window { full_every: Some(2), ..Window::new(4096) };
    let expected = DecoderSize { gemma: Some(gemma), window: Some(window), ..first };
    assert_eq!(second, Ok(expected));
    // As versions 4 and 5 of `transformers` write it.
    let window = Window { full_every: Some(2), theta: Some(100.0), ..Window::new(8) };
    let gemma = Gemma { attention_softcap: None, attention_scale: Some(1.0 / 16.0), ..gemma };
    let third = DecoderSize {
        gemma: Some(gemma),
        window: Some(window),
        theta: 1e6,
        stretch: Some(RotaryStretch::Linear(8.0)),
        normalizes_heads: true,
        ..first
    };
    let linear = json!({"rope_type": "linear", "factor": 8.0});
    let before = json!({
        "model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2, "rope_local_base_freq": 100.0,
        "rope_theta": 1000000.0, "rope_scaling": linear.clone(), "attn_logit_softcapping": null
    });
    assert_eq!(of(before), Ok(third));
    let mut full = linear;
    full["rope_theta"] = 1e6.into();
    let now = json!({
        "model_type": "gemma3_text", "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    });
    assert_eq!(of(now), Ok(third));
    let kinds =
        |kinds: &[&str]| of(json!({"model_type": "gemma2", "layer_types": kinds, "num_hidden_layers": 3}));
    let (full, window) = ("full_attention", "sliding_attention");
    let every =
        |size: Result<DecoderSize, String>| size.map(|size| size.window.and_then(|window| window.full_every));
    assert_eq!(every(kinds(&[window, window, full])), Ok(Some(3)));
    assert_eq!(every(kinds(&[full; 3])), Ok(Some(1)));
    assert_eq!(every(kinds(&[window; 3])), Ok(None));
    for wrong in [&[full, window, window][..], &[window; 2], &[window, "chunked_attention", window]] {
        assert!(kinds(wrong).is_err_and(|error| error.starts_with("layer_types is")));
    }
    let both_ways = json!({"model_type": "gemma3_text", "use_bidirectional_attention": true});
    assert_eq!(of(both_ways), Err("use_bidirectional_attention is true, which is not supported".into()));
}

#[test]
fn phi3_may_rotate_a_part_of_a_head() {
    let of = |changes: Value| {
        let mut phi3 =
            json!({"model_type": "phi3", "original_max_position_embeddings": 64, "hidden_size": 48});
        for (field, value) in changes.as_object().expect("fields") {
            phi3[field] = value.clone();
        }
        size(phi3)
    };
    // As versions 4 and 5 of `transformers` write it.
    let whole = of(json!({
        "rope_scaling": null, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "sliding_window": null, "attention_bias": false,
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"
        },
    }))
    .expect("a Phi-3");
    assert_eq!((whole.rotated, whole.window, whole.joined, whole.epsilon), (None, None, true, 1e-5));
    let rotary = json!({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0});
    assert_eq!(of(json!({"rope_parameters": rotary})), Ok(whole));
    let part = Ok(DecoderSize { rotated: Some(6), window: Some(Window::new(7)), ..whole });
    assert_eq!(of(json!({"partial_rotary_factor": 0.75, "sliding_window": 7})), part);
    let rotary = json!({"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75});
    assert_eq!(of(json!({"rope_parameters": rotary, "sliding_window": 7})), part);
    for (changes, expected) in [
        (json!({"partial_rotary_factor": 0.4}), "partial_rotary_factor is 0.4"),
        (json!({"partial_rotary_factor": 1.5}), "partial_rotary_factor is 1.5"),
        (json!({"partial_rotary_factor": 0}), "partial_rotary_factor is 0"),
        (json!({"partial_rotary_factor": "half"}), r#"partial_rotary_factor is "half""#),
        (
            json!({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}),
            "there is no rope_scaling.short_factor",
        ),
        (
            json!({"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0, 2.0]}}),
            "rope_scaling.short_factor is [1.0]",
        ),
        (
            json!({"rope_scaling": {"type": "su", "short_factor": [1, 1, 1, 1], "long_factor": [1.0, 1.0, 1.0, 0.0]}}),
            "rope_scaling.long_factor is [1.0,1.0,1.0,0.0]",
        ),
        (json!({"resid_pdrop": 0.1}), "resid_pdrop is 0.1"),
        (json!({"embd_pdrop": 0.1}), "embd_pdrop is 0.1"),
        (json!({"auto_map": {"AutoModelForCausalLM": "x.Y"}}), r#"auto_map.AutoModelForCausalLM is "x.Y""#),
        // Others rotate all features.
        (
            json!({
                "model_type": "llama", "original_max_position_embeddings": null, "partial_rotary_factor": 0.5
            }),
            "partial_rotary_factor is 0.5",
        ),
    ] {
        let error = of(changes).expect_err(expected);
        assert!(error.starts_with(expected), "{error}, not {expected}");
    }
}

#[test]
fn mixtures_of_experts() {
    let of = |changes: Value| {
        let mut mixture = json!({"num_key_value_heads": 6, "num_experts": 8, "moe_intermediate_size": 16});
        for (field, value) in changes.as_object().expect("fields") {
            mixture[field] = value.clone();
        }
        size(mixture)
    };
    let mixtral = of(json!({
        "model_type": "mixtral", "num_experts": null, "num_local_experts": 8, "moe_intermediate_size": null,
        "router_aux_loss_coef": 0.02, "output_router_logits": false, "router_jitter_noise": 0.0, "sliding_window": null,
    }))
    .expect("a Mixtral");
    let experts =
        Experts { count: 8, chosen: 2, hidden: 40, normalized: true, shared: None, every: 1, without: 0 };
    assert_eq!((mixtral.experts, mixtral.theta, mixtral.epsilon), (Some(experts), 1e6, 1e-5));
    assert_eq!((mixtral.window, mixtral.biases), (None, Biases::NONE));

    let qwen2 =
        of(json!({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 20, "sliding_window": 0}));
    let experts = Experts { chosen: 4, hidden: 16, normalized: false, shared: Some(20), ..experts };
    let inputs = Biases { inputs: true, ..Biases::NONE };
    let expected =
        DecoderSize { experts: Some(experts), biases: inputs, theta: 1e4, epsilon: 1e-6, ..mixtral };
    assert_eq!(qwen2, Ok(expected));
    let qwen3 = of(json!({
        "model_type": "qwen3_moe", "head_dim": 6, "norm_topk_prob": true, "num_experts_per_tok": 3, "decoder_sparse_step": 2,
        "mlp_only_layers": [1, 3], "num_local_experts": 8, "num_hidden_layers": 6, "use_sliding_window": false,
    }))
    .expect("a mixture of Qwen3");
    let experts = Experts {
        chosen: 3,
        hidden: 16,
        normalized: true,
        shared: None,
        every: 2,
        without: 0b1010,
        ..experts
    };
    assert_eq!((qwen3.experts, qwen3.normalizes_heads, qwen3.head), (Some(experts), true, Some(6)));
    assert_eq!(qwen3.biases, Biases::NONE);
    let with: Vec<usize> = (0..6).filter(|&layer| experts.are_in(layer)).collect();
    assert_eq!(with, [5]);

    for (changes, expected) in [
        (json!({"output_router_logits": true}), "output_router_logits is true"),
        (json!({"num_experts": null}), "there is no num_experts"),
        (json!({"num_experts": 0}), "num_experts is 0"),
        (json!({"num_experts": 1 << 20}), "num_experts is 1048576"),
        (json!({"num_local_experts": 4}), "num_local_experts is 4"),
        (json!({"num_experts_per_tok": 9}), "num_experts_per_tok is 9"),
        (json!({"num_experts_per_tok": 0}), "num_experts_per_tok is 0"),
        (json!({"moe_intermediate_size": null}), "there is no moe_intermediate_size"),
        (json!({"decoder_sparse_step": 0}), "decoder_sparse_step is 0"),
        (json!({"mlp_only_layers": [128], "num_hidden_layers": 200}), "mlp_only_layers is 128"),
        (json!({"use_sliding_window": true}), "use_sliding_window is true"),
        (json!({"model_type": "qwen2_moe"}), "there is no shared_expert_intermediate_size"),
        (json!({"model_type": "mixtral", "router_jitter_noise": 0.1}), "router_jitter_noise is 0.1"),
        // Mixtral does not read it.
        (json!({"model_type": "mixtral"}), "moe_intermediate_size is 16"),
        (json!({"model_type": "mistral", "moe_intermediate_size": null}), "num_experts is 8"),
    ] {
        let mut mixture = json!({"model_type": "qwen3_moe"});
        for (field, value) in changes.as_object().expect("fields") {
            mixture[field] = value.clone();
        }
        let error = of(mixture).expect_err(expected);
        assert!(error.starts_with(expected), "{error}, not {expected}");
    }
}

/// As versions 4 and 5 of `transformers` write them.
#[test]
fn rotary_positions_are_read_in_both_forms() {
    let of = |changes| size(changes).map(|size| (size.theta, size.stretch));
    let stretch = RotaryStretch::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original_length: 8192.0 };
    let mut llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192
    });
    let before = json!({"rope_theta": 500000.0, "rope_scaling": llama3.clone()});
    assert_eq!(of(before), Ok((500_000.0, Some(stretch))));
    llama3["rope_theta"] = 500_000.into();
    assert_eq!(of(json!({"rope_parameters": llama3})), Ok((500_000.0, Some(stretch))));
    let default = json!({"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}});
    assert_eq!(of(default), Ok((100.0, None)));
    let linear = json!({"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2.0}});
    assert_eq!(of(linear), Ok((10_000.0, Some(RotaryStretch::Linear(2.0)))));
}

/// A Phi-3.5 has other factors for long sequences, which are for models that are to have them.
#[test]
fn scaled_rotary_positions() {
    let of = |changes| size(changes).map(|size| (size.length, size.stretch.expect("stretched")));
    let long_rope = json!({"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2, 4]});
    let found = of(json!({
        "model_type": "phi3", "max_position_embeddings": 131_072, "rope_scaling": long_rope,
        "original_max_position_embeddings": 4096,
    }));
    let scale = (1.0f64 + 5.0 / 12.0).sqrt(); // the logarithm of 32, to the base 4096
    let factors = LongRope { short: vec![1.0, 1.5], long: vec![2.0, 4.0], original_length: 4096.0, scale };
    let stretch = RotaryStretch::LongRope(factors.kept());
    assert_eq!(found, Ok((4096, stretch)));
    assert_eq!(stretch.factors([4096, 4], 1e4), [1.0, 1.5]);
    assert_eq!(stretch.factors([4097, 4], 1e4), [2.0, 4.0]);

    let mut yarn = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768});
    let usual = |scale| RotaryStretch::Yarn {
        factor: 4.0,
        fast: 32.0,
        slow: 1.0,
        original_length: 32_768.0,
        truncates: true,
        scale,
    };
    let config = json!({"max_position_embeddings": 131_072, "rope_scaling": yarn.clone()});
    assert_eq!(of(config), Ok((131_072, usual(0.1 * 4f64.ln() + 1.0))));
    yarn["attention_factor"] = 1.25.into();
    assert_eq!(of(json!({"rope_scaling": yarn.clone()})), Ok((64, usual(1.25))));
    yarn["attn_factor"] = 2.into();
    assert_eq!(
        of(json!({"rope_scaling": yarn})).unwrap_err(),
        "rope_scaling.attn_factor is 2, which is not supported"
    );
}

#[test]
fn the_sizes_of_a_gpt2() {
    let of = |changes: Value| {
        let mut config = json!({
            "model_type": "gpt2", "vocab_size": 50, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 12, "n_ctx": 12,
            "n_inner": null, "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1,
            "layer_norm_epsilon": 1e-5, "scale_attn_weights": true, "summary_type": "cls_index",
            "summary_use_proj": true, "task_specific_params": {"text-generation": {"do_sample": true}},
        });
        for (field, value) in changes.as_object().expect("fields") {
            config[field] = value.clone();
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("config.json"), config.to_string()).expect("a file");
        Gpt2Size::from_directory(directory.path()).map_err(|error| error.to_string())
    };
    assert_eq!(of(json!({})), Ok(Gpt2Size { dropout: 0.1, ..Gpt2Size::TINY }));
    // Of gpt2-medium and distilgpt2.
    let old = json!({
        "n_ctx": 13, "n_special": 0, "predict_special_tokens": true, "_num_labels": 1, "output_past": true,
        "resid_pdrop": 0, "embd_pdrop": 0.0
    });
    assert_eq!(of(old), Ok(Gpt2Size::TINY));
    for (changes, expected) in [
        (json!({"model_type": "gptj"}), "model_type"),
        (json!({"n_head": 5}), "n_head"),
        (json!({"n_inner": 100}), "n_inner"),
        (json!({"embd_pdrop": 0.2}), "embd_pdrop"),
        (json!({"resid_pdrop": 1.0}), "resid_pdrop"),
        (json!({"scale_attn_by_inverse_layer_idx": true}), "scale_attn_by_inverse_layer_idx"),
        (json!({"reorder_and_upcast_attn": true}), "reorder_and_upcast_attn"),
    ] {
        let error = of(changes).expect_err(expected);
        assert!(error.contains(&format!("config.json: {expected} is")), "{error}");
    }
}

#[test]
fn the_sizes_of_gptj_and_phi() {
    let of = |config: &Value, changes: Value| {
        let mut config = config.clone();
        for (field, value) in changes.as_object().expect("fields") {
            config[field] = value.clone();
        }
        let directory = tempfile::tempdir().expect("a directory");
        fs::write(directory.path().join("config.json"), config.to_string()).expect("a file");
        GptJSize::from_directory(directory.path()).map_err(|error| error.to_string())
    };
    // As that of GPT-J 6B.
    let gptj = json!({
        "model_type": "gptj", "vocab_size": 50, "n_embd": 24, "n_head": 3, "n_layer": 2, "n_positions": 12, "n_inner": 40,
        "rotary_dim": 4, "activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
        "layer_norm_epsilon": 1e-5, "scale_attn_weights": true, "rotary": true, "summary_type": "cls_index",
        "tie_word_embeddings": false, "task_specific_params": {"text-generation": {"do_sample": true}},
    });
    let tiny = GptJSize::GPT_J_6B.tiny();
    assert_eq!(of(&gptj, json!({})), Ok(tiny));
    let changed = GptJSize { hidden: 96, dropout: 0.1, epsilon: 1e-6, ..tiny };
    assert_eq!(
        of(&gptj, json!({"n_inner": null, "resid_pdrop": 0.1, "layer_norm_epsilon": 1e-6})),
        Ok(changed)
    );
    for (changes, expected) in [
        (json!({"n_head": 5}), "n_head is 5"),
        (json!({"rotary_dim": null}), "rotary_dim is null"),
        (json!({"rotary_dim": 3}), "rotary_dim is 3"),
        (json!({"rotary_dim": 10}), "rotary_dim is 10"),
        (json!({"activation_function": "gelu"}), r#"activation_function is "gelu""#),
        (json!({"attn_pdrop": 0.1}), "attn_pdrop is 0.1"),
        (json!({"embd_pdrop": 1.0}), "embd_pdrop is 1.0"),
        (json!({"tie_word_embeddings": true}), "tie_word_embeddings is true"),
        (json!({"model_type": "gpt2"}), r#"model_type is "gpt2""#),
    ] {
        let error = of(&gptj, changes).expect_err(expected);
        assert!(error.contains(&format!("config.json: {expected}")), "{error}");
    }

    // As that of Phi-2.
    let phi = json!({
        "model_type": "phi", "vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 3,
        "num_key_value_heads": 3, "num_hidden_layers": 2, "max_position_embeddings": 12, "partial_rotary_factor": 0.5,
        "qk_layernorm": false, "rope_scaling": null, "rope_theta": 10000.0, "hidden_act": "gelu_new",
        "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "layer_norm_eps": 1e-5, "tie_word_embeddings": false,
    });
    let tiny = GptJSize::PHI_2.tiny();
    assert_eq!(of(&phi, json!({})), Ok(tiny));
    assert_eq!(of(&phi, json!({"partial_rotary_factor": null, "num_key_value_heads": null})), Ok(tiny));
    let rotary = json!({"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.25});
    let changed =
        GptJSize { rotated: 2, theta: 100.0, key_heads: 1, dropout: 0.1, embedding_dropout: 0.2, ..tiny };
    let changes = json!({
        "rope_parameters": rotary, "num_key_value_heads": 1, "resid_pdrop": 0.1, "embd_pdrop": 0.2,
        "partial_rotary_factor": null, "rope_theta": null,
    });
    assert_eq!(of(&phi, changes), Ok(changed));
    for (changes, expected) in [
        (json!({"qk_layernorm": true}), "qk_layernorm is true"),
        (json!({"num_key_value_heads": 2}), "num_key_value_heads is 2"),
        (json!({"num_attention_heads": 5}), "num_attention_heads is 5"),
        (json!({"partial_rotary_factor": 0.4}), "partial_rotary_factor is 0.4"),
        (json!({"hidden_act": "gelu"}), r#"hidden_act is "gelu""#),
        (json!({"attention_dropout": 0.1}), "attention_dropout is 0.1"),
        (json!({"resid_pdrop": -0.1}), "resid_pdrop is -0.1"),
        (json!({"max_position_embeddings": 1 << 30}), "max_position_embeddings is 1073741824"),
        (json!({"tie_word_embeddings": true}), "tie_word_embeddings is true"),
    ] {
        let error = of(&phi, changes).expect_err(expected);
        assert!(error.contains(&format!("config.json: {expected}")), "{error}");
    }
}

#[test]
fn what_is_not_there_is_refused_by_name() {
    for (changes, expected) in [
        (
            json!({"model_type": "gemma3", "text_config": {}}),
            r#"model_type is "gemma3", which is not supported"#,
        ),
        (json!({"num_hidden_layers": 1 << 17}), "num_hidden_layers is 131072, which is not supported"),
        (json!({"hidden_act": "gelu"}), r#"hidden_act is "gelu", which is not supported"#),
        (json!({"vocab_size": null}), "there is no vocab_size"),
        (json!({"vocab_size": "many"}), r#"vocab_size is "many", which is not supported"#),
        (json!({"hidden_size": 0}), "hidden_size is 0, which is not supported"),
        (json!({"num_key_value_heads": 4}), "num_key_value_heads is 4, which is not supported"),
        (json!({"head_dim": 3}), "head_dim is 3, which is not supported"),
        (json!({"attention_dropout": 0.1}), "attention_dropout is 0.1, which is not supported"),
        (
            json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
            r#"quantization_config.quant_method is "gptq", which is not supported"#,
        ),
        (
            json!({"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": true}}),
            "quantization_config.load_in_8bit is true, which is not supported",
        ),
        (
            json!({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}),
            "quantization_config.weight_block_size is [64,64], which is not supported",
        ),
        (
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
            r#"rope_scaling.rope_type is "dynamic", which is not supported"#,
        ),
        (json!({"rope_scaling": {"rope_type": "llama3"}}), "there is no rope_scaling.factor"),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": true}}),
            "rope_scaling.finetuned is true, which is not supported",
        ),
        (
            json!({"model_type": "qwen2", "num_key_value_heads": 6, "use_sliding_window": true}),
            "use_sliding_window is true, which is not supported",
        ),
        (json!({"model_type": "qwen3"}), "there is no num_key_value_heads"),
        (json!({"vocab_size": 1u64 << 40}), "vocab_size is 1099511627776, which is not supported"),
        (json!({"rms_norm_eps": 0}), "rms_norm_eps is 0.0, which is not supported"),
        (json!({"rope_theta": -1}), "rope_theta is -1.0, which is not supported"),
        (json!({"rope_theta": 1e300}), "rope_theta is 1e+300, which is not supported"),
        (
            json!({"model_type": "mistral", "num_key_value_heads": 6, "sliding_window": 0}),
            "sliding_window is 0, which is not supported",
        ),
        (
            json!({"rope_scaling": {"rope_type": "linear", "factor": 0}}),
            "rope_scaling.factor is 0.0, which is not supported",
        ),
        (json!({"is_causal": false}), "is_causal is false, which is not supported"),
        (json!({"auto_map": {"AutoModel": "x"}}), r#"auto_map is {"AutoModel":"x"}, which is not supported"#),
        (json!({"logit_softcap": 30.0}), "logit_softcap is 30.0, which is not supported"),
    ] {
        assert_eq!(size(changes), Err(expected.to_string()));
    }
    let nothing = DecoderSize::from_directory(Path::new("nothing"));
    assert!(nothing.is_err_and(|error| error.to_string().contains("config.json")));
}
