"""Where our kernels hook in: autocast's own dispatch key.

Every ATen call made under autocast passes that key before autograd and before composite operations fall apart, so the
policy sees what CUDA autocast sees, in C++ code as well (einsum, multi-head attention), and operations that are on no
list cost nothing. torch's kernels of that key are replaced once per process; wherever no region of ours is active, or
someone opened an autocast region of their own inside it, the originals run.

A stop in Python takes 30 microseconds amid a training step, six times what it takes in a loop of its own. Products that
torch's kernel computes the same are therefore left to it in regions that hold forward passes only.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet

from mptrain.precision import fast_paths

if TYPE_CHECKING:
    from mptrain.precision.arithmetic import Arithmetic

LOWER = (torch.float16, torch.bfloat16)
KEY = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
Operation = Callable[..., Any]
Handler = Callable[[Any, DispatchKeySet, tuple, dict], Any]
"""(ATen overload, the dispatch keys below autocast, args, kwargs) -> result"""


class _Region(NamedTuple):
    arithmetic: Arithmetic
    before: tuple[bool, torch.dtype, bool] | None
    """autocast as it was: on or off, its format, its cache; None where it was left alone"""
    nesting: int
    backward: int
    """the backward pass it was opened in, or -1"""


class _State(threading.local):
    def __init__(self) -> None:
        self.regions: list[_Region] = []
        self.latest: Arithmetic | None = None
        self.casts: dict[tuple[int, torch.dtype], tuple[Tensor, int, Any]] = {}
        self.casts_of = -1
        self.rounding: str | None = None
        self.sixteen = False
        """whether the running layer's products stay in 16 bits under FP8"""


state = _State()
_latest: dict[str, Arithmetic] = {}


def rounding() -> str | None:
    """The format whose arithmetic the running FP32 kernel stands for, or None."""
    return state.rounding


class Rounding(AbstractContextManager):
    """Names the format an FP32 kernel stands for while it runs, for whoever records what ran."""

    def __init__(self, name: str):
        self.name = name

    def __enter__(self) -> None:
        self.before, state.rounding = state.rounding, self.name

    def __exit__(self, *exception) -> None:
        state.rounding = self.before


def enter(arithmetic: Arithmetic) -> None:
    """Opens a region of this arithmetic in this thread: torch.autocast's own steps, a third of its time."""
    device_type, dtype = arithmetic.device_type, arithmetic.autocast_dtype
    if not arithmetic.installed:
        install(device_type, arithmetic.handlers, arithmetic.left_to_torch)
        arithmetic.installed = True
    before, enabled = None, torch.is_autocast_enabled(device_type)
    if enabled or dtype is not None:
        before = enabled, torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
        torch.set_autocast_enabled(device_type, dtype is not None)
        if arithmetic.handlers:
            torch.set_autocast_cache_enabled(arithmetic.torch_caches)
    if dtype is not None:
        torch.set_autocast_dtype(device_type, dtype)
        state.latest = _latest[device_type] = arithmetic
    if not state.regions:
        state.casts.clear()
    nesting = _nesting() if before is None else torch.autocast_increment_nesting()
    state.regions.append(_Region(arithmetic, before, nesting, torch._C._current_graph_task_id()))


def leave() -> None:
    """Closes the innermost region of this thread."""
    arithmetic, before, *_ = state.regions.pop()
    if before is not None:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        enabled, dtype, cache = before
        torch.set_autocast_enabled(arithmetic.device_type, enabled)
        torch.set_autocast_dtype(arithmetic.device_type, dtype)
        torch.set_autocast_cache_enabled(cache)
    if not state.regions:
        state.casts.clear()


def innermost() -> Arithmetic | None:
    """The arithmetic of the region that this thread is in."""
    return state.regions[-1].arithmetic if state.regions else None


def active(device_type: str) -> Arithmetic | None:
    """Whose region the running operation is in; None in anybody else's autocast region.

    torch.utils.checkpoint runs a forward pass again during the backward pass. It brings back autocast as it was, which
    tells that the forward pass was ours (the dtype, and the cache, which ours switch off unless torch takes products);
    what it cannot bring back, it finds in the arithmetic that was entered last.
    """
    if state.regions:
        found: Arithmetic | None = state.regions[-1].arithmetic
    elif torch._C._current_graph_task_id() == -1:
        return None
    else:
        found = state.latest or _latest.get(device_type)
        if found is not None and torch.is_autocast_cache_enabled() != found.torch_caches:
            return None
    if found is None or found.device_type != device_type:
        return None
    return found if found.autocast_dtype == torch.get_autocast_dtype(device_type) else None


def differentiating() -> bool:
    """Whether the running operation belongs to a derivative, in a backward pass that was started inside a region.

    It is computed as it would be outside. A forward pass that a checkpoint repeats is one autocast region deeper. The
    transforms of torch.func, whose backward passes always run inside, are left to autocast.
    """
    task = torch._C._current_graph_task_id()
    if task == -1 or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    nesting, opened_in = (state.regions[-1].nesting, state.regions[-1].backward) if state.regions else (0, -1)
    return task != opened_in and _nesting() == nesting


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def casts() -> dict[tuple[int, torch.dtype], tuple[Tensor, int, Any]]:
    """The 16-bit and FP8 copies of parameters made in this region or, while a checkpoint is recomputed, in this
    backward pass: (parameter, dtype) -> (the parameter, its version then, the copy)."""
    task = -1 if state.regions else torch._C._current_graph_task_id()
    if task != state.casts_of:
        state.casts.clear()
        state.casts_of = task
    return state.casts


_libraries: dict[str, torch.library.Library] = {}
_installed: set[tuple[str, str]] = set()
_lock = threading.Lock()


@cache
def of_torch(device_type: str) -> frozenset[str]:
    """The operations for which torch itself has a kernel at autocast's key; asked before ours are there."""
    found = torch._C._dispatch_get_registrations_for_dispatch_key(KEY[device_type].name)
    return frozenset(name.partition("::")[2] for name in found if name.startswith("aten::"))


def install(device_type: str, handlers: dict[str, Handler], left_to_torch: set[str]) -> None:
    """Puts our kernels at autocast's key for every operation that has a handler, once per process.

    On a CPU torch's own list goes beyond CUDA's; those operations are let through as CUDA would let them.
    """
    if all((device_type, name) in _installed for name in set(handlers) - left_to_torch):
        return
    key = KEY[device_type]
    with _lock, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # older torch, of replaced kernels
        if not _libraries:
            fast_paths.leave_where(lambda: (found := innermost()) is not None and bool(found.handlers))
        library = _libraries.setdefault(device_type, torch.library.Library("aten", "IMPL"))
        registered = of_torch(device_type)
        names = set(handlers) | (registered if device_type == "cpu" else set())
        for name in sorted(names - left_to_torch):
            if (device_type, name) in _installed:
                continue
            if (operation := overload(name)) is not None:
                original = torch.library.get_kernel(f"aten::{name}", key.name) if name in registered else None
                library.impl(name, _kernel(name, operation, original, device_type), key.name, with_keyset=True)
            _installed.add((device_type, name))


def _kernel(name: str, operation: Any, original: Any, device_type: str) -> Callable:
    after = torch._C._dispatch_keyset_full_after(KEY[device_type])

    def kernel(keys, *args, **kwargs):
        arithmetic = active(device_type)
        if arithmetic is not None and name in arithmetic.left_to_torch:
            return original.call_boxed(keys, *args, **kwargs)
        if arithmetic is not None and differentiating():
            return operation.redispatch(keys & after, *args, **kwargs)
        if arithmetic is not None and (handler := arithmetic.handlers.get(name)) is not None:
            if original is not None and name in arithmetic.by_torch:  # the same, in C++
                return original.call_boxed(keys, *arithmetic.with_copies(args), **kwargs)
            return handler(operation, keys & after, args, kwargs)
        if original is not None and (arithmetic is None or device_type != "cpu"):
            return original.call_boxed(keys, *args, **kwargs)
        if arithmetic is None:
            return operation.redispatch(keys & after, *args, **kwargs)
        return let_through(operation, keys & after, args, kwargs)

    return kernel


def let_through(operation: Any, below: DispatchKeySet, args: tuple, kwargs: dict) -> Any:
    """Runs what is on no list of CUDA's: composites fall apart into what may be on one; kernels take what they get."""
    return or_in_fp32(partial(operation.redispatch, below), args, kwargs)


def or_in_fp32(run: Operation, args: tuple, kwargs: dict) -> Any:
    """Calls `run`; where torch has no 16-bit CPU kernel for it, its FP32 kernel does the work, rounded once."""
    try:
        return run(*args, **kwargs)
    except RuntimeError as error:
        dtypes = {t.dtype for t in tensors((*args, *kwargs.values())) if t.is_floating_point()}
        if "not implemented for" not in str(error) or len(dtypes) != 1 or not dtypes <= set(LOWER):
            raise
    (low,) = dtypes
    result = run(*each(upcast, args), **each_value(upcast, kwargs))
    return each(lambda t: t.to(low) if t.dtype == torch.float32 else t, result)


def overload(name: str) -> Operation | None:
    """`softmax.int` -> torch.ops.aten.softmax.int; None where this torch has no such operation."""
    base, _, rest = name.partition(".")
    return getattr(getattr(torch.ops.aten, base, None), rest or "default", None)


def upcast(t: Tensor) -> Tensor:
    return t.float() if t.dtype in LOWER else t


def each(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Applies a function to the tensors of an argument list, which may hold lists of tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)([each(function, item) for item in value])
    return value


def each_value(function: Callable[[Tensor], Tensor], values: dict) -> dict:
    return {key: each(function, value) for key, value in values.items()} if values else values


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []
