"""Hard batches: training batches of pictures and captions that are spoilt on purpose, a few in a row.

Large collections from the web come with such stretches, a mislabelled shard or a file of another bit depth. A loss
scaler answers an overflow in them by halving, step after step, and then needs thousands of good steps to come back.

`shuffled`: every caption belongs to another picture. Losses and gradients jump, but every number stays in range.
`undivided`: pixels of 16 bits that nobody divided by 65,535. They overflow in FP16 before the first layer; no other
format and no loss scale notices or helps.
"""

import numpy as np
from torch import Tensor

from mptrain.data.dataset import BatchKey, Dataset
from mptrain.errors import UserError

KINDS = ("shuffled", "undivided")
LARGEST_PIXEL = 65_535


class HardBatches(Dataset):
    """A training set of pictures and captions, whose batches number `first` to `first + count - 1` are spoilt."""

    def __init__(self, inner: Dataset, kind: str, first: int, count: int):
        self.inner, self.name, self.kind = inner, inner.name, inner.kind
        self.hardness, self.first, self.count = kind, first, count

    def __len__(self) -> int:
        return len(self.inner)

    def epoch(self, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
        return self.inner.epoch(batch_size, rng)

    def __getitems__(self, key: BatchKey) -> dict[str, Tensor]:
        batch = self.inner.__getitems__(key)
        if not key.train or not self.first <= key.number < self.first + self.count:
            return batch
        return shuffled(batch, key) if self.hardness == "shuffled" else undivided(batch)


def shuffled(batch: dict[str, Tensor], key: BatchKey) -> dict[str, Tensor]:
    """Captions move on by the same random number of pictures, so that none keeps its own; a batch of one cannot."""
    size = len(batch["words"])
    shift = int(np.random.default_rng((*key.seed, key.number)).integers(1, size)) if size > 1 else 0
    return batch | {"words": batch["words"].roll(shift, 0), "lengths": batch["lengths"].roll(shift, 0)}


def undivided(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pictures in [-1, 1] as they would be had their pixels never been divided: between -1 and 131,069."""
    return batch | {"pictures": (batch["pictures"] + 1) * LARGEST_PIXEL - 1}


def harden(data: Dataset, kind: str | None, first: int, count: int) -> Dataset:
    """The data with hard batches, or as it is if `kind` is None. Raises UserError for what cannot be."""
    if kind is None:
        return data
    if kind not in KINDS:
        raise UserError(f"task.hard={kind} is unknown; type task.hard={', task.hard='.join(KINDS)} or task.hard=null")
    if first < 0 or count < 1:
        raise UserError(
            f"task.hard_from={first} task.hard_count={count}: hard batches start at 0 or later and are at least one; "
            "type task.hard_from=300 task.hard_count=10, or task.hard=null for none"
        )
    return HardBatches(data, kind, first, count)
