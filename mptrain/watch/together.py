"""What many small tensors on a CPU look like, exactly: laid end to end and walked through together.

A step that is looked at has a hundred of them, which it measures between kernels that leave nothing of ours in the
caches. Kept until the step is over they are measured at a tenth of the price: each walk is made once for as many as fit
into a block, and one count of exponents serves all, since every tensor has bins of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mptrain.precision.blocks import BLOCK, how_many, scratch
from mptrain.precision.formats import FLOAT16
from mptrain.watch.sweep import ORDINARY, OVERFLOWS_FROM, TIE, Sweep

LARGEST = BLOCK >> 3
"""Elements; beyond it a tensor is walked through alone, at once, and needs no copy."""
BINS = 512
"""A sign and an exponent."""


def sweeps(rows: Sequence[Tensor]) -> list[Sweep | None]:
    """`sweep` of each row of FP32 numbers, none of which is empty or longer than LARGEST."""
    return [found for group in _groups(rows) for found in _sweeps(group)]


def _groups(rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """As many at a time as fit into half a block, which is walked through several times and is to stay in the cache."""
    group: list[Tensor] = []
    size = 0
    for row in rows:
        if group and size + row.numel() > BLOCK // 2:
            yield group
            group, size = [], 0
        group.append(row)
        size += row.numel()
    if group:
        yield group


def _sweeps(rows: list[Tensor]) -> Iterator[Sweep | None]:
    lengths = np.array([row.numel() for row in rows])
    ends = np.cumsum(lengths)
    starts, count = ends - lengths, int(ends[-1])
    values = torch.cat(rows, out=scratch.floats[:count]).numpy()
    work = scratch.sizes[:count].numpy()
    bins = _bins(values, lengths)
    with np.errstate(all="ignore"):  # of what is not finite or not of ordinary size nothing here is used
        low, high = (end.reduceat(values, starts).tolist() for end in (np.minimum, np.maximum))
        total = np.add.reduceat(values, starts).tolist()
        square = np.add.reduceat(np.multiply(values, values, out=work), starts).tolist()
        sizes = np.abs(values, out=work)
        abs_total = np.add.reduceat(sizes, starts).tolist()
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        peak = max(-low[i], high[i])
        found = Sweep(low[i], high[i], total[i], abs_total[i], square[i])
        if peak == 0:
            found.zero = end - start
        elif not ORDINARY[0] < peak < ORDINARY[1]:
            yield None
            continue
        else:
            counts, mine = bins[i], sizes[start:end]
            if counts[0]:
                found.zero = how_many(np.equal, mine, 0)
                counts[0] -= found.zero
            if counts[TIE]:
                found.tie = how_many(np.equal, mine, FLOAT16.flushed_below)
            if peak >= OVERFLOWS_FROM:
                found.over = how_many(np.greater_equal, mine, OVERFLOWS_FROM)
            fields = counts.nonzero()[0]
            found.exponents = dict(zip((fields - 127).tolist(), counts[fields].tolist(), strict=True))
            found.apart = _apart(values[start:end], found)
        yield found


def _bins(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """[rows, 256]: how many numbers of each row have each exponent field."""
    fields = scratch.fields[: len(values)].numpy()
    np.right_shift(values.view(np.uint32), 23, out=fields.view(np.uint32))
    fields += np.repeat(np.arange(len(lengths), dtype=np.int32) * BINS, lengths)
    counts = torch.bincount(torch.from_numpy(fields), minlength=BINS * len(lengths))
    return counts.view(len(lengths), 2, BINS // 2).sum(1).numpy()


def _apart(values: np.ndarray, found: Sweep) -> float:
    """The norm of the distances from the mean; by the sum of squares where the mean takes away little of it."""
    mean = found.total / len(values)
    away = mean * mean * len(values)
    if away < found.square / 2:
        return math.sqrt(found.square - away)
    distances = values - np.float32(mean)
    return math.sqrt(float(np.dot(distances, distances)))
