"""What rounding does to the products of a step that is looked at: exact where 16-bit arithmetic is emulated, of a
sample of large tensors as everywhere in Watch. A run that counts its products anyhow has all of them looked at.

Native kernels show only what is left after rounding, and a zero does not tell whether it was one before. There the
batch runs once more, ahead of its step, through FP32 kernels on the same 16-bit operands: a shadow, which counts what
rounding makes of its products and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mptrain.precision.blocks import Shelf
from mptrain.precision.counting import DIRECTIONS, KINDS, OPERANDS, Counter


def are_native(arithmetic: Any) -> bool:
    """Whether a precision rounds to 16 bits where nobody can count it."""
    return arithmetic is not None and arithmetic.dtype is not None and not (arithmetic.emulated or arithmetic.fp8)


class Products:
    """The counts of one step; of a tensor larger than `sample` so many of its elements are looked at."""

    def __init__(self, models: Mapping[str, nn.Module], arithmetic: Any, sample: int | None, shelf: Shelf):
        self.models, self.arithmetic, self.sample, self.shelf = models, arithmetic, sample, shelf
        self.counter: Counter | None = None
        self.before: dict[tuple[str, str], Tensor] = {}
        self.sizes: dict[tuple[str, str], int] = {}

    def follow(self) -> list[Any]:
        """Lets the emulation count for this step, unless it counts anyhow; returns what to remove when it ends."""
        arithmetic = self.arithmetic
        if arithmetic is None or arithmetic.dtype is None or not (arithmetic.emulated or arithmetic.fp8):
            return []
        handles: list[Any] = []
        if arithmetic.counter is None:
            arithmetic.counter = Counter(self.sample, self.shelf)
            handles.append(Undo(lambda: setattr(arithmetic, "counter", None)))
            handles += arithmetic.counter.watch(self.models.items())
        self.counter = arithmetic.counter
        self.counter.settle()
        self.before, self.sizes = dict(self.counter.totals), dict(self.counter.sizes)
        return handles

    def shadow(self, run: Callable[[Any], Any]) -> None:
        """Counts a run of the coming batch, forward and backward, in the region that it is given."""
        self.counter = Counter(self.sample, self.shelf)
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

    def rows(self, step: int, scale: float | None, order: Mapping[str, int]) -> list[dict[str, Any]]:
        """One row for each layer that ran and each direction."""
        if self.counter is None:
            return []
        self.counter.settle()
        keys = sorted(self.counter.totals, key=lambda key: (order.get(key[0], -1), DIRECTIONS.index(key[1])))
        changes = [self.counter.totals[key] - self.before.get(key, 0) for key in keys]
        rows = []
        for key, values in zip(keys, torch.stack(changes).tolist() if changes else [], strict=True):
            layer, direction = key
            counts = dict(zip(KINDS, values, strict=True))
            if not counts["values"] or layer not in order:
                continue
            rows.append(
                dict.fromkeys(("norm", "min", "max", "mean", "abs_mean", "std", "nan", "below", "above"))
                | {"lost": None, "small_updates": None}
                | {
                    "step": step,
                    "layer": layer,
                    "order": order[layer],
                    "kind": {"forward": "output"}.get(direction, direction),
                    "name": "products",
                    "dtype": OPERANDS.get(direction, self.arithmetic.compute),
                    "calls": 1,
                    "scale": scale,
                    "count": self.counter.sizes[key] - self.sizes.get(key, 0),
                    "sampled": counts["values"],
                    "zero": counts["zero"],
                    "inf": counts["overflowed"],
                    "subnormal": counts["subnormal"],
                    "flushed": counts["flushed"],
                    "first_exponent": 0,
                    "exponents": [],
                }
            )
        return rows


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
