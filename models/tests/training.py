"""Fine-tuning that begins in burn-memsave and goes on in `peft`. `make`: writes a small network
of a family. `continue`: trains the adapters in `ours`, and
writes the losses, and the adapters, to `theirs`."""

import json
import sys
import warnings
from pathlib import Path

import torch
from peft import AutoPeftModelForCausalLM
from small import decoder
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, LlamaConfig, PhiConfig

warnings.filterwarnings("ignore")
what, directory = sys.argv[1], Path(sys.argv[-1])
torch.manual_seed(0)

if what == "make":
    gpt = dict(vocab_size=50, n_embd=24, n_head=3, n_layer=2, n_positions=64)
    gpt |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    del decoder["num_key_value_heads"], decoder["rms_norm_eps"]
    configs = {
        "llama": LlamaConfig(**decoder, num_key_value_heads=2, rms_norm_eps=1e-5),
        "gpt2": GPT2Config(**gpt),
        "gptj": GPTJConfig(**gpt, rotary_dim=4),
        "phi": PhiConfig(**decoder),
    }
    AutoModelForCausalLM.from_config(configs[sys.argv[2]]).save_pretrained(directory / "base")
    sys.exit()

run = json.loads((directory / "run.json").read_text())
tokens, counts = torch.tensor(run["tokens"]), torch.tensor(run["counts"])
model = AutoPeftModelForCausalLM.from_pretrained(directory / "ours", is_trainable=True)
merged = AutoModelForCausalLM.from_pretrained(directory / "merged")
with torch.no_grad():
    torch.testing.assert_close(merged(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), run["learning_rate"])
losses = []
for step in range(run["steps"] + 1):
    logits = model(tokens[:, :-1]).logits
    every = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
    loss = (every * counts).sum() / counts.sum()
    losses.append(loss.item())
    if step < run["steps"]:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
model.save_pretrained(directory / "theirs")
(directory / "losses.json").write_text(json.dumps(losses))
