"""Where to cut a picture."""

import math

import numpy as np

ENLARGEMENT = 256 / 224
"""Size before a crop over size after it, in Caffe's training and in everybody's evaluation."""


def resized_crop(rng: np.random.Generator, width: int, height: int) -> tuple[int, int, int, int]:
    """A box (left, top, right, bottom) of 8 to 100 % of the area and a shape of 3:4 to 4:3.

    The rule of PyTorch's ImageNet script: ten tries, then the largest centred box whose shape is allowed.
    """
    for _ in range(10):
        area = rng.uniform(0.08, 1) * width * height
        shape = math.exp(rng.uniform(math.log(3 / 4), math.log(4 / 3)))
        across, down = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(rng.integers(width - across + 1)), int(rng.integers(height - down + 1))
            return left, top, left + across, top + down
    across, down = min(width, round(height * 4 / 3)), min(height, round(width * 4 / 3))
    return centred(width, height, across, down)


def centred(width: int, height: int, across: int, down: int) -> tuple[int, int, int, int]:
    """The box of that size in the middle of a picture."""
    left, top = round((width - across) / 2), round((height - down) / 2)
    return left, top, left + across, top + down
