"""Linear layers in FP8: E4M3 for what they are given, E5M2 for the gradients that come back, BF16 for what they give.

Eight bits hold 4 or 3 significant ones and 18 or 32 powers of two, so every tensor brings a unit of its own: it is
stored as FP8 values times one number, chosen from the largest value of this very tensor ("current scaling"; a unit
kept from earlier steps would save a reduction and can overflow). With x (rows, inputs), w (outputs, inputs):

    y  = bf16(x8 w8^T + bf16(b))     x8, w8 = e4m3(x), e4m3(w)      (from FP32 weights directly, rounded once)
    dx = bf16(g8 w8)                 g8 = e5m2(dy)
    dw = bf16(g8^T x8)
    db = sum of dy, which is BF16

Products are exact, sums are FP32, results are rounded once. For backward the FP8 values are kept: a byte for each.

The unit is a power of two, the smallest with which the largest value does not leave the format. So scaling is exact in
both directions and rounds nothing by itself; no cast overflows; and since every binade of a format has the same grid,
another unit changes only values at the format's lower end: a batch that is split over processes, each with a unit of
its own, is rounded as the whole batch is, but for those. It costs at most one of 18 binades.

A tensor that holds an infinity or NaN has no largest value; its unit is NaN, and so is everything made of it. Nothing
saturates or becomes zero in silence: whoever looks for values that are not finite finds them, and the step is skipped.

Transforms of torch.func (grad, vmap, jvp) take `linear` apart before it arrives here: under them it runs in BF16.

Native kernels are cuBLASLt's, through torch's scaled matmul, from capability 8.9 on. They want both operands contiguous
along the sum and its length, and that of the result's rows, a multiple of 16: layers with other sizes stay in BF16 on
every device, and a batch is filled up with zeros, which adds nothing to a sum. Elsewhere FP32 kernels multiply the FP8
values. The two differ in the order of additions, and in that Hopper's tensor cores keep fewer bits than FP32 in a sum
of FP8 products between two additions to an FP32 accumulator (`use_fast_accum=False` makes these frequent).
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import DispatchKeySet, _ExcludeDispatchKeyGuard
from torch.autograd.function import once_differentiable

from mptrain.precision import dispatch
from mptrain.precision.counting import Site
from mptrain.precision.dispatch import Rounding
from mptrain.precision.formats import E4M3, E5M2, Format

MULTIPLE = 16
"""What the lengths of an FP8 product have to be a multiple of, in all but its first dimension."""
_DTYPE = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}


class Scaled(NamedTuple):
    """A tensor in FP8: `values` times `unit`, a power of two in FP32."""

    values: Tensor
    unit: Tensor

    def image(self) -> Tensor:
        """The tensor in FP32, exactly.

        torch's own cast from FP8 takes values one by one on a CPU. E5M2 is FP16 without its last 8 bits, and E4M3 has
        FP16's bits, one to the left, in units of 2^-8; its NaN becomes a number there, and NaN again by its unit.
        """
        bits = self.values.view(torch.int8).to(torch.int16)
        if self.values.dtype == torch.float8_e5m2:
            return bits.bitwise_left_shift_(8).view(torch.float16).float().mul_(self.unit)
        half = bits.bitwise_left_shift_(7).bitwise_and_(~0x4000).view(torch.float16)  # without the sign's second copy
        return half.float().mul_(2.0**8).mul_(self.unit)


def unit_of(x: Tensor, to: Format) -> Tensor:
    """The smallest power of two, but at least 2^-126, with max|x| / unit <= to.max; NaN if x is not finite.

    Never waits for the device. x must not be empty.
    """
    low, high = torch.aminmax(x)
    largest = torch.maximum(-low, high).float()
    # Of the bits of FP32, the exponent and the 23 below it. Both formats end at 1.75 times a power of two: a fraction
    # beyond 0.75 is carried into the exponent.
    bits = largest.view(torch.int32) + (0x7FFFFF - 0x600000)
    exponent = (bits >> 23) - int(to.max / 1.75).bit_length() + 1
    unit = (exponent.clamp(min=1) << 23).view(torch.float32)
    return unit + (largest - largest)


def scaled(x: Tensor, to: Format, site: Site | None = None, direction: str = "") -> Scaled:
    """Rounds a tensor (FP32, BF16 or FP16) to FP8 with a unit of its own; what that lost, `site` counts."""
    unit = unit_of(x, to)
    before = x * unit.reciprocal()
    values = before.to(_DTYPE[to])
    if site is not None:
        site.cast(direction, before, values)
    return Scaled(values, unit)


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` of these can be an FP8 product."""
    return (
        weight.dim() == 2
        and not any(size % MULTIPLE for size in weight.shape)
        and x.numel() > 0
        and x.layout == weight.layout == torch.strided
        and x.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and weight.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and x.device == weight.device
    )


def operands(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The arguments of ATen's `linear`, however they were given."""
    return input, weight, bias


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, native: bool, off: DispatchKeySet, site: Site | None
) -> Tensor:
    """x (..., inputs), weight (outputs, inputs), bias (outputs,) -> (..., outputs) in BF16; see the head of this file.

    off: the dispatch keys to switch off below. Raises RuntimeError where it is differentiated twice.
    """
    with _ExcludeDispatchKeyGuard(off):
        return _Linear.apply(x, weight, bias, _weight(weight, site), native, off, site)  # type: ignore[no-any-return]


def _weight(weight: Tensor, site: Site | None) -> Scaled:
    """A parameter in FP8, kept until the region ends, as autocast keeps its 16-bit copies."""
    if not weight.is_leaf:
        return scaled(weight.detach(), E4M3, site, "weight")
    casts = dispatch.casts()
    kept = casts.get((id(weight), torch.float8_e4m3fn))
    if kept is None or kept[1] != weight._version:
        made = scaled(weight.detach(), E4M3, site, "weight")
        kept = casts[id(weight), torch.float8_e4m3fn] = (weight, weight._version, made)
    return kept[2]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, w, native, off, site):
        rows = x.reshape(-1, x.shape[-1])
        x8 = scaled(rows, E4M3, site, "input")
        ctx.native, ctx.off, ctx.site = native, off, site
        ctx.shape, ctx.dtypes = x.shape, [None if t is None else t.dtype for t in (x, weight, bias)]
        kept = x8 if ctx.needs_input_grad[1] else (None, None)
        ctx.save_for_backward(*kept, *(w if ctx.needs_input_grad[0] else (None, None)))
        b = None if bias is None else bias.to(torch.bfloat16)
        y = _native(x8, w, b) if native else _emulated(x8.image(), w.image(), b)
        # A view made in here could not be changed in place by whoever gets it, a ReLU for instance.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        x_values, x_unit, w_values, w_unit = ctx.saved_tensors
        to_x = to_weight = to_bias = None
        ways: Any = (_native, _as_it_is, _turned) if ctx.native else (_emulated, Scaled.image, Tensor.t)
        product, ready, turned = ways
        with _ExcludeDispatchKeyGuard(ctx.off):
            rows = gradient.reshape(-1, gradient.shape[-1])
            if w_values is not None or x_values is not None:
                g = ready(scaled(rows, E5M2, ctx.site, "grad_output"))
            if w_values is not None:
                to_x = product(g, turned(ready(Scaled(w_values, w_unit))), None)
                to_x = to_x.reshape(ctx.shape).to(ctx.dtypes[0])
            if x_values is not None:
                to_weight = product(turned(g), turned(ready(Scaled(x_values, x_unit))), None).to(ctx.dtypes[1])
            if ctx.needs_input_grad[2]:
                to_bias = rows.sum(0).to(ctx.dtypes[2])
        return to_x, to_weight, to_bias, None, None, None, None


def _emulated(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """a (m, k) times the transpose of b (n, k), the images of FP8 tensors, by an FP32 kernel."""
    with Rounding("float8_e4m3fn") if torch._C._current_graph_task_id() == -1 else nullcontext():
        y = F.linear(a, b, None if bias is None else bias.float())
    return y.to(torch.bfloat16)


def _native(a: Scaled, b: Scaled, bias: Tensor | None) -> Tensor:
    """The same of FP8 tensors, by torch's scaled matmul; k and n are multiples of 16."""
    return torch._scaled_mm(
        _by_rows(a.values),
        _by_rows(b.values).t(),
        scale_a=a.unit,
        scale_b=b.unit,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )


def _by_rows(values: Tensor) -> Tensor:
    """The same, contiguous along its rows: what came transposed was rounded where it lay."""
    if values.stride() == (values.shape[1], 1):
        return values
    return values.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(values.dtype)


def _as_it_is(a: Scaled) -> Scaled:
    return a


def _turned(a: Scaled) -> Scaled:
    """The transpose, contiguous, with zeros up to the next multiple of 16 columns."""
    bits = a.values.view(torch.uint8)
    if missing := -bits.shape[0] % MULTIPLE:
        bits = F.pad(bits, (0, 0, 0, missing))
    return Scaled(bits.t().contiguous().view(a.values.dtype), a.unit)
