"""Tensors on a CPU, a block at a time: what stays in the cache is read several times for the price of once.

Comparisons are NumPy's, whose results are bytes written by vector instructions; torch's take several times as long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK = 1 << 18
"""Elements: one megabyte of FP32."""


class Scratch(threading.local):
    """Memory for one block, kept from tensor to tensor; every thread has its own."""

    def __init__(self) -> None:
        self.floats = torch.empty(BLOCK)
        self.sizes = torch.empty(BLOCK)
        self.fields = torch.empty(BLOCK, dtype=torch.int32)
        self.bytes = torch.empty(BLOCK, dtype=torch.uint8)
        self.bits = np.empty(BLOCK, dtype=np.int16)
        self.truth = np.empty(BLOCK, dtype=bool)


scratch = Scratch()


class Shelf:
    """FP32 memory for what is kept until a step is over; the next one uses it again.

    Small copies strewn among the large tensors of a step would keep the memory around them from being used again, and
    each page that is taken instead costs a fault.
    """

    FULL = 64
    """Megabytes from which on it is time to be done with what is kept."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self.clear()

    def clear(self) -> None:
        self._at = self._used = 0

    @property
    def full(self) -> bool:
        return self._at >= self.FULL

    def take(self, count: int) -> Tensor:
        """Memory for so many numbers, at most BLOCK."""
        if self._used + count > BLOCK:
            self._at, self._used = self._at + 1, 0
        if self._at == len(self._blocks):
            self._blocks.append(torch.empty(BLOCK, dtype=torch.float32))
        start, self._used = self._used, self._used + count
        return self._blocks[self._at][start : start + count]


def flat(tensor: Tensor) -> Tensor:
    """All elements in a row, in the order of memory where that needs no copy; of a sparse tensor those it holds."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        return tensor.coalesce().values().reshape(-1)
    if tensor.is_contiguous():
        return tensor.view(-1)
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(by_stride).reshape(-1)


def every(row: Tensor, sample: int | None) -> Tensor:
    """About `sample` evenly spaced elements; an odd distance, so that even row lengths do not hide columns."""
    if sample is None or row.numel() <= sample:
        return row
    return row[:: row.numel() // sample | 1]


RUN = 16
"""Elements: one line of the cache in FP32."""


def runs(row: Tensor, sample: int | None) -> Tensor:
    """About `sample` elements in evenly spaced runs, [runs, elements]; they touch a sixteenth of the memory.

    For shares of numbers that no structure repeats in; of the rows of an embedding `every` sees more.
    """
    if sample is None or row.numel() <= sample:
        return row
    distance = min(row.numel(), row.numel() // max(1, sample // RUN) | 1)
    step = row.stride(0)
    return row.as_strided((row.numel() // distance, min(RUN, distance)), (distance * step, step))


def blocks(row: Tensor) -> Iterator[Tensor]:
    """A row of numbers as contiguous blocks of FP32, each valid until the next."""
    for block in (row,) if row.numel() <= BLOCK else row.split(BLOCK):
        if block.dtype == torch.float32 and block.is_contiguous():
            yield block
        else:
            yield scratch.floats[: block.numel()].copy_(block)


def how_many(compare: Any, values: Any, limit: float) -> int:
    """For how many values of a block a NumPy comparison with a number is true."""
    return int(np.count_nonzero(compare(values, limit, out=scratch.truth[: len(values)])))
