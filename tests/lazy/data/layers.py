"""Writes `layers.pt`, `layers.json`, `kinds.pt` and `script.pt` of this directory, with PyTorch 2: `python layers.py`."""

import json
import torch
from torch.nn.utils import parametrizations

torch.manual_seed(0)


class Layers(torch.nn.Module):
    """Layers whose parameters have other names, and other parts, than Burn's."""

    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 4, num_layers=2, batch_first=True)
        self.both = torch.nn.LSTM(4, 2, batch_first=True, bidirectional=True)
        self.gru = torch.nn.GRU(4, 4, batch_first=True)
        self.rnn = torch.nn.RNN(4, 4, batch_first=True)
        self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)
        self.conv = parametrizations.weight_norm(torch.nn.Conv1d(4, 4, 3, padding=1))
        self.head = torch.nn.Linear(4, 3)

    def forward(self, x):
        for layer in [self.lstm, self.both, self.gru, self.rnn]:
            x, _ = layer(x)
        x, _ = self.attention(x, x, x)
        return self.head(self.conv(x.transpose(1, 2)).transpose(1, 2))


model = Layers()
x = torch.rand(2, 3, 4)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.uniform_(-0.7, 0.7)
    output = model(x)
torch.save({"epoch": 3, "model": {"module." + name: value for name, value in model.state_dict().items()}}, "layers.pt")
with open("layers.json", "w") as file:
    json.dump({"input": x.flatten().tolist(), "output": output.flatten().tolist()}, file)

# Tensors of kinds that are not read, beside one that is.
weight = torch.arange(6, dtype=torch.float32).reshape(2, 3)
kinds = {
    "weight": weight,
    "sparse": weight.to_sparse(),
    "quantized": torch.quantize_per_tensor(weight, 0.1, 0, torch.qint8),
    "complex": torch.view_as_complex(torch.ones(2, 2)),
    "eight": weight.to(torch.float8_e4m3fn),
    "strided": weight.t(),
}
torch.save(kinds, "kinds.pt")
torch.jit.script(torch.nn.Linear(3, 2)).save("script.pt")
