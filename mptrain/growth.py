"""What a training step costs at any batch, from few that were traced: the largest that fits, and its least time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mptrain.gpus import Machine
from mptrain.roofline import Work

CLOSE = 0.01
"""How far the memory of a step may lie from where it was expected, as a share."""


@dataclass
class Step(Work):
    """One training step: bytes at the peak by kind, and every operation."""

    batch_size: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    moments: list[int] = field(default_factory=list)
    """bytes after every operation, without the batch"""

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


class Growth:
    """What becomes of a step as its batch grows, from a traced step and one of twice its batch.

    Both go through the same operations, and what each of them computes, moves and leaves behind is so much, and so much
    for each sample: so is the memory of every moment, and the step of any batch follows. Where the operations are not
    the same (a loop over the pictures of a batch, which takes as long to trace as there are pictures), memory and time
    are taken to go straight on beyond the two, and smaller batches are traced as they are needed: memory is the highest
    of many lines, so between two batches it is at most on the line through them, and on it everywhere if it is in
    between.
    """

    def __init__(self, trace: Callable[[int], Step], batch_size: int) -> None:
        self.trace = trace
        self.traced = {size: trace(size) for size in (2 * batch_size, batch_size)}
        self.straight: list[tuple[int, int]] = []
        self.first, self.double = self.traced[batch_size], self.traced[2 * batch_size]
        self.lines = _same_operations(self.first, self.double)

    def step(self, batch_size: int) -> Step:
        """The step of a batch: known, computed or traced; of one too large to be traced the memory alone."""
        if batch_size not in self.traced:
            beyond = batch_size > self.double.batch_size
            find = self._computed if self.lines else self._straight_on if beyond else self.trace
            self.traced[batch_size] = find(batch_size)
        return self.traced[batch_size]

    def _straight_on(self, batch_size: int) -> Step:
        peak = round(self._line(self.first.batch_size, self.double.batch_size, batch_size))
        return Step([], batch_size, {"of all kinds": peak}, self.first.parameters)

    def _computed(self, batch_size: int) -> Step:
        further = batch_size / self.first.batch_size - 1
        first, double = (np.array([work for _, *work in s.operations]) for s in (self.first, self.double))
        work = (first + further * (double - first)).tolist()
        first, double = (np.array(s.moments) + s.memory["input"] for s in (self.first, self.double))
        peak = round((first + further * (double - first)).max())
        operations = [(dtype, *w) for (dtype, *_), w in zip(self.first.operations, work, strict=True)]
        return Step(operations, batch_size, {"of all kinds": peak}, self.first.parameters)

    def largest(self, room: float) -> int:
        """The largest batch whose step fits into so many bytes, to a hundredth of the room; 0 if none does."""
        for _ in range(12):
            low = max((size for size, found in self.traced.items() if found.peak <= room), default=0)
            high = min((size for size, found in self.traced.items() if found.peak > room), default=0)
            if high == low + 1 or (low and room - self.traced[low].peak < CLOSE * room):
                return low
            guess = self._guess(low, high, room)
            if any(start <= low and high <= end for start, end in self.straight if high):
                return guess
            before = self._line(low, high, guess) if low and high else 0.0
            peak = self.step(guess).peak
            if before and abs(peak - before) < CLOSE / 10 * before:
                self.straight.append((low, high))
        return low

    def _guess(self, low: int, high: int, room: float) -> int:
        """Between a batch that fits and one that does not; or beyond all that were traced."""
        if low and high:
            slope = (self.traced[high].peak - self.traced[low].peak) / (high - low)
            return min(max(int(low + (room - self.traced[low].peak) / slope), low + 1), high - 1)
        nearer, farther = sorted(self.traced)[-2:] if low else sorted(self.traced)[:2]
        slope = (self.traced[farther].peak - self.traced[nearer].peak) / (farther - nearer)  # flat where weights decide
        guess = int(nearer + (room - self.traced[nearer].peak) / max(slope, 1.0))
        return min(max(guess, low + 1), 64 * low) if low else min(max(guess, 1), high - 1)

    def _line(self, low: int, high: int, size: int) -> float:
        share = (size - low) / (high - low)
        return self.traced[low].peak + share * (self.traced[high].peak - self.traced[low].peak)

    def seconds(self, batch_size: int, machine: Machine, compute: str) -> float:
        """The least time of a step of this batch."""
        timed = [found for found in self.traced.values() if found.operations]
        if self.lines or any(found.batch_size == batch_size for found in timed):
            return _seconds(self.step(batch_size), machine, compute)
        nearest = sorted(timed, key=lambda found: abs(found.batch_size - batch_size))[:2]
        low, high = sorted(nearest, key=lambda found: found.batch_size)
        before, after = (_seconds(found, machine, compute) for found in (low, high))
        share = (batch_size - low.batch_size) / (high.batch_size - low.batch_size)
        return before + share * (after - before)


def _same_operations(one: Step, other: Step) -> bool:
    formats, others = ([dtype for dtype, *_ in found.operations] for found in (one, other))
    return formats == others and 0 < len(one.moments) == len(other.moments)


def _seconds(found: Step, machine: Machine, compute: str) -> float:
    """A step that was traced in BF16 or FP32 stands for FP16 and TF32 as well."""
    if compute == "float16":
        found = found.renamed("bfloat16", "float16")
    return found.seconds(machine, tf32=compute == "tf32")
