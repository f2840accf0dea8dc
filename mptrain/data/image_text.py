"""Pictures with captions, for contrastive training.

`emoji`: every emoji as four vendors drew it, with its name and tags, embedded; one vendor's drawings are held out.
`imagetext`: a folder of train/ and test/ (or validation/), each with pictures and a metadata.csv or metadata.jsonl of
`file_name` and `text` (the form `datasets` calls an image folder); without a folder, Flickr8k from the hub.
`synthetic`: coloured shapes with captions that name them.

A caption is START, its words in lower case, END, cut after a stated number of words; padding is told by length.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mptrain.data.dataset import BatchKey, Dataset, DataSpec
from mptrain.data.emoji import read_emoji
from mptrain.data.image_folder import image_folder
from mptrain.data.sequences import padded
from mptrain.data.words import END, START, Vocabulary
from mptrain.errors import UserError


class ImageText(Dataset):
    """Base: pairs of a picture and a caption made of a name and tags."""

    def __init__(self, name: str, kind: str, names: Sequence[str], tags: Sequence[Sequence[str]], length: int):
        self.name, self.kind, self.length = name, kind, length
        self.names = [split_words(text) for text in names]
        self.tags = [[split_words(tag) for tag in some] for some in tags]
        self.vocabulary: Vocabulary

    def __len__(self) -> int:
        return len(self.names)

    def pictures(self, indices: np.ndarray, rng: np.random.Generator | None) -> Tensor:
        """Pictures (batch, 3, size, size) in [0, 1]; `rng` chooses among several of one caption, None the first."""
        raise NotImplementedError

    def counts(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for name, tags in zip(self.names, self.tags, strict=True):
            for part in (name, *tags):
                found.update(part)
        return found

    def caption(self, index: int, rng: np.random.Generator | None) -> np.ndarray:
        """The name and all tags; with `rng`, the name and a random part of the tags in random order."""
        tags = self.tags[index]
        if rng is not None:
            tags = [tags[i] for i in rng.permutation(len(tags))[: rng.integers(len(tags) + 1)]]
        words = self.vocabulary.encode(word for part in (self.names[index], *tags) for word in part)
        return np.concatenate([[START], words[: self.length - 2], [END]])

    def __getitems__(self, key: BatchKey) -> dict[str, Tensor]:
        """`pictures` (batch, 3, size, size) in [-1, 1], `words` (batch, time) and their `lengths` (batch,)."""
        rng = key.rng() if key.train else None
        words, lengths = padded([self.caption(i, rng) for i in key.indices])
        pictures = self.pictures(key.indices, rng)
        if key.train:
            pictures = augment(pictures, key.generator())
        return {"pictures": pictures * 2 - 1, "words": words.long(), "lengths": lengths}


class DrawnPairs(ImageText):
    """Several drawings of each concept, in memory: (concepts, vendors, 3, size, size) uint8.

    One epoch shows each concept once, by a vendor chosen by chance, so that no caption comes twice in a batch.
    """

    def __init__(self, name: str, kind: str, drawings: Tensor, names, tags, length: int):
        super().__init__(name, kind, names, tags, length)
        self.drawings = drawings

    def pictures(self, indices: np.ndarray, rng: np.random.Generator | None) -> Tensor:
        vendors = np.zeros_like(indices) if rng is None else rng.integers(self.drawings.shape[1], size=len(indices))
        return self.drawings[indices, vendors].float() / 255


class PicturePairs(ImageText):
    """Pictures that are decoded when they are needed, one a caption."""

    def __init__(self, name: str, decode: Callable[[int], Tensor], captions: Sequence[str], length: int):
        super().__init__(name, "real", captions, [()] * len(captions), length)
        self.decode = decode

    def pictures(self, indices: np.ndarray, rng: np.random.Generator | None) -> Tensor:
        return torch.stack([self.decode(int(i)) for i in indices]).float() / 255


def split_words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’]\w+)*", text.lower())


def augment(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Turns by up to 14 degrees, zooms by up to 20 %, shifts by up to 7 %; shifts the colours, greys one in five."""

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) * 2 - 1

    batch = len(pictures)
    angle, zoom, shift = 0.25 * uniform(batch), 1 + 0.2 * uniform(batch), 0.15 * uniform(batch, 2)
    cosine, sine = angle.cos() * zoom, angle.sin() * zoom
    matrices = torch.stack(
        [torch.stack([cosine, -sine, shift[:, 0]], 1), torch.stack([sine, cosine, shift[:, 1]], 1)], dim=1
    )
    grid = F.affine_grid(matrices, list(pictures.shape), align_corners=False)
    pictures = F.grid_sample(pictures, grid, padding_mode="border", align_corners=False)
    grey = torch.rand(batch, 1, 1, 1, generator=generator) < 0.2
    pictures = torch.where(grey, pictures.mean(1, keepdim=True), pictures)
    return pictures * (1 + 0.2 * uniform(batch, 3, 1, 1)) + 0.1 * uniform(batch, 3, 1, 1)


def load(spec: DataSpec, size: int, words: int, length: int) -> tuple[ImageText, ImageText]:
    """Pairs to learn from and held-out pairs, with a vocabulary of at most `words` from the training captions.

    Raises UserError for an unknown data set, a size it does not have, or a folder without the files.
    """
    readers = {"emoji": emoji, "imagetext": imagetext, "synthetic": synthetic}
    if spec.name not in readers:
        raise UserError(f"data={spec.name} has no captions; type data={', data='.join(sorted(readers))}")
    train, test = readers[spec.name](spec, size, length)
    train.vocabulary = test.vocabulary = Vocabulary(train.counts(), words)
    return train, test


def emoji(spec: DataSpec, size: int, length: int) -> tuple[ImageText, ImageText]:
    found = read_emoji()
    unseen = found.vendors.index(found.held_out)
    seen = [i for i in range(len(found.vendors)) if i != unseen]
    drawings = resized(found.pictures, size)
    rest = found.labels, found.tags, length
    return DrawnPairs(spec.name, "real", drawings[:, seen], *rest), DrawnPairs(
        spec.name, "real", drawings[:, [unseen]], *rest
    )


def resized(drawings: Tensor, size: int) -> Tensor:
    if drawings.shape[-1] == size:
        return drawings
    large = F.interpolate(drawings.flatten(0, 1).float(), (size, size), mode="bilinear", antialias=True)
    return large.round().clamp(0, 255).to(torch.uint8).unflatten(0, drawings.shape[:2])


def imagetext(spec: DataSpec, size: int, length: int) -> tuple[ImageText, ImageText]:
    train, test = image_folder(spec.folder, size)
    return PicturePairs(spec.name, *train, length), PicturePairs(spec.name, *test, length)


SHAPES = {
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.6,
    "disc": lambda x, y: x**2 + y**2 < 0.4,
    "diamond": lambda x, y: abs(x) + abs(y) < 0.7,
    "cross": lambda x, y: np.minimum(abs(x), abs(y)) < 0.2,
    "ring": lambda x, y: abs(x**2 + y**2 - 0.4) < 0.15,
    "stripes": lambda x, y: (x * 4) % 2 < 1,
    "bars": lambda x, y: (y * 4) % 2 < 1,
    "corner": lambda x, y: (x < 0) & (y < 0),
}
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 40),
    "black": (20, 20, 20),
    "purple": (150, 60, 180),
    "orange": (245, 140, 30),
    "grey": (130, 130, 130),
}


def synthetic(spec: DataSpec, size: int, length: int) -> tuple[ImageText, ImageText]:
    """Eight shapes in eight colours on four grounds, three noisy drawings of each to learn from and one held out."""
    rng = np.random.default_rng(spec.seed)
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    drawings, names = [], []
    for shape, inside in SHAPES.items():
        for colour, paint in COLOURS.items():
            for ground, tone in {"white": 255, "light": 200, "dim": 170, "dark": 60}.items():
                plain = np.where(inside(x, y)[..., None], paint, (tone,) * 3)
                drawings.append(np.clip(plain + rng.normal(0, 12, (4, size, size, 3)), 0, 255).astype(np.uint8))
                names.append(f"{colour} {shape} on {ground}")
    pictures = torch.from_numpy(np.stack(drawings)).permute(0, 1, 4, 2, 3).contiguous()
    rest = names, [()] * len(names), length
    return DrawnPairs("synthetic", "synthetic", pictures[:, :3], *rest), DrawnPairs(
        "synthetic", "synthetic", pictures[:, 3:], *rest
    )
