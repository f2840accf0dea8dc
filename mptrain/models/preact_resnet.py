"""Pre-activation residual networks (He et al. 2016, "Identity Mappings in Deep Residual Networks").

Every residual unit is normalise, ReLU, convolve, so that the sum itself is never normalised or rectified: a signal and
its gradient can pass the whole network along the additions. torchvision has the post-activation form only. As in the
paper's appendix, the first unit's activation sits right after the stem (before the paths split), a unit whose shape
changes feeds its activated input to the projection too, and one more activation follows the last sum.
"""

from collections.abc import Sequence

from torch import Tensor, nn


class BasicUnit(nn.Module):
    """Two 3x3 convolutions, each after its own batch norm and ReLU."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, activate: bool = True) -> None:
        super().__init__()
        self.activation = activation(inputs) if activate else nn.Identity()
        self.shortcut = projection(inputs, width, stride)
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False),
            activation(width),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activation(x)
        kept = x if self.shortcut is None else self.shortcut(activated)
        return kept + self.residual(activated)


class BottleneckUnit(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolution to four times the width, each after batch norm and ReLU."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, activate: bool = True) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.activation = activation(inputs) if activate else nn.Identity()
        self.shortcut = projection(inputs, outputs, stride)
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            activation(width),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            activation(width),
            nn.Conv2d(width, outputs, 1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        activated = self.activation(x)
        kept = x if self.shortcut is None else self.shortcut(activated)
        return kept + self.residual(activated)


class PreActResNet(nn.Module):
    """A stem that ends activated, stages of units (each stage after the first halves the picture), a linear classifier.

    Takes pictures (batch, channels, height, width), returns logits (batch, num_classes).
    """

    def __init__(
        self,
        stem: nn.Module,
        unit: type[BasicUnit] | type[BottleneckUnit],
        depths: Sequence[int],
        widths: Sequence[int],
        num_classes: int,
    ) -> None:
        super().__init__()
        self.stem = stem
        channels = widths[0] if unit is BasicUnit else 64
        stages = []
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            units = []
            for position in range(depth):
                stride = 2 if stage > 0 and position == 0 else 1
                units.append(unit(channels, width, stride, activate=(stage, position) != (0, 0)))
                channels = width * unit.expansion
            stages.append(nn.Sequential(*units))
        self.stages = nn.Sequential(*stages)
        self.activation = activation(channels)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, pictures: Tensor) -> Tensor:
        x = self.activation(self.stages(self.stem(pictures)))
        return self.classifier(self.pool(x).flatten(1))


def activation(channels: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(inplace=True))


def projection(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    if inputs == outputs and stride == 1:
        return None
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


def preact_resnet50(num_classes: int = 1000) -> PreActResNet:
    """The paper's ResNet-50 (table 1): bottleneck units 3, 4, 6, 3 on 224x224 colour pictures, 25.5 M parameters."""
    stem = nn.Sequential(
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), activation(64), nn.MaxPool2d(3, stride=2, padding=1)
    )
    return PreActResNet(stem, BottleneckUnit, (3, 4, 6, 3), (64, 128, 256, 512), num_classes)


def preact_resnet8(num_classes: int = 10, channels: int = 1, width: int = 32) -> PreActResNet:
    """The small form for 28 to 32 pixels: eight layers, three stages of one basic unit, 0.3 M parameters.

    The stem has stride 2 as at full size, so that most of the arithmetic happens in convolutions, not around them.
    """
    stem = nn.Sequential(nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), activation(width))
    return PreActResNet(stem, BasicUnit, (1, 1, 1), (width, 2 * width, 4 * width), num_classes)
