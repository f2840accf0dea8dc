"""AlexNet (Krizhevsky et al. 2012) for small pictures; `torchvision.models:alexnet` is the one at full size."""

from torch import Tensor, nn


class SmallAlexNet(nn.Module):
    """Five convolutions, three of them pooled (3x3, stride 2, overlapping), three fully connected layers with dropout.

    No normalisation of any kind. Takes (batch, channels, 28 to 32, 28 to 32), returns logits (batch, num_classes).
    """

    def __init__(self, num_classes: int, channels: int, width: int, dropout: float) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *convolution(channels, width, 5, stride=2),
            nn.MaxPool2d(3, stride=2, padding=1),
            *convolution(width, 3 * width, 5),
            nn.MaxPool2d(3, stride=2, padding=1),
            *convolution(3 * width, 6 * width, 3),
            *convolution(6 * width, 4 * width, 3),
            *convolution(4 * width, 4 * width, 3),
            nn.MaxPool2d(3, stride=2, padding=1),
            nn.AdaptiveAvgPool2d(2),
        )
        hidden = 8 * width
        logits = nn.Linear(hidden, num_classes)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(4 * 4 * width, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            logits,
        )
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.zeros_(parameter)
            else:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
        nn.init.normal_(logits.weight, std=0.01)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.features(pictures).flatten(1))


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2), nn.ReLU(inplace=True)


def alexnet_small(num_classes: int = 10, channels: int = 1, width: int = 32, dropout: float = 0.5) -> SmallAlexNet:
    """The same eight layers in about a third of the channels; He's initialisation below the logits."""
    return SmallAlexNet(num_classes, channels, width, dropout)
