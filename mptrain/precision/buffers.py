"""Buffers that a forward pass moves, put back when its step is skipped.

A scaler protects the weights from a bad batch and nothing else: by the time the gradients turn out to be infinite,
BatchNorm has averaged the same infinities into its running statistics, and every later evaluation is NaN while the
training loss, which never reads them, recovers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class MovingBuffers:
    """A copy of every buffer, made again before each step.

    All of them each time: which ones move is not known before they do (a network that is frozen at first, an
    assignment that replaces the tensor, an update through `.data`), and what they hold is small beside a step's work.
    """

    def __init__(self, models: Iterable[nn.Module]):
        self._models = list(models)
        self._before: list[tuple[nn.Module, str, Tensor]] = []

    def _buffers(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        seen = set()
        for model in self._models:
            for module in model.modules():
                for name, buffer in module._buffers.items():
                    if buffer is not None and (id(module), name) not in seen:
                        seen.add((id(module), name))
                        yield module, name, buffer

    @torch.no_grad()
    def keep(self) -> None:
        """Call before the step's first forward pass."""
        now = list(self._buffers())
        if len(now) == len(self._before) and all(
            m is n and a == b and s.shape == t.shape and s.dtype == t.dtype and s.device == t.device
            for (m, a, s), (n, b, t) in zip(self._before, now, strict=True)
        ):
            if now:
                torch._foreach_copy_([t for *_, t in self._before], [t for *_, t in now])
        else:
            self._before = [(module, name, buffer.clone()) for module, name, buffer in now]

    @torch.no_grad()
    def restore(self) -> None:
        """Call when the step was skipped; buffers that appeared since `keep` are left as they are."""
        for module, name, before in self._before:
            buffer = module._buffers.get(name)
            if buffer is not None and buffer.shape == before.shape:
                buffer.copy_(before)
            else:
                module._buffers[name] = before.clone()
