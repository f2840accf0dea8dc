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
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.optim import Optimizer

from mptrain.errors import UserError
from mptrain.precision.counting import DIRECTIONS, KINDS, OPERANDS, Counter
from mptrain.watch.alarms import Alarm, Alarms
from mptrain.watch.modules import named, tensors
from mptrain.watch.statistics import Row, Statistics, every, flat, measure, read
from mptrain.watch.store import Store

DENSE_STEPS, DENSER = 50, 5
"""After an alarm: for so many steps, so many times as often."""
SMALL_UPDATE = 2048.0
"""A weight this many times its update may keep its value in FP16 (Mixed Precision Training, section 3.1)."""


class Watch:
    """Collects statistics of a model's tensors every few steps; see `watch.store` for what is written.

    model, optimizer: one, or several by name. every: steps. out: the folder that gets watch.parquet; None keeps the
    alarms only. layers: patterns of module paths ("layer1.*"); unset, all modules that own parameters.
    scaler: mptrain's or torch's, to tell magnitudes without the loss scale. arithmetic: of a Precision, to count
    exactly what rounding flushes where it is emulated. sample: see `statistics.measure`. on_alarm: gets each new
    Alarm; unset, prints it. floor: of the loss scale. Raises UserError for a pattern that matches no module.
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
        sample: int | None = 16384,
        on_alarm: Callable[[Alarm], None] = print,
        floor: float = 1.0,
        rounded_updates: bool = False,
    ):
        if every < 1:
            raise UserError(f"every={every}: give a number of steps, 1 or more")
        self.models = {"": model} if isinstance(model, nn.Module) else dict(model)
        if len(self.models) == 1:
            self.models = {"": next(iter(self.models.values()))}
        given = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
        self.optimizers = list(given.values()) if isinstance(given, Mapping) else list(given)
        self.every, self.sample, self.scaler, self.arithmetic = every, sample, scaler, arithmetic
        self.on_alarm, self.rounded_updates = on_alarm, rounded_updates
        self.names = _chosen(self.models, list(layers))
        self.alarms = Alarms(floor)
        self.store = None if out is None else Store(Path(out) / "watch.parquet")
        self.done = 0
        self.dense_until = 0
        self.rows: list[dict[str, Any]] = []
        self._collection: Collection | None = None
        self._begin()

    def step(self, loss: Tensor | None = None) -> list[Alarm]:
        """Ends a step, after the optimizer's; returns the alarms that are new."""
        self.done += 1
        new: list[Alarm] = []
        if self._collection is not None:
            self.rows = self._collection.end(self.done, loss)
            self._collection = None
            if self.store is not None:
                self.store.add(self.rows)
            new = self.alarms.look(self.rows)
            for alarm in new:
                self.on_alarm(alarm)
            if new:
                self.dense_until = self.done + DENSE_STEPS
        self._begin()
        return new

    def resume(self, step: int) -> None:
        """Goes on after this step: drops rows that came later, and remembers the alarms of those that stay."""
        self._abandon()
        self.done = step
        self.alarms = Alarms(self.alarms.floor)
        by_step: dict[int, list[dict[str, Any]]] = {}
        for row in self.store.cut(step) if self.store is not None else ():
            by_step.setdefault(row["step"], []).append(row)
        for at in sorted(by_step):
            if self.alarms.look(by_step[at]):
                self.dense_until = at + DENSE_STEPS
        self._begin()

    def flush(self) -> None:
        """Brings rows to the disk."""
        if self.store is not None:
            self.store.flush()

    def close(self) -> None:
        """Takes off what is attached and writes what waits."""
        self._abandon()
        self.flush()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> None:
        coming = self.done + 1
        distance = max(1, self.every // DENSER) if coming <= self.dense_until else self.every
        if coming == 1 or coming % distance == 0:
            self._collection = Collection(self)

    def skip(self) -> None:
        """Leaves the coming step alone, if it was to be looked at."""
        self._abandon()

    def _abandon(self) -> None:
        if self._collection is not None:
            self._collection.detach()
            self._collection = None


class Collection:
    """One step that is looked at, from the end of the step before to its own end."""

    def __init__(self, watch: Watch):
        self.watch = watch
        self.measured: dict[tuple[str, str, str], list[Row]] = {}
        self.dtypes: dict[tuple[str, str, str], torch.dtype] = {}
        self.order: dict[str, int] = {}
        self.scale: Tensor | float | None = None
        self.closed: set[nn.Parameter] = set()
        self.before: dict[nn.Parameter, Tensor] = {}
        self.full: dict[nn.Parameter, Tensor] = {}
        self.counter: Counter | None = None
        self.counted: dict[tuple[str, str], Tensor] = {}
        self.parameters = _parameters(watch)
        self.handles: list[Any] = [
            every_module.register_module_forward_pre_hook(_weak(self._enters)),
            every_module.register_module_forward_hook(_weak(self._leaves)),
        ]
        for p in self.parameters:
            if p.requires_grad:
                self.handles.append(p.register_post_accumulate_grad_hook(_weak(self._gradient)))
        for optimizer in watch.optimizers:
            self.handles.append(optimizer.register_step_pre_hook(_weak(self._steps)))
        self._count()
        self._finalizer = weakref.finalize(watch, _remove, self.handles)

    def _count(self) -> None:
        """Lets the emulation count for one step, unless it counts anyhow."""
        arithmetic = self.watch.arithmetic
        if arithmetic is None or arithmetic.dtype is None or not (arithmetic.emulated or arithmetic.fp8):
            return
        if arithmetic.counter is None:
            arithmetic.counter = Counter()
            self.handles.append(_Undo(lambda: setattr(arithmetic, "counter", None)))
            self.handles += arithmetic.counter.watch(self.watch.models.items())
        self.counter = arithmetic.counter
        self.counted = dict(self.counter.totals)

    def detach(self) -> None:
        _remove(self.handles)
        self._finalizer.detach()

    # What the hooks do.

    def _add(self, layer: str, kind: str, name: str, tensor: Tensor, replacing: bool = False) -> None:
        key = layer, kind, name
        row = measure(tensor, self.watch.sample)
        if replacing:
            self.measured[key] = [row]
        else:
            self.measured.setdefault(key, []).append(row)
        self.dtypes[key] = tensor.dtype

    def _enters(self, module: nn.Module, inputs: Any) -> None:
        if (layer := self.watch.names.get(module)) is not None and _training():
            self.order.setdefault(layer, len(self.order))
            for tensor in tensors(inputs):
                self._add(layer, "input", "", tensor)

    def _leaves(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if (layer := self.watch.names.get(module)) is None or not _training():
            return
        for tensor in tensors(output):
            self._add(layer, "output", "", tensor)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._comes_back, layer))

    def _comes_back(self, layer: str, gradient: Tensor) -> None:
        self._add(layer, "grad_output", "", gradient)

    def _gradient(self, p: nn.Parameter) -> None:
        if self.scale is None:
            self.scale = _scale_of(self.watch.scaler)
        if p in self.closed or p.grad is None:
            return
        layer, name = self.parameters[p]
        self._add(layer, "grad_weight", name, p.grad, replacing=True)  # the last of several batches holds their sum

    def _steps(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """An optimizer is about to step: later gradients of its parameters belong to others."""
        for p, mine in _updated(self.watch, optimizer, self.parameters):
            self.closed.add(mine)
            low = mine.dtype in (torch.float16, torch.bfloat16) and (p is mine or self.watch.rounded_updates)
            if low and (gradient := p.grad) is not None and not gradient.is_sparse:
                moving = every(flat(gradient), self.watch.sample) != 0
                self.before[mine] = torch.where(moving, every(flat(mine), self.watch.sample), torch.nan)
            elif p is mine and mine.dtype == torch.float32 and p.grad is not None:
                self.full[mine] = every(flat(mine), self.watch.sample).clone()

    # The end.

    def end(self, step: int, loss: Tensor | None) -> list[dict[str, Any]]:
        """Looks at what lives from step to step, detaches, and reads everything at once."""
        self.detach()
        watch = self.watch
        for p, (layer, name) in self.parameters.items():
            self._add(layer, "weight", name, p)
        for optimizer in watch.optimizers:
            for p, mine in _updated(watch, optimizer, self.parameters):
                layer, name = self.parameters[mine]
                for key, value in optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point():
                        self._add(layer, "moment", f"{name}.{key}", value)
        for module, layer in watch.names.items():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    self._add(layer, "buffer", name, buffer)
        if loss is not None:
            self._add("", "loss", "", loss)
        keys = [(key, len(rows)) for key, rows in self.measured.items()]
        lost = {p: torch.count_nonzero(b == every(flat(p), watch.sample)).double() for p, b in self.before.items()}
        small = {p: _small_updates(b, every(flat(p), watch.sample)) for p, b in self.full.items()}
        found = iter(read([row for rows in self.measured.values() for row in rows]))
        scale = None if self.scale is None else float(self.scale)
        lost_of, small_of = ({self.parameters[p]: int(n) for p, n in each.items()} for each in (lost, small))
        rows = []
        for key, calls in keys:
            whole = sum((next(found) for _ in range(calls)), Statistics())
            row = self._row(step, key, calls, whole, scale)
            if row["kind"] == "weight":
                row |= {"lost": lost_of.get((key[0], key[2])), "small_updates": small_of.get((key[0], key[2]))}
            rows.append(row)
        return rows + self._products(step, scale)

    def _row(
        self, step: int, key: tuple[str, str, str], calls: int, s: Statistics, scale: float | None
    ) -> dict[str, Any]:
        layer, kind, name = key
        if kind.startswith("grad_") and scale is not None:
            s = s.unscaled(scale)
        first, exponents = s.histogram.bins()
        plain = ("count", "sampled", "norm", "min", "max", "mean", "abs_mean", "std", "zero", "nan", "inf", "subnormal",
                 "below", "above")  # fmt: skip
        return {
            "step": step,
            "layer": layer,
            "order": self.order.get(layer),
            "kind": kind,
            "name": name,
            "dtype": str(self.dtypes[key]).removeprefix("torch."),
            "calls": calls,
            "scale": scale,
            **{n: getattr(s, n) for n in plain},
            "flushed": None,
            "lost": None,
            "small_updates": None,
            "first_exponent": first,
            "exponents": exponents,
        }

    def _products(self, step: int, scale: float | None) -> list[dict[str, Any]]:
        """What rounding did to the products of this step."""
        if self.counter is None:
            return []
        assert self.watch.arithmetic is not None
        keys = sorted(self.counter.totals, key=lambda key: (self.order.get(key[0], -1), DIRECTIONS.index(key[1])))
        changes = [self.counter.totals[key] - self.counted.get(key, 0) for key in keys]
        rows = []
        for (layer, direction), values in zip(keys, torch.stack(changes).tolist() if changes else [], strict=True):
            counts = dict(zip(KINDS, values, strict=True))
            if not counts["values"] or layer not in self.order:
                continue
            rows.append(
                dict.fromkeys(("norm", "min", "max", "mean", "abs_mean", "std", "nan", "below", "above"))
                | {"lost": None, "small_updates": None}
                | {
                    "step": step,
                    "layer": layer,
                    "order": self.order[layer],
                    "kind": {"forward": "output"}.get(direction, direction),
                    "name": "products",
                    "dtype": OPERANDS.get(direction, self.watch.arithmetic.compute),
                    "calls": 1,
                    "scale": scale,
                    "count": counts["values"],
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


def _small_updates(before: Tensor, after: Tensor) -> Tensor:
    """How many weights are over 2048 times what they were moved by; zeros are not."""
    return torch.count_nonzero(before.abs() > SMALL_UPDATE * (after - before).abs()).double()


class _Undo:
    """Something to be undone together with hooks."""

    def __init__(self, remove: Callable[[], None]):
        self.remove = remove


def _weak(method: Any) -> Callable[..., None]:
    """The method, without keeping its object alive: a Watch that is forgotten takes its hooks along."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


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


def _parameters(watch: Watch) -> dict[nn.Parameter, tuple[str, str]]:
    """Of the chosen layers, each parameter once."""
    found: dict[nn.Parameter, tuple[str, str]] = {}
    for module, layer in watch.names.items():
        for name, p in module.named_parameters(recurse=False):
            if p.is_floating_point():
                found.setdefault(p, (layer, name))
    return found


def _updated(
    watch: Watch, optimizer: Optimizer, chosen: Mapping[nn.Parameter, Any]
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Pairs of what an optimizer updates and the network's parameter: itself, or the one it is a master copy of."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for model in watch.models.values():
        trained = [p for p in model.parameters() if p.requires_grad]
        if len(trained) == len(held) and all(a.shape == b.shape for a, b in zip(held, trained, strict=True)):
            yield from ((a, b) for a, b in zip(held, trained, strict=True) if b in chosen)
            return
    yield from ((p, p) for p in held if p in chosen)


def _scale_of(scaler: Any) -> Tensor | float | None:
    """The factor of this step; torch's scaler keeps it on the device, where it stays until all is read."""
    if scaler is None:
        return None
    if hasattr(scaler, "value"):
        return float(scaler.value)
    return scaler._scale.clone() if scaler.is_enabled() and scaler._scale is not None else float(scaler.get_scale())


def _training() -> bool:
    """Not an evaluation, and not the second forward pass of gradient checkpointing within the backward pass."""
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
