"""Adapters of `peft` on networks of `transformers`. `theirs`: writes some, and what they compute. `ours`: checks those written here."""

import json
import sys
import warnings
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small import decoder, encoder
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

warnings.filterwarnings("ignore")
directory = Path(sys.argv[2])
torch.manual_seed(0)
decoder["rope_parameters"] = dict(rope_type="default", rope_theta=10000.0)
encoder["max_position_embeddings"] = 12
families = {
    "bert": (BertModel, BertConfig(**encoder), 10),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=50, n_embd=24, n_head=3, n_layer=2, n_positions=12), 12),
    "llama": (LlamaForCausalLM, LlamaConfig(**decoder), 40),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**decoder, num_local_experts=6), 40),
    "t5": (
        T5ForConditionalGeneration,
        T5Config(vocab_size=50, d_model=24, d_kv=8, d_ff=40, num_heads=4, num_layers=2),
        30,
    ),
}


decoders = ("gpt2", "llama", "mixtral")
# The networks here have no pooler.
no_pooler = {"bert": dict(add_pooling_layer=False)}


def outputs(model, inputs):
    with torch.no_grad():
        output = model(**{name: torch.tensor(value) for name, value in inputs.items()})
    return output.logits if "logits" in output else output.last_hidden_state


def write(path, model, inputs):
    values = outputs(model, inputs).flatten()
    every = -(-values.numel() // 1000)
    expected = inputs | {"every": every, "outputs": values[::every].tolist()}
    (path / "expected.json").write_text(json.dumps(expected))


def fill(model):
    """Factors are zero at first, magnitudes those of the weight."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif parameter.requires_grad:
                parameter.add_(0.2 * torch.randn_like(parameter))


def theirs():
    attention = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"], "t5": ["q", "v"]}
    attention["mixtral"] = attention["llama"]
    of_llama = dict(
        all=dict(target_modules="all-linear", use_rslora=True),
        dora=dict(target_modules=["q_proj", "k_proj", "o_proj", "down_proj"], use_dora=True),
        patterns=dict(
            target_modules=["q_proj", "k_proj", "v_proj"],
            rank_pattern={r"layers.1.self_attn.q_proj": 2},
            alpha_pattern={"q_proj": 3.5, "layers.0.self_attn.q_proj": 1.0, "k_proj": 1.5},
        ),
        embedding=dict(target_modules=["k_proj", "embed_tokens", "lm_head"]),
        saved=dict(modules_to_save=["embed_tokens", "lm_head"]),
        norms=dict(modules_to_save=["norm"]),
        half={},
        pickled={},
    )
    options = {
        "bert": dict(lora={}, dora=dict(use_dora=True), biases=dict(bias="all"), own=dict(bias="lora_only"))
        | dict(norms=dict(modules_to_save=["LayerNorm"], bias="all"))
        | dict(tables=dict(target_modules=["position_embeddings", "token_type_embeddings"])),
        "gpt2": dict(lora={}, dense=dict(target_modules=["c_attn", "c_fc", "c_proj"]))
        | dict(saved=dict(modules_to_save=["c_proj"]), norms=dict(modules_to_save=["ln_1", "ln_f"])),
        "llama": dict(lora={}) | of_llama,
        "mixtral": dict(lora={}, dora=dict(target_modules=["q_proj", "k_proj", "o_proj"], use_dora=True)),
        "t5": dict(lora={}, dense=dict(target_modules=["k", "o", "wi", "wo"]))
        | dict(norms=dict(modules_to_save=["layer_norm"]))
        | dict(distances=dict(target_modules=["q", "relative_attention_bias"])),
    }
    for family, (make, config, length) in families.items():
        choices = no_pooler.get(family, {})
        base = make(config, **choices).eval()
        fill(base)
        path = directory / family
        base.save_pretrained(path / "base")
        inputs = {"input_ids": torch.randint(2, 50, (2, length)).tolist()}
        if family == "t5":
            inputs["decoder_input_ids"] = torch.randint(2, 50, (2, 20)).tolist()
        write(path / "base", base, inputs)
        for name, option in options[family].items():
            task = "CAUSAL_LM" if family in decoders else None
            lora = dict(r=4, lora_alpha=6, task_type=task, target_modules=attention[family]) | option
            model = get_peft_model(make.from_pretrained(path / "base", **choices), LoraConfig(**lora)).eval()
            fill(model)
            if name == "half":
                for parameter_name, parameter in model.named_parameters():
                    if "lora_" in parameter_name:
                        parameter.data = parameter.data.bfloat16().float()
            model.save_pretrained(path / name)
            file = path / name / "adapter_model.safetensors"
            if name == "half":
                save_file({key: value.bfloat16() for key, value in load_file(file).items()}, file)
            if name == "pickled":
                torch.save(load_file(file), path / name / "adapter_model.bin")
                file.unlink()
            # As `peft` reads it again: patterns that overlap, for example, are in alphabetical order in the file.
            base = make.from_pretrained(path / "base", **choices)
            write(path / name, PeftModel.from_pretrained(base, path / name).eval(), inputs)


def ours():
    for family, (make, _, _) in families.items():
        for path in sorted((directory / family).glob("ours*")):
            if family in decoders:
                model = AutoPeftModelForCausalLM.from_pretrained(path)
            else:
                base = make.from_pretrained(directory / family / "base", **no_pooler.get(family, {}))
                model = PeftModel.from_pretrained(base, path)
            expected = json.loads((path / "expected.json").read_text())
            inputs = {name: expected[name] for name in ("input_ids", "decoder_input_ids") if name in expected}
            found = outputs(model.eval(), inputs).flatten()[:: expected["every"]]
            wanted = torch.tensor(expected["outputs"])
            off = ((found - wanted).abs().max() / wanted.abs().max()).item()
            print(f"{path}: off by {off:.1e} of the largest")
            assert off < 1e-5, path


{"theirs": theirs, "ours": ours}[sys.argv[1]]()
