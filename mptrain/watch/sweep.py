"""What a tensor on a CPU looks like, exactly and all of it, in one walk through its memory.

Exponents are counted two at a time: a pair of them is a number below 2^16, and counting pairs takes half the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.linalg import blas
from torch import Tensor

from mptrain.precision.blocks import blocks, how_many, scratch
from mptrain.precision.formats import FLOAT16

OVERFLOWS_FROM = 65520.0
"""The smallest number that rounds to infinity in FP16, halfway between 65,504 and 2^16."""
ORDINARY = 1e-15, 1e15
"""Between these the square of the largest number, and of any that matters beside it, is a normal FP32 number."""
PAIRS_FROM = 1 << 15
TIE = 127 - 25
"""The exponent field of 2^-25."""


@dataclass
class Sweep:
    """Of finite numbers: extremes, sums, norm of the distances from the mean, counts, and counts by exponent."""

    low: float
    high: float
    total: float = 0.0
    abs_total: float = 0.0
    square: float = 0.0
    apart: float = 0.0
    zero: int = 0
    tie: int = 0
    over: int = 0
    exponents: dict[int, int] = field(default_factory=dict)


def sweep(row: Tensor) -> Sweep | None:
    """Of a row of numbers; None if they are not all finite, or of unusual size: then others have to take care."""
    if (ends := ordinary_ends(row)) is None:
        return None
    found = Sweep(*ends)
    peak = max(-found.low, found.high)
    if peak == 0:
        found.zero = row.numel()
        return found
    counts = np.zeros(256, dtype=np.int64)
    pairs: Tensor | None = None
    for block in blocks(row):
        values = block.numpy()
        if len(values) < PAIRS_FROM or len(values) % 2:
            counts += np.bincount(values.view(np.int32) >> 23 & 255, minlength=256)
        else:
            counted = torch.bincount(_pairs(block), minlength=1 << 16)
            pairs = counted if pairs is None else pairs.add_(counted)
        found.total += block.sum().item()
        found.abs_total += float(blas.sasum(values))
        found.square += torch.dot(block, block).item()
    if pairs is not None:
        table = pairs.view(256, 256)
        counts += (table.sum(0) + table.sum(1)).numpy()
    if row.dtype == torch.float16:  # has no numbers between its zero and FP32's normal ones, no tie, and none too large
        found.zero = int(counts[0])
    elif counts[0]:
        found.zero = sum(how_many(np.equal, block.numpy(), 0) for block in blocks(row))
    counts[0] -= found.zero
    if counts[TIE]:
        found.tie = sum(how_many(np.equal, size, FLOAT16.flushed_below) for size in _sizes(row))
    if peak >= OVERFLOWS_FROM:
        found.over = sum(how_many(np.greater_equal, size, OVERFLOWS_FROM) for size in _sizes(row))
    found.apart = _apart(row, found.total / row.numel(), found.square)
    fields = counts.nonzero()[0]
    found.exponents = dict(zip((fields - 127).tolist(), counts[fields].tolist(), strict=True))
    return found


def ordinary_ends(row: Tensor) -> tuple[float, float] | None:
    """Minimum and maximum; None if numbers are not all finite, or the largest is of unusual size."""
    if row.dtype in (torch.float16, torch.bfloat16) and row.is_contiguous():
        low, high = _ends_of_bits(row)
    else:
        low, high = (end.item() for end in torch.aminmax(row))
    if math.isnan(low) or math.isnan(high):
        return None
    peak = max(-low, high)
    return (low, high) if peak == 0 or ORDINARY[0] < peak < ORDINARY[1] else None


def _ends_of_bits(row: Tensor) -> tuple[float, float]:
    """The same of 16-bit numbers, whose bits are ordered as integers; a NaN is beyond the infinity of its sign.

    Larger than all others are, of numbers without a sign, those with the largest bits; if all have one, with the
    smallest. The sign's bit is the largest of an unsigned integer.
    """
    bits = row.view(torch.int16)
    least, most = (end.item() for end in torch.aminmax(bits))
    bottom = int(bits.numpy().view(np.uint16).max()) - (1 << 16) if least < 0 else least
    ends = np.array([bottom, most if most >= 0 else least], dtype=np.int16)
    if row.dtype == torch.float16:
        low, high = ends.view(np.float16).tolist()
    else:  # BF16 is the upper half of FP32
        low, high = (ends.astype(np.int32) << 16).view(np.float32).tolist()
    return low + 0.0, high + 0.0  # a zero has no sign


def norm(row: Tensor) -> float:
    """Of numbers of ordinary size, without a copy of more than a block, whose squares FP32 sums to five digits."""
    if row.dtype == torch.float64:
        return torch.linalg.vector_norm(row).item()
    return math.sqrt(sum(float(blas.sdot(block.numpy(), block.numpy())) for block in blocks(row)))


def _pairs(block: Tensor) -> Tensor:
    """The exponent's eight bits of each two numbers: floor(log2 |x|) + 127, and 0 of zeros and FP32 subnormals."""
    count = block.numel()
    fields = torch.bitwise_right_shift(block.view(torch.int32), 23, out=scratch.fields[:count])
    pairs = scratch.bytes[:count].copy_(fields).view(torch.int16)  # the sign's bits fall off
    return scratch.fields[: count // 2].copy_(pairs).bitwise_and_(0xFFFF)


def _sizes(row: Tensor) -> Iterator[np.ndarray]:
    """Blocks of absolute values."""
    for block in blocks(row):
        yield torch.abs(block, out=scratch.sizes[: block.numel()]).numpy()


def _apart(row: Tensor, mean: float, square: float) -> float:
    """The norm of the distances from the mean; by the sum of squares where the mean takes away little of it."""
    away = mean * mean * row.numel()
    if away < square / 2:
        return math.sqrt(square - away)
    found = 0.0
    for block in blocks(row):
        distances = torch.sub(block, mean, out=scratch.sizes[: block.numel()])
        found += torch.dot(distances, distances).item()
    return math.sqrt(found)
