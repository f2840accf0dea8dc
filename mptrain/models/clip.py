"""CLIP (Radford et al. 2021): an image tower and a text tower that meet in one space of unit vectors.

The vision transformer and the text transformer have the shapes of OpenCLIP, so ViT-H-14 comes out at 986 M parameters.
The convolutional image tower is the small alternative whose norm can be chosen: batch norm keeps running statistics,
which a step that was skipped because of an overflow has already spoilt.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST_SCALE = 100.0
"""The temperature is learned, but the logits never grow by more than this (Radford et al. 2021, section 2.5)."""


class CLIP(nn.Module):
    """Two towers and a learned scale (inverse temperature), which starts at 1 / 0.07."""

    def __init__(self, image: nn.Module, text: nn.Module) -> None:
        super().__init__()
        self.image, self.text = image, text
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, pictures: Tensor, words: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """FP32 unit vectors of pictures (batch, 3, size, size) and of captions (batch, time), and the clamped scale."""
        pictures, captions = self.image(pictures), self.text(words, lengths)
        scale = self.log_scale.float().clamp(0.0, math.log(LARGEST_SCALE)).exp()
        return F.normalize(pictures.float(), dim=-1), F.normalize(captions.float(), dim=-1), scale


class VisionTransformer(nn.Module):
    """Dosovitskiy et al. 2021: patches and a class token through a transformer; returns (batch, dimension).

    `stem` "patch" sees each patch through one large convolution, "convolutions" through many small ones (Xiao et al.
    2021, "Early Convolutions Help Transformers See Better"), with which a small one learns much sooner. `pool` says
    what stands for the picture in the end: the class "token", or the "mean" of the patches.
    """

    def __init__(
        self,
        size: int,
        patch: int,
        width: int,
        layers: int,
        heads: int,
        dimension: int,
        stem: str = "patch",
        pool: str = "token",
    ) -> None:
        super().__init__()
        self.pool = pool
        plain = nn.Conv2d(3, width, patch, stride=patch, bias=False)
        self.patches = plain if stem == "patch" else small_convolutions(patch, width)
        self.class_token = nn.Parameter(torch.randn(width) * width**-0.5)
        self.positions = nn.Parameter(torch.randn((size // patch) ** 2 + 1, width) * width**-0.5)
        self.norm_before = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, layers) for _ in range(layers))
        self.norm_after = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dimension, bias=False)
        nn.init.normal_(self.projection.weight, std=width**-0.5)

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        token = self.class_token.to(x.dtype).expand(len(x), 1, -1)
        x = self.norm_before(torch.cat([token, x], dim=1) + self.positions)
        for block in self.blocks:
            x = block(x)
        x = x[:, 0] if self.pool == "token" else x[:, 1:].mean(1)
        return self.projection(self.norm_after(x))


def small_convolutions(patch: int, width: int) -> nn.Sequential:
    """Pairs of 3x3 convolutions that halve the picture and double the maps, until a patch is one position."""
    layers: list[nn.Module] = []
    halvings, before = int(math.log2(patch)), 3
    for maps in (width // 2**i for i in reversed(range(halvings))):
        for inputs, stride in ((before, 2), (maps, 1)):
            convolution = nn.Conv2d(inputs, maps, 3, stride, padding=1)
            nn.init.kaiming_normal_(convolution.weight, nonlinearity="relu")
            layers += [convolution, nn.ReLU()]
        before = maps
    return nn.Sequential(*layers, nn.Conv2d(width, width, 1))


class TextTransformer(nn.Module):
    """A causal transformer over words; the last word's vector stands for the caption; returns (batch, dimension)."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int, dimension: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.01)
        self.blocks = nn.ModuleList(Block(width, heads, layers) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, dimension, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.projection.weight, std=width**-0.5)

    def forward(self, words: Tensor, lengths: Tensor) -> Tensor:
        """`words` (batch, time) start with a start word, so that `lengths` (batch,) are at least 1."""
        time = torch.arange(words.shape[1], device=words.device)
        visible = (time <= time[:, None]) & (time < lengths[:, None, None])
        x = self.embedding(words) + self.positions[: len(time)]
        for block in self.blocks:
            x = block(x, visible.unsqueeze(1))
        last = x[torch.arange(len(x), device=x.device), lengths - 1]
        return self.projection(self.norm(last))


class Block(nn.Module):
    """Attention and a four times wider MLP, each behind its own layer norm and added to what came in."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, layers)
        self.mlp_norm = nn.LayerNorm(width)
        wide, narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(wide, nn.GELU(), narrow)
        nn.init.normal_(wide.weight, std=(2 * width) ** -0.5)
        nn.init.normal_(narrow.weight, std=width**-0.5 * (2 * layers) ** -0.5)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), visible)
        return x + self.mlp(self.mlp_norm(x))


class Attention(nn.Module):
    """Multi-head self-attention; `visible` (batch, 1, time, time) is True where a query may look at a key."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        nn.init.normal_(self.inputs.weight, std=width**-0.5)
        nn.init.normal_(self.output.weight, std=width**-0.5 * (2 * layers) ** -0.5)
        nn.init.zeros_(self.inputs.bias)
        nn.init.zeros_(self.output.bias)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        batch, time, width = x.shape
        query, key, value = self.inputs(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        return self.output(x.transpose(1, 2).reshape(batch, time, width))


class ConvolutionalTower(nn.Module):
    """A small convolutional tower: each stage halves the picture and doubles the maps; returns (batch, dimension).

    `norm` is "batch", "group" (8 maps a group) or "layer" (one group).
    """

    def __init__(self, width: int, stages: int, dimension: int, norm: str) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for stage in range(stages):
            maps = width * 2**stage
            for inputs, stride in ((before, 2), (maps, 1)):
                layers += [nn.Conv2d(inputs, maps, 3, stride, padding=1, bias=False), normalise(norm, maps), nn.ReLU()]
            before = maps
        self.stages = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.projection = nn.Linear(before, dimension)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.projection(self.pool(self.stages(pictures)).flatten(1))


def normalise(norm: str, maps: int) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(maps)
    return nn.GroupNorm(maps // 8 if norm == "group" else 1, maps)
