"""Composites: labelled Fashion-MNIST items pasted on crops of aerial photographs. Real pixels, made-up places.

Boxes are exact by construction. The training pictures take training items and the training part of the photographs, the
test pictures test items and the test part, so that neither an item nor a place is in both.
"""

import io

import numpy as np
from PIL import Image

from mptrain.data import samples, trees
from mptrain.data.boxes import DetectionSet, Sample, flipped

CLASSES = ("t-shirt", "trousers", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
TRAIN_PICTURES, TEST_PICTURES = 4000, 1000
MOST_ITEMS = 4
SMALLEST, LARGEST = 1 / 4, 5 / 8
"""side of an item's frame, as a share of the picture's"""


class Composites(DetectionSet):
    """Pictures in memory, mirrored at random in training."""

    name, kind, classes = "composite", "composite", CLASSES

    def __init__(self, pictures: list[Sample]) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def sample(self, index: int, rng: np.random.Generator | None) -> Sample:
        mirror = rng is not None and rng.random() < 0.5
        return flipped(self.pictures[index]) if mirror else self.pictures[index]


def load(size: int) -> tuple[Composites, Composites]:
    """Training and test pictures of size x size, the same every time; UserError if a photograph is smaller."""
    trees.refuse_too_large(size)
    return compose("train", TRAIN_PICTURES, size), compose("test", TEST_PICTURES, size)


def compose(split: str, count: int, size: int) -> Composites:
    items, labels = fashion(split)
    photographs = [photograph.picture for photograph in trees.photographs(split)]
    rng = np.random.default_rng((0 if split == "train" else 1, size))
    areas = np.array([photograph.shape[0] * photograph.shape[1] for photograph in photographs], float)
    pictures = []
    for _ in range(count):
        photograph = photographs[rng.choice(len(photographs), p=areas / areas.sum())]
        background = crop(photograph, size, rng)
        chosen = rng.integers(0, len(items), rng.integers(1, MOST_ITEMS, endpoint=True))
        pictures.append(paste(background, items[chosen], labels[chosen], rng))
    return Composites(pictures)


def fashion(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Items (n, 28, 28) and their classes (n,)."""
    rows = samples.read("fashion", split).to_pylist()
    items = [np.asarray(Image.open(io.BytesIO(row["image"]["bytes"]))) for row in rows]
    return np.stack(items), np.array([row["label"] for row in rows], np.int64)


def crop(photograph: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    y, x = (int(rng.integers(0, side - size, endpoint=True)) for side in photograph.shape[:2])
    return photograph[y : y + size, x : x + size].copy()


def paste(picture: np.ndarray, items: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Sample:
    """Pastes grey items (n, 28, 28), black being transparent, into `picture` where they touch no earlier one.

    An item that finds no free place in ten tries is left out.
    """
    size = len(picture)
    boxes: list[np.ndarray] = []
    kept: list[int] = []
    for item, label in zip(items, labels, strict=True):
        side = int(rng.integers(round(SMALLEST * size), round(LARGEST * size), endpoint=True))
        grey = np.asarray(Image.fromarray(item).resize((side, side), Image.Resampling.BILINEAR), np.float32)[..., None]
        opacity = np.clip(grey / 32, 0, 1)
        rows, columns = (np.flatnonzero((opacity > 0.5).any((axis, 2))) for axis in (1, 0))
        if not len(rows):
            continue
        tight = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        for _ in range(10):
            x, y = (int(value) for value in rng.integers(0, size - side, 2, endpoint=True))
            box = tight + [x, y, x, y]
            if not any(overlap(box, other) for other in boxes):
                under = picture[y : y + side, x : x + side]
                under[:] = np.rint(opacity * grey + (1 - opacity) * under).astype(np.uint8)
                boxes.append(box)
                kept.append(label)
                break
    found = np.array(boxes, np.float32).reshape(-1, 4)
    return Sample(picture, found, np.array(kept, np.int64), np.zeros(len(kept), bool))


def overlap(one: np.ndarray, other: np.ndarray) -> bool:
    return bool((np.maximum(one[:2], other[:2]) < np.minimum(one[2:], other[2:])).all())
