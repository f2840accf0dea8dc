"""Batches of sequences: alike in length, so that little of a batch is padding; and samples that cannot be used."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

log = logging.getLogger(__name__)

POOL = 50
"""Batches' worth of shuffled samples that are sorted together: alike in length, yet never the same batches twice."""


def bucketed(lengths: np.ndarray, batch_size: int, rng: np.random.Generator | None) -> list[np.ndarray]:
    """Cuts samples into batches of similar length, every sample exactly once, the uneven tail kept.

    With `rng`, pools of shuffled samples are sorted and the order of the batches is shuffled; `rng=None` sorts the
    whole set, longest first, so that a batch that does not fit into memory shows at once.
    """
    if rng is None:
        order = np.argsort(-lengths, kind="stable")
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    order, pool, found = rng.permutation(len(lengths)), POOL * batch_size, []
    for start in range(0, len(order), pool):
        part = order[start : start + pool]
        part = part[np.argsort(lengths[part], kind="stable")]
        found += [part[i : i + batch_size] for i in range(0, len(part), batch_size)]
    return [found[i] for i in rng.permutation(len(found))]


def padded(rows: Sequence[np.ndarray | Tensor]) -> tuple[Tensor, Tensor]:
    """Stacks sequences (T, ...) of different lengths -> zero-padded (B, longest, ...), lengths (B,) int64."""
    tensors = [torch.as_tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True), torch.tensor([len(row) for row in tensors])


def tell_left_out(what: str, left_out: Mapping[str, str]) -> None:
    """Warns of samples that are not used, with id and reason; beyond ten, with their number."""
    for sample, reason in list(left_out.items())[:10]:
        log.warning("%s %s is left out: %s", what, sample, reason)
    if len(left_out) > 10:
        log.warning("%s: %d left out in all", what, len(left_out))
