"""What is recalled is what torch would have answered."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mptrain import compose, estimate
from mptrain.config import check
from mptrain.recall import Recall

FAKE = FakeTensorMode(allow_non_fake_inputs=True)


class Recalling(TorchDispatchMode):
    """Every operation goes through Recall."""

    def __init__(self):
        super().__init__()
        self.recall = Recall(FAKE)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        return self.recall(func, args, kwargs or {})

    def ways(self):
        """How many operations it can answer; None if there is one that it cannot."""
        return None if None in self.recall.known.values() else len(self.recall.known)


def fake(*shape, dtype=torch.float32):
    with FAKE:
        return torch.empty(shape, dtype=dtype)


def looks(result):
    """All that can be seen of a result, and which of its tensors share storage."""
    found = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    places = [t.untyped_storage()._cdata for t in found]
    return type(result), [
        (type(t), t.dtype, t.device, t.shape, t.stride(), t.storage_offset(), t.untyped_storage().nbytes(), t.is_conj(),
         places.index(place))
        for t, place in zip(found, places, strict=True)
    ]  # fmt: skip


REAL = torch.arange(6.0).view(2, 3)
OPERATIONS = {
    "new": lambda x: x @ x.t(),
    "expanded": lambda x: x.sum().expand(3, 5).mul(2),
    "convolution": lambda x: F.conv2d(x[None, None], x[None, None, :1, :2], padding=1),
    "channels last": lambda x: x.expand(2, 4, 4, 6).to(memory_format=torch.channels_last) + 1,
    "cast": lambda x: x.half(),
    "view": lambda x: x.t()[1:],
    "views": lambda x: x.split(2, 1),
    "pairs": lambda x: x.max(1),
    "integers": lambda x: x.to(torch.int64) * 2,
    "floats": lambda x: x.to(torch.int64) * 2.0,
    "truths": lambda x: x.to(torch.int64) * True,
    "real and fake": lambda x: x[:2, :3] * REAL,
    "real index": lambda x: x[torch.tensor([0, 3, 3])],
    "normalised": lambda x: F.layer_norm(x, (6,)),
    "foreach": lambda x: torch._foreach_mul([x, x.t()], 2.0),
    "conjugate": lambda x: torch.complex(x, x).conj() * 2,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_recalled_is_what_torch_answers(name):
    operation = OPERATIONS[name]
    expected = looks(operation(fake(4, 6)))
    with Recalling() as mode:
        first = looks(operation(fake(4, 6)))
        ways = mode.ways()
        second = looks(operation(fake(4, 6)))
    assert first == second == expected
    assert ways == mode.ways()
    assert (ways is None) == (name == "conjugate")


def test_what_is_alike_but_not_the_same_is_asked_again():
    with Recalling():
        for dtype in (torch.float32, torch.int32):
            for number, kind in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64)):
                expected = dtype if dtype.is_floating_point or kind != torch.float32 else kind
                assert (fake(2, dtype=dtype) * number).dtype == expected
        assert fake(2, 3).t().contiguous().stride() == (2, 1)
        assert fake(3, 2).contiguous().stride() == (2, 1)
        assert (fake(2, 3).t() * 1).stride() == (1, 3)
        assert (fake(3, 2) * 1).stride() == (2, 1)


def test_in_place_and_view_are_of_the_very_argument():
    with Recalling() as mode:
        for _ in range(2):
            x, y = fake(4, 6), fake(4, 6)
            assert x.add_(y) is x
            assert all(map(operator.is_, torch._foreach_add_([x, y], 1.0), [x, y]))
            view = x[1:]
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata != y.untyped_storage()._cdata
        assert mode.ways() == 3


def test_what_has_effects_is_left_to_torch():
    written = torch.zeros(3)
    with Recalling() as mode:
        for _ in range(2):
            x = fake(3)
            x.resize_(8)
            assert x.shape == (8,) and x.untyped_storage().nbytes() == 32
            torch.add(torch.ones(3), float(written[0]), out=written)
        assert written.tolist() == [2.0] * 3
        with pytest.raises(DataDependentOutputException):
            fake(1).item()
        assert not any(mode.recall.known.values())


@pytest.mark.parametrize(("recipe", "precision"), [("resnet", "fp16_master"), ("language", "fp32"), ("ssd", "bf16")])
def test_a_step_is_the_same_with_and_without(recipe, precision, monkeypatch):
    values = compose.baseline(recipe, precision) | {"data": "synthetic", "batch_size": 2, "device": "cpu"}
    config = check(values)

    def traced():
        (model,) = estimate.models(config, [config.numbers])
        return [model.step(4), model.step(2)]

    recalled = traced()
    monkeypatch.setattr(Recall, "__call__", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert recalled == traced()
