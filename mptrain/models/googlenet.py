"""GoogLeNet, alias Inception v1 (Szegedy et al. 2015): torchvision's at full size, and a form for small pictures."""

import torch
import torchvision
from torch import Tensor, nn

from mptrain.models.layers import ConvNormReLU


class InceptionModule(nn.Module):
    """1x1, 3x3, 5x5 convolutions and a pooled projection side by side, their channels joined.

    `widths` = 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; pool projection, as in the paper's table 1.
    """

    def __init__(self, inputs: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, three_reduce, three, five_reduce, five, pooled = widths
        self.branches = nn.ModuleList(
            [
                ConvNormReLU(inputs, one, 1),
                nn.Sequential(ConvNormReLU(inputs, three_reduce, 1), ConvNormReLU(three_reduce, three, 3, padding=1)),
                nn.Sequential(ConvNormReLU(inputs, five_reduce, 1), ConvNormReLU(five_reduce, five, 5, padding=2)),
                nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), ConvNormReLU(inputs, pooled, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


class AuxiliaryClassifier(nn.Sequential):
    """The classifier hung on a middle module, in training only: pooling, 1x1 convolution, two linear layers."""

    def __init__(self, inputs: int, width: int, num_classes: int) -> None:
        super().__init__(
            nn.AdaptiveAvgPool2d(3),
            ConvNormReLU(inputs, width, 1),
            nn.Flatten(),
            nn.Linear(9 * width, 4 * width),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4 * width, num_classes),
        )


class SmallGoogLeNet(nn.Module):
    """A stem, two, three and one Inception module at 7, 4 and 2 pixels, global pooling, one linear layer.

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
        self.stage3 = nn.Sequential(
            InceptionModule(4 * w, (2 * w, 2 * w, 4 * w, w // 2, w, w)),
            InceptionModule(8 * w, (3 * w, 2 * w, 5 * w, w, 2 * w, 2 * w)),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stage4 = InceptionModule(12 * w, (4 * w, 3 * w, 6 * w, w, 2 * w, 2 * w))
        self.auxiliary = AuxiliaryClassifier(14 * w, 4 * w, num_classes)
        self.stage4_rest = nn.Sequential(
            InceptionModule(14 * w, (4 * w, 3 * w, 6 * w, w, 2 * w, 2 * w)),
            InceptionModule(14 * w, (5 * w, 3 * w, 7 * w, w, 2 * w, 2 * w)),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        self.stage5 = InceptionModule(16 * w, (6 * w, 4 * w, 8 * w, w, 3 * w, 3 * w))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.4)
        self.classifier = nn.Linear(20 * w, num_classes)

    def forward(self, pictures: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        middle = self.stage4(self.stage3(self.stem(pictures)))
        x = self.pool(self.stage5(self.stage4_rest(middle))).flatten(1)
        logits = self.classifier(self.dropout(x))
        return (logits, self.auxiliary(middle)) if self.training else logits


def googlenet(num_classes: int = 1000) -> nn.Module:
    """torchvision's GoogLeNet with both auxiliary classifiers: 13.0 M parameters, 6.6 M of them used after training.

    It differs from the 2015 network in batch norm after every convolution, none of the local response normalisation,
    and 3x3 kernels where the paper has 5x5.
    """
    return torchvision.models.googlenet(num_classes=num_classes, aux_logits=True, init_weights=True)


def googlenet_small(num_classes: int = 10, channels: int = 1, width: int = 12) -> SmallGoogLeNet:
    """Six of the nine Inception modules, with one of the two auxiliary classifiers, in a sixth of the channels."""
    return SmallGoogLeNet(num_classes, channels, width)
