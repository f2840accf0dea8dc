"""TF32 emulated: FP32 tensors whose products see 10 bits of mantissa.

Operands of a dot product are rounded, in the forward product and in both products of the backward pass; what is added
to it (a bias, `addmm`'s first argument, an attention mask, an LSTM's cell) is not, and neither is a bias gradient,
which is a sum. Results are FP32 and are not rounded.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet, _ExcludeDispatchKeyGuard

from mptrain.precision.dispatch import Rounding, each
from mptrain.precision.formats import round_tf32
from mptrain.precision.saved import Sources

ADDENDS = frozenset({"bias", "attn_mask", "b_ih", "b_hh"})


def run(operation: Any, args: tuple, kwargs: dict, off: DispatchKeySet, device_type: str) -> Any:
    """An ATen operation on operands rounded to TF32, `off` being the keys to switch off below."""
    sources = Sources(round_tf32)
    name = operation._schema.name.partition("::")[2]
    names = [argument.name for argument in operation._schema.arguments]
    addend = "self" if name in ("addmm", "addbmm", "baddbmm", "addmv") else "bias"
    added: Tensor | None = None

    def operand(t: Tensor) -> Tensor:
        if t.dtype != torch.float32 or t.device.type != device_type:
            return t
        return sources.add(t, _Round.apply(t))

    def prepared(argument: str, value: Any) -> Any:
        nonlocal added
        if argument == addend and isinstance(value, Tensor):
            added = value
            return value.detach()
        if argument in ADDENDS:
            return value
        if argument == "params":
            return [t if t.dim() == 1 else operand(t) for t in value]
        if argument == "hx" and isinstance(value, (list, tuple)):
            return [operand(value[0]), *value[1:]]
        return each(operand, value)

    args = tuple(prepared(argument, value) for argument, value in zip(names, args, strict=False))
    kwargs = {argument: prepared(argument, value) for argument, value in kwargs.items()}
    saving = sources.saved() if sources.needed() else nullcontext()
    with _ExcludeDispatchKeyGuard(off), Rounding("tf32"), saving:
        result = operation(*args, **kwargs)
        sources.clear()
    if added is not None and name not in ("linear", "conv_tbc") and addend == "bias":
        added = added.view(-1, *[1] * (args[1].dim() - 2))
    beta = kwargs.get("beta", 1)
    return each(lambda t: _RoundGradient.apply(t, added, beta) if t.dtype == torch.float32 else t, result)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return round_tf32(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _RoundGradient(torch.autograd.Function):
    """result, which holds beta * addend already, unchanged; backward rounds for the product, not for the addend."""

    @staticmethod
    def forward(ctx, result, addend, beta):
        ctx.beta = beta
        ctx.shape = None if addend is None else addend.shape
        return result.detach()

    @staticmethod
    def backward(ctx, gradient):
        to_addend = None
        if ctx.needs_input_grad[1]:
            to_addend = gradient.sum_to_size(ctx.shape)
            to_addend = to_addend if ctx.beta == 1 else to_addend * ctx.beta
        return _Round.apply(gradient), to_addend, None
