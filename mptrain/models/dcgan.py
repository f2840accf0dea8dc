"""DCGAN (Radford et al. 2015) in the form of the paper's section 4.6.

The generator doubles a 1x1 noise map until it has the picture's size: 128x128 takes seven fractionally strided
convolutions. The discriminator halves the picture down to 2x2, six convolutions from 128x128, and ends in two fully
connected layers. It returns a logit: the sigmoid belongs to the loss, which takes both in one stable step.
"""

import math

import torch
from torch import Tensor, nn


class Generator(nn.Module):
    """Makes pictures (batch, channels, size, size) in [-1, 1] out of noise (batch, noise).

    `size` is a power of two; `width` is the number of maps before the last layer, doubled towards the noise up to 16
    times `width`. Leaky ReLU after each layer but the last, which has tanh and no batch norm.
    """

    def __init__(self, size: int = 128, channels: int = 3, width: int = 64, noise: int = 100) -> None:
        super().__init__()
        doublings = power_of_two(size)
        widths = [noise] + [width * min(2**i, 16) for i in reversed(range(doublings - 1))] + [channels]
        layers: list[nn.Module] = []
        for i in range(doublings):
            last = i == doublings - 1
            layers.append(nn.ConvTranspose2d(widths[i], widths[i + 1], 4, stride=2, padding=1, bias=last))
            layers += [nn.Tanh()] if last else [nn.BatchNorm2d(widths[i + 1]), nn.LeakyReLU(0.2, inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.apply(initialise)

    def forward(self, noise: Tensor) -> Tensor:
        return self.layers(noise[:, :, None, None])


class Discriminator(nn.Module):
    """Returns one logit per picture (batch, channels, size, size): positive means real.

    Leaky ReLU after every layer but the last. `width` maps after the first convolution, doubled at each one up to 16
    times `width`; `features` units in the first fully connected layer. `norm` says where batch norm is: after "all"
    layers but the last (the paper), or after the "inner" convolutions, all but the first (Radford et al. 2015). As the
    pictures of a batch are all real or all drawn, norm at the first layer hides their colour: "inner" learns sooner.
    """

    def __init__(
        self, size: int = 128, channels: int = 3, width: int = 64, features: int = 1024, norm: str = "all"
    ) -> None:
        super().__init__()
        halvings = power_of_two(size) - 1
        widths = [channels] + [width * min(2**i, 16) for i in range(halvings)]
        layers: list[nn.Module] = []
        for i in range(halvings):
            normed = norm == "all" or i > 0
            layers.append(nn.Conv2d(widths[i], widths[i + 1], 4, stride=2, padding=1, bias=not normed))
            layers += [nn.BatchNorm2d(widths[i + 1])] if normed else []
            layers.append(nn.LeakyReLU(0.2, inplace=True))
        layers += [nn.Flatten(), nn.Linear(widths[-1] * 4, features, bias=norm != "all")]
        layers += [nn.BatchNorm1d(features)] if norm == "all" else []
        layers.append(nn.LeakyReLU(0.2, inplace=True))
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(features, 1)
        self.apply(initialise)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.layers(pictures)).squeeze(1)


def power_of_two(size: int) -> int:
    """Returns n for size = 2^n."""
    if size < 8 or size & (size - 1):
        raise ValueError(f"pictures must be 8, 16, 32, 64, ... pixels wide, not {size}")
    return int(math.log2(size))


def initialise(module: nn.Module) -> None:
    """Weights from N(0, 0.02), batch norm gains from N(1, 0.02) (Radford et al., section 4)."""
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d):
        nn.init.normal_(module.weight, 1.0, 0.02)
    if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
        nn.init.zeros_(bias)
