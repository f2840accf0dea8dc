"""Exact 16-bit and TF32 arithmetic where the hardware has none, and CUDA autocast's op policy everywhere.

A tensor core multiplies FP16 inputs exactly, sums the products in FP32 and rounds the sum once when it is stored. An
FP32 kernel does the same on upcast inputs: products of FP16 values fit in FP32, so rounding its result to FP16 gives
what the tensor core would (up to the order of the FP32 additions, which no two kernels share). Hence, per operation,

    y = op(x.half().float(), w.half().float()).half()

and ordinary autograd finishes the job: the backward of `.float()` rounds the input gradient to FP16, once; the
backward of the first `.half()` hands the weight gradient, rounded to FP16, to the FP32 parameter, the master copy of
Mixed Precision Training (ICLR 2018, section 3.1). What is saved for backward is the 16-bit tensor, not its image, so
memory is that of real 16-bit storage. This costs about what FP32 costs.

Where it hooks in is told in dispatch.py, what is kept for backward in saved.py, TF32 in tf32.py, FP8 in fp8.py.

What is not element-for-element a GPU: recurrent layers (nn.LSTM, GRU, RNN, and their cells) and scaled dot product
attention are single kernels here as there, and are rounded once around the whole call: inputs and weights are
rounded, states inside stay FP32, outputs and their gradients are rounded.
"""

from __future__ import annotations

import functools
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet, _ExcludeDispatchKeyGuard

from mptrain.errors import UserError
from mptrain.precision import accumulate, dispatch, fp8, policy, tf32
from mptrain.precision.counting import Counter
from mptrain.precision.dispatch import LOWER, Handler, Rounding, each, each_value, upcast
from mptrain.precision.saved import Sources


class Arithmetic(AbstractContextManager):
    """One precision's operations on one kind of device; `with arithmetic:` is its autocast region.

    Regions nest, and threads may share one arithmetic. An FP32 region inside another switches that one off.

    compute: the format of dot products: "float16", "bfloat16", "tf32" or "float32".
    emulated: compute dot products by FP32 kernels, rounded once, instead of by the device's own.
    chunk: FP16 accumulation, the running sum rounded after every `chunk` products; 0 accumulates in FP32.
    keep_fp32: operations by base name ("softmax", "conv2d", "lstm") that stay in FP32.
    counter: counts what rounding to 16 bits does to every product; None counts nothing and costs nothing.
    fp8: "native" or "emulated" computes `linear` in FP8 where its sizes allow it, and counts that rounding instead.
    forward_only: regions hold forward passes only, in which no parameter changes and no derivative is taken. What
        torch's autocast computes the same on a CPU that multiplies BF16 itself then stays in C++: products, with copies
        of parameters of their own, and losses, of which cross_entropy is FP32 even of 16-bit logits. If the promise is
        broken, they are as torch's are.
    """

    def __init__(
        self,
        device_type: str,
        compute: str,
        emulated: bool,
        chunk: int = 0,
        keep_fp32: frozenset[str] = frozenset(),
        counter: Counter | None = None,
        fp8: str | None = None,
        forward_only: bool = False,
    ):
        self.device_type = device_type
        self.compute = compute
        self.emulated = emulated
        self.chunk = chunk
        self.counter = counter
        self.fp8 = fp8
        self.keep_fp32 = keep_fp32
        self.dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(compute)
        self.off = DispatchKeySet(dispatch.KEY[device_type])
        self.handlers = self._handlers(keep_fp32)
        self.by_torch = {n for n in policy.CPU_AUTOCAST_TOO if self.handlers.get(n) == self._cast}
        self.left_to_torch: set[str] = set()
        if forward_only and self.by_torch:
            losses = {n for n in policy.CPU_AUTOCAST_FP32_TOO if policy.base_name(n) not in keep_fp32}
            self.left_to_torch = (self.by_torch | losses) & dispatch.of_torch(device_type)
        self.torch_caches = bool(self.left_to_torch) or (device_type == "cuda" and not emulated)
        """whether torch's kernels take products, and so keep the copies of most parameters"""
        native = device_type == "cuda" and not emulated and fp8 is None and not keep_fp32
        self.compilable = native or not self.handlers
        """whether all roundings are torch's own"""
        # TF32 changes no dtype; autocast is entered because only it opens its dispatch key.
        self.autocast_dtype = self.dtype or (torch.bfloat16 if self.handlers else None)
        self.installed = False

    def emulating(self, counter: Counter) -> Arithmetic:
        """The same arithmetic by FP32 kernels, which shows what rounding does to products that are native here."""
        return Arithmetic(self.device_type, self.compute, True, self.chunk, self.keep_fp32, counter, self.fp8)

    def __enter__(self) -> Arithmetic:
        dispatch.enter(self)
        return self

    def __exit__(self, *exception) -> None:
        dispatch.leave()

    def _handlers(self, keep_fp32: frozenset[str]) -> dict[str, Handler]:
        handlers: dict[str, Handler] = {}
        if self.compute == "float32" or (self.compute == "tf32" and not self.emulated):
            return handlers
        if self.compute == "tf32":
            handlers = dict.fromkeys(policy.TENSOR_CORE, self._tf32)
        elif self.emulated or self.device_type == "cpu":
            products = self._rounded_once if self.emulated else self._cast
            handlers |= dict.fromkeys(policy.LOWER_PRECISION, self._decomposed)
            handlers |= dict.fromkeys(policy.TENSOR_CORE | {"prelu", "addr"}, products)
            handlers |= dict.fromkeys(policy.FP32, self._fp32)
            handlers |= dict.fromkeys(policy.FP32_SET_OPT_DTYPE, self._fp32_output)
            handlers |= dict.fromkeys(policy.FP32_APPEND_DTYPE, self._fp32_appended)
            handlers |= dict.fromkeys(policy.PROMOTE, self._promoted)
            handlers |= dict.fromkeys(policy.BANNED, _banned)
            handlers["cross_entropy_loss"] = self._cross_entropy
        else:
            # A GPU's regions are torch's own, but for what an older torch has not listed yet, and for cuDNN's recurrent
            # layers, which torch's kernel of this key takes to FP16 whatever the region's format is.
            lacks = policy.FP32 - dispatch.of_torch(self.device_type)
            handlers = {name: self._fp32 for name in lacks if dispatch.overload(name) is not None}
            handlers |= dict.fromkeys(policy.RECURRENT if self.compute == "bfloat16" else (), self._cast)
        if self.fp8 is not None:
            handlers["linear"] = self._linear
        known = policy.LOWER_PRECISION | policy.RECURRENT | policy.CONV_PADDING | policy.PROMOTE | set(handlers)
        handlers |= {name: self._fp32 for name in known if policy.base_name(name) in keep_fp32}
        if self.device_type == "cuda":
            handlers |= {name: _scattered(handlers[name]) for name in policy.RECURRENT & handlers.keys()}
        return handlers

    # How each class of operation runs. `operation` is the ATen overload, `below` the dispatch keys below autocast.

    def _cast(self, operation, below, args, kwargs):
        args, kwargs = each(self._lower, args), each_value(self._lower, kwargs)
        with _ExcludeDispatchKeyGuard(self.off):
            return operation(*args, **kwargs)

    def with_copies(self, args: tuple) -> list:
        """Arguments for torch's own autocast kernel: of parameters our copies, which are kept until the region ends."""
        casts, found = dispatch.casts(), []
        for t in args:
            if isinstance(t, Tensor) and t.requires_grad and t.is_leaf:
                kept = casts.get((id(t), self.dtype))  # type: ignore[arg-type]
                t = kept[2] if kept is not None and kept[1] == t._version else self._lower(t)
            found.append(t)
        return found

    def _decomposed(self, operation, below, args, kwargs):
        """A composite falls apart into products, which come by here again."""
        return operation.redispatch(below, *each(self._lower, args), **each_value(self._lower, kwargs))

    def _fp32(self, operation, below, args, kwargs):
        args, kwargs = each(upcast, args), each_value(upcast, kwargs)
        with _ExcludeDispatchKeyGuard(self.off):
            return operation(*args, **kwargs)

    def _cross_entropy(self, operation, below, args, kwargs):
        """Of FP32 logits all is FP32: one stop instead of three. Of others it asks for the logarithms in their format,
        which CUDA's policy grants."""
        if args[0].dtype in LOWER:
            return operation.redispatch(below, *args, **kwargs)
        return self._fp32(operation, below, args, kwargs)

    def _fp32_output(self, operation, below, args, kwargs):
        position = _position_of_dtype(operation)
        asked = args[position] if len(args) > position else kwargs.get("dtype")
        with _ExcludeDispatchKeyGuard(self.off):
            if (asked is not None and asked not in LOWER) or not self._eligible(args[0]):
                return operation(*args, **kwargs)
            result = operation(*args[:position], **{**kwargs, "dtype": torch.float32})
            return result if asked is None else result.to(asked)  # as on a GPU; a CPU's kernels round in between, too

    def _fp32_appended(self, operation, below, args, kwargs):
        x, *rest = args
        with _ExcludeDispatchKeyGuard(self.off):
            if not self._eligible(x):
                return operation(*args, **kwargs)
            if operation._schema.overload_name == "Scalar":
                return torch.ops.aten.norm.ScalarOpt_dtype(x, *(rest or [2]), dtype=torch.float32)
            p, dim, keepdim = (*rest, False)[:3]
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=torch.float32)

    def _promoted(self, operation, below, args, kwargs):
        found = {t.dtype for t in dispatch.tensors((*args, *kwargs.values())) if t.dtype in (*LOWER, torch.float32)}
        widest = found.pop() if len(found) == 1 else torch.float32

        def promote(t: Tensor) -> Tensor:
            return t.to(widest) if t.dtype in LOWER else t

        args, kwargs = each(promote, args), each_value(promote, kwargs)
        if self.emulated and widest == self.dtype:
            if operation._schema.name in ("aten::dot", "aten::vdot", "aten::bilinear"):
                return self._rounded_once(operation, below, args, kwargs)
            if operation._schema.name == "aten::tensordot":
                return self._decomposed(operation, below, args, kwargs)
        with _ExcludeDispatchKeyGuard(self.off):
            return dispatch.or_in_fp32(operation, args, kwargs)

    def _rounded_once(self, operation, below, args, kwargs):
        if dispatch.rounding() is not None:  # torch.func sends what a transform above has rounded by here again
            return operation.redispatch(below, *args, **kwargs)
        _refuse_compilers()
        sources = Sources(torch.Tensor.float)
        site = self.counter.site() if self.counter is not None and self.fp8 is None else None

        def image(t: Tensor) -> Tensor:
            if not self._eligible(t):
                return t
            low = self._lower(t)
            if site is None:
                return sources.add(low, low.float())
            whole = t if t._base is None else t._base  # attention projects by slices of one weight
            return sources.add(low, site.image(low, is_weight=whole.is_leaf and whole.requires_grad))

        args, kwargs = each(image, args), each_value(image, kwargs)
        saving = sources.saved() if sources.needed() else nullcontext()
        with _ExcludeDispatchKeyGuard(self.off), Rounding(self.compute), saving:
            result = accumulate.run(operation, args, kwargs, self.chunk) if self.chunk else operation(*args, **kwargs)
            sources.clear()
            return each(self._store if site is None else site.store(self.dtype), result)

    def _linear(self, operation, below, args, kwargs):
        x, weight, bias = fp8.operands(*args, **kwargs)
        if dispatch.state.sixteen or not (self._eligible(x) and fp8.fits(x, weight)):
            products = self._rounded_once if self.emulated else self._cast
            return products(operation, below, args, kwargs)
        if self.fp8 == "emulated":
            _refuse_compilers()
        site = self.counter.site() if self.counter is not None else None
        return fp8.linear(x, weight, bias, self.fp8 == "native", self.off, site)

    def _tf32(self, operation, below, args, kwargs):
        _refuse_compilers()
        return tf32.run(operation, args, kwargs, self.off, self.device_type)

    def _eligible(self, t: Any) -> bool:
        return t.is_floating_point() and t.dtype != torch.float64 and t.device.type == self.device_type

    def _lower(self, t: Tensor) -> Tensor:
        """The 16-bit copy of a tensor; a parameter's is kept until the region ends, as autocast keeps it.

        Unlike autocast's, a copy is made again when the parameter has changed since.
        """
        if self.dtype is None or not self._eligible(t) or t.dtype == self.dtype:
            return t
        if not (t.is_leaf and t.requires_grad and torch.is_grad_enabled()):
            return t.to(self.dtype)
        casts = dispatch.casts()
        kept = casts.get((id(t), self.dtype))
        if kept is None or kept[1] != t._version:
            kept = casts[id(t), self.dtype] = (t, t._version, t.to(self.dtype))
        return kept[2]

    def _store(self, t: Tensor) -> Tensor:
        return t.to(self.dtype) if t.dtype == torch.float32 else t


def _scattered(handler: Handler) -> Handler:
    """The handler of a recurrent layer, without cuDNN's remark that weights, made for this call, lie apart."""

    def run(operation, below, args, kwargs):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk of memory")
            return handler(operation, below, args, kwargs)

    return run


def _refuse_compilers() -> None:
    """Raises UserError while torch.compile traces the running operation.

    Its compiler drops roundings, and its caches tell graphs apart by torch's own autocast alone: one that was traced
    under FP16 sums would run under FP32 sums as well.
    """
    if torch._guards.TracingContext.try_get() is not None:
        raise UserError(
            "torch.compile leaves out roundings, which emulated arithmetic is made of; leave the network as it is, "
            "or compile it where its arithmetic is torch's own: FP32, or a GPU with kernels for it"
        )


@functools.cache
def _position_of_dtype(operation: Any) -> int:
    return [argument.name for argument in operation._schema.arguments].index("dtype")


def _banned(operation, below, args, kwargs):
    raise RuntimeError(policy.BANNED[policy.base_name(operation._schema.name.partition("::")[2])])
