"""Times steps in PyTorch for `cargo bench --bench peers`, which starts this program where `python3` can import torch.

Reads a step per line and answers with milliseconds:
- `conv batch in out size kernel stride padding groups wanted`; what is wanted is one of `forward`, `dx` and `dweight`;
- `norm_relu batch in out size kernel wanted`: a frozen convolution, batch norm with running statistics and ReLU;
- `resnet depth batch size case` and `efficientnet batch size case`; the case is one of `all`, `input`, `running` and `norm`;
- `encoder vocabulary width hidden heads layers batch length dropout`;
- `llama vocabulary width hidden heads blocks batch length rank`: only LoRA of all projections of the blocks requires a gradient.
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


def conv_norm(channels, out, kernel, stride=1, groups=1, eps=1e-5):
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out, eps))


def norm_relu(batch, channels, out, size, kernel, wanted):
    batch, channels, out, size, kernel = map(int, (batch, channels, out, size, kernel))
    model = nn.Sequential(conv_norm(channels, out, kernel), nn.ReLU()).eval().requires_grad_(False)
    x = torch.randn(batch, channels, size, size, requires_grad=wanted == "dx")

    def run():
        y = model(x)
        if y.requires_grad:
            x.grad = None
            y.sum().backward()

    return run


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
    return classifier(model, batch, size, case)


class SqueezeExcitation(nn.Module):
    def __init__(self, channels, squeezed):
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, squeezed, 1),
            nn.SiLU(),
            nn.Conv2d(squeezed, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.scale(x) * x


class InvertedBottleneck(nn.Module):
    """As torchvision has it, without stochastic depth."""

    def __init__(self, fused, expansion, channels, out, stride):
        super().__init__()
        inner = expansion * channels

        def active(*sizes):
            return [conv_norm(*sizes, eps=1e-3), nn.SiLU()]

        if fused:
            layers = active(channels, out if expansion == 1 else inner, 3, stride)
        else:
            layers = active(channels, inner, 1) + active(inner, inner, 3, stride, inner)
            layers.append(SqueezeExcitation(inner, max(channels // 4, 1)))
        if not fused or expansion > 1:
            layers.append(conv_norm(inner, out, 1, eps=1e-3))
        self.body = nn.Sequential(*layers)
        self.is_residual = stride == 1 and channels == out

    def forward(self, x):
        return self.body(x) + x if self.is_residual else self.body(x)


def efficientnet(batch, size, case):
    layers, channels = [conv_norm(3, 24, 3, 2, eps=1e-3), nn.SiLU()], 24
    for fused, expansion, stride, out, count in (
        (True, 1, 1, 24, 2),
        (True, 4, 2, 48, 4),
        (True, 4, 2, 64, 4),
        (False, 4, 2, 128, 6),
        (False, 6, 1, 160, 9),
        (False, 6, 2, 256, 15),
    ):
        for number in range(count):
            layers.append(InvertedBottleneck(fused, expansion, channels, out, stride if number == 0 else 1))
            channels = out
    layers += [conv_norm(channels, 1280, 1, eps=1e-3), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2)]
    return classifier(nn.Sequential(*layers, nn.Linear(1280, 1000)), batch, size, case)


def classifier(model, batch, size, case):
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


class Encoder(nn.Module):
    def __init__(self, vocabulary, width, hidden, heads, layers, length, dropout):
        super().__init__()
        self.words, self.positions, self.segments = (nn.Embedding(count, width) for count in (vocabulary, length, 2))
        self.norm, self.dropout = nn.LayerNorm(width, 1e-12), nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(width, heads, hidden, dropout, nn.functional.gelu, 1e-12, batch_first=True)
        layer.dropout = nn.Identity()  # as in BERT, none between the dense layers
        self.encoder = nn.TransformerEncoder(layer, layers)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.positions(positions) + self.segments(torch.zeros_like(tokens))
        return self.encoder(self.dropout(self.norm(x)))


def encoder(vocabulary, width, hidden, heads, layers, batch, length, dropout):
    vocabulary, width, hidden, heads, layers, batch, length = map(
        int, (vocabulary, width, hidden, heads, layers, batch, length)
    )
    model = Encoder(vocabulary, width, hidden, heads, layers, 512, float(dropout))
    tokens = torch.randint(vocabulary, (batch, length))

    def run():
        model.zero_grad()
        model(tokens).sum().backward()

    return run


class Lora(nn.Module):
    """A frozen linear layer, and an adapter of it."""

    def __init__(self, d_input, d_output, rank):
        super().__init__()
        self.base = nn.Linear(d_input, d_output, bias=False).requires_grad_(False)
        self.down = nn.Linear(d_input, rank, bias=False)
        self.up = nn.Linear(rank, d_output, bias=False)

    def forward(self, x):
        return self.base(x) + 2.0 * self.up(self.down(x))


class LlamaBlock(nn.Module):
    def __init__(self, width, hidden, heads, rank):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.query, self.key, self.value, self.output = (Lora(width, width, rank) for _ in range(4))
        self.gate, self.up = Lora(width, hidden, rank), Lora(width, hidden, rank)
        self.down = Lora(hidden, width, rank)

    def attention(self, x, cosines, sines):
        batch, length, width = x.shape

        def split(linear):
            return linear(x).view(batch, length, self.heads, -1).transpose(1, 2)

        def rotate(x):
            even, odd = x[..., 0::2], x[..., 1::2]
            return torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), -1).flatten(-2)

        query, key = rotate(split(self.query)), rotate(split(self.key))
        context = nn.functional.scaled_dot_product_attention(query, key, split(self.value), is_causal=True)
        return self.output(context.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x, cosines, sines):
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        normed = self.feed_forward_norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, vocabulary, width, hidden, heads, blocks, length, rank):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.RMSNorm(width, 1e-5)
        self.blocks = nn.ModuleList(LlamaBlock(width, hidden, heads, rank) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        for module in (self.embedding, self.norm, self.head):
            module.requires_grad_(False)
        for block in self.blocks:
            block.attention_norm.requires_grad_(False)
            block.feed_forward_norm.requires_grad_(False)
        head = width // heads
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, head, 2) / head))
        self.cosines, self.sines = angles.cos(), angles.sin()

    def forward(self, tokens, following):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cosines, self.sines)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return nn.functional.cross_entropy(logits, following.flatten())


def llama(vocabulary, width, hidden, heads, blocks, batch, length, rank):
    vocabulary, width, hidden, heads, blocks, batch, length, rank = map(
        int, (vocabulary, width, hidden, heads, blocks, batch, length, rank)
    )
    model = Llama(vocabulary, width, hidden, heads, blocks, length, rank)
    tokens, following = (torch.randint(vocabulary, (batch, length)) for _ in range(2))

    def run():
        model.zero_grad()
        model(tokens, following).backward()

    return run


torch.set_num_threads(int(sys.argv[1]))
line, run = None, None
for request in sys.stdin:
    if request != line:
        kind, *arguments = request.split()
        kinds = {"conv": convolution, "norm_relu": norm_relu, "resnet": resnet, "efficientnet": efficientnet}
        kinds |= {"encoder": encoder, "llama": llama}
        line, run = request, kinds[kind](*arguments)
        run()
    start = time.perf_counter()
    run()
    print((time.perf_counter() - start) * 1e3, flush=True)
