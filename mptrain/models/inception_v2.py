"""Inception v2, alias BN-Inception (Ioffe and Szegedy 2015), which torchvision lacks, and a form for small pictures."""

import torch
from torch import Tensor, nn

from mptrain.models.layers import ConvNormReLU

# One row a module, from the paper's figure 5: 1x1 (0 = no such branch, and then stride 2); 3x3 reduce, 3x3;
# double 3x3 reduce, double 3x3; pooling; channels of the pooled projection (0 = pooled input passed on).
FULL_SIZE = (
    (64, 64, 64, 64, 96, "average", 32),
    (64, 64, 96, 64, 96, "average", 64),
    (0, 128, 160, 64, 96, "max", 0),
    (224, 64, 96, 96, 128, "average", 128),
    (192, 96, 128, 96, 128, "average", 128),
    (160, 128, 160, 128, 160, "average", 96),
    (96, 128, 192, 160, 192, "average", 96),
    (0, 128, 192, 192, 256, "max", 0),
    (352, 192, 320, 160, 224, "average", 128),
    (352, 192, 320, 192, 224, "max", 128),
)
Row = tuple[int, int, int, int, int, str, int]


class InceptionModule(nn.Module):
    """1x1, 3x3 and double 3x3 convolutions and a pooled projection side by side, their channels joined."""

    def __init__(self, inputs: int, row: Row) -> None:
        super().__init__()
        one, three_reduce, three, double_reduce, double, pooling, projected = row
        stride = 1 if one else 2
        pool = nn.AvgPool2d if pooling == "average" else nn.MaxPool2d
        pooled: list[nn.Module] = [pool(3, stride=stride, padding=1)]
        if projected:
            pooled.append(ConvNormReLU(inputs, projected, 1))
        branches = [
            nn.Sequential(
                ConvNormReLU(inputs, three_reduce, 1), ConvNormReLU(three_reduce, three, 3, stride, padding=1)
            ),
            nn.Sequential(
                ConvNormReLU(inputs, double_reduce, 1),
                ConvNormReLU(double_reduce, double, 3, padding=1),
                ConvNormReLU(double, double, 3, stride, padding=1),
            ),
            nn.Sequential(*pooled),
        ]
        if one:
            branches.insert(0, ConvNormReLU(inputs, one, 1))
        self.branches = nn.ModuleList(branches)
        self.outputs = one + three + double + (projected or inputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class InceptionV2(nn.Module):
    """A stem, Inception modules, global pooling, one linear layer; no dropout and no auxiliary classifier.

    Takes pictures (batch, channels, height, width), returns logits (batch, num_classes).
    """

    def __init__(self, stem: nn.Module, inputs: int, rows: tuple[Row, ...], num_classes: int) -> None:
        super().__init__()
        self.stem = stem
        modules = []
        for row in rows:
            modules.append(InceptionModule(inputs, row))
            inputs = modules[-1].outputs
        self.inception = nn.Sequential(*modules)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.pool(self.inception(self.stem(pictures))).flatten(1))


def inception_v2(num_classes: int = 1000) -> InceptionV2:
    """The network of the paper's figure 5 for 224x224 colour pictures, about 11.2 M parameters.

    The first convolution is an ordinary one; the paper's own was separable with a depth multiplier of 8.
    """
    stem = nn.Sequential(
        ConvNormReLU(3, 64, 7, stride=2, padding=3),
        nn.MaxPool2d(3, stride=2, padding=1),
        ConvNormReLU(64, 64, 1),
        ConvNormReLU(64, 192, 3, padding=1),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    return InceptionV2(stem, 192, FULL_SIZE, num_classes)


def inception_v2_small(num_classes: int = 10, channels: int = 1, width: int = 12) -> InceptionV2:
    """Six of the ten modules in about a sixth of the channels, at 7, 4 and 2 pixels."""
    w = width
    stem = nn.Sequential(
        ConvNormReLU(channels, 2 * w, 3, stride=2, padding=1),
        ConvNormReLU(2 * w, 4 * w, 3, padding=1),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    rows: tuple[Row, ...] = (
        (2 * w, 2 * w, 3 * w, 2 * w, 3 * w, "average", w),
        (0, 3 * w, 5 * w, 2 * w, 3 * w, "max", 0),
        (6 * w, 3 * w, 4 * w, 3 * w, 4 * w, "average", 3 * w),
        (4 * w, 4 * w, 5 * w, 4 * w, 5 * w, "average", 3 * w),
        (0, 4 * w, 6 * w, 4 * w, 6 * w, "max", 0),
        (10 * w, 6 * w, 10 * w, 6 * w, 7 * w, "max", 4 * w),
    )
    return InceptionV2(stem, 4 * w, rows, num_classes)
