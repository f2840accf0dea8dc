"""Pictures with boxes: what every detection data set has in common.

A box is (x1, y1, x2, y2) in pixels, x2 and y2 one past the last column and row, float32. A class is 0 .. classes - 1.
"""

import logging
from dataclasses import dataclass

import numpy as np
import torch

from mptrain.data.dataset import Batch, BatchKey, Dataset

log = logging.getLogger(__name__)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""of ImageNet's pictures: what torchvision's VGG-16 weights were trained with"""


@dataclass
class Sample:
    """One picture, (height, width, 3) bytes, and its objects: boxes (n, 4), classes (n,), marked difficult (n,)."""

    picture: np.ndarray
    boxes: np.ndarray
    labels: np.ndarray
    difficult: np.ndarray

    @property
    def target(self) -> dict[str, torch.Tensor]:
        return {
            "boxes": torch.as_tensor(self.boxes, dtype=torch.float32).reshape(-1, 4),
            "labels": torch.as_tensor(self.labels, dtype=torch.int64),
            "difficult": torch.as_tensor(self.difficult, dtype=torch.bool),
        }


class DetectionSet(Dataset):
    """Hands out {"images": (batch, 3, height, width), or a list where sizes differ, "targets": a dict a picture}."""

    classes: tuple[str, ...]

    def sample(self, index: int, rng: np.random.Generator | None) -> Sample:
        """One sample; with a generator it is augmented."""
        raise NotImplementedError

    def __getitems__(self, key: BatchKey) -> Batch:
        rng = key.rng() if key.train else None
        samples = [self.sample(int(index), rng) for index in key.indices]
        targets = [sample.target for sample in samples]
        if len({sample.picture.shape for sample in samples}) == 1:
            return {"images": normalised(np.stack([sample.picture for sample in samples])), "targets": targets}
        return {"images": [normalised(sample.picture[None])[0] for sample in samples], "targets": targets}


def normalised(pictures: np.ndarray) -> torch.Tensor:
    """Bytes (batch, height, width, 3) to float32 (batch, 3, height, width), zero mean and unit spread a channel."""
    channels_first = torch.from_numpy(np.ascontiguousarray(pictures.transpose(0, 3, 1, 2)))
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) * 255 for values in (MEAN, STD))
    return (channels_first.float() - mean) / std


def inside(boxes: np.ndarray, width: int, height: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Cuts boxes (n, 4) at the picture's border; returns them with the mask (n,) of those that keep an area.

    Boxes without an area (turned round, flat, not finite, outside) are reported once, under the sample's name.
    """
    clipped = np.clip(np.nan_to_num(boxes, nan=-1.0), 0, [width, height, width, height]).astype(np.float32)
    kept = np.isfinite(boxes).all(1) & (clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])
    if not kept.all():
        log.warning("%s: %d of %d boxes have no area in the picture and are left out", name, (~kept).sum(), len(boxes))
    return clipped, kept


def flipped(sample: Sample) -> Sample:
    """The mirror picture, left and right exchanged."""
    boxes = sample.boxes.copy()
    boxes[:, [0, 2]] = sample.picture.shape[1] - sample.boxes[:, [2, 0]]
    return Sample(sample.picture[:, ::-1], boxes, sample.labels, sample.difficult)


def turned(sample: Sample) -> Sample:
    """The transposed picture, rows and columns exchanged."""
    return Sample(sample.picture.transpose(1, 0, 2), sample.boxes[:, [1, 0, 3, 2]], sample.labels, sample.difficult)
