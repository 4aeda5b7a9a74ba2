"""Loads the adapter in `ours`, compares outputs, and writes another one to `theirs`. Called by `main.rs`."""
import json
import pathlib
import sys

import torch
from peft import LoraConfig, PeftModel, get_peft_model

directory = pathlib.Path(sys.argv[1])
base = json.loads((directory / "base.json").read_text())


def tensor(weight):
    return torch.nn.Parameter(torch.tensor(weight["values"]).reshape(weight["shape"]))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(9, 6)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 5), torch.nn.Linear(5, 8)])
        self.conv = torch.nn.Conv2d(1, 4, (3, 2))
        self.embed_tokens.weight = tensor(base["embedding"])
        for layer, (weight, bias) in zip(self.layers, base["linear"]):
            layer.weight, layer.bias = tensor(weight), tensor(bias)
        self.conv.weight, self.conv.bias = map(tensor, base["conv"])

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.conv(x.unsqueeze(1))


tokens = torch.arange(9).reshape(1, 9)
for name, output in (("ours", "output"), ("ours_dora", "output_dora")):
    ours = PeftModel.from_pretrained(Model(), directory / name)
    found, expected = ours(tokens).flatten(), torch.tensor(base[output])
    assert torch.allclose(found, expected, atol=1e-4), (name, found, expected)

torch.manual_seed(1)
layers = ["layers.0", "layers.1"]
for name, targets, use_dora in (
    ("theirs", ["embed_tokens", *layers, "conv"], False),
    ("theirs_dora", layers, True),
):
    config = LoraConfig(
        r=2,
        lora_alpha=3,
        target_modules=targets,
        rank_pattern={"layers.1": 4},
        use_rslora=True,
        use_dora=use_dora,
    )
    theirs = get_peft_model(Model(), config).eval()
    for parameter_name, parameter in theirs.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_()
    theirs.save_pretrained(directory / name)
    (directory / f"{name}.json").write_text(json.dumps(theirs(tokens).flatten().tolist()))
