"""What the modules of networks are called, and the tensors that they pass on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

COMPILED = "_orig_mod"
"""What torch.compile calls the module that it wraps."""


def named(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path, which begins with the network's name where there are several."""
    for name, model in models.items():
        for path, module in model.named_modules():
            own = [part for part in path.split(".") if part != COMPILED]
            yield ".".join(part for part in (name if len(models) > 1 else "", *own) if part), module


def compiled(model: nn.Module) -> bool:
    """Whether torch.compile has its hands in a part of it."""
    return any(hasattr(m, COMPILED) or m._compiled_call_impl is not None for m in model.modules())


def tensors(value: Any) -> list[Tensor]:
    """The floating point tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []
