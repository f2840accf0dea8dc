"""VGG (Simonyan and Zisserman 2014) for small pictures; `torchvision.models:vgg16` is configuration D at full size."""

from torch import Tensor, nn


class SmallVGG(nn.Module):
    """Stages of 3x3 convolutions, each ended by a 2x2 max pooling, then three fully connected layers with dropout.

    No normalisation of any kind. Takes (batch, channels, 28 to 32, 28 to 32), returns logits (batch, num_classes).
    """

    def __init__(self, stages: tuple[tuple[int, ...], ...], hidden: int, num_classes: int, channels: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for widths in stages:
            for width in widths:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(2)
        logits = nn.Linear(hidden, num_classes)
        self.classifier = nn.Sequential(
            nn.Linear(4 * channels, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            logits,
        )
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        nn.init.normal_(logits.weight, std=0.01)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(pictures)).flatten(1))


def vgg_small(num_classes: int = 10, channels: int = 1, width: int = 16) -> SmallVGG:
    """Configuration D's stage pattern (2, 2, 3 convolutions, channels doubling) without its last two stages."""
    stages = ((width,) * 2, (2 * width,) * 2, (4 * width,) * 3, (8 * width,) * 3)
    return SmallVGG(stages, 16 * width, num_classes, channels)
