"""Times PyTorch with its weights in memory, and offloaded to disk by `accelerate`, for `cargo bench --bench lazy`, which starts this program
where `$PYTHON` (or `python3`) can import both.

Prints a row of CSV per model and number of rows: what, rows, milliseconds in memory, milliseconds offloaded.
"""

import sys
import tempfile
import time

del sys.path[0]  # this folder: its `torch` is `torch.py`
import torch
from accelerate import disk_offload
from torch import nn

LAYERS, WIDTH, PASSES = 8, 2048, 9


def fastest(models, x):
    """Milliseconds of the fastest pass of each, after one that is not timed, in turns."""
    times = [float("inf")] * len(models)
    with torch.no_grad():
        for index in range(PASSES + 1):
            for at, model in enumerate(models):
                begin = time.perf_counter()
                model(x)
                if index > 0:
                    times[at] = min(times[at], (time.perf_counter() - begin) * 1e3)
    return times


def tower():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def encoder():
    layer = nn.TransformerEncoderLayer(1024, 16, 4096, activation="gelu", batch_first=True)
    return nn.TransformerEncoder(layer, 24, enable_nested_tensor=False).eval()


torch.backends.mha.set_fastpath_enabled(False)  # it reads all weights of a layer at once
torch.set_num_threads(int(sys.argv[1]))
inputs = [("tower", tower, torch.randn(rows, WIDTH), rows) for rows in (1, 16, 256)]
inputs.append(("encoder", encoder, torch.randn(1, 128, 1024), 128))
for name, make, x, rows in inputs:
    with tempfile.TemporaryDirectory() as directory:
        model, offloaded = make(), make()
        # Attention reads the weights of a module within it, without calling that module.
        disk_offload(offloaded, directory, execution_device="cpu", preload_module_classes=["MultiheadAttention"])
        in_memory, from_disk = fastest([model, offloaded], x)
    print(f"{name},{rows},{in_memory},{from_disk}", flush=True)
