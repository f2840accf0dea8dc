"""Who updates what: parameters of the layers that are watched, what optimizers hold of them, and the loss scaler."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from mptrain.watch.hook import Watch

FARTHEST = 20
"""Frames between an optimizer's hook and the scaler that calls the optimizer."""


def chosen(watch: Watch) -> dict[nn.Parameter, tuple[str, str]]:
    """Of the chosen layers, each parameter once."""
    found: dict[nn.Parameter, tuple[str, str]] = {}
    for module, layer in watch.names.items():
        for name, p in module.named_parameters(recurse=False):
            if p.is_floating_point():
                found.setdefault(p, (layer, name))
    return found


def adam_betas(watch: Watch) -> dict[tuple[str, str], tuple[float, float]]:
    """Of the chosen layers' parameters that an optimizer with two moments updates."""
    layers = chosen(watch)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for optimizer in watch.optimizers:
        mine = dict(updated(watch, optimizer, layers))
        for group in optimizer.param_groups:
            if len(betas := group.get("betas", ())) >= 2:
                found |= {layers[mine[p]]: (float(betas[0]), float(betas[1])) for p in group["params"] if p in mine}
    return found


def updated(
    watch: Watch, optimizer: Optimizer, layers: Mapping[nn.Parameter, Any]
) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """Pairs of what an optimizer updates and the layer's parameter: itself, or the one it is a master copy of."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    own = {p for model in watch.models.values() for p in model.parameters()}
    for model in watch.models.values() if own.isdisjoint(held) else ():
        trained = [p for p in model.parameters() if p.requires_grad]
        if len(trained) == len(held) and all(a.shape == b.shape for a, b in zip(held, trained, strict=True)):
            yield from ((a, b) for a, b in zip(held, trained, strict=True) if b in layers)
            return
    yield from ((p, p) for p in held if p in layers)


def scaler_above() -> Any:
    """The loss scaler that lets an optimizer step, torch's or one of ours, where nobody said which it is."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(FARTHEST):
        if frame is None:
            return None
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.amp.GradScaler) or (hasattr(owner, "unscale_") and hasattr(owner, "value")):
            return owner
        frame = frame.f_back
    return None


def scale_of(scaler: Any) -> Tensor | float | None:
    """The factor of this step; torch's scaler keeps it on the device, where it stays until all is read."""
    if scaler is None:
        return None
    if hasattr(scaler, "value"):
        return float(scaler.value)
    return scaler._scale.clone() if scaler.is_enabled() and scaler._scale is not None else float(scaler.get_scale())
