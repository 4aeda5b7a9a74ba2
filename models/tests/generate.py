"""Writes small decoders with random weights, and the tokens that `transformers` generates with them, one prompt at a time."""

import sys
from pathlib import Path

import torch
from small import decoder
from texts import expect, with_clear_texts
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

directory = Path(sys.argv[1])
torch.manual_seed(0)

decoder |= dict(max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0)
llama3 = dict(
    rope_type="llama3",
    rope_theta=100.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
linear = dict(rope_type="linear", rope_theta=1000.0, factor=2.5)
yarn = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=64)
yarn_with_all = yarn | dict(beta_fast=8, beta_slow=2, truncate=False, mscale=0.7, mscale_all_dim=1.2)
longrope = dict(
    rope_type="longrope", rope_theta=100.0, short_factor=[1.0, 1.1, 1.3, 1.5], long_factor=[1.0, 2.0, 5.0, 9.0]
)
without_rms = {name: value for name, value in decoder.items() if name != "rms_norm_eps"}
families = {
    "llama": (LlamaForCausalLM, LlamaConfig(**decoder)),
    "llama_tied": (LlamaForCausalLM, LlamaConfig(**decoder, tie_word_embeddings=True, rope_parameters=llama3)),
    "llama_biases": (
        LlamaForCausalLM,
        LlamaConfig(**decoder, attention_bias=True, mlp_bias=True, head_dim=12, rope_parameters=linear),
    ),
    # Shorter than the prompts.
    "mistral": (MistralForCausalLM, MistralConfig(**decoder, sliding_window=7)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**decoder, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**decoder, head_dim=16)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(vocab_size=50, n_embd=24, n_head=3, n_layer=2, n_positions=128, eos_token_id=None),
    ),
    "gemma": (GemmaForCausalLM, GemmaConfig(**decoder, head_dim=16)),
    # Softcaps that change something.
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **decoder,
            head_dim=12,
            query_pre_attn_scalar=20,
            sliding_window=7,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **(decoder | dict(num_hidden_layers=4)),
            head_dim=16,
            query_pre_attn_scalar=24,
            sliding_window=7,
            sliding_window_pattern=3,
            rope_parameters={"full_attention": linear, "sliding_attention": dict(rope_type="default", rope_theta=100.0)},
        ),
    ),
    "mixtral": (
        MixtralForCausalLM,
        MixtralConfig(**decoder, num_local_experts=5, num_experts_per_tok=2, sliding_window=7),
    ),
    # Only the second layer has experts.
    "qwen2_moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **decoder,
            num_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=28,
            mlp_only_layers=[0],
        ),
    ),
    "qwen3_moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **decoder,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            norm_topk_prob=True,
        ),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**decoder, sliding_window=7)),
    # Six of the eight features of a head are rotated.
    "phi3_partial": (
        Phi3ForCausalLM,
        Phi3Config(
            **decoder,
            rope_parameters=dict(rope_type="default", rope_theta=1000.0, partial_rotary_factor=0.75),
        ),
    ),
    # All sequences are shorter than the original length; all that rotate anything are longer.
    "phi3_short": (Phi3ForCausalLM, Phi3Config(**decoder, original_max_position_embeddings=128, rope_parameters=longrope)),
    "phi3_long": (
        Phi3ForCausalLM,
        Phi3Config(
            **decoder, original_max_position_embeddings=1, rope_parameters=longrope | dict(attention_factor=1.3)
        ),
    ),
    "llama_yarn": (LlamaForCausalLM, LlamaConfig(**decoder, rope_parameters=yarn_with_all)),
    "qwen2_yarn": (Qwen2ForCausalLM, Qwen2Config(**decoder, rope_parameters=yarn)),
    "gptj": (
        GPTJForCausalLM,
        GPTJConfig(
            vocab_size=50, n_embd=24, n_head=3, n_layer=2, n_positions=128, rotary_dim=4, eos_token_id=None
        ),
    ),
    "phi": (
        PhiForCausalLM,
        PhiConfig(
            **(without_rms | dict(layer_norm_eps=1e-3)),
            rope_parameters=linear | dict(partial_rotary_factor=0.75),
        ),
    ),
}
for name, (make, config) in families.items():
    model, texts = with_clear_texts(make, config)
    model.save_pretrained(directory / name)
    expect(directory / name, texts)

make, config = families["gpt2"]
model, texts = with_clear_texts(make, config)
for name in "gpt2_twice", "gpt2_head":
    state = model.state_dict()
    if name == "gpt2_head":
        state["lm_head.weight"] = state["lm_head.weight"] + 1
    config.save_pretrained(directory / name)
    torch.save(state, directory / name / "pytorch_model.bin")
    expect(directory / name, texts)

# The head is the embedding, and the file has both: the same numbers, and others.
for name, tied in ("llama_twice", True), ("llama_head", False):
    make, config = families["llama"]
    config.tie_word_embeddings = tied
    model, texts = with_clear_texts(make, config)
    config.tie_word_embeddings = True
    config.save_pretrained(directory / name)
    torch.save(model.state_dict(), directory / name / "pytorch_model.bin")
    inputs = torch.tensor([texts[0]["prompt"]])
    with torch.no_grad():
        assert torch.equal(make.from_pretrained(directory / name)(inputs).logits, model(inputs).logits)
    expect(directory / name, texts)
