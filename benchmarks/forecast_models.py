"""Ten models as users write them: plain torch, passed to runs by ``model.factory``."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness.memory import ROLLUP, memory_fields
from torch import Tensor, nn

VOCABULARY, CONTEXT, CLASSES = 256, 64, 10
VARIABLE = "HPCTRAIN_FORECAST_PEAKS"  # the folder in which ranks record their initial memory


def mlp(width: int, depth: int, inputs: int = 256) -> nn.Module:
    """Return a multilayer perceptron: a sequence of linear layers and ReLUs."""
    sizes = [inputs] + [width] * depth
    row: list[nn.Module] = []
    for before, after in zip(sizes, sizes[1:]):
        row += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*row, nn.Linear(width, CLASSES))


def normed_mlp(width: int, depth: int, inputs: int = 256) -> nn.Module:
    """Return a perceptron with batch norms and dropout, whose activations outweigh its parameters."""
    row: list[nn.Module] = []
    for before in [inputs] + [width] * (depth - 1):
        row += [nn.Linear(before, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*row, nn.Linear(width, CLASSES))


def convolved(before: int, after: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution of 3 x 3 with a batch norm."""
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))


def cnn(channels: int) -> nn.Module:
    """Return a plain convnet."""
    row: list[nn.Module] = []
    before = 3
    for after in (channels, 2 * channels, 4 * channels):
        row += [convolved(before, after), nn.ReLU(), convolved(after, after), nn.ReLU(), nn.MaxPool2d(2)]
        before = after
    return nn.Sequential(*row, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class Residual(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolved(before, after, stride), convolved(after, after)
        self.around = nn.Identity() if before == after and stride == 1 else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.around(x))


def resnet(channels: int, blocks: int) -> nn.Module:
    """Return a ResNet for small images: three groups of residual blocks."""
    row: list[nn.Module] = [convolved(3, channels), nn.ReLU()]
    before = channels
    for group in range(3):
        after = channels * 2**group
        for number in range(blocks):
            row.append(Residual(before, after, 2 if group and not number else 1))
            before = after
    return nn.Sequential(*row, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES))


class UNet(nn.Module):
    """Encoder of images and its decoder, with skip connections, that ends in classes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down1, self.down2 = convolved(3, channels), convolved(channels, 2 * channels, 2)
        self.bottom = convolved(2 * channels, 4 * channels, 2)
        self.up2 = nn.ConvTranspose2d(4 * channels, 2 * channels, 2, 2)
        self.up1 = nn.ConvTranspose2d(4 * channels, channels, 2, 2)
        self.end = nn.Conv2d(2 * channels, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean of the pixels' outputs over the image."""
        one = F.relu(self.down1(x))
        two = F.relu(self.down2(one))
        three = F.relu(self.bottom(two))
        up = torch.cat([self.up2(three), two], 1)
        result: Tensor = self.end(torch.cat([self.up1(up), one], 1)).mean((2, 3))
        return result


class Encoder(nn.Module):
    """Transformer encoder of torch over vectors."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return classes of the mean over the sequence."""
        result: Tensor = self.head(self.encoder(x).mean(1))
        return result


class EncoderDecoder(nn.Module):
    """Transformer of torch, with tokens as inputs and outputs."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 4, layers, layers, 4 * width, batch_first=True, dropout=0.0)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=x.device, dtype=x.dtype)
        result: Tensor = self.head(self.transformer(x, x, src_mask=mask, tgt_mask=mask, memory_mask=mask))
        return result


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return result


class Block(nn.Module):
    """Block of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class Begin(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return result


def gpt(width: int, blocks: int) -> nn.Module:
    """Return a GPT as a sequence of layers."""
    row = [Block(width) for _ in range(blocks)]
    return nn.Sequential(Begin(width), *row, nn.LayerNorm(width), nn.Linear(width, VOCABULARY))


class Mean(nn.Module):
    """Mean over a sequence's tokens so far."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]


def embedding(rows: int, width: int) -> nn.Module:
    """Return a model that consists mostly of a large embedding table."""
    return nn.Sequential(nn.Embedding(rows, width), Mean(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 256))


FACTORIES: dict[str, Callable[..., nn.Module]] = {
    **{one.__name__: one for one in (mlp, normed_mlp, cnn, resnet, gpt, embedding)},
    "unet": UNet,
    "encoder": Encoder,
    "encoder_decoder": EncoderDecoder,
}


def make(kind: str, **options: Any) -> nn.Module:
    """Return a model by its name; first record the memory that its rank already has."""
    record_start()
    return FACTORIES[kind](**options)


# Memory of a rank -----------------------------------------------------------------------------------------------------


def record_start() -> None:
    """Record the memory of this rank if a measurement is in progress."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    program = memory_fields(ROLLUP)["Pss_Anon"]
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak (proc(5))
    part = Path(folder, f".{os.getpid()}")
    part.write_text(json.dumps({"program": program}))
    part.rename(Path(folder, str(os.getpid())))
