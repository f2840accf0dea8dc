"""What rounding does to the products of a step that is looked at: exact where 16-bit arithmetic is emulated, of a
sample of large tensors as everywhere in Watch. A run that counts its products anyhow has all of them looked at.

Native kernels show only what is left after rounding, and a zero does not tell whether it was one before. There FP32
kernels multiply the same 16-bit operands. Either beside the backward pass, product by product (`native.py`); or, for
those who can give their batch, in a run of the batch ahead of its step, a shadow, which counts what rounding makes of
all its products, those of the forward pass too, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.precision.blocks import Shelf
from mptrain.precision.counting import DIRECTIONS, KINDS, OPERANDS, Counter
from mptrain.precision.dispatch import innermost
from mptrain.watch.histogram import Histogram
from mptrain.watch.native import Native
from mptrain.watch.statistics import Measured, Statistics


def are_native(arithmetic: Any) -> bool:
    """Whether a precision rounds to 16 bits where nobody can count it."""
    return arithmetic is not None and arithmetic.dtype is not None and not (arithmetic.emulated or arithmetic.fp8)


def may_be_native(arithmetic: Any) -> bool:
    """Whether there may be native 16-bit products: known to be, those beside FP8's, or anything if nobody said."""
    return arithmetic is None or (arithmetic.dtype is not None and not arithmetic.emulated)


class Products:
    """The counts of one step; of a tensor larger than `sample` so many of its elements are looked at.

    arithmetic: None if nobody said; then it is that of the region in which the networks run, if it is one of ours.
    native: counts what is not emulated; None if that is not to be looked at in this step.
    """

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        arithmetic: Any,
        sample: int | None,
        shelf: Shelf,
        native: Native | None = None,
    ):
        self.models, self.arithmetic, self.sample, self.shelf, self.native = models, arithmetic, sample, shelf, native
        self.counter: Counter | None = None
        self.lent = False
        self.before: dict[tuple[str, str], Tensor] = {}
        self.sizes: dict[tuple[str, str], int] = {}
        self.spare: Counter | None = None

    def follow(self) -> list[Any]:
        """Lets the emulation count for this step, unless it counts anyhow; returns what to remove when it ends."""
        if self.arithmetic is not None and not _counts(self.arithmetic):
            return []
        if self.arithmetic is not None and self.arithmetic.counter is not None:
            self._adopt(self.arithmetic)
            return []
        self.spare = Counter(self.sample, self.shelf)  # knows the layers from the beginning, whoever will count
        handles = [Undo(self._let_go), *self.spare.watch(self.models.items())]
        if self.arithmetic is not None:
            self._adopt(self.arithmetic)
        return handles

    def find(self) -> None:
        """Within the forward pass: looks whose region it is, if nobody said."""
        if self.arithmetic is None and self.counter is None and _counts(found := innermost()):
            self._adopt(found)

    def _adopt(self, arithmetic: Any) -> None:
        self.arithmetic = arithmetic
        if arithmetic.counter is None:
            arithmetic.counter, self.lent = self.spare, True
        self.counter = arithmetic.counter
        self.counter.settle()
        self.before, self.sizes = dict(self.counter.totals), dict(self.counter.sizes)
        if self.native is not None and not arithmetic.fp8:
            self.native.on = False

    def _let_go(self) -> None:
        if self.lent:
            self.arithmetic.counter = None

    def shadow(self, run: Callable[[Any], Any]) -> None:
        """Counts a run of the coming batch, forward and backward, in the region that it is given."""
        self.counter = Counter(self.sample, self.shelf)
        if self.native is not None:
            self.native.on = False
        handles = self.counter.watch(self.models.items())
        try:
            with unseen(self.models.values()):
                run(self.arithmetic.emulating(self.counter))
        finally:
            for handle in handles:
                handle.remove()

    def settle(self) -> None:
        """Counts what was kept so far."""
        if self.counter is not None:
            self.counter.settle()

    def pending(self) -> tuple[list[Measured], list[Tensor]]:
        """What `rows` needs brought to the host: of native products what they were, and the counts of all."""
        self.settle()
        counters = [] if self.counter is None else [self.counter]
        exact: list[Measured] = []
        if self.native is not None:
            counters.append(self.native.counter)
            exact = [row for rows in self.native.exact.values() for row in rows]
        return exact, [
            counter.totals[key] - (self.before.get(key, 0) if counter is self.counter else 0)
            for counter in counters
            for key in counter.totals
        ]

    def rows(
        self,
        step: int,
        scale: float | None,
        order: Mapping[str, int],
        exact: Iterator[Statistics],
        counts: Iterator[list[float]],
    ) -> Iterator[dict[str, Any]]:
        """One row for each layer that ran and each direction."""
        if self.counter is not None:
            compute = self.arithmetic.compute
            dtypes = {key: OPERANDS.get(key[1], compute) for key in self.counter.totals}
            lossy = {k: Histogram.from_bins(*bins, 0) for k, bins in self.counter.exponents()}
            yield from self._rows(self.counter, dtypes, lossy, step, scale, order, counts)
        if self.native is not None:
            names = {key: str(dtype).removeprefix("torch.") for key, dtype in self.native.dtypes.items()}
            lossy = {
                k: sum((next(exact).histogram for _ in rows), Histogram()) for k, rows in self.native.exact.items()
            }
            yield from self._rows(self.native.counter, names, lossy, step, scale, order, counts)

    def _rows(
        self,
        counter: Counter,
        dtypes: Mapping[tuple[str, str], str],
        exact: Mapping[tuple[str, str], Histogram],
        step: int,
        scale: float | None,
        order: Mapping[str, int],
        changes: Iterator[list[float]],
    ) -> Iterator[dict[str, Any]]:
        counted = {key: dict(zip(KINDS, map(int, next(changes)), strict=True)) for key in list(counter.totals)}
        mine = counter is self.counter
        for key in sorted(counted, key=lambda key: (order.get(key[0], -1), DIRECTIONS.index(key[1]))):
            counts = counted[key]
            layer, direction = key
            if not counts["values"] or layer not in order:
                continue
            first, exponents = exact.get(key, Histogram()).bins()
            yield (
                dict.fromkeys(("norm", "min", "max", "mean", "abs_mean", "std", "nan", "below", "above"))
                | {"lost": None, "small_updates": None}
                | {
                    "step": step,
                    "layer": layer,
                    "order": order[layer],
                    "kind": {"forward": "output"}.get(direction, direction),
                    "name": "products",
                    "dtype": dtypes[key],
                    "calls": 1,
                    "scale": scale,
                    "count": counter.sizes[key] - (self.sizes.get(key, 0) if mine else 0),
                    "sampled": counts["values"],
                    "zero": counts["zero"],
                    "inf": counts["overflowed"],
                    "subnormal": counts["subnormal"],
                    "flushed": counts["flushed"],
                    "first_exponent": first,
                    "exponents": exponents,
                }
            )


def _counts(arithmetic: Any) -> bool:
    """Whether a region rounds by our hands, which can count."""
    return arithmetic is not None and arithmetic.dtype is not None and bool(arithmetic.emulated or arithmetic.fp8)


class Undo:
    """Something to be undone together with hooks."""

    def __init__(self, remove: Callable[[], None]):
        self.remove = remove


@contextmanager
def unseen(models: Any) -> Iterator[None]:
    """Whatever runs inside, gradients, buffers and torch's random numbers are afterwards as they were."""
    models = list(models)
    parameters = list({p: None for model in models for p in model.parameters()})
    gradients = [p.grad for p in parameters]
    buffers = [(m, n, b, b.clone()) for model in models for m in model.modules()
               for n, b in m._buffers.items() if b is not None]  # fmt: skip
    devices = {t.device for t in parameters if t.device.type == "cuda"}
    for p in parameters:
        p.grad = None
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        for module, name, buffer, value in buffers:
            module._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(value)
