"""What `vision_torchvision.rs` compares with. With `expected`: of small networks what their tensors are and what they make of images, which
is committed in `torchvision/`; with `small`: that, and their checkpoints; with `full`: checkpoints of the networks that are published,
without numbers: names and shapes."""
import json
import math
import pathlib
import sys

import numpy
import torch
from torch import nn
from torchvision import models
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.segmentation.deeplabv3 import _deeplabv3_resnet
from torchvision.models.segmentation.fcn import _fcn_resnet
from torchvision.models.vgg import VGG, make_layers
from torchvision.models.vision_transformer import VisionTransformer

mode, directory = sys.argv[1], pathlib.Path(sys.argv[2])


class Double(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        convs = [nn.Conv2d(i, width, 3, padding=1, bias=False) for i in (channels, width)]
        norms = [nn.BatchNorm2d(width) for _ in convs]
        self.double_conv = nn.Sequential(convs[0], norms[0], nn.ReLU(), convs[1], norms[1], nn.ReLU())

    def forward(self, x):
        return self.double_conv(x)


class Down(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.maxpool_conv = nn.Sequential(nn.MaxPool2d(2), Double(channels, width))

    def forward(self, x):
        return self.maxpool_conv(x)


class Up(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.up = nn.ConvTranspose2d(channels, width, 2, stride=2)
        self.conv = Double(channels, width)

    def forward(self, x, skipped):
        return self.conv(torch.cat([skipped, self.up(x)], dim=1))


class Last(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv = nn.Conv2d(channels, classes, 1)

    def forward(self, x):
        return self.conv(x)


class UNet(nn.Module):
    """With the names of https://github.com/milesial/Pytorch-UNet; torchvision has none."""

    def __init__(self, width, classes):
        super().__init__()
        self.inc = Double(3, width)
        for at in range(4):
            setattr(self, f"down{at + 1}", Down(width << at, width << at + 1))
            setattr(self, f"up{at + 1}", Up(width << 4 - at, width << 3 - at))
        self.outc = Last(width, classes)

    def forward(self, x):
        seen = [self.inc(x)]
        for at in range(4):
            seen.append(getattr(self, f"down{at + 1}")(seen[-1]))
        x = seen.pop()
        for at in range(4):
            x = getattr(self, f"up{at + 1}")(x, seen.pop())
        return self.outc(x)


def vgg(batch_norm):
    model = VGG(make_layers([8, 12, "M", 16, "M", 24, 24, "M"], batch_norm), init_weights=False)
    dense = [nn.Linear(i, o) for i, o in ((49 * 24, 32), (32, 32), (32, 7))]
    model.classifier = nn.Sequential(
        dense[0], nn.ReLU(), nn.Dropout(), dense[1], nn.ReLU(), nn.Dropout(), dense[2]
    )
    return model


def dilated():
    return ResNet(Bottleneck, [1, 1, 2, 2], replace_stride_with_dilation=[False, True, True])


def convnext():
    blocks = [CNBlockConfig(8, 12, 1), CNBlockConfig(12, 16, 2), CNBlockConfig(16, 20, 1)]
    return ConvNeXt([*blocks, CNBlockConfig(20, None, 1)], num_classes=7)


def vit():
    return VisionTransformer(64, 16, num_layers=2, num_heads=3, hidden_dim=24, mlp_dim=40, num_classes=7)


SMALL = {
    "resnet_basic": (lambda: ResNet(BasicBlock, [2, 1, 1, 1], num_classes=7), (64, 96)),
    "resnet_bottleneck": (lambda: ResNet(Bottleneck, [1, 2, 1, 1], num_classes=7), (64, 96)),
    "resnext": (lambda: ResNet(Bottleneck, [1] * 4, num_classes=7, groups=8, width_per_group=16), (64, 96)),
    "vgg": (lambda: vgg(False), (64, 96)),
    "vgg_norm": (lambda: vgg(True), (64, 96)),
    "efficientnet_v2_s": (models.efficientnet_v2_s, (32, 64)),
    "mobilenet_v3_large": (models.mobilenet_v3_large, (32, 64)),
    "convnext": (convnext, (64, 96)),
    "vit": (vit, (64, 64)),
    "vit_legacy": (vit, (64, 64)),
    "deeplab": (lambda: _deeplabv3_resnet(dilated(), 5, True), (34, 50)),
    "fcn": (lambda: _fcn_resnet(dilated(), 5, True), (34, 50)),
    "unet": (lambda: UNet(4, 3), (32, 48)),
}

FULL = {
    "resnet18": models.resnet18,
    "resnet50": models.resnet50,
    "resnet101": models.resnet101,
    "resnext101_64x4d": models.resnext101_64x4d,
    "vgg16": models.vgg16,
    "vgg16_bn": models.vgg16_bn,
    "efficientnet_v2_s": models.efficientnet_v2_s,
    "efficientnet_v2_l": models.efficientnet_v2_l,
    "mobilenet_v3_large": models.mobilenet_v3_large,
    "convnext_tiny": models.convnext_tiny,
    "vit_b_16": models.vit_b_16,
    "deeplabv3_resnet101": lambda: models.segmentation.deeplabv3_resnet101(weights_backbone=None, aux_loss=True),
    "fcn_resnet101": lambda: models.segmentation.fcn_resnet101(weights_backbone=None),
    "unet": lambda: UNet(64, 2),
}


def numbers(position, shape, low, high):
    """Numbers of the tensor at this position, which look random: the finalizer of MurmurHash3 makes them. The test makes the same ones."""
    x = numpy.arange(math.prod(shape), dtype=numpy.uint32) + numpy.uint32(position * 0x9E3779B9 % 2**32)
    x = (x ^ (x >> 16)) * numpy.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * numpy.uint32(0xC2B2AE35)
    x ^= x >> 16
    return torch.from_numpy((low + (high - low) * (x / 2**32)).astype(numpy.float32)).reshape(shape)


def bounds(name, tensor, gain):
    """Between which numbers features keep their size, about, and none of them is as it is at first."""
    if name.endswith("num_batches_tracked"):
        return 3, 3
    if name.endswith("running_var"):
        return 0.5, 1.5
    if "layer_scale" in name or (tensor.dim() == 1 and name.endswith("weight")):
        return gain - 0.3, gain + 0.3
    if tensor.dim() == 1:
        return -0.2, 0.2
    if "pos_embedding" in name or "class_token" in name:
        return -0.9, 0.9
    bound = round(math.sqrt(6 / tensor[0].numel()), 4)
    return -bound, bound


@torch.no_grad()
def small(name, new, size):
    with torch.device("meta"):
        model = new()
    model = model.to_empty(device="cpu").eval()
    # EfficientNet has so many blocks that features, and rounding errors, explode with a larger gain.
    gain = 0.77 if name.startswith("efficientnet") else 0.9
    weights, tensors = model.state_dict(), []
    for position, (key, tensor) in enumerate(weights.items()):
        low, high = bounds(key, tensor, gain)
        tensor.copy_(numbers(position, tensor.shape, low, high))
        tensors.append([key, "I64" if tensor.dtype == torch.int64 else "F32", list(tensor.shape), low, high])
    output = model(numbers(len(tensors), (2, 3, *size), -1.7, 1.7))
    output = output["out"] if isinstance(output, dict) else output
    # What the images are is seen in the result.
    assert (output[0] - output[1]).abs().max() > 1e-2 * output.abs().max(), name
    if name == "vit_legacy":
        old = lambda key: key.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2.")
        weights = {old(key): value for key, value in weights.items()}
        tensors = [[old(key), *rest] for key, *rest in tensors]
    if mode == "small":
        torch.save(weights, directory / f"{name}.pth")
    every = -(-output.numel() // 1000)
    output = [float(f"{value:.7g}") for value in output.flatten()[::every].tolist()]
    result = {"size": size, "tensors": tensors, "every": every, "output": output}
    (directory / f"{name}.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")


def full(name, new):
    """As safetensors whose data are a hole."""
    with torch.device("meta"):
        weights = new().state_dict()
    header, end = {}, 0
    for key, value in weights.items():
        dtype, start = {torch.float32: "F32", torch.int64: "I64"}[value.dtype], end
        end += value.numel() * value.element_size()
        header[key] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    header = json.dumps(header).encode()
    header += b" " * (-len(header) % 8)
    with open(directory / f"{name}.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + end)


if mode == "full":
    for name, new in FULL.items():
        full(name, new)
else:
    for name, (new, size) in SMALL.items():
        small(name, new, size)
