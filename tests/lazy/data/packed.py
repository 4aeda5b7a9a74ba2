"""Writes packed tensors, and in `unpacked.safetensors` what the libraries that pack them make of them: every 11th element.

    pip install torch numpy safetensors gguf bitsandbytes
    python packed.py
"""

import gguf
import numpy
import torch
from bitsandbytes import functional as bitsandbytes
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

numbers = numpy.random.default_rng(0)
torch.manual_seed(0)
unpacked = {}

# Where the blocks of each format have numbers in half precision, the scales of scales.
HALVES = {
    Kind.Q4_0: [0],
    Kind.Q4_1: [0, 2],
    Kind.Q5_0: [0],
    Kind.Q5_1: [0, 2],
    Kind.Q8_0: [0],
    Kind.Q2_K: [80, 82],
    Kind.Q3_K: [108],
    Kind.Q4_K: [0, 2],
    Kind.Q5_K: [0, 2],
    Kind.Q6_K: [208],
    Kind.IQ4_NL: [0],
    Kind.IQ4_XS: [0],
}
ROWS, COLUMNS = 3, 512


def write(path, kinds, prefix="", split=None):
    writer = gguf.GGUFWriter(path, "llama")
    if split:
        writer.add_uint16("split.no", split[0])
        writer.add_uint16("split.count", split[1])
    for kind in kinds:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        blocks = numbers.integers(0, 256, (ROWS, COLUMNS // elements, size), dtype=numpy.uint8)
        for at in HALVES[kind]:
            halves = numbers.normal(size=blocks.shape[:2]).astype(numpy.float16)
            blocks[..., at : at + 2] = halves[..., None].view(numpy.uint8)
        blocks, name = blocks.reshape(ROWS, -1), prefix + kind.name
        writer.add_tensor(name, blocks, raw_dtype=kind)
        unpacked[name] = torch.from_numpy(gguf.quants.dequantize(blocks, kind).copy())
    half, name = numbers.normal(size=(2, 5)).astype(numpy.float16), f"{prefix}F16"
    writer.add_tensor(name, half)
    unpacked[name] = torch.from_numpy(half.astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


write("packed.gguf", HALVES)
write("split-00001-of-00002.gguf", [Kind.Q8_0], "first.", (0, 2))
write("split-00002-of-00002.gguf", [Kind.Q4_0], "second.", (1, 2))

packed = {}
for kind in ["nf4", "fp4"]:
    for nested in [False, True]:
        # The last block is not complete; of the scales that are packed, too, there are two blocks.
        weight = torch.randn(37, 500) if nested else torch.randn(7, 101)
        name = f"{kind}_twice" if nested else kind
        codes, state = bitsandbytes.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
        packed[name] = codes
        packed |= {f"{name}.{part}": value for part, value in state.as_dict(packed=True).items()}
        unpacked[name] = bitsandbytes.dequantize_4bit(codes, state)

FLOAT8 = torch.arange(256, dtype=torch.uint8)
FLOAT8[[127, 255]] = 0  # not NaN
weight = FLOAT8.repeat(130 * 150 // 256 + 1)[: 130 * 150].reshape(130, 150).view(torch.float8_e4m3fn)
blocks, rows, all_of_it = torch.rand(2, 2) + 0.5, torch.rand(130, 1) + 0.5, torch.rand(1) + 0.5
packed["blocks.weight"] = weight
packed |= {f"{name}.weight": weight[:, :9].clone() for name in ["plain", "rows", "whole"]}
packed["blocks.weight_scale_inv"] = blocks
packed["rows.weight_scale"] = rows.to(torch.bfloat16)
packed["whole.weight_scale"] = all_of_it
each = blocks.repeat_interleave(128, 0)[:130].repeat_interleave(128, 1)[:, :150]
floats = weight.to(torch.float32)
unpacked["blocks.weight"] = floats * each
floats = floats[:, :9]
unpacked["plain.weight"] = floats
unpacked["rows.weight"] = floats * packed["rows.weight_scale"].to(torch.float32)
unpacked["whole.weight"] = floats * all_of_it

save_file(packed, "packed.safetensors")
save_file({name: value.flatten()[::11].clone() for name, value in unpacked.items()}, "unpacked.safetensors")
