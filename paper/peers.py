"""What PyTorch keeps between the forward and the backward pass, in MiB: the column `pytorch_mib` of `peers.csv`.

    python3 paper/peers.py    # with torch and torchvision

Autograd hands every tensor that it keeps to a hook; memory that several of them share counts once, that of parameters, statistics and the
images not at all.
"""
import platform

import torch
from torchvision import models

CASES = {
    "all": lambda name: True,
    "input": lambda name: False,
    "input, running statistics": lambda name: False,
    "norm": lambda name: "bn" in name or "downsample.1" in name,
    "first quarter": lambda name: name.startswith(("conv1", "bn1", "layer1")),
}


def kept(model, images):
    there = [images, *model.state_dict().values()]
    there = {tensor.untyped_storage().data_ptr() for tensor in there}
    sizes = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(images).sum()
    del loss
    return sum(sizes.values()) / 2**20


print(f"# torch {torch.__version__}, {platform.machine()}")
print("model,input,case,pytorch_mib")
for name, new in {"ResNet-101": models.resnet101, "ResNet-18": models.resnet18}.items():
    for case, is_trained in CASES.items():
        model = new().train()
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(parameter_name))
        if case.endswith("running statistics"):
            model.eval()
        images = torch.randn(8, 3, 224, 224).requires_grad_(case.startswith("input"))
        print(f'{name},8 x 224 x 224,"{case}",{kept(model, images):.0f}', flush=True)
