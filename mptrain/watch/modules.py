"""What the modules of networks are called, and the tensors that they pass on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn


def named(models: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its path, which begins with the network's name where there are several."""
    for name, model in models.items():
        for path, module in model.named_modules():
            yield ".".join(part for part in (name if len(models) > 1 else "", path) if part), module


def tensors(value: Any) -> list[Tensor]:
    """The floating point tensors in nested containers."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []
