"""Inception v3 (Szegedy et al. 2016): torchvision's at full size, and a form for small pictures."""

import torch
import torchvision
from torch import Tensor, nn

from mptrain.models.layers import ConvNormReLU


class Branches(nn.Module):
    """Paths side by side, their channels joined."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def small_kernels(inputs: int, w: int) -> Branches:
    """Figure 5 of the paper: 3x3 convolutions in place of 5x5. Returns 12 w channels."""
    return Branches(
        ConvNormReLU(inputs, 3 * w, 1),
        nn.Sequential(ConvNormReLU(inputs, 2 * w, 1), ConvNormReLU(2 * w, 3 * w, 3, padding=1)),
        nn.Sequential(
            ConvNormReLU(inputs, 2 * w, 1),
            ConvNormReLU(2 * w, 4 * w, 3, padding=1),
            ConvNormReLU(4 * w, 4 * w, 3, padding=1),
        ),
        nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), ConvNormReLU(inputs, 2 * w, 1)),
    )


def smaller_grid(inputs: int, w: int) -> Branches:
    """Figure 10: convolution and pooling with stride 2 side by side. Returns 8 w channels and the inputs."""
    return Branches(
        nn.Sequential(ConvNormReLU(inputs, 3 * w, 1), ConvNormReLU(3 * w, 4 * w, 3, stride=2, padding=1)),
        nn.Sequential(
            ConvNormReLU(inputs, 2 * w, 1),
            ConvNormReLU(2 * w, 4 * w, 3, padding=1),
            ConvNormReLU(4 * w, 4 * w, 3, stride=2, padding=1),
        ),
        nn.MaxPool2d(3, stride=2, padding=1),
    )


def long_kernels(inputs: int, w: int) -> Branches:
    """Figure 6: 1x7 and 7x1 convolutions in turn in place of 7x7. Returns 20 w channels."""

    def wide(inputs: int, outputs: int) -> ConvNormReLU:
        return ConvNormReLU(inputs, outputs, (1, 7), padding=(0, 3))

    def tall(inputs: int, outputs: int) -> ConvNormReLU:
        return ConvNormReLU(inputs, outputs, (7, 1), padding=(3, 0))

    return Branches(
        ConvNormReLU(inputs, 5 * w, 1),
        nn.Sequential(ConvNormReLU(inputs, 4 * w, 1), wide(4 * w, 4 * w), tall(4 * w, 5 * w)),
        nn.Sequential(
            ConvNormReLU(inputs, 4 * w, 1),
            tall(4 * w, 4 * w),
            wide(4 * w, 4 * w),
            tall(4 * w, 4 * w),
            wide(4 * w, 5 * w),
        ),
        nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), ConvNormReLU(inputs, 5 * w, 1)),
    )


def wide_outputs(inputs: int, w: int) -> Branches:
    """Figure 7: the last convolutions fork into 1x3 and 3x1. Returns 40 w channels."""

    def fork() -> Branches:
        return Branches(
            ConvNormReLU(8 * w, 8 * w, (1, 3), padding=(0, 1)), ConvNormReLU(8 * w, 8 * w, (3, 1), padding=(1, 0))
        )

    return Branches(
        ConvNormReLU(inputs, 4 * w, 1),
        nn.Sequential(ConvNormReLU(inputs, 8 * w, 1), fork()),
        nn.Sequential(ConvNormReLU(inputs, 8 * w, 1), ConvNormReLU(8 * w, 8 * w, 3, padding=1), fork()),
        nn.Sequential(nn.AvgPool2d(3, stride=1, padding=1), ConvNormReLU(inputs, 4 * w, 1)),
    )


class SmallInceptionV3(nn.Module):
    """A stem and one module of each of the paper's kinds at 7 and 4 pixels, global pooling, one linear layer.

    Takes (batch, channels, 28 to 32, 28 to 32). Returns logits (batch, num_classes), in training (logits, auxiliary
    logits).
    """

    def __init__(self, num_classes: int, channels: int, width: int) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            ConvNormReLU(channels, 2 * w, 3, stride=2, padding=1),
            ConvNormReLU(2 * w, 4 * w, 3, padding=1),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.first = nn.Sequential(small_kernels(4 * w, w), long_kernels(12 * w, w))
        self.auxiliary = nn.Sequential(
            nn.AdaptiveAvgPool2d(3),
            ConvNormReLU(20 * w, 4 * w, 1),
            ConvNormReLU(4 * w, 16 * w, 3),
            nn.Flatten(),
            nn.Linear(16 * w, num_classes),
        )
        self.last = nn.Sequential(smaller_grid(20 * w, w), wide_outputs(28 * w, w))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(40 * w, num_classes)

    def forward(self, pictures: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        middle = self.first(self.stem(pictures))
        logits = self.classifier(self.dropout(self.pool(self.last(middle)).flatten(1)))
        return (logits, self.auxiliary(middle)) if self.training else logits


def inception_v3(num_classes: int = 1000) -> nn.Module:
    """torchvision's Inception v3 for 299x299: 27.2 M parameters, 23.8 M of them used after training."""
    return torchvision.models.inception_v3(num_classes=num_classes, aux_logits=True, init_weights=True)


def inception_v3_small(num_classes: int = 10, channels: int = 1, width: int = 8) -> SmallInceptionV3:
    """Four modules of the eleven, one of each kind, with the auxiliary classifier, in a fraction of the channels."""
    return SmallInceptionV3(num_classes, channels, width)
