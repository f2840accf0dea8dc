"""What rounding does to every product, counted exactly, per layer and direction.

The emulation holds each result before and after it is rounded to 16 bits, so nothing has to be guessed from zeros: a
value that was nonzero and became zero was flushed, whatever ReLU and padding zeroed before it was not. Under FP8 it is
the operands of products that are rounded hard, and they are what is counted: inputs, weights, gradients of outputs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn

from mptrain.precision.blocks import BLOCK, Shelf, blocks, flat, how_many, runs, scratch
from mptrain.precision.formats import OF_DTYPE

DIRECTIONS = ("input", "weight", "forward", "grad_output", "grad_input", "grad_weight")
OPERANDS = {"input": "float8_e4m3fn", "weight": "float8_e4m3fn", "grad_output": "float8_e5m2"}
"""the directions that are rounded to FP8, and to which"""
KINDS = ("values", "zero", "flushed", "subnormal", "overflowed", "nonfinite")
"""of a tensor's values: all; exactly zero before rounding; nonzero before and zero after; nonzero after and below
the smallest normal; finite before and infinite after; infinite or NaN before"""
FLUSHED = KINDS.index("flushed")


def count(before: Tensor, after: Tensor) -> Tensor:
    """The numbers of KINDS as an int64 tensor, left on the device."""
    if before.device.type == "cpu" and after.dtype in BITS:
        return torch.tensor(_on_cpu(flat(before), flat(after)))
    size = after.float().abs()
    finite = before.isfinite()
    zero = before == 0
    return torch.stack([
        torch.full((), before.numel(), device=before.device),
        zero.sum(),
        (~zero & (size == 0)).sum(),
        ((size > 0) & (size < OF_DTYPE[after.dtype].smallest_normal)).sum(),
        (finite & ~size.isfinite()).sum(),
        (~finite).sum(),
    ])  # fmt: skip


BITS = {torch.float16: (0x0400, 0x7C00), torch.bfloat16: (0x0080, 0x7F80)}
"""Of a format, without the sign: the bits of its smallest normal and of infinity."""


def _on_cpu(before: Tensor, after: Tensor) -> list[int]:
    """The same; rounding keeps zeros, infinities and NaN, so that differences of counts are counts of changes."""
    normal, infinity = BITS[after.dtype]
    zero = zero_after = small = lost = lost_before = 0
    for part in after.split(BLOCK):
        bits = np.bitwise_and(part.contiguous().view(torch.int16).numpy(), 0x7FFF, out=scratch.bits[: len(part)])
        zero_after += len(part) - int(np.count_nonzero(bits))
        small += how_many(np.less, bits, normal)
        lost += how_many(np.greater_equal, bits, infinity) if bits.max(initial=0) >= infinity else 0
    for block in blocks(before):
        values = block.numpy()
        zero += how_many(np.equal, values, 0)
        if lost:
            lost_before += len(values) - int(np.count_nonzero(np.isfinite(values)))
    return _changes(len(before), zero, zero_after, small, lost, lost_before)


def _changes(values: int, zero: int, zero_after: int, small: int, lost: int, lost_before: int) -> list[int]:
    """KINDS, from counts before and after rounding; small: after, below the smallest normal, zeros included."""
    return [values, zero, zero_after - zero, small - zero_after, lost - lost_before, lost_before]


def _together(rows: list[Tensor], dtype: torch.dtype) -> Iterator[list[int]]:
    """The same of rows of FP32 numbers that are yet to be rounded, in one walk through all of them."""
    normal, infinity = BITS[dtype]
    values = torch.cat(rows)
    bits = values.to(dtype).view(torch.int16).bitwise_and_(0x7FFF).numpy()
    kinds = [values.numpy() == 0, bits == 0, bits < normal, bits >= infinity, ~np.isfinite(values.numpy())]
    start = 0
    for row in rows:
        end = start + len(row)
        yield _changes(end - start, *(int(np.count_nonzero(kind[start:end])) for kind in kinds))
        start = end


def _sampled(before: Tensor, after: Tensor, sample: int | None) -> tuple[Tensor, Tensor]:
    """About so many pairs of a larger tensor."""
    if sample is None or before.numel() <= sample:
        return before, after
    if before.stride() != after.stride():  # then their orders in memory differ
        before, after = before.reshape(-1), after.reshape(-1)
    return runs(flat(before), sample).reshape(-1), runs(flat(after), sample).reshape(-1)


class Counter:
    """Adds up `count` per layer and direction; layers are named by the module that was running.

    sample: of a larger tensor, look at about so many elements; unset, at all. sizes: the elements of all tensors
    together. With a shelf a sample on a CPU is kept there, and rounded once more when it is counted, by `settle`:
    between kernels that leave nothing of ours in the caches, counting would take several times as long.
    """

    def __init__(self, sample: int | None = None, shelf: Shelf | None = None) -> None:
        self.sample, self.shelf = sample, shelf
        self.sizes: dict[tuple[str, str], int] = defaultdict(int)
        self.totals: dict[tuple[str, str], Tensor] = defaultdict(lambda: torch.tensor(0))
        self._running: list[str] = [""]
        self._kept: list[tuple[tuple[str, str], Tensor, torch.dtype]] = []
        self._lossy: dict[tuple[str, str], np.ndarray] = {}

    def watch(self, models: Iterable[tuple[str, nn.Module]]) -> list:
        """Learns the names of all modules; returns the hooks' handles, to be removed by the caller."""
        handles = []
        for prefix, model in models:
            for name, module in model.named_modules():
                path = ".".join(part for part in (prefix, name) if part)
                handles.append(module.register_forward_pre_hook(lambda m, a, path=path: self._running.append(path)))
                handles.append(module.register_forward_hook(lambda m, a, o: self._leave(), always_call=True))
        return handles

    def _leave(self) -> None:
        self._running.pop()

    def site(self) -> "Site":
        """One operation of the layer that is running now."""
        return Site(self, self._running[-1])

    def add(self, layer: str, direction: str, before: Tensor, after: Tensor) -> None:
        key = layer, direction
        self.sizes[key] += before.numel()
        if self._keeps(before, after):
            assert self.shelf is not None
            part = runs(flat(before), self.sample)
            kept = self.shelf.take(part.numel())
            kept.view(part.shape).copy_(part)
            self._kept.append((key, kept, after.dtype))
        else:
            before, after = _sampled(before, after, self.sample)
            self._take(key, before, count(before, after))

    def _take(self, key: tuple[str, str], before: Tensor, counted: Tensor) -> None:
        self.totals[key] = self.totals[key] + counted
        if self.shelf is not None and before.device.type == "cpu" and counted[FLUSHED]:
            found = self._lossy.setdefault(key, np.zeros(256, dtype=np.int64))
            for block in blocks(flat(before)):
                found += np.bincount(block.numpy().view(np.int32) >> 23 & 255, minlength=256)

    def exponents(self) -> Iterator[tuple[tuple[str, str], tuple[int, list[int]]]]:
        """Layer and direction, first exponent, and counts of 2^e <= |x| < 2^(e+1) from there on, before rounding.

        Of tensors on a CPU that lost something, where there is a shelf.
        """
        for key, counts in self._lossy.items():
            yield key, (-126, counts[1:255].tolist())

    def _keeps(self, before: Tensor, after: Tensor) -> bool:
        if self.shelf is None or self.shelf.full or self.sample is None or self.sample > BLOCK // 2:
            return False
        return before.device.type == "cpu" and after.dtype in BITS and before.dtype == torch.float32

    def settle(self) -> None:
        """Brings `totals` up to date."""
        for dtype in {dtype for *_, dtype in self._kept}:
            kept = [(key, before) for key, before, mine in self._kept if mine == dtype]
            for (key, before), counted in zip(kept, _together([b for _, b in kept], dtype), strict=True):
                self._take(key, before, torch.tensor(counted))
        self._kept.clear()

    def table(self) -> list[dict]:
        """One row per layer and direction: {layer, direction, values, zero, flushed, ...}; waits for the device."""
        self.settle()
        order = sorted(self.totals, key=lambda key: (key[0], DIRECTIONS.index(key[1])))
        return [
            {"layer": layer, "direction": direction}
            | dict(zip(KINDS, self.totals[layer, direction].tolist(), strict=True))
            for layer, direction in order
        ]

    def state_dict(self) -> dict[str, list[int]]:
        self.settle()
        return {"\n".join(key): torch.as_tensor(value).tolist() for key, value in self.totals.items()}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.totals.clear()
        for key, value in state.items():
            layer, direction = key.split("\n")
            self.totals[layer, direction] = torch.tensor(value)


class Site:
    """One operation: its rounded result, and the gradients that come back through it.

    A result that gradient checkpointing computes a second time, within the backward pass, is not counted again.
    """

    def __init__(self, counter: Counter, layer: str):
        self.counter = counter
        self.layer = layer

    def image(self, low: Tensor, is_weight: bool) -> Tensor:
        """`low.float()`, whose backward counts what rounding does to the gradient of an operand."""
        return _Image.apply(low, self, "grad_weight" if is_weight else "grad_input")  # type: ignore[no-any-return]

    def store(self, dtype: torch.dtype | None) -> Callable[[Tensor], Tensor]:
        """Rounding of a result to its stored format, counted."""

        def rounded(t: Tensor) -> Tensor:
            if t.dtype != torch.float32:
                return t
            low = t.to(dtype)
            if torch._C._current_graph_task_id() == -1:
                self.counter.add(self.layer, "forward", t.detach(), low.detach())
            return low

        return rounded

    def cast(self, direction: str, before: Tensor, after: Tensor) -> None:
        """Counts an operand's cast to FP8, `before` being in the same unit as `after`."""
        if direction == "grad_output" or torch._C._current_graph_task_id() == -1:
            self.counter.add(self.layer, direction, before, after)


class _Image(torch.autograd.Function):
    @staticmethod
    def forward(ctx, low, site, direction):
        ctx.site, ctx.direction, ctx.dtype = site, direction, low.dtype
        return low.float()

    @staticmethod
    def backward(ctx, gradient):
        low = gradient.to(ctx.dtype)
        ctx.site.counter.add(ctx.site.layer, ctx.direction, gradient, low)
        return low, None, None
