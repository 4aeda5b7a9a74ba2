"""Writes the checkpoints of this directory, with PyTorch 1.12: `python pytorch.py`."""

import json
import torch

torch.manual_seed(0)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(11, 6)
        self.first = torch.nn.Linear(6, 6)
        self.norm = torch.nn.LayerNorm(6)
        self.second = torch.nn.Linear(6, 4)

    def forward(self, x):
        return self.second(self.norm(self.first(self.embedding(x))))


model = Model()
with torch.no_grad():
    model.norm.weight.uniform_(0.5, 1.5)
    model.norm.bias.uniform_(-0.5, 0.5)
    output = model(torch.tensor([[1, 10, 3], [0, 1, 2]]))

torch.save(model.state_dict(), "model.pt")
torch.save(model.state_dict(), "legacy.pt", _use_new_zipfile_serialization=False)
torch.save({"epoch": 3, "model": model.state_dict()}, "checkpoint.pth")
torch.save(model.half().state_dict(), "half.pt")
with open("output.json", "w") as file:
    json.dump(output.flatten().tolist(), file)
