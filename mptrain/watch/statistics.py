"""What a tensor looks like: moments, shares and a histogram of exponents, computed where it lies.

`measure` leaves one row of numbers on the tensor's device; `read` brings many of them over at once, so that looking at
a whole network waits for the device one time. Exponents are read from the bits: floor(log2 |x|) of an FP32 number
is eight bits of it, which is several times faster than a logarithm and exact. Formats of 16 bits fit into FP32, their
subnormals included.

Sums of squares of numbers like 1e-25 would be zero in FP32. Moments are therefore taken of x / max|x|.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mptrain.precision.blocks import Shelf, every, flat
from mptrain.precision.formats import FLOAT16
from mptrain.watch.histogram import FLUSHED_BELOW, LOWEST, SUBNORMAL_BELOW, Histogram
from mptrain.watch.sweep import OVERFLOWS_FROM, Sweep, norm, ordinary_ends, sweep
from mptrain.watch.together import LARGEST, sweeps

HEAD = ("min", "max", "unit", "norm", "sum", "abs_sum", "apart", "nonzero", "nan", "inf", "tie", "over")
"""The numbers of a row before its 256 bins. Sums are of x / unit; apart: norm of the distances from the mean."""


NARROW = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Row:
    """What was measured of one tensor and still lies on its device."""

    count: int
    sampled: int
    values: Tensor


@dataclass(frozen=True)
class Kept:
    """A small tensor on a CPU, or the sample of a large one, as it was: measured when it is read.

    count: elements of the tensor. ends, norm: of all of them, where this is a sample.
    """

    count: int
    part: Tensor
    ends: tuple[float, float] | None = None
    norm: float = 0.0


@dataclass(frozen=True)
class Statistics:
    """One tensor, or several taken together by `+`.

    count: elements. sampled: how many of them the counts, the histogram, mean, abs_mean and std are taken of.
    norm, min, max (of all elements), mean, abs_mean, std: of the finite values, divided by the loss scale; None
    without any finite value. zero, nan, inf: counts of the tensor as it is, of `sampled`. subnormal: nonzero below
    2^-14, FP16's smallest normal. below: nonzero and rounded to zero by FP16 (up to 2^-25, which is a tie and goes to
    zero). above: finite and rounded to infinity by FP16. histogram: of the tensor as it is, loss scale included.
    """

    count: int = 0
    sampled: int = 0
    norm: float | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    abs_mean: float | None = None
    std: float | None = None
    zero: int = 0
    nan: int = 0
    inf: int = 0
    subnormal: int = 0
    below: int = 0
    above: int = 0
    histogram: Histogram = field(default_factory=Histogram)

    @property
    def finite(self) -> int:
        return self.sampled - self.nan - self.inf

    def share(self, kind: str) -> float:
        """A count as a share of the elements looked at; 0 of an empty tensor."""
        return float(getattr(self, kind) / max(1, self.sampled))

    def unscaled(self, scale: float) -> Statistics:
        """The same with magnitudes divided by the loss scale; counts and histogram stay those of the scaled tensor."""
        names = ("norm", "min", "max", "mean", "abs_mean", "std")
        changes: dict[str, Any] = {n: None if (v := getattr(self, n)) is None else v / scale for n in names}
        return replace(self, **changes)

    def __add__(self, other: Statistics) -> Statistics:
        """Both as one tensor."""
        counts = {
            n: getattr(self, n) + getattr(other, n)
            for n in ("count", "sampled", "zero", "nan", "inf", "subnormal", "below", "above", "histogram")
        }
        if self.mean is None or other.mean is None:
            given = other if self.mean is None else self
            return replace(given, **counts)
        assert self.std is not None and other.std is not None
        a, b = (s.finite / max(1, s.sampled) * s.count for s in (self, other))
        mean = (a * self.mean + b * other.mean) / (a + b)
        square = (a * self.std**2 + b * other.std**2) / (a + b) + a * b * ((self.mean - other.mean) / (a + b)) ** 2
        return Statistics(
            **counts,
            norm=math.hypot(self.norm or 0.0, other.norm or 0.0),
            min=min(self.min, other.min),  # type: ignore[type-var]
            max=max(self.max, other.max),  # type: ignore[type-var]
            mean=mean,
            abs_mean=(a * (self.abs_mean or 0.0) + b * (other.abs_mean or 0.0)) / (a + b),
            std=math.sqrt(square),
        )


Measured = Row | Kept | Statistics


def describe(tensor: Tensor, scale: float = 1.0, sample: int | None = None) -> Statistics:
    """Statistics of one tensor of floating point numbers, which carries a loss scale; waits for the device."""
    return read([measure(tensor, sample)])[0].unscaled(scale)


def measure(tensor: Tensor, sample: int | None = None, shelf: Shelf | None = None) -> Measured:
    """The numbers behind `Statistics`, on the tensor's device, without waiting for it; a CPU keeps small tensors.

    sample: of a larger tensor, look at about so many evenly spaced elements for counts, histogram and means; minimum,
    maximum and norm are always of all. Unset, all is exact. Numbers wider than FP32 are looked at as FP32.
    shelf: where what is kept lies.
    """
    count = tensor.numel()
    if 0 < count <= (LARGEST if sample is None else min(sample, LARGEST)) and _keeps(tensor):
        kept = _room(count, shelf)
        kept.view(tensor.shape).copy_(tensor.detach())
        return Kept(count, kept)
    with torch._C._DisableAutocast():  # whoever measures may stand in a region that casts, and asks at every operation
        whole = flat(tensor)
        part = every(whole, sample)
        count = whole.numel()
        if not count:
            return Statistics()
        if whole.device.type == "cpu" and (found := _on_cpu(whole, part, shelf)) is not None:
            return found
        return _row(whole, part)


def _row(whole: Tensor, part: Tensor) -> Row:
    part = part.float().contiguous()
    floats, counts = _with_care(whole.float(), part)
    values = [torch.stack([f.float() for f in floats]), torch.stack(counts), _bins(part)]
    return Row(whole.numel(), part.numel(), torch.cat([v.double() for v in values]))


def _on_cpu(whole: Tensor, part: Tensor, shelf: Shelf | None) -> Kept | Statistics | None:
    """None for numbers that need more care."""
    ends = None
    if part is not whole and (ends := ordinary_ends(whole)) is None:
        return None
    if ends is not None and part.numel() <= LARGEST and _keeps(part):
        return Kept(whole.numel(), _room(part.numel(), shelf).copy_(part), ends, norm(whole))
    if (found := sweep(part.contiguous())) is None:
        return None
    return _of_sweep(part.numel(), found, whole.numel(), ends, 0.0 if ends is None else norm(whole))


def _room(count: int, shelf: Shelf | None) -> Tensor:
    return torch.empty(count, dtype=torch.float32) if shelf is None else shelf.take(count)


def _keeps(tensor: Tensor) -> bool:
    """Whether FP32 holds all its numbers, in the host's memory."""
    return tensor.device.type == "cpu" and tensor.dtype in NARROW and tensor.layout == torch.strided


LANES = 64


def _bins(part: Tensor) -> Tensor:
    """Counts by exponent field: 0 holds zeros and FP32 subnormals, 255 what is not finite.

    Many numbers share few bins: lanes of their own keep them from waiting for each other, and bincount would wait for
    the device.
    """
    exponent = (part.view(torch.int32) >> 23).bitwise_and_(255).long()
    exponent = torch.nn.functional.pad(exponent, (0, -len(exponent) % LANES), value=255).view(LANES, -1)
    bins = torch.zeros(LANES, 256, dtype=torch.int64, device=part.device)
    return bins.scatter_add_(1, exponent, torch.ones_like(exponent)).sum(0)


def _with_care(whole: Tensor, part: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The same numbers of tensors that may hold anything."""
    finite = whole.isfinite()
    low, high = torch.where(finite, whole, torch.inf).amin(), torch.where(finite, whole, -torch.inf).amax()
    peak = torch.maximum(low.abs(), high.abs())
    unit = torch.where((peak > 0) & peak.isfinite(), peak, 1.0)
    wide = torch.float64 if whole.device.type == "cpu" else None  # where squares are added one after the other
    norm = torch.linalg.vector_norm(torch.where(finite, whole, 0.0) / unit, dtype=wide)
    size = part.abs()
    nan, infinite = torch.count_nonzero(part.isnan()), torch.count_nonzero(part.isinf())
    over = torch.count_nonzero(size >= OVERFLOWS_FROM) - infinite
    tie = torch.count_nonzero(size == FLOAT16.flushed_below)
    finite = part.isfinite()
    y = torch.where(finite, part, 0.0) / unit
    total = y.sum()
    apart = torch.where(finite, y - total / (part.numel() - nan - infinite), 0.0)
    return (
        [low, high, unit, norm, total, y.abs().sum(), torch.linalg.vector_norm(apart, dtype=wide)],
        [torch.count_nonzero(part), nan, infinite, tie, over],
    )


def read(rows: Sequence[Measured]) -> list[Statistics]:
    """Measures what was kept, and brings rows to the host, all of one device at once."""
    return fetch(rows, [])[0]


def fetch(rows: Sequence[Measured], others: Sequence[Tensor]) -> tuple[list[Statistics], list[list[float]]]:
    """`read`, and the numbers of other tensors, on the same way: one wait for each device."""
    swept = iter(sweeps([row.part for row in rows if isinstance(row, Kept)]))
    here = [_of_kept(row, next(swept)) if isinstance(row, Kept) else row for row in rows]
    waiting = [row.values for row in here if isinstance(row, Row)] + [other.reshape(-1).double() for other in others]
    came: dict[torch.device, Iterator[float]] = {
        device: iter(torch.cat([t for t in waiting if t.device == device]).tolist())
        for device in {t.device for t in waiting}
    }
    lists = iter([list(itertools.islice(came[t.device], t.numel())) for t in waiting])
    found = [row if isinstance(row, Statistics) else _of_row(row, next(lists)) for row in here]
    return found, list(lists)


def _of_kept(row: Kept, found: Sweep | None) -> Statistics:
    if found is not None:
        return _of_sweep(row.part.numel(), found, row.count, row.ends, row.norm)
    careful = _row(row.part, row.part)
    part = _of_row(careful, careful.values.tolist())
    return part if row.ends is None else replace(part, count=row.count, min=row.ends[0], max=row.ends[1], norm=row.norm)


def _of_sweep(sampled: int, found: Sweep, count: int, ends: tuple[float, float] | None, norm: float) -> Statistics:
    """Of so many numbers out of `count`, whose ends and norm are these, where it is not all of them."""
    histogram = Histogram(found.exponents, found.zero)
    return Statistics(
        count=count,
        sampled=sampled,
        norm=math.sqrt(found.square) if ends is None else norm,
        min=found.low if ends is None else ends[0],
        max=found.high if ends is None else ends[1],
        mean=found.total / sampled,
        abs_mean=found.abs_total / sampled,
        std=found.apart / math.sqrt(sampled),
        zero=found.zero,
        subnormal=histogram.below(SUBNORMAL_BELOW),
        below=histogram.below(FLUSHED_BELOW) + found.tie,
        above=found.over,
        histogram=histogram,
    )


def _of_row(row: Row, values: list[float]) -> Statistics:
    low, high, unit, norm, total, abs_total, apart, *counts = values[: len(HEAD)]
    bins = [int(v) for v in values[len(HEAD) :]]
    nonzero, nan, infinite, tie, over = (int(c) for c in counts)
    zero, seen = row.sampled - nonzero, row.sampled - nan - infinite
    bins[0] -= zero
    bins[255] = 0
    histogram = Histogram.from_bins(LOWEST, bins, zero)
    magnitudes: dict[str, float] = {}
    if seen > 0:
        magnitudes = {
            "norm": norm * unit,
            "min": low,
            "max": high,
            "mean": total / seen * unit,
            "abs_mean": abs_total / seen * unit,
            "std": apart / math.sqrt(seen) * unit,
        }
    return Statistics(
        count=row.count,
        sampled=row.sampled,
        zero=zero,
        nan=nan,
        inf=infinite,
        subnormal=histogram.below(SUBNORMAL_BELOW),
        below=histogram.below(FLUSHED_BELOW) + tie,
        above=over,
        histogram=histogram,
        **magnitudes,
    )
