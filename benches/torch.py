"""Times steps in PyTorch for `cargo bench --bench peers`, which starts this program where `python3` can import torch.

Reads a case per line, `batch in out size kernel stride padding groups` of a 2-D convolution, and then one of `forward`, `dx`, `dweight`
per line; answers each with milliseconds. An empty line ends a case.
"""
import sys
import time

del sys.path[0]  # this folder: its `torch` is this file
import torch

torch.set_num_threads(int(sys.argv[1]))


def step(case, wanted):
    batch, channels, out, size, kernel, stride, padding, groups = map(int, case.split())
    x = torch.randn(batch, channels, size, size, requires_grad=wanted == "dx")
    weight = torch.randn(out, channels // groups, kernel, kernel, requires_grad=wanted == "dweight")

    def run():
        y = torch.nn.functional.conv2d(x, weight, None, stride, padding, 1, groups)
        if y.requires_grad:
            x.grad = weight.grad = None
            y.backward(torch.ones_like(y))

    return run


steps = {}
for line in sys.stdin:
    if line not in steps:
        case, wanted = line.rsplit(maxsplit=1)
        steps = {other: run for other, run in steps.items() if other.startswith(case)}
        steps[line] = step(case, wanted)
        steps[line]()
    start = time.perf_counter()
    steps[line]()
    print((time.perf_counter() - start) * 1e3, flush=True)
