"""Which layer first saw a number that is not finite: the batch is run again with an eye on every module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def first_nonfinite(models: dict[str, nn.Module], run: Callable[[], None]) -> str | None:
    """Runs forward and backward once more; returns e.g. "forward of layer1.conv2 (Conv2d)", or None if all is finite.

    Forward: the first module, in the order they finish, with infinities or NaN in its output. Backward: the first
    module, in the order gradients arrive, with infinities or NaN in the gradient of its output. `run` is to leave no
    trace: gradients and buffers are the caller's to put back.
    """
    forward: list[str] = []
    backward: list[str] = []
    handles = []

    def watch(path: str, module: nn.Module) -> None:
        label = f"{path} ({type(module).__name__})"

        def after_forward(_module, _inputs, output) -> None:
            for tensor in _tensors(output):
                if not bool(tensor.detach().isfinite().all()):
                    forward.append(label)
                if tensor.requires_grad and torch.is_grad_enabled():
                    tensor.register_hook(lambda g: backward.append(label) if not bool(g.isfinite().all()) else None)

        handles.append(module.register_forward_hook(after_forward))

    several = len(models) > 1
    for name, model in models.items():
        for path, module in model.named_modules():
            watch(".".join(part for part in (name if several else "", path) if part) or "the whole network", module)
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if forward:
        return f"forward of {forward[0]}"
    return f"backward at the output of {backward[0]}" if backward else None


def _tensors(value) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []
