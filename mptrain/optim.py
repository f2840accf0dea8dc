"""Optimizers by name, learning-rate schedules as functions of the applied steps, and averaged weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mptrain.errors import UserError
from mptrain.files import suggest
from mptrain.options import OPTIMIZERS as DEFAULTS

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}

Factor = Callable[[int], float]
"""Share of the peak learning rate for the step that follows so many applied ones."""


def optimizer(name: str, parameters: list[nn.Parameter], lr: float, **options: Any) -> Optimizer:
    """Builds an optimizer of torch.optim.

    Raises UserError for options that it does not take, and for an `eps` that is zero in the format of the
    parameters (Adam's 1e-8 in FP16 divides zero gradients by zero).
    """
    kind = OPTIMIZERS[name]
    for key in options:
        if key not in (known := list(DEFAULTS[name])):
            raise UserError(f"optimizer.{key} is not an option of {name}; {suggest(key, known)}")
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    try:
        built = kind(parameters, lr=lr, **options)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise UserError(f"optimizer {name}: {error}") from error
    eps = built.defaults.get("eps")
    for dtype in {p.dtype for p in parameters}:
        if eps and torch.tensor(eps, dtype=torch.float64).to(dtype) == 0:
            raise UserError(
                f"optimizer.eps={eps} is zero in {str(dtype).removeprefix('torch.')}, the format {name} works in here; "
                "give a larger one (+optimizer.eps=1e-4), or keep the update in FP32 (precision.update=float32)"
            )
    _go_without_label(built)
    return built


def _go_without_label(optimizer: Optimizer) -> None:
    """Steps that nobody profiles or hooks into leave out torch's label for its profiler.

    Around every step torch enters and leaves a record_function, which takes 40 microseconds of a CPU whether a profiler
    listens or not: a tenth of a small network's step.
    """
    labelled = type(optimizer).step
    if not getattr(labelled, "hooked", False):  # torch's mark on the step that it has wrapped
        return
    plain = labelled.__wrapped__  # type: ignore[attr-defined]
    hooks = (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        _global_optimizer_pre_hooks,
        _global_optimizer_post_hooks,
    )

    def step(closure: Callable[[], float] | None = None) -> float | None:
        wanted = torch.autograd._profiler_enabled() or any(hooks)
        return (labelled if wanted else plain)(optimizer, closure)

    optimizer.step = step  # type: ignore[assignment, method-assign]


def schedule(name: str, steps: int, warmup: int = 0, **options: Any) -> Factor:
    """The learning rate's factor by applied step: a linear warm-up of `warmup` steps, then the named shape to `steps`.

    constant; cosine, linear (to `final`); onecycle (up from 1/25 and down to zero along cosines, as
    torch.optim.lr_scheduler.OneCycleLR does); step (`gamma` at each of `milestones`); exponential (`gamma` every
    `every` steps). Raises UserError for options of another shape.
    """
    if name == "onecycle":
        _take(name, options)
        return lambda k: _onecycle(k, warmup, steps)
    shapes: dict[str, tuple[Callable[..., Factor], dict[str, Any]]] = {
        "constant": (lambda: lambda k: 1.0, {}),
        "cosine": (lambda final: lambda k: final + (1 - final) * _cosine(_progress(k, warmup, steps)), {"final": 0.0}),
        "linear": (lambda final: lambda k: 1 - (1 - final) * _progress(k, warmup, steps), {"final": 0.0}),
        "step": (lambda milestones, gamma: lambda k: gamma ** sum(k >= m for m in milestones),
                 {"milestones": [], "gamma": 0.1}),
        "exponential": (lambda gamma, every: lambda k: gamma ** (k // every), {"gamma": 0.99, "every": 1}),
    }  # fmt: skip
    make, defaults = shapes[name]
    shape = make(**_take(name, options, defaults))
    return lambda k: (k + 1) / (warmup + 1) if k < warmup else shape(k)


def _take(name: str, options: dict[str, Any], defaults: dict[str, Any] | None = None) -> dict[str, Any]:
    for key in options:
        if key not in (defaults or {}):
            raise UserError(f"schedule.{key} is not an option of {name}; {suggest(key, sorted(defaults or {}))}")
    return {**(defaults or {}), **options}


def _progress(k: int, warmup: int, steps: int) -> float:
    return min(1.0, (k - warmup) / max(1, steps - warmup))


def _cosine(t: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * t))


def _onecycle(k: int, warmup: int, steps: int) -> float:
    if k < warmup:
        return 1 - (1 - 1 / 25) * _cosine(k / warmup)
    return _cosine(_progress(k, warmup, steps))


class Average:
    """An exponential moving average of parameters, kept in FP32 and moved once per applied step."""

    def __init__(self, weights: dict[str, list[nn.Parameter]], decay: float):
        self.decay = decay
        self.weights = weights
        self.shadow = {name: [p.detach().float().clone() for p in ps] for name, ps in weights.items()}

    @torch.no_grad()
    def update(self, name: str) -> None:
        torch._foreach_lerp_(self.shadow[name], [p.detach().float() for p in self.weights[name]], 1 - self.decay)

    @contextmanager
    def evaluating(self, networks: dict[str, nn.Module]) -> Iterator[None]:
        """The networks with the averaged parameters in place of their own."""
        pairs = [
            (p, p.data, average)
            for name, network in networks.items()
            for p, average in zip((p for p in network.parameters() if p.requires_grad), self.shadow[name], strict=True)
        ]
        try:
            for p, data, average in pairs:
                p.data = average.to(data.dtype)
            yield
        finally:
            for p, data, _ in pairs:
                p.data = data

    def state_dict(self) -> dict[str, Any]:
        return self.shadow

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, tensors in self.shadow.items():
            for shadow, saved in zip(tensors, state[name], strict=True):
                shadow.copy_(saved)
