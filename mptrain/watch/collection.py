"""One step that is looked at: hooks on, everything measured where it lies, and read at once at the end."""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from torch.optim import Optimizer

from mptrain.precision.blocks import every, flat
from mptrain.precision.dispatch import LOWER
from mptrain.watch.modules import compiled, tensors
from mptrain.watch.native import Native
from mptrain.watch.products import Products, may_be_native
from mptrain.watch.statistics import Measured, Statistics, fetch, measure, read
from mptrain.watch.updates import chosen, scale_of, scaler_above, updated

if TYPE_CHECKING:
    from mptrain.watch.hook import Watch

SMALL_UPDATE = 2048.0
"""A weight this many times its update may keep its value in FP16 (Mixed Precision Training, section 3.1)."""


class Collection:
    """One step that is looked at, from the end of the step before to its own end."""

    def __init__(self, watch: Watch):
        self.watch = watch
        watch.shelf.clear()
        self.measured: dict[tuple[str, str, str], list[Measured]] = {}
        self.dtypes: dict[tuple[str, str, str], torch.dtype] = {}
        self.order: dict[str, int] = {}
        self.scale: Tensor | float | None = None
        self.closed: set[nn.Parameter] = set()
        self.before: dict[nn.Parameter, Tensor] = {}
        self.full: dict[nn.Parameter, Tensor] = {}
        self.muted = False
        self.known: dict[int, tuple[weakref.ref[Tensor], int, Measured]] = {}
        self.parameters = chosen(watch)
        self.native = (
            Native(self.parameters, self.order, watch.sample) if watch.due and may_be_native(watch.arithmetic) else None
        )
        self.products = Products(watch.models, watch.arithmetic, watch.sample, watch.shelf, self.native)
        self.forward: set[str] = set()
        self.handles: list[Any] = [
            every_module.register_module_forward_pre_hook(_weak(self._enters)),
            every_module.register_module_forward_hook(_weak(self._leaves)),
        ]
        for p in self.parameters:
            if p.requires_grad:
                self.handles.append(p.register_post_accumulate_grad_hook(_weak(self._gradient)))
        for optimizer in watch.optimizers:
            self.handles.append(optimizer.register_step_pre_hook(_weak(self._steps)))
        self.handles += self.products.follow()
        if any(compiled(model) for model in watch.models.values()):
            self.handles.append(_AsWritten())
        self._finalizer = weakref.finalize(watch, _remove, self.handles)

    def shadow(self, run: Callable[[Any], Any]) -> None:
        """Counts what native rounding will flush, by a run of the coming batch that nothing else here sees."""
        self.muted = True
        try:
            self.products.shadow(run)
        finally:
            self.muted = False

    def detach(self) -> None:
        if self.native is not None:
            self.native.on = False
        _remove(self.handles)
        self._finalizer.detach()

    # What the hooks do.

    def _add(self, layer: str, kind: str, name: str, tensor: Tensor, replacing: bool = False) -> None:
        key = layer, kind, name
        row = self._measured(tensor)
        if replacing:
            self.measured[key] = [row]
        else:
            self.measured.setdefault(key, []).append(row)
        self.dtypes[key] = tensor.dtype
        if self.watch.shelf.full:
            self._settle()

    def _settle(self) -> None:
        """Measures what was kept so far."""
        found = iter(read([row for rows in self.measured.values() for row in rows]))
        self.measured = {key: [next(found) for _ in rows] for key, rows in self.measured.items()}
        self.known.clear()
        self.products.settle()
        self.watch.shelf.clear()

    def _measured(self, tensor: Tensor) -> Measured:
        """What one layer hands on and another takes, unchanged, is measured once."""
        known = self.known.get(id(tensor))
        version = 0 if tensor.is_inference() else tensor._version
        if known is None or known[0]() is not tensor or known[1] != version:
            known = weakref.ref(tensor), version, measure(tensor, self.watch.sample, self.watch.shelf)
            self.known[id(tensor)] = known
        return known[2]

    def _enters(self, module: nn.Module, inputs: Any) -> None:
        if (layer := self.watch.names.get(module)) is None or self.muted:
            return
        self.products.find()
        if torch._C._current_graph_task_id() == -1:
            self.order.setdefault(layer, len(self.order))
        if not self._looks(layer):
            return
        given = tensors(inputs)
        if self.native is not None:
            self.native.look(given, None)
        for tensor in given:
            self._add(layer, "input", "", tensor)

    def _leaves(self, module: nn.Module, _inputs: Any, output: Any) -> None:
        if (layer := self.watch.names.get(module)) is None or not self._looks(layer):
            return
        made = tensors(output)
        if self.native is not None:
            self.native.look(made, layer)
        for tensor in made:
            self._add(layer, "output", "", tensor)
            if tensor.requires_grad:
                tensor.register_hook(functools.partial(self._comes_back, layer))

    def _comes_back(self, layer: str, gradient: Tensor) -> None:
        self._add(layer, "grad_output", "", gradient)

    def _looks(self, layer: str) -> bool:
        """Not an evaluation, not a shadow, not the second forward pass of checkpointing within the backward pass.

        Unless the first was without gradients, as in the reentrant kind: then the second is the one that counts.
        """
        if self.muted or not torch.is_grad_enabled():
            return False
        first = torch._C._current_graph_task_id() == -1
        if first:
            self.forward.add(layer)
        return first or layer not in self.forward

    def _gradient(self, p: nn.Parameter) -> None:
        if self.muted:
            return
        if self.scale is None:
            self.scale = scale_of(self.watch.scaler)
        if p in self.closed or p.grad is None:
            return
        layer, name = self.parameters[p]
        self._add(layer, "grad_weight", name, p.grad, replacing=True)  # the last of several batches holds their sum

    def _steps(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """An optimizer is about to step: later gradients of its parameters belong to others."""
        if self.watch.scaler is None and (scaler := scaler_above()) is not None:
            self.watch.scaler, self.scale = scaler, scale_of(scaler)
        for p, mine in updated(self.watch, optimizer, self.parameters):
            self.closed.add(mine)
            low = mine.dtype in LOWER and (p is mine or self.watch.rounded_updates)
            full = mine.dtype == torch.float32 and p is mine
            if (low or full) and (gradient := p.grad) is not None and not gradient.is_sparse:
                moving = every(flat(gradient), self.watch.sample) != 0
                before = self.before if low else self.full
                before[mine] = torch.where(moving, every(flat(mine), self.watch.sample), torch.nan)

    # The end.

    def end(self, step: int, loss: Tensor | None) -> list[dict[str, Any]]:
        """Looks at what lives from step to step, detaches, and reads everything at once."""
        self.detach()
        watch = self.watch
        for p, (layer, name) in self.parameters.items():
            self._add(layer, "weight", name, p)
        for optimizer in watch.optimizers:
            for p, mine in updated(watch, optimizer, self.parameters):
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
        lost = {p: torch.count_nonzero(b == every(flat(p), watch.sample)) for p, b in self.before.items()}
        small = {p: _small_updates(b, every(flat(p), watch.sample)) for p, b in self.full.items()}
        exact, products = self.products.pending()
        scales = [] if self.scale is None else [torch.as_tensor(self.scale)]
        measured = [row for rows in self.measured.values() for row in rows]
        statistics, numbers = fetch([*measured, *exact], [*lost.values(), *small.values(), *scales, *products])
        found, figures = iter(statistics), iter(numbers)
        lost_of, small_of = ({self.parameters[p]: int(next(figures)[0]) for p in each} for each in (lost, small))
        scale = next(figures)[0] if scales else None
        rows = []
        for key, calls in keys:
            whole = next(found)
            for _ in range(calls - 1):
                whole += next(found)
            row = self._row(step, key, calls, whole, scale)
            if row["kind"] == "weight":
                row |= {"lost": lost_of.get((key[0], key[2])), "small_updates": small_of.get((key[0], key[2]))}
            rows.append(row)
        return [*rows, *self.products.rows(step, scale, self.order, found, figures)]

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


def _small_updates(before: Tensor, after: Tensor) -> Tensor:
    """How many weights are over 2048 times what they were moved by; NaN, which has no gradient, and zeros are not."""
    moved = (after - before).abs_().mul_(SMALL_UPDATE)
    return torch.count_nonzero(before.abs() > moved)


def _weak(method: Any) -> Callable[..., None]:
    """The method, without keeping its object alive: a Watch that is forgotten takes its hooks along."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        if (alive := reference()) is not None:
            alive(*args)

    return call


class _AsWritten:
    """Compiled networks run as they are written: a compiler would take the hooks apart, anew for every step.

    It also warns of them, for a reason that is none here: what torch.compile wraps a network in is no layer.
    """

    def __init__(self) -> None:
        self.stance = torch.compiler.set_stance("force_eager")
        warnings.filterwarnings("ignore", r"Using .torch\.compile\(module\). when there are global hooks")
        self.filter = warnings.filters[0]

    def remove(self) -> None:
        self.stance.__exit__(None, None, None)
        with contextlib.suppress(ValueError):  # somebody else put them in order meanwhile
            warnings.filters.remove(self.filter)  # type: ignore[attr-defined]


def _remove(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()
