"""Synthetic detection pictures: coloured rectangles on noise, the colour tells the class."""

import colorsys

import numpy as np

from mptrain.data.boxes import DetectionSet, Sample


class Rectangles(DetectionSet):
    """Up to four rectangles a picture, drawn from (seed, split, index) each time they are asked for."""

    name, kind = "synthetic", "synthetic"

    def __init__(self, count: int, size: int, classes: int, seed: tuple[int, ...]) -> None:
        self.count, self.size, self.seed = count, size, seed
        self.classes = tuple(f"hue {index}" for index in range(classes))

    def __len__(self) -> int:
        return self.count

    def sample(self, index: int, rng: np.random.Generator | None) -> Sample:
        chance = np.random.default_rng((*self.seed, index))
        picture = chance.integers(64, 192, (self.size, self.size, 3), dtype=np.uint8)
        count = int(chance.integers(0, 5))
        sides = chance.integers(self.size // 6, self.size // 2, (count, 2), endpoint=True)
        corners = (chance.random((count, 2)) * (self.size - sides)).astype(np.int64)
        labels = chance.integers(0, len(self.classes), count)
        for (x, y), (width, height), label in zip(corners, sides, labels, strict=True):
            colour = np.array(colorsys.hsv_to_rgb(label / len(self.classes), 1.0, 1.0)) * 255
            picture[y : y + height, x : x + width] = colour.astype(np.uint8)
        boxes = np.concatenate([corners, corners + sides], axis=1).astype(np.float32)
        return Sample(picture, boxes, labels, np.zeros(count, bool))


def load(size: int, classes: int, seed: int) -> tuple[Rectangles, Rectangles]:
    """256 training and 64 test pictures of size x size."""
    return Rectangles(256, size, classes, (seed, 0)), Rectangles(64, size, classes, (seed, 1))
