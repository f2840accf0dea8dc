"""Buffers after a skipped step."""

import copy

import pytest
import torch
from torch import nn

from mptrain.precision.buffers import MovingBuffers
from mptrain.precision.modes import Precision
from mptrain.precision.scaling import loss_scaler


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3))


def state(model):
    return {name: b.clone() for name, b in model.named_buffers()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name, bad", [("fp16", 3e5), ("bf16", float("inf")), ("fp32", float("nan"))])
def test_a_skipped_step_leaves_no_trace_in_batch_norm(name, bad):
    precision, model, scaler = Precision.load(name), network(), loss_scaler(8)
    weights, buffers = precision.prepare(model), MovingBuffers([model])
    optimizer, arithmetic = torch.optim.SGD(weights.of("model"), lr=0.01), precision.arithmetic()
    skipped = []
    for factor in (1, bad, 1, bad, bad, 1):
        buffers.keep()
        before, parameters = state(model), [p.detach().clone() for p in model.parameters()]
        weights.zero_grad()
        with arithmetic:
            loss = (model(torch.randn(4, 3, 8, 8) * factor).float() ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        skipped.append(scaler.update())
        if skipped[-1]:
            assert not equal(before, state(model))
            buffers.restore()
            assert equal(before, state(model))
            assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
        else:
            assert not equal(before, state(model))
    assert skipped == [False, True, False, True, True, False]
    assert all(b.isfinite().all() for b in model.buffers())
    assert model(torch.randn(4, 3, 8, 8)).isfinite().all()


def test_no_buffers():
    buffers = MovingBuffers([nn.Linear(2, 2), nn.ReLU()])
    for _ in range(2):
        buffers.keep()
        buffers.restore()
    empty = MovingBuffers([])
    empty.keep()
    empty.restore()


def test_restoring_before_keeping_does_nothing():
    model = network()
    before = state(model)
    MovingBuffers([model]).restore()
    assert equal(before, state(model))


def test_buffers_that_move_only_later():
    model = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
    buffers = MovingBuffers([model])
    model[1].eval()
    for _ in range(3):
        buffers.keep()
        model[0](torch.randn(4, 2))
        model[1](torch.randn(4, 2))
    model[1].train()
    before = None
    for _ in range(2):
        buffers.keep()
        before = state(model)
        model[1](torch.randn(4, 2) * float("inf"))
        assert not model[1].running_mean.isfinite().any()
        buffers.restore()
        assert equal(before, state(model))


class Assigns(nn.Module):
    """Replaces its buffer instead of changing it, as some custom layers do; and one through `.data`."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("other", torch.zeros(3))
        self.register_buffer("none", None)

    def forward(self, x):
        self.mean = self.mean * 0.9 + x.mean(0) * 0.1
        self.other.data.add_(x.mean(0))
        return x - self.mean


def test_buffers_that_are_assigned_or_changed_through_data():
    model = Assigns()
    buffers = MovingBuffers([model])
    for _ in range(3):
        buffers.keep()
        before = state(model)
        model(torch.randn(4, 3))
        assert not equal(before, state(model))
        buffers.restore()
        assert equal(before, state(model))
        model(torch.randn(4, 3))


def test_buffers_that_change_their_size_or_appear():
    model = Assigns()
    buffers = MovingBuffers([model])
    buffers.keep()
    model.mean = torch.ones(5)
    model.none = torch.ones(2)
    buffers.restore()
    assert torch.equal(model.mean, torch.zeros(3)) and torch.equal(model.none, torch.ones(2))
    buffers.keep()
    model.none.zero_()
    buffers.restore()
    assert torch.equal(model.none, torch.ones(2))


def test_restoring_changes_no_bit_of_what_follows():
    model, straight = network(), network()
    buffers = MovingBuffers([model])
    torch.manual_seed(1)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    for x in batches:
        buffers.keep()
        kept = copy.deepcopy(model.state_dict())
        model(x * float("nan"))
        buffers.restore()
        assert all(torch.equal(kept[n], t) for n, t in model.state_dict().items())
        model(x)
        straight(x)
    assert equal(state(model), state(straight))
