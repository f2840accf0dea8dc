"""The small picture classifier whose features measure a generator's faces (Fréchet distance in our own features).

Its weights lie beside this file; `python scripts/train_emoji_features.py` makes them again from the embedded emoji, in
a few seconds.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WEIGHTS = Path(__file__).with_suffix(".npz")
SIZE = 32
FEATURES = 64


class EmojiClassifier(nn.Module):
    """Three convolutions with max pooling, the mean over the picture (64 features), a linear classifier."""

    def __init__(self, classes: int = 9) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, FEATURES)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.convolutions = nn.Sequential(*layers)
        self.classifier = nn.Linear(FEATURES, classes)

    def features(self, pictures: Tensor) -> Tensor:
        """Pictures (batch, 1 or 3, height, width) in [-1, 1], averaged down to 32x32 -> (batch, 64) FP32."""
        pictures = pictures.float().expand(-1, 3, -1, -1)
        if pictures.shape[-2:] != (SIZE, SIZE):
            pictures = F.interpolate(pictures, (SIZE, SIZE), mode="area")
        return self.convolutions(pictures).mean((2, 3))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classifier(self.features(pictures))


def pretrained() -> EmojiClassifier:
    """The classifier with the weights of this package, in evaluation mode and frozen."""
    network = EmojiClassifier()
    with np.load(WEIGHTS) as weights:
        network.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return network.requires_grad_(False).eval()
