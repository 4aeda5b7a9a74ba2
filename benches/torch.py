"""Times steps in PyTorch for `cargo bench --bench peers`, which starts this program where `python3` can import torch.

Reads a step per line and answers with milliseconds: `conv batch in out size kernel stride padding groups wanted`, where what is wanted is one of
`forward`, `dx` and `dweight`, or `resnet depth batch size case`, where the case is one of `all`, `input`, `running` and `norm`.
"""
import sys
import time

del sys.path[0]  # this folder: its `torch` is this file
import torch
from torch import nn


def convolution(batch, channels, out, size, kernel, stride, padding, groups, wanted):
    batch, channels, out, size, kernel, stride, padding, groups = map(
        int, (batch, channels, out, size, kernel, stride, padding, groups)
    )
    x = torch.randn(batch, channels, size, size, requires_grad=wanted == "dx")
    weight = torch.randn(out, channels // groups, kernel, kernel, requires_grad=wanted == "dweight")

    def run():
        y = torch.nn.functional.conv2d(x, weight, None, stride, padding, 1, groups)
        if y.requires_grad:
            x.grad = weight.grad = None
            y.sum().backward()

    return run


def conv_norm(channels, out, kernel, stride=1):
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out))


class Block(nn.Module):
    """A basic block, or a bottleneck, as torchvision has them."""

    def __init__(self, channels, width, stride, bottleneck):
        super().__init__()
        out = 4 * width if bottleneck else width
        if bottleneck:
            layers = [conv_norm(channels, width, 1), conv_norm(width, width, 3, stride), conv_norm(width, out, 1)]
        else:
            layers = [conv_norm(channels, width, 3, stride), conv_norm(width, out, 3)]
        parts = [part for layer in layers for part in (layer, nn.ReLU())]
        self.body = nn.Sequential(*parts[:-1])
        same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if same else conv_norm(channels, out, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.body(x) + self.shortcut(x))


def resnet(depth, batch, size, case):
    counts, bottleneck = {"18": ([2, 2, 2, 2], False), "101": ([3, 4, 23, 3], True)}[depth]
    layers, channels = [conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for stage, count in enumerate(counts):
        width = 64 << stage
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            layers.append(Block(channels, width, stride, bottleneck))
            channels = 4 * width if bottleneck else width
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            norm = isinstance(module, nn.BatchNorm2d)
            parameter.requires_grad_(case == "all" or (case == "norm" and norm))
    model.train(case != "running")
    images = torch.randn(int(batch), 3, int(size), int(size), requires_grad=case in ("input", "running"))

    def run():
        images.grad = None
        model.zero_grad()
        model(images).sum().backward()

    return run


torch.set_num_threads(int(sys.argv[1]))
line, run = None, None
for request in sys.stdin:
    if request != line:
        kind, *arguments = request.split()
        line, run = request, {"conv": convolution, "resnet": resnet}[kind](*arguments)
        run()
    start = time.perf_counter()
    run()
    print((time.perf_counter() - start) * 1e3, flush=True)
