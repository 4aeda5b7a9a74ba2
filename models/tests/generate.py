"""Writes small decoders with random weights, and the tokens that `transformers` generates with them, one prompt at a time."""

import json
import sys
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

directory = Path(sys.argv[1])
torch.manual_seed(0)

decoder = dict(
    vocab_size=50,
    hidden_size=48,
    intermediate_size=40,
    num_attention_heads=6,
    num_key_value_heads=2,
    num_hidden_layers=2,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
llama3 = dict(
    rope_type="llama3",
    rope_theta=100.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
linear = dict(rope_type="linear", rope_theta=1000.0, factor=2.5)
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
}
NEW = 64


def prompts():
    # 0 and 1 are padding.
    return [torch.randint(2, 50, (1, length)) for length in (9, 30, 1)]


for name, (make, config) in families.items():
    model = make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    texts = []
    for prompt in prompts():
        mask = torch.ones_like(prompt)
        text = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW)
        with torch.no_grad():
            logits = model(text).logits[0]
        # How much more probable the next tokens are than any others: what is less than rounding could go either way.
        top = logits[prompt.shape[1] - 1 : -1].topk(2).values
        texts.append(
            {
                "prompt": prompt[0].tolist(),
                "text": text[0, prompt.shape[1] :].tolist(),
                "margin": (top[:, 0] - top[:, 1]).min().item() / logits.abs().max().item(),
                "last_logits": [float(f"{value:.7g}") for value in logits[-2].tolist()],
            }
        )
    model.save_pretrained(directory / name)
    (directory / name / "expected.json").write_text(json.dumps(texts) + "\n")
