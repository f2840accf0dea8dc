"""Watch: looks into the tensors of a training loop every few steps, and changes nothing.

    watch = mptrain.Watch(model, optimizer, every=10, out="runs/mine", scaler=scaler)
    for batch in data:
        ...                                   # forward, backward, optimizer.step(), scaler.update()
        watch.step(loss)

Between collections nothing is attached. In a step that is collected, one hook for all modules measures inputs and
outputs at the moment they exist, before an in-place operation that follows can change them; hooks of the output
tensors measure the gradients that come back (full backward hooks would fail on in-place ReLU); parameters tell when
their gradient is complete, which is before anybody unscales it. What was measured stays on the device until the step
ends and is then read at once.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mptrain.errors import UserError
from mptrain.precision.blocks import Shelf
from mptrain.watch import events
from mptrain.watch.alarms import Alarm, Alarms, replay
from mptrain.watch.collection import Collection
from mptrain.watch.modules import named
from mptrain.watch.products import are_native, unseen
from mptrain.watch.provenance import Finding, first_nonfinite
from mptrain.watch.store import Store
from mptrain.watch.updates import adam_betas

DENSE_STEPS, DENSER = 50, 5
"""After an alarm: for so many steps, so many times as often."""
SHADOWS = 10
"""Of so many collections one has a shadow, where products are native."""


class Watch:
    """Collects statistics of a model's tensors every few steps; see `watch.store` for what is written.

    model, optimizer: one, or several by name. every: steps. out: the folder that gets watch.parquet and, unless
    tensorboard is False, TensorBoard's file; None keeps the alarms only. layers: patterns of module paths
    ("layer1.*"); unset, all modules that own parameters. scaler: mptrain's or torch's, to tell magnitudes without the
    loss scale; unset, the one that lets the optimizer step, from its first step on. arithmetic: of a Precision; unset,
    that of the region in which the networks are found to run. What rounding flushes is counted as it happens where a
    Precision emulates it; where kernels are native, under torch.autocast or in 16-bit networks, FP32 ones multiply
    again in one of ten collections (`native.py`; `shadow` sees more). sample: see `statistics.measure`. on_alarm: gets
    each new Alarm; unset, prints it. floor: of the loss scale. rounded_updates: parameters are kept in 16 bits without
    an FP32 master copy. Raises UserError for a pattern that matches no module, and for a folder that cannot be written.
    """

    def __init__(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: Optimizer | Mapping[str, Optimizer] | Iterable[Optimizer] = (),
        every: int = 10,
        out: str | Path | None = None,
        *,
        layers: Iterable[str] = (),
        scaler: Any = None,
        arithmetic: Any = None,
        sample: int | None = None,
        on_alarm: Callable[[Alarm], None] = print,
        floor: float = 1.0,
        rounded_updates: bool = False,
        tensorboard: bool = True,
    ):
        if type(every) is not int or every < 1:
            raise UserError(f"every={every}: give a number of steps, 1 or more")
        self.models = {"": model} if isinstance(model, nn.Module) else dict(model)
        if len(self.models) == 1:
            self.models = {"": next(iter(self.models.values()))}
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self.optimizers = list(given.values()) if isinstance(given, Mapping) else list(given)
        self.every, self.sample, self.scaler, self.arithmetic = every, sample, scaler, arithmetic
        self.on_alarm, self.rounded_updates = on_alarm, rounded_updates
        self.shelf = Shelf()
        self.names = _chosen(self.models, [layers] if isinstance(layers, str) else list(layers))
        self.alarms = Alarms(floor, adam_betas(self))
        self.store = None if out is None else Store(Path(out) / "watch.parquet")
        self.tensorboard = tensorboard and out is not None
        self.writer: Any = None
        self.done = 0
        self.dense_until = 0
        self.shadowed = False
        self.rows: list[dict[str, Any]] = []
        self._collection: Collection | None = None
        self._begin()

    def step(self, loss: Tensor | float | None = None) -> list[Alarm]:
        """Ends a step, after the optimizer's; returns the alarms that are new.

        Raises UserError if `out` holds the rows of an earlier run and `resume` did not say where to go on.
        """
        self.done += 1
        new: list[Alarm] = []
        if self._collection is not None:
            self.rows = self._collection.end(self.done, None if loss is None else torch.as_tensor(loss))
            self._collection = None
            self.shadowed = self.shadowed or any(row["name"] == "products" for row in self.rows)
            if self.store is not None:
                self.store.add(self.rows)
            if self.tensorboard:
                self._show()
            new = self.alarms.look(self.rows)
            for alarm in new:
                self.on_alarm(alarm)
            if new:
                self.dense_until = self.done + DENSE_STEPS
        self._begin()
        return new

    @property
    def due(self) -> bool:
        """Whether the coming collection is one in which native products are multiplied once more."""
        coming = self.done + 1
        return not self.shadowed or coming % (self.every * SHADOWS) == 0 or coming <= self.dense_until

    @property
    def wants_shadow(self) -> bool:
        """Whether the coming step is one of those for which `shadow` tells most about what rounding flushes."""
        return self.due and self._collection is not None and are_native(self.arithmetic)

    def shadow(self, run: Callable[[Any], Any]) -> None:
        """Before a step: lets `run(region)` compute the coming batch's loss in the region and its gradients, scaled.

        For a native Precision; tells, beyond the gradients of layers, what the forward pass and products without
        weights lose. Runs in one of ten collections, and not at all where products are emulated or FP32. Gradients,
        buffers and torch's random numbers are put back.

            watch.shadow(lambda region: scaler.scale(loss_of(batch, region)).backward())
        """
        if self.wants_shadow:
            assert self._collection is not None
            self._collection.shadow(run)

    def explain(self, run: Callable[[], Any]) -> Finding | None:
        """Once something was not finite: lets `run()` compute that batch's loss and gradients once more, and tells
        where it began: module, operation, its inputs and the lines that led there; None if all is finite.

            if not loss.isfinite():
                found = watch.explain(lambda: scaler.scale(loss_of(batch)).backward())
                print(found, found.advice, *found.details, sep="\\n")

        Leaves provenance.json in `out`, and no other trace: gradients, buffers and random numbers are put back.
        """
        with self.blind(), unseen(self.models.values()):
            found = first_nonfinite(self.models, run)
        if found is not None and self.store is not None:
            path = self.store.folder.parent / "provenance.json"
            path.write_text(json.dumps({"step": self.done + 1, **found.as_dict()}, indent=1) + "\n", encoding="utf-8")
        return found

    def resume(self, step: int) -> None:
        """Goes on after this step: drops rows that came later, and remembers the alarms of those that stay."""
        self._abandon()
        self.done = step
        kept = [] if self.store is None else self.store.cut(step)
        self.shadowed = any(row["name"] == "products" for row in kept)
        self.alarms = replay(kept, self.alarms.floor, self.alarms.betas)
        self.dense_until = max((alarm.step + DENSE_STEPS for alarm in self.alarms.found), default=0)
        self._begin()

    def _show(self) -> None:
        if self.writer is None:
            assert self.store is not None
            self.writer = events.writer(self.store.folder.parent, self.done - 1)
            weakref.finalize(self, self.writer.close)
        events.show(self.writer, self.done, self.rows)

    def flush(self) -> None:
        """Brings rows to the disk; happens by itself every minute, and when the process ends."""
        if self.store is not None:
            self.store.flush()
        if self.writer is not None:
            self.writer.flush()

    def close(self) -> None:
        """Takes off what is attached and writes what waits."""
        self._abandon()
        self.flush()
        if self.writer is not None:
            self.writer.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> None:
        coming = self.done + 1
        distance = max(1, self.every // DENSER) if coming <= self.dense_until else self.every
        if coming == 1 or coming % distance == 0:
            self._collection = Collection(self)

    @contextmanager
    def blind(self) -> Iterator[None]:
        """What runs inside belongs to no step: it is neither looked at nor counted."""
        counter = getattr(self.arithmetic, "counter", None)
        if self._collection is not None:
            self._collection.muted = True
        if counter is not None:
            self.arithmetic.counter = None
        try:
            yield
        finally:
            if self._collection is not None:
                self._collection.muted = False
            if counter is not None:
                self.arithmetic.counter = counter

    def skip(self) -> None:
        """Leaves the coming step alone, if it was to be looked at."""
        self._abandon()

    def _abandon(self) -> None:
        if self._collection is not None:
            self._collection.detach()
            self._collection = None


def _chosen(models: Mapping[str, nn.Module], patterns: list[str]) -> dict[nn.Module, str]:
    paths = dict(named(models))
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, n=3) or [path for path in paths if path][:3]
            raise UserError(
                f"watch.layers: '{pattern}' matches no module of this network; there are {', '.join(near)}; patterns "
                "like layer1.* work too"
            )
    if patterns:
        return {m: path for path, m in paths.items() if any(fnmatch.fnmatchcase(path, p) for p in patterns)}
    return {m: path for path, m in paths.items() if any(True for _ in m.parameters(recurse=False))}
