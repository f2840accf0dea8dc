"""Exact 16-bit and TF32 arithmetic where the hardware has none, and CUDA autocast's op policy everywhere.

A tensor core multiplies FP16 inputs exactly, sums the products in FP32 and rounds the sum once when it is stored. An
FP32 kernel does the same on upcast inputs: products of FP16 values fit in FP32, so rounding its result to FP16 gives
what the tensor core would (up to the order of the FP32 additions, which no two kernels share). Hence, per operation,

    y = op(x.half().float(), w.half().float()).half()

and ordinary autograd finishes the job: the backward of `.float()` rounds the input gradient to FP16, once; the
backward of the first `.half()` hands the weight gradient, rounded to FP16, to the FP32 parameter, the master copy of
Mixed Precision Training (ICLR 2018, section 3.1). What is saved for backward is the 16-bit tensor, not its image, so
memory is that of real 16-bit storage. This costs about what FP32 costs.

Where it hooks in: at autocast's own dispatch key. Every ATen call made under autocast passes that key before
autograd and before composite operations fall apart, so the policy sees what CUDA autocast sees, in C++ code as well
(einsum, multi-head attention, checkpointing), and operations that are on no list cost nothing. torch's kernels of
that key are replaced once per process; while no `Arithmetic` is active the originals run.

What is not element-for-element a GPU: recurrent layers (nn.LSTM, GRU, RNN, and their cells) and scaled dot product
attention are single kernels here as there, and are rounded once around the whole call: inputs and weights are
rounded, states inside stay FP32, outputs and their gradients are rounded.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

from mptrain.precision import accumulate, policy
from mptrain.precision.counting import Counter
from mptrain.precision.formats import round_tf32

LOWER = (torch.float16, torch.bfloat16)
KEY = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
Operation = Callable[..., Any]


class _State(threading.local):
    active: "Arithmetic | None" = None
    rounding: str | None = None


_state = _State()


def rounding() -> str | None:
    """The format whose arithmetic the running FP32 kernel stands for, or None."""
    return _state.rounding


class Arithmetic(AbstractContextManager):
    """One precision's operations on one kind of device; `with arithmetic:` is its autocast region.

    compute: the format of dot products: "float16", "bfloat16", "tf32" or "float32".
    emulated: compute dot products by FP32 kernels, rounded once, instead of by the device's own.
    chunk: FP16 accumulation, the running sum rounded after every `chunk` products; 0 accumulates in FP32.
    keep_fp32: operations by base name ("softmax", "conv2d", "lstm") that stay in FP32.
    counter: counts what rounding does to every product; None counts nothing and costs nothing.
    """

    def __init__(
        self,
        device_type: str,
        compute: str,
        emulated: bool,
        chunk: int = 0,
        keep_fp32: frozenset[str] = frozenset(),
        counter: Counter | None = None,
    ):
        self.device_type = device_type
        self.compute = compute
        self.emulated = emulated
        self.chunk = chunk
        self.counter = counter
        self.dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(compute)
        self.off = DispatchKeySet(KEY[device_type])
        self.handlers = self._handlers(keep_fp32)
        self._cache: dict[int, tuple[Tensor, Tensor]] = {}
        self._entered: list[tuple[Any, Any]] = []

    def __enter__(self) -> "Arithmetic":
        if self.handlers:
            _install(self.device_type, self.handlers)
        if self.dtype is not None:
            region: Any = torch.autocast(self.device_type, self.dtype)
        elif self.handlers:
            # TF32 changes no dtype; autocast is entered because only it opens its dispatch key.
            region = torch.autocast(self.device_type, torch.bfloat16)
        else:
            region = nullcontext()
        self._entered.append((region, _state.active))
        _state.active = self
        region.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        region, _state.active = self._entered.pop()
        region.__exit__(*exception)
        if not self._entered:
            self._cache.clear()

    def _handlers(self, keep_fp32: frozenset[str]) -> dict[str, Callable]:
        if self.compute == "float32":
            return {}
        if self.compute == "tf32":
            if not self.emulated:
                return {}
            return {
                name: self._tf32 for name in policy.TENSOR_CORE - {"addr"} if policy.base_name(name) not in keep_fp32
            }
        handlers: dict[str, Callable] = {}
        if self.emulated or self.device_type == "cpu":
            products = self._rounded_once if self.emulated else self._cast
            handlers |= dict.fromkeys(policy.LOWER_PRECISION - policy.TENSOR_CORE, self._decomposed)
            handlers |= dict.fromkeys(policy.TENSOR_CORE | {"prelu", "addr"}, products)
            handlers |= dict.fromkeys(policy.FP32, self._fp32)
            handlers |= dict.fromkeys(policy.FP32_SET_OPT_DTYPE, self._fp32_output)
            handlers |= dict.fromkeys(policy.FP32_APPEND_DTYPE, self._fp32_appended)
            handlers |= dict.fromkeys(policy.PROMOTE, self._promoted)
            handlers |= dict.fromkeys(policy.BANNED, _banned)
        known = handlers or dict.fromkeys(
            policy.LOWER_PRECISION | policy.LOWER_PRECISION_CUDNN | policy.PROMOTE, self._fp32
        )
        handlers |= {name: self._fp32 for name in known if policy.base_name(name) in _with_kernels(keep_fp32)}
        return handlers

    # How each class of operation runs. `operation` is the ATen overload, called with the key switched off.

    def _cast(self, operation: Operation, args, kwargs):
        args, kwargs = _map(self._lower, args), _map_values(self._lower, kwargs)
        with _ExcludeDispatchKeyGuard(self.off):
            return operation(*args, **kwargs)

    def _decomposed(self, operation: Operation, args, kwargs):
        args, kwargs = _map(self._lower, args), _map_values(self._lower, kwargs)
        if self.emulated and (result := operation.decompose(*args, **kwargs)) is not NotImplemented:  # type: ignore[attr-defined]
            return result
        with _ExcludeDispatchKeyGuard(self.off):
            return operation(*args, **kwargs)

    def _fp32(self, operation: Operation, args, kwargs):
        args, kwargs = _map(_upcast, args), _map_values(_upcast, kwargs)
        with _ExcludeDispatchKeyGuard(self.off):
            return operation(*args, **kwargs)

    def _fp32_output(self, operation: Operation, args, kwargs):
        names = [argument.name for argument in operation._schema.arguments]  # type: ignore[attr-defined]
        position = names.index("dtype")
        asked = args[position] if len(args) > position else kwargs.get("dtype")
        with _ExcludeDispatchKeyGuard(self.off):
            if asked is None and isinstance(args[0], Tensor) and args[0].dtype in (*LOWER, torch.float32):
                return operation(*args[:position], **{**kwargs, "dtype": torch.float32})
            return operation(*args, **kwargs)

    def _fp32_appended(self, operation: Operation, args, kwargs):
        x, *rest = args
        with _ExcludeDispatchKeyGuard(self.off):
            if x.dtype not in (*LOWER, torch.float32):
                return operation(*args, **kwargs)
            if operation._schema.overload_name == "Scalar":  # type: ignore[attr-defined]
                return torch.ops.aten.norm.ScalarOpt_dtype(x, *(rest or [2]), dtype=torch.float32)
            p, dim, keepdim = (*rest, *(kwargs.get("keepdim", False),))[:3]
            return torch.ops.aten.norm.ScalarOpt_dim_dtype(x, p, dim, keepdim, dtype=torch.float32)

    def _promoted(self, operation: Operation, args, kwargs):
        tensors = [t for t in _tensors((*args, *kwargs.values())) if t.dtype in (*LOWER, torch.float32)]
        widest = torch.float32 if len({t.dtype for t in tensors}) != 1 else tensors[0].dtype

        def promote(t: Tensor) -> Tensor:
            return t.to(widest) if t.dtype in LOWER else t

        args, kwargs = _map(promote, args), _map_values(promote, kwargs)
        if self.emulated and widest == self.dtype:
            name = operation._schema.name.partition("::")[2]  # type: ignore[attr-defined]
            if name in ("dot", "vdot", "bilinear"):
                return self._rounded_once(operation, args, kwargs)
            if name == "tensordot":
                return self._decomposed(operation, args, kwargs)
        with _ExcludeDispatchKeyGuard(self.off):
            return operation(*args, **kwargs)

    def _rounded_once(self, operation: Operation, args, kwargs):
        sources: dict[int, tuple[Tensor, Tensor]] = {}
        count = self.counter.site() if self.counter is not None else None

        def image(t: Tensor) -> Tensor:
            if not self._eligible(t):
                return t
            low = self._lower(t)
            is_weight = t.is_leaf and t.requires_grad
            high = low.float() if count is None else count.image(low, is_weight)
            sources[high.untyped_storage().data_ptr()] = (low, high)
            return high

        args, kwargs = _map(image, args), _map_values(image, kwargs)
        needs_grad = torch.is_grad_enabled() and any(high.requires_grad for _, high in sources.values())
        saving = _saved_as_sources(sources, _float) if needs_grad else nullcontext()
        with _ExcludeDispatchKeyGuard(self.off), _Rounding(self.compute), saving:
            result = self._run(operation, args, kwargs)
            sources.clear()  # the hooks outlive the call and must not keep the images alive
            return _map(self._store if count is None else count.store(self.dtype), result)

    def _run(self, operation: Operation, args, kwargs):
        return accumulate.run(operation, args, kwargs, self.chunk) if self.chunk else operation(*args, **kwargs)

    def _tf32(self, operation: Operation, args, kwargs):
        """FP32 storage; operands of the product, forward and backward, rounded to TF32; addends untouched."""
        name = operation._schema.name.partition("::")[2]  # type: ignore[attr-defined]
        if name in ("addmm", "addbmm", "baddbmm", "addmv"):
            addend, left, right = args
            product = {"addmm": "mm", "addbmm": "bmm", "baddbmm": "bmm", "addmv": "mv"}[name]
            result = self._tf32(getattr(torch.ops.aten, product).default, (left, right), {})
            result = result.sum(0) if name == "addbmm" else result
            return kwargs.get("beta", 1) * addend + kwargs.get("alpha", 1) * result
        bias, args, kwargs = _split_bias(operation, args, kwargs)
        sources: dict[int, tuple[Tensor, Tensor]] = {}

        def image(t: Tensor) -> Tensor:
            if t.dtype != torch.float32 or t.device.type != self.device_type:
                return t
            high = _RoundTF32.apply(t)
            sources[high.untyped_storage().data_ptr()] = (t, high)
            return high

        args, kwargs = _map(image, args), _map_values(image, kwargs)
        needs_grad = torch.is_grad_enabled() and any(high.requires_grad for _, high in sources.values())
        saving = _saved_as_sources(sources, round_tf32) if needs_grad else nullcontext()
        with _ExcludeDispatchKeyGuard(self.off), _Rounding("tf32"), saving:
            result = operation(*args, **kwargs)
        sources.clear()
        result = _map(lambda t: _RoundGradientTF32.apply(t) if t.dtype == torch.float32 else t, result)
        return result if bias is None else result + bias

    def _eligible(self, t: Tensor) -> bool:
        return t.is_floating_point() and t.dtype != torch.float64 and t.device.type == self.device_type

    def _lower(self, t: Tensor) -> Tensor:
        """The 16-bit copy of a tensor; a parameter's is kept until the region ends, as autocast keeps it."""
        if not self._eligible(t) or t.dtype == self.dtype:
            return t
        if not (t.is_leaf and t.requires_grad and torch.is_grad_enabled()):
            return t.to(self.dtype)
        if (kept := self._cache.get(id(t))) is None:
            kept = self._cache[id(t)] = (t, t.to(self.dtype))
        return kept[1]

    def _store(self, t: Tensor) -> Tensor:
        return t.to(self.dtype) if t.is_floating_point() else t


class _Rounding(AbstractContextManager):
    """Names the format an FP32 kernel stands for while it runs, for whoever records what ran."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        self.before, _state.rounding = _state.rounding, self.name

    def __exit__(self, *exception) -> None:
        _state.rounding = self.before


class _RoundTF32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return round_tf32(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _RoundGradientTF32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return round_tf32(gradient)


def _saved_as_sources(sources: dict[int, tuple[Tensor, Tensor]], image: Callable[[Tensor], Tensor]):
    """Keeps the stored tensor for backward instead of its FP32 image, which is made again when it is needed."""

    def pack(saved: Tensor):
        source = sources.get(saved.untyped_storage().data_ptr())
        if source is None:
            return saved
        low, high = source
        if saved.dtype != high.dtype or low.stride() != high.stride():
            return saved
        place = saved.size(), saved.stride(), low.storage_offset() + saved.storage_offset()
        return low.detach(), place, low._version

    def unpack(packed):
        if isinstance(packed, Tensor):
            return packed
        low, place, version = packed
        if low._version != version:
            raise RuntimeError(
                "a tensor needed for backward was changed in place after the operation that used it "
                f"(shape {tuple(low.shape)}, version {low._version}, expected {version})"
            )
        return image(low.as_strided(*place))

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _split_bias(operation: Operation, args, kwargs):
    """Takes the bias out of a linear or convolution call, shaped so that it can be added to the result."""
    names = [argument.name for argument in operation._schema.arguments]  # type: ignore[attr-defined]
    if "bias" not in names:
        return None, args, kwargs
    position = names.index("bias")
    bias = args[position] if len(args) > position else kwargs.get("bias")
    if bias is None:
        return None, args, kwargs
    args = tuple(None if i == position else a for i, a in enumerate(args))
    kwargs = {key: value for key, value in kwargs.items() if key != "bias"}
    name = operation._schema.name  # type: ignore[attr-defined]
    if name in ("aten::linear", "aten::conv_tbc"):
        return bias, args, kwargs
    return bias.view(-1, *[1] * (args[1].dim() - 2)), args, kwargs


def _banned(operation: Operation, args, kwargs):
    raise RuntimeError(policy.BANNED[operation._schema.name.partition("::")[2]])  # type: ignore[attr-defined]


def _float(t: Tensor) -> Tensor:
    return t.float()


def _upcast(t: Tensor) -> Tensor:
    return t.float() if t.dtype in LOWER else t


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies a function to the tensors of an argument list, which may hold lists of tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)([_map(function, item) for item in value])
    return value


def _map_values(function: Callable[[Tensor], Tensor], values: dict) -> dict:
    return {key: _map(function, value) for key, value in values.items()} if values else values


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in _tensors(item)] if isinstance(value, (tuple, list)) else []


def _with_kernels(names: frozenset[str]) -> frozenset[str]:
    """A function's name together with the kernels it is known by one step below."""
    below = {"lstm": ["_cudnn_rnn"], "gru": ["_cudnn_rnn"], "rnn_tanh": ["_cudnn_rnn"], "rnn_relu": ["_cudnn_rnn"]}
    return names | {kernel for name in names for kernel in below.get(name, ())}


_libraries: dict[str, torch.library.Library] = {}
_installed: set[tuple[str, str]] = set()


def _install(device_type: str, handlers: dict[str, Callable]) -> None:
    """Puts our kernels at autocast's key for every operation that has a handler, once per process.

    On a CPU torch's own list goes beyond CUDA's; those operations are let through as CUDA would let them.
    """
    if all((device_type, name) in _installed for name in handlers):
        return
    key = KEY[device_type]
    library = _libraries.setdefault(device_type, torch.library.Library("aten", "IMPL"))
    registered = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_registrations_for_dispatch_key(key.name)
        if name.startswith("aten::")
    }
    names = set(handlers) | (registered if device_type == "cpu" else set())
    for name in sorted(names):
        if (device_type, name) in _installed or (operation := _overload(name)) is None:
            continue
        original = torch.library.get_kernel(f"aten::{name}", key.name) if name in registered else None
        library.impl(name, _kernel(name, operation, original, key), key.name)
        _installed.add((device_type, name))


def _kernel(name: str, operation: Operation, original: Any, key: DispatchKey) -> Callable:
    keys = DispatchKeySet(key)

    def kernel(*args, **kwargs):
        if (active := _state.active) is None:
            if original is not None:
                return original.call_boxed(keys, *args, **kwargs)
        elif (handler := active.handlers.get(name)) is not None:
            return handler(operation, args, kwargs)
        elif active.device_type != "cpu" and original is not None:
            return original.call_boxed(keys, *args, **kwargs)
        return _let_through(operation, keys, args, kwargs)

    return kernel


def _let_through(operation: Operation, keys: DispatchKeySet, args, kwargs):
    """Runs what is on no list of CUDA's.

    A composite falls apart into operations that may be on one; a kernel takes what it gets. Where torch has no 16-bit CPU kernel for it, the FP32 kernel does the work, rounded once.
    """
    if (result := operation.decompose(*args, **kwargs)) is not NotImplemented:  # type: ignore[attr-defined]
        return result
    with _ExcludeDispatchKeyGuard(keys):
        try:
            return operation(*args, **kwargs)
        except RuntimeError as error:
            dtypes = {t.dtype for t in _tensors((*args, *kwargs.values())) if t.is_floating_point()}
            if "not implemented for" not in str(error) or len(dtypes) != 1 or not dtypes <= set(LOWER):
                raise
        (low,) = dtypes
        result = operation(*_map(_upcast, args), **_map_values(_upcast, kwargs))
    return _map(lambda t: t.to(low) if t.dtype == torch.float32 else t, result)


def _overload(name: str) -> Operation | None:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
