"""Loss scaling: none, static, dynamic; per layer in layerwise.py.

FP16 gradients below 2^-25 become zero. Multiplying the loss by a constant shifts every gradient up by the same factor
(the chain rule does the work); the gradients are divided by it again, in FP32, before clipping and the update
(Mixed Precision Training, section 3.2). Too large a factor makes some gradient infinite; that update is skipped.

Every scaler here, "none" included, checks the gradients of every update and skips it if one is not finite, so no
number format writes NaN into the weights; the three differ only in what the factor is and whether it moves.

The dynamic scaler with its default settings moves exactly as torch.amp.GradScaler does, except that it stops at a
floor: below 2^-128 the inverse of the scale is infinite in FP32, and a scaler without a floor ends by applying
infinite updates. Further settings reproduce the scalers of other projects: hysteresis (DeepSpeed, Megatron) and
tolerance (fairseq).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mptrain.errors import UserError
from mptrain.precision.modes import SMALLEST_SCALE, fits_fp32

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT16_MAX = torch.finfo(torch.float16).max


class LossScaler:
    """Scales a loss, unscales gradients, decides step or skip. As it stands: a factor that never moves.

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)          # then clip, if you like
        scaler.step(optimizer)              # True: applied, False: skipped, None: it had no gradients
        scaler.update()                     # once per iteration, after all optimizers

    With several optimizers an overflow skips the step of its own optimizer only; the factor moves once per iteration.
    """

    label: str = "none"

    def __init__(self, value: float = 1.0):
        self.value = value
        self.consecutive_skips = 0
        self._finite: dict[int, bool | None] = {}
        self._stepped: set[int] = set()
        self.agree: Callable[[bool | None], bool | None] = _as_found
        """what several processes, each with a part of the gradients, make of their findings"""
        self._scratch: dict[torch.device, tuple[float, Tensor, Tensor]] = {}

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor, in FP32; the loss itself if there is nothing to do. Then call backward on it."""
        return loss if self.value == 1 and loss.dtype == torch.float32 else loss.float() * self.value

    def aside(self) -> LossScaler:
        """One that scales as this one does at the moment, for a backward pass that leaves no trace in this one."""
        return copy.copy(self)

    def unscale_(self, optimizer: Optimizer) -> bool | None:
        """Divides the optimizer's gradients by the factor in place; returns whether all are finite, None without any.

        Raises UserError if a gradient is kept in FP16 (it could not hold what unscaling makes small), and RuntimeError
        if it is called twice in an iteration.
        """
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UserError(
                "LBFGS runs its closure several times a step, between which no gradient can be unscaled or checked; "
                "give another optimizer"
            )
        if id(optimizer) in self._finite:
            raise RuntimeError("unscale_ was already called for this optimizer since the last update()")
        gradients = [
            torch.view_as_real(gradient) if gradient.is_complex() else _coalesced(p) if gradient.is_sparse else gradient
            for group in optimizer.param_groups
            for p in group["params"]
            if (gradient := p.grad) is not None
        ]
        if self.value != 1 and any(g.dtype == torch.float16 for g in gradients):
            raise UserError(
                "the optimizer holds FP16 parameters, whose gradients cannot be unscaled in FP16; "
                "let Precision.prepare make FP32 copies (precision=fp16_master) and give those to the optimizer"
            )
        self._finite[id(optimizer)] = self.agree(self._unscale(gradients) if gradients else None)
        return self._finite[id(optimizer)]

    def step(self, optimizer: Optimizer) -> bool | None:
        """Steps the optimizer if its gradients are finite, after unscaling them if that was not done.

        Raises RuntimeError if it is called twice in an iteration: without update() between them the second one's
        gradients would be taken for unscaled.
        """
        if id(optimizer) in self._stepped:
            raise RuntimeError(
                "step was already called for this optimizer since the last update(); "
                "call update() once per iteration, after all optimizers"
            )
        if id(optimizer) not in self._finite:
            self.unscale_(optimizer)
        if self._finite[id(optimizer)] is not None:
            self._stepped.add(id(optimizer))
        if finite := self._finite[id(optimizer)]:
            optimizer.step()
        return finite

    def _unscale(self, gradients: list[Tensor]) -> bool:
        """Multiplies by 1 / factor in place and tells whether all values are finite.

        Waits once for each device: what one format after another finds is noted in the same place.
        """
        places = {(g.dtype, g.get_device()) for g in gradients}
        groups = [gradients]
        if len(places) > 1:
            groups = [[g for g in gradients if (g.dtype, g.get_device()) == place] for place in places]
        notes = {}
        for group in groups:
            inverse, found_inf = self._inverse(group[0].device)
            torch._amp_foreach_non_finite_check_and_unscale_(group, found_inf, inverse)
            notes[found_inf.device] = found_inf
        bad = [found_inf for found_inf in notes.values() if found_inf.item()]
        for found_inf in bad:
            found_inf.zero_()
        return not bad

    def _inverse(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """1 / factor on the device, kept until the factor moves, and a place to note infinities in."""
        factor, inverse, found_inf = self._scratch.get(device, (None, None, None))
        if inverse is None or found_inf is None or factor != self.value:
            inverse, found_inf = torch.full((), 1.0 / self.value, device=device), torch.zeros(1, device=device)
            self._scratch[device] = (self.value, inverse, found_inf)
        return inverse, found_inf

    def update(self) -> bool:
        """Ends the iteration; returns whether any optimizer skipped its step."""
        skipped = False in self._finite.values()
        self._finite.clear()
        self._stepped.clear()
        self.consecutive_skips = self.consecutive_skips + 1 if skipped else 0
        self._move(skipped)
        return skipped

    def _move(self, skipped: bool) -> None:
        """Changes the factor after an iteration."""

    def state_dict(self) -> dict[str, Any]:
        return {"label": self.label, "value": self.value, "consecutive_skips": self.consecutive_skips}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave; raises UserError for another scaler's state."""
        if state.get("label") != self.label:
            raise UserError(f"this is the state of scale={state.get('label')}, it does not fit scale={self.label}")
        self.value = state["value"]
        self.consecutive_skips = state["consecutive_skips"]


class StaticScaler(LossScaler):
    """A constant factor: it skips on overflow and never moves."""

    def __init__(self, value: float):
        super().__init__(check_scale(value))
        self.label = f"{value:g}"

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the factor, in FP32; raises UserError for an FP16 loss, whose gradient is the factor, if FP16
        cannot hold it: every step would be skipped."""
        if loss.dtype == torch.float16 and self.value > FLOAT16_MAX:
            raise UserError(
                f"the loss is FP16, in which its gradient, the scale {self.value:g}, is infinite; compute the loss in "
                f"FP32 (loss_function(output.float(), ...)), or give a scale of at most {FLOAT16_MAX:g}"
            )
        return super().scale(loss)


@dataclass(frozen=True)
class DynamicSettings:
    """How a dynamic scale moves.

    init: where it starts. growth: factor after `interval` good iterations in a row. backoff: factor after a bad one.
    floor, ceiling: limits, beside 2^-126, below which FP32 has no inverse. hysteresis: bad iterations until it backs
    off, refilled when it grows, or by every good iteration if `consecutive`. tolerance: it backs off only if at least
    this share of the iterations since it last moved were bad.
    """

    init: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 1.0
    ceiling: float = FLOAT32_MAX
    hysteresis: int = 1
    consecutive: bool = False
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        """Raises UserError for settings under which the scale would not move, or not as they are called."""
        allowed = {
            "growth above 1": self.growth > 1,
            "backoff between 0 and 1": 0 < self.backoff < 1,
            "interval of 1 or more": self.interval >= 1,
            "hysteresis of 1 or more": self.hysteresis >= 1,
            "tolerance from 0 to 1": 0 <= self.tolerance <= 1,
            "floor from 0 up to the ceiling": 0 <= self.floor <= self.ceiling,
        }
        if wrong := [what for what, is_so in allowed.items() if not is_so]:
            raise UserError(f"{self}: give {', '.join(wrong)}")


class DynamicScaler(LossScaler):
    """A factor that grows while gradients stay finite and backs off when they do not."""

    label = "dynamic"

    def __init__(self, settings: DynamicSettings | None = None):
        self.settings = settings or DynamicSettings()
        super().__init__(check_scale(self.settings.init))
        self.good = 0
        self.chances = self.settings.hysteresis
        self.since_moved = 0
        self.bad_since_moved = 0

    def _move(self, skipped: bool) -> None:
        s = self.settings
        self.since_moved += 1
        if skipped:
            self.good = 0
            self.bad_since_moved += 1
            self.chances -= 1
            if self.chances <= 0 and self.bad_since_moved / self.since_moved >= s.tolerance:
                self.value = max(self.value * s.backoff, min(max(s.floor, SMALLEST_SCALE), self.value))
                self.since_moved = self.bad_since_moved = 0
            return
        self.good += 1
        if s.consecutive:
            self.chances = s.hysteresis
        if self.good == s.interval:
            self.good = 0
            self.chances = s.hysteresis
            self.since_moved = 0
            if (grown := self.value * s.growth) <= min(FLOAT32_MAX, s.ceiling):
                self.value = grown

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "settings": asdict(self.settings),
            "good": self.good,
            "chances": self.chances,
            "since_moved": self.since_moved,
            "bad_since_moved": self.bad_since_moved,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.settings = DynamicSettings(**state["settings"])
        self.good, self.chances = state["good"], state["chances"]
        self.since_moved, self.bad_since_moved = state["since_moved"], state["bad_since_moved"]


def loss_scaler(
    scale: str | float,
    settings: DynamicSettings | None = None,
    models: Mapping[str, nn.Module] | None = None,
    **layerwise: Any,
) -> LossScaler:
    """The scaler that `scale=` names: "none", a number (static), "dynamic" or "layerwise"; UserError for anything else.

    models, layerwise: the networks and the further settings of `LayerwiseScaler`; the others have no use for them.
    """
    if scale == "none":
        return LossScaler()
    if scale == "dynamic":
        return DynamicScaler(settings)
    if scale == "layerwise":
        from mptrain.precision.layerwise import LayerwiseScaler

        if models is None:
            raise UserError("scale=layerwise needs the networks: loss_scaler('layerwise', models={'model': model})")
        return LayerwiseScaler(models, settings, **layerwise)
    return StaticScaler(check_scale(scale))


def check_scale(value: Any) -> float:
    """A static scale as a number; raises UserError unless it is finite, positive and fits in FP32 with its inverse."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not fits_fp32(number):
        raise UserError(
            f"scale={value}: give a positive number (a power of two is exact, e.g. 128), dynamic, layerwise or none"
        )
    return number


def _as_found(finite: bool | None) -> bool | None:
    """One process's finding is everybody's."""
    return finite


def _coalesced(p: Tensor) -> Tensor:
    """The values of a sparse gradient, one per row."""
    assert p.grad is not None
    p.grad = p.grad.coalesce()
    return p.grad._values()
