"""A network with two ends: it marks what lies where, pixel by pixel, and tells one number of the whole picture."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def block(inputs: int, width: int, stride: int = 1) -> nn.Sequential:
    """3x3 convolution, batch norm, ReLU in place."""
    return nn.Sequential(
        nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
    )


class Marker(nn.Module):
    """Pictures (N, channels, H, W) -> logits of every pixel (N, kinds, H, W), and one number for each (N,).

    Both share the first block. Marks come from features at a half and a quarter of the resolution, joined; the number
    from the mean of the first block's features.
    """

    def __init__(self, channels: int, kinds: int, width: int = 16) -> None:
        super().__init__()
        self.stem = block(channels, width)
        self.down = block(width, 2 * width, stride=2)
        self.deep = nn.Sequential(block(2 * width, 4 * width, stride=2), block(4 * width, 4 * width))
        self.joined = block(6 * width, 2 * width)
        self.marks = nn.Conv2d(2 * width, kinds, 1)
        self.number = nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, 1))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(pictures)
        number = self.number(x.mean((2, 3))).squeeze(1)
        half = self.down(x)
        quarter = F.interpolate(self.deep(half), size=half.shape[2:], mode="nearest")
        marks = self.marks(self.joined(torch.cat([half, quarter], 1)))
        return F.interpolate(marks, size=pictures.shape[2:], mode="bilinear"), number
