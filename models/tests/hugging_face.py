"""Writes checkpoints of small networks with random weights, what goes into them and what comes out: as in `checkpoints/`."""

import json
import sys
from pathlib import Path

import torch
from small import decoder, encoder
from transformers import (
    BertConfig,
    BertForPreTraining,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
)

directory = Path(sys.argv[1])
torch.manual_seed(0)


def network(make, config):
    """With weights that are not 1 or 0 in norms and biases either."""
    model = make(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def expect(name, model, inputs, pick):
    with torch.no_grad():
        outputs = pick(model(**inputs))
    expected = {key: value.tolist() for key, value in inputs.items()}
    expected["every"] = -(-outputs.numel() // 1000)
    outputs = outputs.flatten()[:: expected["every"]].tolist()
    expected["outputs"] = [float(f"{value:.7g}") for value in outputs]
    (directory / name / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")


def write(name, model, inputs, pick, **options):
    model.save_pretrained(directory / name, **options)
    expect(name, model, inputs, pick)


def old(name, state):
    """With names and tensors of checkpoints of older versions."""
    (directory / f"{name}_old").mkdir()
    torch.save(state, directory / f"{name}_old" / "pytorch_model.bin")


def tokens(*shape):
    # 0 and 1 are padding.
    return torch.randint(2, 50, shape)


def features(output):
    return output.last_hidden_state


def logits(output):
    return output.logits


bert = BertConfig(**encoder, max_position_embeddings=12)
write("bert", network(BertModel, bert), {"input_ids": tokens(3, 10)}, features)

model = network(BertForPreTraining, bert)
state = {
    name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
    for name, tensor in model.state_dict().items()
}
old("bert", state | {"bert.embeddings.position_ids": torch.arange(12)[None]})
expect("bert_old", model.bert, {"input_ids": tokens(2, 12)}, features)

roberta = RobertaConfig(**encoder, max_position_embeddings=14, type_vocab_size=1, layer_norm_eps=1e-5)
write("roberta", network(RobertaModel, roberta), {"input_ids": tokens(3, 12)}, features)

gpt2 = GPT2Config(vocab_size=50, n_embd=24, n_head=3, n_layer=2, n_positions=12)
model = network(GPT2LMHeadModel, gpt2)
write("gpt2", model, {"input_ids": tokens(3, 12)}, logits)
state = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
masks = {f"h.{block}.attn.bias": torch.ones(1, 1, 12, 12, dtype=torch.uint8) for block in range(2)}
masks |= {f"h.{block}.attn.masked_bias": torch.tensor(-1e4) for block in range(2)}
old("gpt2", state | masks)
expect("gpt2_old", model, {"input_ids": tokens(2, 9)}, logits)

# Long enough for the class of the longest distances.
t5 = T5Config(vocab_size=50, d_model=24, d_kv=8, d_ff=40, num_heads=4, num_layers=2)
inputs = {"input_ids": tokens(2, 150), "decoder_input_ids": tokens(2, 140)}
model = network(T5ForConditionalGeneration, t5)
write("t5", model, inputs, logits)
bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
old("t5", model.state_dict() | {bias: torch.ones(32, 4)})
inputs = {"input_ids": tokens(1, 20), "decoder_input_ids": tokens(1, 30)}
expect("t5_old", model, inputs, logits)

# Of the four wavelengths, one is short, two are between, and one is long.
rotary = dict(
    rope_type="llama3",
    rope_theta=100.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
llama = LlamaConfig(**decoder, tie_word_embeddings=True, rope_parameters=rotary)
write("llama", network(LlamaForCausalLM, llama), {"input_ids": tokens(3, 40)}, logits)
model = network(LlamaForCausalLM, LlamaConfig(**decoder))
frequencies = {f"model.layers.{block}.self_attn.rotary_emb.inv_freq": torch.ones(4) for block in range(2)}
old("llama", model.state_dict() | frequencies)
expect("llama_old", model, {"input_ids": tokens(3, 40)}, logits)

mistral = MistralConfig(**decoder, sliding_window=64)
write("mistral", network(MistralForCausalLM, mistral), {"input_ids": tokens(3, 40)}, logits, max_shard_size="20KB")
