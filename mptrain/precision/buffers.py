"""Buffers that a forward pass moves, put back when its step is skipped.

A scaler protects the weights from a bad batch and nothing else: by the time the gradients turn out to be infinite,
BatchNorm has averaged the same infinities into its running statistics, and every later evaluation is NaN while the
training loss, which never reads them, recovers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class MovingBuffers:
    """Snapshots before each step; after the first, only of the buffers that a step was seen to move."""

    def __init__(self, models: Iterable[nn.Module]):
        self._buffers: list[Tensor] = [b for model in models for b in model.buffers()]
        self._before: list[Tensor] = []
        self._versions: list[int] | None = None

    @torch.no_grad()
    def keep(self) -> None:
        """Call before the step's first forward pass."""
        if self._versions is not None and self._before:
            moving = [b for b, version in zip(self._buffers, self._versions, strict=True) if b._version != version]
            if len(moving) < len(self._buffers):
                self._buffers, self._before = moving, []
        if not self._before:
            self._before = [b.clone() for b in self._buffers]
        else:
            torch._foreach_copy_(self._before, self._buffers)
        self._versions = [b._version for b in self._buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Call when the step was skipped."""
        for b, before in zip(self._buffers, self._before, strict=True):
            b.copy_(before)
