"""What a step has to compute and to move, and the least time a machine needs for it.

A roofline: each operation at the machine's peak for its format or at its full bandwidth, whichever takes longer, one
after the other. No step is faster unless a compiler fuses operations; real steps take longer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from mptrain.gpus import Machine
from mptrain.precision.formats import DTYPES
from mptrain.precision.modes import Precision

aten = torch.ops.aten
SIDE = 1024
"""Rows and columns of the matrix product that measures a peak."""
STREAM = 2**25
"""FP32 numbers whose copy measures bandwidth: more than caches hold"""


@dataclass
class Work:
    """Every operation as (format, FLOP, bytes touched)."""

    operations: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def flops(self) -> float:
        return sum(flops for _, flops, _ in self.operations)

    @property
    def bytes(self) -> float:
        return sum(size for _, _, size in self.operations)

    def seconds(self, machine: Machine, tf32: bool = False) -> float:
        """The least time; `tf32`: FP32 products run as TF32. KeyError for a format without units."""
        total = 0.0
        names = {"float32": "tf32"} if tf32 else {}
        for dtype, flops, size in self.operations:
            peak = machine.peaks[names.get(dtype, dtype)] if flops else 1.0
            total += max(flops / peak, size / machine.bandwidth)
        return total

    def renamed(self, before: str, after: str) -> Any:
        """The same in another format that is as wide."""
        operations = [(after if dtype == before else dtype, flops, size) for dtype, flops, size in self.operations]
        return replace(self, operations=operations)


class Operations(TorchDispatchMode):
    """Notes format, FLOP and bytes touched of every operation; views and empty tensors touch nothing.

    What an operation picks out of a table counts, not the table.
    """

    def __init__(self, found: list[tuple[str, float, float]]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # FakeTensors are asked for their device at every turn
            return args[0].fake_device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
            formula = FORMULAS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
            flops = float(formula(*args, **kwargs, out_val=result)) if formula else 0.0
            dtype = next((t.dtype for t in read if t.is_floating_point()), torch.float32)
            self.found.append((_name(dtype), flops, float(_touched(func, args, read, result))))
        return result


@cache
def _name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def _touched(func: Any, args: Any, read: list[Tensor], result: Any) -> int:
    name, overwrites, written = _habits(func)
    if name in EMPTY:
        return 0
    into = [t for i in written if i < len(args) for t in tree_leaves(args[i]) if isinstance(t, Tensor)]
    out = _bytes(into or [t for t in tree_leaves(result) if isinstance(t, Tensor)])
    if name in PICKED:
        return 2 * out
    if name in PUT:
        return 2 * _bytes(read[1:])
    return out + _bytes(read[len(into) :] if overwrites else read)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_"}
PICKED = {"embedding", "index", "index_select", "gather"}
PUT = {"index_put_", "_index_put_impl_", "index_add_", "scatter_", "scatter_add_"}
OVERWRITE = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}


@cache
def _habits(func: Any) -> tuple[str, bool, tuple[int, ...]]:
    """Its name, whether it overwrites what it writes to unread, and which of its arguments it writes to."""
    name = func._overloadpacket.__name__
    arguments = enumerate(func._schema.arguments)
    return name, name in OVERWRITE, tuple(i for i, a in arguments if a.alias_info and a.alias_info.is_write)


def _recurrent(x: Tensor, input_weight: Tensor, hidden_weight: Tensor, *rest: Any, out_val: Any) -> int:
    """oneDNN's LSTM over x (time, batch, inputs): two products a step."""
    return 2 * x.shape[0] * x.shape[1] * (input_weight.numel() + hidden_weight.numel())


def _recurrent_backward(*args: Any, out_val: Any) -> int:
    return 2 * _recurrent(*args, out_val=out_val)


def _cudnn(x: Tensor, weights: list[Tensor], *rest: Any, out_val: Any) -> int:
    """cuDNN's layers over x (..., inputs), packed or not: every weight matrix meets every position once."""
    return 2 * (x.numel() // x.shape[-1]) * sum(w.numel() for w in weights if w.dim() == 2)


def _cudnn_backward(*args: Any, out_val: Any) -> int:
    return 2 * _cudnn(*args, out_val=out_val)


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mkldnn_rnn_layer: _recurrent,
    aten.mkldnn_rnn_layer_backward: _recurrent_backward,
    aten._cudnn_rnn: _cudnn,
    aten._cudnn_rnn_backward: _cudnn_backward,
}
"""FLOP of what torch's counter leaves out."""


def counted(step: Callable[[], Any]) -> Work:
    """What a step does, counted while it runs."""
    work = Work()
    with Operations(work.operations):
        step()
    return work


def this_cpu(
    precisions: Iterable[Precision] = (),
    clock: Callable[[], float] = time.perf_counter,
    numbers: int = STREAM,
    seconds: float = 0.2,
) -> Machine:
    """This CPU with torch's threads, measured for so many seconds a format, and three times at least.

    Products in the formats of the precisions (emulated where they are), and a copy of so many FP32 numbers: by default
    of more than its caches hold. clock: time.process_time where other processes share the CPU and torch has one thread.
    """
    source, target = torch.zeros(numbers), torch.empty(numbers)
    bandwidth = 2 * 4 * numbers / (milliseconds(lambda: target.copy_(source), seconds, clock) / 1e3)
    peaks: dict[str, float] = {}
    asked = list(precisions)
    besides = [
        "fp32",
        *(["bf16"] if any(p.compute == "float8" for p in asked) else []),
    ]  # what runs beside the products
    for precision in (*(Precision.load(name) for name in besides), *asked):
        if precision.compute not in peaks:
            a, b = (torch.randn(SIDE, SIDE, dtype=DTYPES[precision.storage]) for _ in range(2))
            product = under(precision, "cpu", partial(F.linear, a, b))
            peaks[precision.compute] = 2 * SIDE**3 / (milliseconds(product, seconds, clock) / 1e3)
    return Machine("this CPU", peaks, None, bandwidth)


def under(precision: Precision, device_type: str, function: Callable[[], Any]) -> Callable[[], None]:
    """The function in the arithmetic of a precision, without gradients, waited for."""
    region: Any = nullcontext() if precision.compute == "float32" else precision.arithmetic(device_type)

    def run() -> None:
        with torch.no_grad(), region:
            function()
        if device_type == "cuda":
            torch.cuda.synchronize()

    return run


def milliseconds(
    operation: Callable[[], Any], seconds: float = 0.3, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median of at least three calls, after one that warms up; more while there is time."""
    operation()
    times: list[float] = []
    end = clock() + seconds
    while len(times) < 3 or (clock() < end and len(times) < 200):
        start = clock()
        operation()
        times.append(clock() - start)
    return statistics.median(times) * 1e3


def line(work: Work, machine: Machine, seconds: float) -> str:
    """One sentence for a benchmark: how far a step that took so long is from the machine's limits."""
    peak, least = machine.peaks["float32"], work.seconds(machine)
    return (
        f"{work.flops / 1e9:.2f} GFLOP and {work.bytes / 1e9:.2f} GB a step; {machine.name} does "
        f"{peak / 1e9:.0f} GFLOP/s in FP32 and {machine.bandwidth / 1e9:.1f} GB/s: at least {least * 1e3:.1f} ms, "
        f"{least / seconds:.0%} of the {seconds * 1e3:.1f} ms taken; {work.flops / peak / seconds:.0%} MFU"
    )
