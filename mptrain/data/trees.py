"""Tree crowns in aerial photographs, boxes drawn by hand: one class, cut into square tiles.

The split is by place: a strip of the first photograph is the test set, in tiles side by side; all the rest is for
training, from where tiles are cut at random.
"""

import io
from collections.abc import Sequence
from functools import cache

import numpy as np
from PIL import Image

from mptrain.data import samples
from mptrain.data.boxes import DetectionSet, Sample, flipped, turned
from mptrain.errors import UserError

TRAIN_TILES = 1024
"""tiles that count as one epoch; each is cut anew every time"""
LEARNT, ASKED = 0.3, 0.5
"""shares of a crown that a tile has to show, to be learnt in training, to be asked for in the test"""


class RandomTiles(DetectionSet):
    """Tiles cut at random around random crowns; one epoch has TRAIN_TILES of them.

    In training they are mirrored and turned too, since from above no side is up.
    """

    name, kind, classes = "trees", "real", ("tree",)

    def __init__(self, photographs: Sequence[Sample], size: int) -> None:
        self.size = size
        self.crowns = [(sample, box) for sample in photographs for box in sample.boxes]

    def __len__(self) -> int:
        return TRAIN_TILES

    def sample(self, index: int, rng: np.random.Generator | None) -> Sample:
        chance = np.random.default_rng(index) if rng is None else rng
        photograph, (x1, y1, x2, y2) = self.crowns[chance.integers(len(self.crowns))]
        height, width = photograph.picture.shape[:2]
        x = self.start((x1 + x2) / 2, width, chance)
        y = self.start((y1 + y2) / 2, height, chance)
        sample = without_difficult(cut_tile(photograph, y, x, self.size, LEARNT))
        if rng is None:
            return sample
        for _ in range(rng.integers(4)):
            sample = turned(flipped(sample))
        return flipped(sample) if rng.random() < 0.5 else sample

    def start(self, centre: float, side: int, rng: np.random.Generator) -> int:
        """First row or column of a tile that has the middle of the crown in it and ends within the photograph."""
        return int(np.clip(centre - rng.uniform(0, self.size), 0, side - self.size))


class TilesSideBySide(DetectionSet):
    """Every tile of the photographs once; the last of a row or column overlaps its neighbour to end at the border."""

    name, kind, classes = "trees", "real", ("tree",)

    def __init__(self, photographs: Sequence[Sample], size: int) -> None:
        self.tiles = []
        for photograph in photographs:
            rows, columns = (starts(side, size) for side in photograph.picture.shape[:2])
            self.tiles += [cut_tile(photograph, y, x, size, ASKED) for y in rows for x in columns]

    def __len__(self) -> int:
        return len(self.tiles)

    def sample(self, index: int, rng: np.random.Generator | None) -> Sample:
        return self.tiles[index]


def starts(side: int, size: int) -> list[int]:
    return [min(start, side - size) for start in range(0, side, size)]


def cut_tile(photograph: Sample, y: int, x: int, size: int, visible: float) -> Sample:
    """A tile of the photograph; crowns are cut at its border, and difficult where less than `visible` is left."""
    moved = photograph.boxes - np.array([x, y, x, y], np.float32)
    clipped = np.clip(moved, 0, size).astype(np.float32)
    shown = area(clipped) / area(moved)
    seen = shown > 0
    difficult = photograph.difficult[seen] | (shown[seen] < visible)
    return Sample(photograph.picture[y : y + size, x : x + size], clipped[seen], photograph.labels[seen], difficult)


def without_difficult(sample: Sample) -> Sample:
    easy = ~sample.difficult
    return Sample(sample.picture, sample.boxes[easy], sample.labels[easy], sample.difficult[easy])


def area(boxes: np.ndarray) -> np.ndarray:
    return np.prod(np.maximum(boxes[:, 2:] - boxes[:, :2], 0), axis=1)


@cache
def photographs(split: str) -> tuple[Sample, ...]:
    """The photographs of one part, "train" or "test", with all their boxes."""
    return tuple(annotated(row) for row in samples.read("trees", split).to_pylist())


def refuse_too_large(size: int) -> None:
    everything = (*photographs("train"), *photographs("test"))
    smallest = min(side for sample in everything for side in sample.picture.shape[:2])
    if size > smallest:
        raise UserError(f"task.size={size} is larger than the smallest photograph; type at most task.size={smallest}")


def annotated(row: dict) -> Sample:
    picture = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB"))
    objects = row["objects"]
    boxes = np.array(objects["bbox"], np.float32)
    return Sample(picture, boxes, np.array(objects["category"], np.int64), np.array(objects["difficult"], bool))


def load(size: int) -> tuple[RandomTiles, TilesSideBySide]:
    """Training and test tiles, size x size pixels of 10 cm on the ground; UserError if a photograph is smaller."""
    refuse_too_large(size)
    return RandomTiles(photographs("train"), size), TilesSideBySide(photographs("test"), size)
