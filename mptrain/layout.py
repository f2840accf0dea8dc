"""How networks lie in memory and run: channels last, torch.compile."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mptrain.config import Config
from mptrain.errors import UserError
from mptrain.precision.arithmetic import Arithmetic

BACKEND = "inductor"


def channels_last(models: Mapping[str, nn.Module]) -> None:
    """Lays the weights of 2-D convolutions out with channels last; their inputs and outputs follow.

    Raises UserError where there are none.
    """
    if not any(p.dim() == 4 for model in models.values() for p in model.parameters()):
        raise UserError("channels_last=true: these networks have no 2-D convolution; leave it out")
    for model in models.values():
        for t in (*model.parameters(), *model.buffers()):
            if t.dim() == 4:  # as Module.to does, which cannot swap parameters without numbers (estimate.py)
                t.data = t.data.to(memory_format=torch.channels_last)


def compile_networks(models: Mapping[str, nn.Module], config: Config, arithmetic: Arithmetic, ranks: int) -> None:
    """Training goes through torch.compile from here on; names, parameters and checkpoints stay as they are.

    A compiler fuses operations and leaves out roundings between them, so whatever is made of roundings or looks
    between operations is refused: raises UserError.
    """
    said = f"compile={str(config.compile).lower()}"
    if not arithmetic.compilable:
        raise UserError(
            f"{said} needs torch's own arithmetic, and precision={config.numbers.name} is computed by ours here: a "
            "compiler would leave out roundings; use precision=fp32, or a GPU with kernels for it"
        )
    if config.watch.enabled or config.scale_name == "layerwise":
        other = "watch=true" if config.watch.enabled else "scale=layerwise"
        raise UserError(f"{said} and {other} exclude each other: {other} looks at every layer; leave one of them out")
    if ranks > 1:
        raise UserError(f"{said} is for one process; start mptrain without torchrun")
    if config.compile == "reduce-overhead" and arithmetic.device_type != "cuda":
        raise UserError(f"{said} records CUDA graphs and needs a GPU; use compile=true")
    for model in models.values():
        model.compile(backend=BACKEND, **({"mode": config.compile} if isinstance(config.compile, str) else {}))


def as_written(config: Config) -> AbstractContextManager[Any]:
    """Inside, networks run uncompiled: to be evaluated as all others are, and where instruments look on."""
    return torch.compiler.set_stance("force_eager") if config.compile else nullcontext()


def explained(error: Exception) -> Exception:
    """The error itself, or what it means if a compiler is missing or failed."""
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        return UserError(f"compile: torch.compile failed ({reason}); it needs a C++ compiler; or set compile=false")
    return error
