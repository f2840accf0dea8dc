"""What really ran, and that looking changes nothing."""

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from mptrain.precision.modes import Precision
from mptrain.precision.ran import RanDtypes, name

PRECISIONS = {
    "fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "pseudo_fp16": "float16",
    "fp16_acc16": "float16", "fp16_master": "float16", "fp16_nomaster": "float16", "bf16_pure": "bfloat16",
    "fp8": "bfloat16",  # linear layers that FP8 kernels take are in test_precision_fp8_layers.py
}  # fmt: skip


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 3), nn.Softmax(-1)
    ), torch.randn(4, 3, 8, 8)


class Sequence(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.head = kind(4, 8, 2), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer(x)[0])


def lstm():
    return Sequence(nn.LSTM), torch.randn(5, 4, 4)


def gru():
    return Sequence(nn.GRU), torch.randn(5, 4, 4)


def transformer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), torch.randn(4, 5, 8)


NETWORKS = {
    "convnet": (convnet, "softmax", "same"),
    "lstm": (lstm, "none ran", "none ran"),
    "gru": (gru, "none ran", "none ran"),
    "transformer": (transformer, "none ran", "float32"),
}


def step(make, precision, *contexts):
    torch.manual_seed(0)
    model, x = make()
    precision = Precision.load(precision)
    weights = precision.prepare(model)
    for context in contexts:
        context.__enter__()
    try:
        with precision.arithmetic():
            y = model(x)
        (y.float() ** 2).mean().backward()
        weights.gather("model")
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
    return [y.detach(), *(p.grad for p in weights.of("model")), *model.buffers()]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_reports_the_truth(network, precision):
    make, softmax, norm = NETWORKS[network]
    ran = RanDtypes()
    step(make, precision, ran)
    table = ran.table()
    compute = PRECISIONS[precision]
    assert table["matmul"] == compute
    assert table["softmax"] == ("float32" if softmax == "softmax" else table["softmax"])
    stored = {"tf32": "float32"}.get(compute, compute)
    assert table["norm"] == (stored if norm == "same" else norm)
    assert set(table) == {"matmul", "softmax", "norm"}


def test_only_the_forward_pass_is_reported():
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 2, requires_grad=True)
    with RanDtypes() as ran:
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
        y.float().sum().backward()
        (x.double() @ w.double()).sum().backward()
    assert ran.table() == {"matmul": "bfloat16 and float64", "softmax": "none ran", "norm": "none ran"}


def test_mixed_formats_are_all_reported():
    precision = Precision.load("fp16", keep_fp32=["4"])
    model, x = convnet()
    precision.prepare(model)
    with RanDtypes() as ran, precision.arithmetic():
        model(x)
    assert ran.table()["matmul"] == "float16 and float32"


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_looking_changes_no_bit(network, precision):
    make = NETWORKS[network][0]
    plain = step(make, precision)
    for a, b in zip(plain, step(make, precision, MemTracker(), RanDtypes()), strict=True):
        assert torch.equal(a, b)


def test_names():
    assert name(torch.float16) == "float16"
