"""The form every data set has here: whole batches, fetched by a key that carries all of their randomness.

A batch is named by a `BatchKey` instead of a list of numbers, so augmentation and synthetic noise depend on (seed,
epoch, position) and on nothing else: the same bits come out with zero or two loader workers, and after a resume in
the middle of an epoch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mptrain.errors import UserError

Batch = Any
"""A tensor, or tuples, lists and dicts of tensors; anything else in it stays on the CPU untouched."""


class DataSpec:
    """The data the command line asked for.

    name: `data=fashion`.
    folder: `data_dir=/path` (or hub:NAME, where a data set can be a name); None for embedded and synthetic data.
    seed: for synthetic data and for splits made by chance.
    """

    def __init__(self, name: str, folder: Path | None = None, seed: int = 0):
        self.name, self.seed = name, seed
        self._folder, self.looked_up = folder, folder is None

    @property
    def folder(self) -> Path | None:
        self.looked_up = True
        return self._folder

    def refuse_a_folder_in_vain(self) -> None:
        """Raises UserError if there is a folder and no data set asked for it."""
        if not self.looked_up:
            raise UserError(
                f"data_dir={self._folder} has no effect, data={self.name} reads no folder; "
                "leave data_dir out, or name what lies there: data=..."
            )


@dataclass(frozen=True)
class BatchKey:
    """Names one batch; every random choice inside it starts from `seed`."""

    indices: np.ndarray
    seed: tuple[int, ...]
    first: bool
    """first batch of an epoch: recurrent state starts anew"""
    train: bool
    """augmentation is for training only"""
    number: int = 0
    """batches of the run before this one, if every epoch has as many"""

    def rng(self) -> np.random.Generator:
        """A fresh NumPy generator of this batch."""
        return np.random.default_rng(self.seed)

    def generator(self) -> torch.Generator:
        """A fresh torch generator of this batch."""
        return torch.Generator().manual_seed(int(self.rng().integers(2**62)))


class Dataset:
    """Samples in memory or on disk, handed out as whole batches."""

    name: str
    kind: str
    """real | composite | synthetic"""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitems__(self, key: BatchKey) -> Batch:
        raise NotImplementedError

    def epoch(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        """The sample numbers of each batch of one epoch, the uneven tail kept; `rng=None` is evaluation order."""
        order = np.arange(len(self)) if rng is None else rng.permutation(len(self))
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]


def batches(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    """The whole data set exactly once, in evaluation order, without augmentation."""
    for position, indices in enumerate(dataset.epoch(batch_size, None)):
        yield dataset.__getitems__(BatchKey(indices, (0, 0, position), position == 0, train=False))
