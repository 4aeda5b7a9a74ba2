"""Writes small decoders whose weights are packed, and the tokens that `transformers` generates with what it makes of the same files."""

import copy
import json
import math
import sys
from pathlib import Path

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file
from small import decoder
from texts import expect, is_clear, shaken, texts_of
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

directory = Path(sys.argv[1])
torch.manual_seed(0)

# As wide as the blocks of packed elements.
decoder |= dict(hidden_size=256, intermediate_size=512, num_attention_heads=4, max_position_embeddings=256)
decoder |= dict(bos_token_id=1, eos_token_id=None, pad_token_id=0)
families = {
    "llama": (LlamaForCausalLM, LlamaConfig(**decoder, tie_word_embeddings=True)),
    # As of Llama 3.2: GGUF has only the factors by which wavelengths are stretched.
    "llama3": (
        LlamaForCausalLM,
        LlamaConfig(
            **decoder,
            tie_word_embeddings=True,
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=500_000.0,
                factor=32.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
        ),
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**decoder)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**decoder, head_dim=128)),
    # What Python does not read of a file has its default.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**decoder, head_dim=256, sliding_window=7)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **(decoder | dict(num_hidden_layers=6, num_attention_heads=2, num_key_value_heads=1)),
            head_dim=256,
            sliding_window=7,
        ),
    ),
}

# Names of GGUF, and how matrices are stored there, by family: every format once.
NAMES = {
    "model.embed_tokens": ("token_embd", {"llama": Kind.Q8_0, "qwen2": Kind.F16, "qwen3": Kind.Q6_K}),
    "model.norm": ("output_norm", {}),
    "lm_head": ("output", {"qwen2": Kind.Q5_1, "qwen3": Kind.BF16}),
    "self_attn.q_proj": ("attn_q", {"llama": Kind.Q4_0, "qwen2": Kind.Q4_1, "qwen3": Kind.Q4_K}),
    "self_attn.k_proj": ("attn_k", {"llama": Kind.Q8_0, "qwen2": Kind.Q5_0, "qwen3": Kind.Q5_K}),
    "self_attn.v_proj": ("attn_v", {"llama": Kind.Q5_0, "qwen2": Kind.Q8_0, "qwen3": Kind.Q6_K}),
    "self_attn.o_proj": ("attn_output", {"llama": Kind.Q5_1, "qwen2": Kind.Q8_0, "qwen3": Kind.Q3_K}),
    "self_attn.q_norm": ("attn_q_norm", {}),
    "self_attn.k_norm": ("attn_k_norm", {}),
    "input_layernorm": ("attn_norm", {}),
    "post_attention_layernorm": ("ffn_norm", {}),
    "pre_feedforward_layernorm": ("ffn_norm", {}),
    "post_feedforward_layernorm": ("post_ffw_norm", {}),
    "mlp.gate_proj": ("ffn_gate", {"llama": Kind.Q4_1, "qwen2": Kind.Q4_0, "qwen3": Kind.Q4_K}),
    "mlp.up_proj": ("ffn_up", {"llama": Kind.Q8_0, "qwen2": Kind.Q8_0, "qwen3": Kind.Q4_K}),
    "mlp.down_proj": ("ffn_down", {"llama": Kind.Q4_0, "qwen2": Kind.Q5_1, "qwen3": Kind.Q2_K}),
}
numbers = numpy.random.default_rng(0)
# Where the blocks that `gguf` only unpacks have their scales.
HALVES = {Kind.Q2_K: [80, 82], Kind.Q3_K: [108], Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q6_K: [208]}


def packed(weight, kind):
    """Blocks of a matrix; where `gguf` cannot pack them, any blocks of about its size."""
    if kind not in HALVES:
        return gguf.quants.quantize(weight, kind)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = numbers.integers(0, 256, (len(weight), weight.shape[1] // elements, size), dtype=numpy.uint8)
    largest = 1 if kind == Kind.Q2_K else 30
    for at in HALVES[kind]:
        halves = numpy.full(blocks.shape[:2], numpy.abs(weight).max() / largest / 30, dtype=numpy.float16)
        blocks[..., at : at + 2] = halves[..., None].view(numpy.uint8)
    return blocks.reshape(len(weight), -1)


def factors(config):
    """As `llama.cpp` computes them."""
    rope, factors = config.rope_parameters, []
    for exponent in torch.arange(0, config.head_dim, 2) / config.head_dim:
        fits = rope["original_max_position_embeddings"] / (2 * math.pi * rope["rope_theta"] ** exponent)
        short = (fits - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
        short = short.clamp(0, 1).item()
        factors.append(1 / (short + (1 - short) / rope["factor"]))
    return numpy.array(factors, dtype=numpy.float32)


def write_gguf(path, family, model, config):
    architecture = "llama" if family == "llama3" else family
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    is_gemma = family.startswith("gemma")
    rope = config.rope_parameters
    writer.add_rope_freq_base((rope if "rope_theta" in rope else rope["full_attention"])["rope_theta"])
    if is_gemma:
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "qwen3" or is_gemma:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{index}" for index in range(config.vocab_size)])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", factors(config))
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, value in state.items():
        value = value.numpy()
        short, end = name.rsplit(".", 1)
        layer = ""
        if short.startswith("model.layers."):
            _, _, index, short = short.split(".", 3)
            layer = f"blk.{index}."
        new, kinds = NAMES[short]
        if is_gemma and short == "post_attention_layernorm":
            new = "post_attention_norm"
        if architecture == "llama" and short in ("self_attn.q_proj", "self_attn.k_proj"):
            # Pairs of features that are rotated are neighbors in GGUF, and in both halves of a head in Hugging Face.
            heads = config.num_attention_heads if short.endswith("q_proj") else config.num_key_value_heads
            value = value.reshape(heads, 2, len(value) // heads // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if value.ndim == 1:
            writer.add_tensor(f"{layer}{new}.{end}", value + 1 if is_gemma else value)
        else:
            kind = kinds.get(architecture, Kind.Q8_0)
            writer.add_tensor(f"{layer}{new}.{end}", packed(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def until_clear(write, read):
    """Writes models until one is read whose texts do not depend on rounding."""
    while True:
        write()
        texts = texts_of(read())
        if is_clear(texts):
            return texts


def read_gguf(path, family, config):
    model = AutoModelForCausalLM.from_pretrained(path, gguf_file="model.gguf").eval()
    model.generation_config.eos_token_id = None
    if family == "llama3":
        # Python does not know the factors.
        model.model.rotary_emb = LlamaRotaryEmbedding(copy.deepcopy(config))
    return model


for family, (make, config) in families.items():
    name = f"{family}_gguf"
    (directory / name).mkdir()
    texts = until_clear(
        lambda: write_gguf(directory / name / "model.gguf", family, shaken(make, config), config),
        lambda: read_gguf(directory / name, family, config),
    )
    expect(directory / name, texts)

for nested in False, True:
    name = "nf4_twice" if nested else "nf4"
    make, config = families["llama"]
    options = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32,
    )

    def write():
        shaken(make, config).save_pretrained(directory / "whole")
        model = AutoModelForCausalLM.from_pretrained(directory / "whole", quantization_config=options)
        model.save_pretrained(directory / name)

    texts = until_clear(
        write, lambda: AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32).eval()
    )
    expect(directory / name, texts)

# With scales for blocks, as of DeepSeek; Python unpacks them only on a GPU, so what they are is computed here.
make, config = families["qwen3"]
(directory / "float8").mkdir()
while True:
    model, state = shaken(make, config), {}
    for name, value in model.state_dict().items():
        if value.ndim == 1 or "proj" not in name:
            state[name] = value
            continue
        down, across = -(-value.shape[0] // 128), -(-value.shape[1] // 128)
        scales = 0.001 * (1 + torch.rand(down, across))
        each = scales.repeat_interleave(128, 0)[: value.shape[0]].repeat_interleave(128, 1)[:, : value.shape[1]]
        codes = (value / each).clamp(-448, 448).to(torch.float8_e4m3fn)
        state |= {name: codes, f"{name}_scale_inv": scales}
        value.copy_(codes.float() * each)
    texts = texts_of(model)
    if is_clear(texts):
        break
config.save_pretrained(directory / "float8")
path = directory / "float8" / "config.json"
fields = json.loads(path.read_text())
fields["quantization_config"] = dict(
    quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128]
)
path.write_text(json.dumps(fields))
save_file(state, directory / "float8" / "model.safetensors", metadata={"format": "pt"})
expect(directory / "float8", texts)
