"""Ways to compute in FP16 on a CPU, and how many of their results have the very bits of the definition.

The definition: each operation in FP32 on FP16 operands, its result rounded once, and the same for each product of its
derivative. It is written out here with casts, one module after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from benchmarking import table
from torch import Tensor, nn

from mptrain.precision.modes import Precision

NATIVE, MODULES = "torch's own FP16", "FP16 after modules"


class Rounded(torch.autograd.Function):
    """FP16 values in FP32 storage, and so the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.half().float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.half().float()


def rounded(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Rounded.apply(value) if value.is_floating_point() else value
    return type(value)(map(rounded, value)) if isinstance(value, (tuple, list)) else value


def round_after_modules(model: nn.Module) -> None:
    """Hooks on every module without submodules."""
    for module in model.modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(lambda module, inputs, output: rounded(output))


def round_in_place(tensors: Iterator[Tensor | None]) -> None:
    with torch.no_grad():
        for t in tensors:
            if t is not None:
                t.copy_(t.half())


def low(x: Tensor) -> Tensor:
    """Rounded to FP16; autograd rounds the gradient as well."""
    return x.half().float()


class Attention(nn.Module):
    """One head, without projections of its own: two products and a softmax inside one module."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(1, 2)).softmax(-1) @ v


class Residual(nn.Module):
    """Two convolutions, a functional ReLU and an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(32, 32, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + F.relu(self.second(x))


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    return low(F.linear(low(x), low(module.weight), low(module.bias)))


def convolution(module: nn.Conv2d, x: Tensor) -> Tensor:
    return low(F.conv2d(low(x), low(module.weight), low(module.bias), padding=1))


def residual(module: Residual, x: Tensor) -> Tensor:
    x = convolution(module.first, x)
    return low(x + F.relu(convolution(module.second, x)))


def attention(module: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = low(low(q) @ low(k.transpose(1, 2)))
    return low(low(scores.softmax(-1)) @ low(v))


def lstm(module: nn.LSTM, x: Tensor) -> Tensor:
    weights = {name: low(p) for name, p in module.named_parameters()}
    return low(torch.func.functional_call(module, weights, (low(x),))[0])


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], tuple[int, ...], int]] = {
    "linear": (lambda: nn.Linear(256, 256), linear, (64, 256), 1),
    "convolution": (lambda: nn.Conv2d(32, 32, 3, padding=1), convolution, (8, 32, 16, 16), 1),
    "residual block": (Residual, residual, (8, 32, 16, 16), 1),
    "attention": (Attention, attention, (8, 64, 64), 3),
    "LSTM, rounded around the call": (lambda: nn.LSTM(128, 128), lstm, (20, 8, 128), 1),
}


@contextmanager
def way(name: str, module: nn.Module) -> Iterator[Any]:
    """The region to compute in; the module is changed for it."""
    if name == MODULES:
        round_in_place(module.parameters())
        round_after_modules(module)
        yield nullcontext()
    else:
        yield torch.autocast("cpu", torch.float16) if name == NATIVE else Precision.load("fp16").arithmetic("cpu")


def results(function: Callable[..., Any], module: nn.Module, inputs: list[Tensor], upstream: Tensor) -> list[Tensor]:
    """Output, gradients of the inputs, gradients of the parameters."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    output = function(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    output.backward(upstream.to(output.dtype))
    return [output.detach().float(), *(x.grad for x in inputs), *(p.grad for p in module.parameters())]  # type: ignore


def shares(case: str, name: str) -> list[str]:
    """Of output, input gradients and weight gradients: the share with the bits of the definition."""
    make, definition, size, count = CASES[case]
    torch.manual_seed(0)
    module = make()
    inputs = [torch.randn(size).half().float() for _ in range(count)]
    upstream = torch.randn(definition(module, *inputs).shape).half().float()
    expected = results(lambda *x: definition(module, *x), module, inputs, upstream)
    module.zero_grad()
    try:
        with way(name, module) as region:

            def computed(*x: Tensor) -> Any:
                with region:
                    return module(*(rounded(t) for t in x) if name == MODULES else x)

            found = results(computed, module, inputs, upstream)
    except RuntimeError:
        return ["does not run", "", ""]
    if name == MODULES:
        round_in_place(iter(found[1 + count :]))
    groups = (slice(0, 1), slice(1, 1 + count), slice(1 + count, None))
    cells = []
    for group in groups:
        equal = [(a == b).flatten() for a, b in zip(found[group], expected[group], strict=True)]
        cells.append(f"{torch.cat(equal).double().mean() * 100:.2f} %" if equal else "")
    return cells


def exactness_table() -> str:
    rows = [[case, name, *shares(case, name)] for case in CASES for name in ("emulated FP16", MODULES, NATIVE)]
    return table(["module", "way", "output", "gradient of the input", "gradient of the weights"], rows)
