"""Asks torch only once what an operation gives for tensors without numbers.

Format, shape and strides of a result follow from those of the arguments, and a training step asks for the same results
again: in its second tracing, in the next precision, in the next time step of a recurrent layer. torch keeps such
results too, but takes most of its time to find out whether it knows them. What is recalled is only what a result is
made of; the tensor is made anew each time, in storage of its own or in that of the argument which it is a view of.

Left to torch is whatever could depend on more, or has effects: real tensors that are written to, sizes of storage,
sparse tensors, results of other kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

Make = Callable[[list[FakeTensor]], Any]
"""The result of an operation, from the tensors among its arguments."""


class Recall:
    """Results of operations by what they were given."""

    def __init__(self, fake: FakeTensorMode) -> None:
        self.fake = fake
        self.known: dict[Any, Make | None] = {}

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: list[FakeTensor] = []
        try:
            key = _key(func, args, kwargs, given)
            make = self.known.get(key, _unknown) if given else None
        except (_Unlike, TypeError):  # not to be described, or not to be looked up
            make = None
        if make is None:
            return func(*args, **kwargs)
        if make is not _unknown:
            return make(given)
        result = func(*args, **kwargs)
        resized = "resize" in func._schema.name  # which depends on how large a storage is
        settled = not resized and _writes_to_these(func, args) and key == _key(func, args, kwargs, [])
        self.known[key] = self._way(result, given) if settled else None
        return result

    def _way(self, result: Any, given: list[FakeTensor]) -> Make | None:
        if result is None:
            return lambda tensors: None
        if isinstance(result, (tuple, list)):
            places = [_place(part) for part in result if type(part) is FakeTensor]
            own = [place for place in places if place not in map(_place, given)]
            ways = [self._way(part, given) for part in result]
            kind = type(result)
            if None in ways or len(own) > len(set(own)):
                return None
            return lambda tensors: kind([way(tensors) for way in ways])  # type: ignore[misc]
        if type(result) is not FakeTensor or result.requires_grad or result.constant is not None:
            return None
        same = [i for i, tensor in enumerate(given) if tensor is result]
        if same:
            return itemgetter(same[0])
        within = [i for i, tensor in enumerate(given) if _place(tensor) == _place(result)]
        if len(within) > 1:
            return None
        make = self._maker(result, within)
        made = make(given)
        alike = _describe(made) == _describe(result) and (within or _bytes(made) == _bytes(result))
        return make if alike else None

    def _maker(self, like: FakeTensor, within: list[int]) -> Make:
        """Makes a tensor with storage of its own, or within that of an argument."""
        fake, device, dtype = self.fake, like.fake_device, like.dtype
        shape, stride, offset = like.shape, like.stride(), like.storage_offset()

        def anew(tensors: list[FakeTensor]) -> FakeTensor:
            return FakeTensor(fake, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

        def view(tensors: list[FakeTensor]) -> FakeTensor:
            elem = torch.empty((0,), dtype=dtype, device="meta")
            elem.set_(tensors[within[0]].untyped_storage(), offset, shape, stride)
            return FakeTensor(fake, elem, device)

        return view if within else anew


def _unknown(tensors: list[FakeTensor]) -> Any:
    """Stands for what was not asked before."""
    raise AssertionError


class _Unlike(Exception):
    """An argument that does not tell all by itself."""


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[FakeTensor]) -> tuple[Any, ...]:
    """Everything that the result depends on; the tensors are added to `given`."""
    found = [func]
    _describe_all(args, found, given)
    if kwargs:
        _describe_all(kwargs.items(), found, given)
    return tuple(found)


@cache
def _written(func: Any) -> tuple[int, ...]:
    return tuple(i for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write)


def _writes_to_these(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether all that an operation writes to are tensors without numbers: what is written to real ones counts."""
    written = [args[i] if i < len(args) else None for i in _written(func)]
    return all(type(t) is FakeTensor for target in written for t in (target if isinstance(target, list) else [target]))


def _describe_all(values: Iterable[Any], found: list[Any], given: list[FakeTensor]) -> None:
    for value in values:
        kind = type(value)
        found.append(kind)  # 1, 1.0 and True are equal, and not the same
        if kind is FakeTensor:
            if value.constant is not None:
                raise _Unlike
            given.append(value)
            found.append(_describe(value))
        elif kind is list or kind is tuple:
            found.append(len(value))
            _describe_all(value, found, given)
        elif kind is Tensor:  # a real one: its numbers decide nothing where they meet tensors without
            found.append(_describe(value))
        elif isinstance(value, Tensor):
            raise _Unlike
        else:
            found.append(value)


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    """Its dispatch keys tell device, layout, conjugation and the like."""
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    return keys, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
