"""Networks without numbers: a step runs through all of its operations, and nothing is computed or stored.

Parameters and pictures are torch's FakeTensors, which know shape and format. What decides the course of a step stays
real: labels, lengths, masks and boxes of the batch, and whatever is computed from those alone. Where values that are
not there would decide a shape, `Shapes` settles it: the size that real numbers cannot exceed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torchvision  # noqa: F401 - brings its operations
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules import module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from mptrain.recall import Recall

aten = torch.ops.aten
SMALL = 2e9
"""FLOP of a recurrent layer that is run to ask for its workspace; of a larger one, shorter pieces are"""


@contextmanager
def networks(fake: FakeTensorMode) -> Iterator[None]:
    """Parameters and buffers of modules built inside hold no numbers.

    Initialisation that draws again until its numbers suffice (torch's truncated normal) is told that they do.
    """

    def emptied(_: nn.Module, __: str, value: Tensor | None) -> Any:
        return value if value is None or isinstance(value, FakeTensor) else _empty(value, fake)

    hooks = (
        module.register_module_parameter_registration_hook(emptied),  # type: ignore[arg-type]
        module.register_module_buffer_registration_hook(emptied),  # type: ignore[arg-type]
    )
    try:
        with _Sufficing():
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Sufficing(TorchDispatchMode):
    """Asked whether anything is true of numbers that are not there, it says no."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten._local_scalar_dense.default and isinstance(args[0], FakeTensor) and args[0].dtype == torch.bool:
            return False
        return func(*args, **(kwargs or {}))


def copies(models: Iterable[nn.Module], fake: FakeTensorMode) -> dict[int, Any]:
    """What copy.deepcopy needs to be told of these networks: for each parameter and buffer, by its id, another one."""
    return {id(t): _empty(t, fake) for model in models for t in (*model.parameters(), *model.buffers())}


def _empty(value: Tensor, fake: FakeTensorMode) -> Tensor:
    with fake:
        empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return nn.Parameter(empty, value.requires_grad) if isinstance(value, nn.Parameter) else empty


def batch(value: Any, fake: FakeTensorMode | None, samples: int, wanted: int) -> Any:
    """A batch of so many samples instead, repeated in turn; its pictures, sounds and texts hold no numbers.

    fake: None leaves them their numbers.

    Samples lie along the first dimension of tensors, or in lists; what is of another length stays. So do boxes, masks,
    and what has one dimension: labels and lengths.
    """
    if isinstance(value, dict):
        return {key: batch(item, fake, samples, wanted) for key, item in value.items()}
    if isinstance(value, tuple):
        items = (batch(item, fake, samples, wanted) for item in value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        alone = [batch(item, fake, 0, 0) for item in value]
        return [alone[i % samples] for i in range(wanted)] if len(value) == samples else alone
    if not isinstance(value, Tensor):
        return value
    size = (wanted, *value.shape[1:]) if value.dim() and len(value) == samples else value.shape
    if fake is not None and value.dtype != torch.bool and value.dim() > (2 if value.is_floating_point() else 1):
        with fake:
            return torch.empty(size, dtype=value.dtype)
    return value if size == value.shape else value[torch.arange(wanted) % samples]


def size(value: Any) -> int:
    """Bytes of a batch."""
    return sum(x.numel() * x.element_size() for x in tree_leaves(value) if isinstance(x, Tensor))


class Shapes(TorchDispatchMode):
    """Settles shapes that values decide, where the values are not there.

    A mask is true everywhere, unless so many places were set in zeros; suppression keeps every box. Lengths of texts
    are real. Recurrent layers of oneDNN keep a workspace as large as the real ones do.
    """

    def __init__(self, recall: Recall) -> None:
        super().__init__()
        self.recall, self.fake = recall, recall.fake
        self.true: Any = WeakIdKeyDictionary()
        """masks with at most so many true places"""
        self.rules: dict[Any, Callable] = {
            aten.nonzero.default: self.nonzero,
            aten.index.Tensor: self.index,
            aten._ctc_loss.Tensor: self.ctc_loss,
            aten._unique2.default: self.unique,
            aten.mkldnn_rnn_layer.default: self.recurrent,
            aten.mkldnn_rnn_layer_backward.default: self.recurrent_backward,
            aten.zeros_like.default: self.zeros_like,
            aten.index_put_.default: self.index_put_,
            aten.bitwise_or.Tensor: self.bitwise_or,
            torch.ops.torchvision.nms.default: self.suppression,
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        rule = self.rules.get(func)
        if rule is not None and any(isinstance(t, FakeTensor) for t in tree_leaves((args, kwargs))):
            return rule(func, *args, **(kwargs or {}))
        return self.recall(func, args, kwargs or {})

    def empty(self, *size: int, dtype: torch.dtype = torch.int64) -> Tensor:
        with self.fake:
            return torch.empty(size, dtype=dtype)

    def count(self, mask: Tensor) -> int:
        """The most places of a mask that can be true."""
        if not isinstance(mask, FakeTensor):
            return int(mask.count_nonzero())
        return min(self.true.get(mask, mask.numel()), mask.numel())

    def nonzero(self, func, mask: Tensor) -> Tensor:
        return self.empty(self.count(mask), mask.dim())

    def index(self, func, x: Tensor, indices: list[Tensor | None]) -> Tensor:
        places: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
            elif isinstance(index, FakeTensor):
                places += self.nonzero(None, index).unbind(1)
            else:
                places += index.nonzero().unbind(1)
        return self.recall(func, (x, places), {})

    def ctc_loss(self, func, scores: Tensor, text: Tensor, lengths: Tensor, text_lengths: Tensor, *rest) -> Any:
        frames, clips = scores.shape[:2]
        longest = 2 * int(text_lengths.max()) + 1
        return self.empty(clips, dtype=scores.dtype), self.empty(clips, frames, longest, dtype=scores.dtype)

    def unique(self, func, x: Tensor, *rest: bool, **more: bool) -> tuple[Tensor, Tensor, Tensor]:
        """One value: levels of a feature pyramid, of which there is one here."""
        return self.empty(1, dtype=x.dtype), self.empty(0), self.empty(0)

    def suppression(self, func, boxes: Tensor, scores: Tensor, overlap: float) -> Tensor:
        return self.empty(len(boxes))

    def recurrent(self, func, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *results, _ = self.recall(func, (x, *rest), {})
        time, batch, _ = x.shape
        hidden, train = rest[4].shape[-1], rest[-1]
        size = workspace(x.dtype, time, batch, x.shape[-1], hidden) if train else 0
        return *results, self.empty(size, dtype=torch.uint8)

    def recurrent_backward(self, func, *args: Any) -> tuple[Tensor, ...]:
        """oneDNN gives one gradient for the two biases."""
        inputs, input_weight, hidden_weight, bias, _, *state = self.recall(func, args, {})
        return inputs, input_weight, hidden_weight, bias, bias, *state

    def zeros_like(self, func, x: Tensor, **options: Any) -> Tensor:
        result = self.recall(func, (x,), options)
        self.true[result] = 0
        return result

    def index_put_(self, func, x: Tensor, indices: list[Tensor | None], *rest: Any) -> Tensor:
        if x in self.true:
            self.true[x] += math.prod(i.numel() for i in indices if i is not None)
        return self.recall(func, (x, indices, *rest), {})

    def bitwise_or(self, func, a: Tensor, b: Tensor) -> Tensor:
        result = self.recall(func, (a, b), {})
        self.true[result] = self.count(a) + self.count(b)
        return result


@cache
def workspace(dtype: torch.dtype, time: int, batch: int, inputs: int, hidden: int) -> int:
    """Bytes that oneDNN's LSTM keeps for backward, asked of the kernel itself; beyond `SMALL`, of smaller ones.

    They grow by so much for each step, each sample, and each sample of each step.
    """

    def asked(time: int, batch: int) -> int:
        x, state = torch.zeros(time, batch, inputs, dtype=dtype), torch.zeros(1, batch, hidden, dtype=dtype)
        sizes = (4 * hidden, inputs), (4 * hidden, hidden), (4 * hidden,), (4 * hidden,)
        weights = [torch.zeros(size, dtype=dtype) for size in sizes]
        lstm = 2
        call = (x, *weights, state, state, False, [], lstm, hidden, 1, True, False, False, True)
        return aten.mkldnn_rnn_layer(*call)[3].numel()

    if 8.0 * time * batch * hidden * (inputs + hidden) < SMALL:
        return asked(time, batch)
    t, n = (time - 2) / 2, (batch - 16) / 16
    corner, later, wider, both = asked(2, 16), asked(4, 16), asked(2, 32), asked(4, 32)
    return round(corner + t * (later - corner) + n * (wider - corner) + t * n * (both - later - wider + corner))
