"""Which layers multiply in FP8: the plan, and that what runs is what it says."""

import copy

import pytest
import torch
from torch import nn

from mptrain.precision.fp8_layers import plan, sentences
from mptrain.precision.modes import Precision
from mptrain.precision.ran import RanDtypes


def convnet():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 24), nn.Linear(24, 32),
        nn.Linear(32, 16),
    )  # fmt: skip


def formats(model, x, **changes):
    """The format of the products of every child."""
    precision = Precision.load("fp8", **changes)
    precision.prepare(model)
    found = {}
    with precision.arithmetic(), torch.no_grad():
        for name, child in model.named_children():
            with RanDtypes() as ran:
                x = child(x)
                x = x[0] if isinstance(x, tuple) else x
            found[name] = ran.table()["matmul"]
    return found


def test_first_last_and_uneven_layers_stay_out():
    model = convnet()
    inside, outside = plan({"model": model})
    assert inside == ["3"]
    assert outside == {
        "convolutions, which have no FP8 kernels": ["0"],
        "sizes that 16 does not divide": ["4", "5"],
        "first and last layer": ["6"],
    }
    ran = {name: form for name, form in formats(model, torch.randn(2, 3, 4, 4)).items() if form != "none ran"}
    assert ran == {"0": "bfloat16", "3": "float8_e4m3fn", "4": "bfloat16", "5": "bfloat16", "6": "bfloat16"}


def test_the_first_layer_and_copies():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    assert plan({"model": model})[0] == ["1"]
    x = torch.randn(2, 16)
    expected = {"0": "bfloat16", "1": "float8_e4m3fn", "2": "bfloat16"}
    assert formats(model, x) == expected
    assert formats(copy.deepcopy(model), x) == expected


def test_keep_fp32():
    model, x = convnet(), torch.randn(2, 3, 4, 4)
    inside, outside = plan({"model": model}, ["3", "6"])
    assert inside == [] and outside["in FP32, by precision.keep_fp32"] == ["3", "6"]
    ran = formats(model, x, keep_fp32=["3", "6"])
    assert ran["3"] == ran["6"] == "float32" and ran["4"] == "bfloat16"
    assert plan({"model": model}, ["linear"])[0] == []
    assert formats(convnet(), x, keep_fp32=["linear"])["3"] == "float32"
    nested = nn.ModuleDict({"a": nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), "b": nn.Linear(16, 16)})
    assert plan({"model": nested}, ["a"])[1]["in FP32, by precision.keep_fp32"] == ["a.0", "a.1"]


def test_attention_is_one_layer():
    model = nn.ModuleDict({
        "first": nn.Linear(32, 32), "attention": nn.MultiheadAttention(32, 2), "last": nn.MultiheadAttention(32, 2),
    })  # fmt: skip
    inside, outside = plan({"model": model})
    assert inside == ["attention"] and outside == {"first and last layer": ["first", "last"]}
    precision = Precision.load("fp8")
    precision.prepare(model)
    x = torch.randn(5, 3, 32)
    for name, expected in (("attention", "bfloat16 and float8_e4m3fn"), ("last", "bfloat16")):
        with precision.arithmetic(), RanDtypes() as ran:
            model[name](x, x, x)
        assert ran.table()["matmul"] == expected  # between its projections, products of activations
    assert plan({"model": nn.ModuleList([nn.Linear(16, 16), nn.MultiheadAttention(24, 2), nn.Linear(16, 16)])})[1] == {
        "first and last layer": ["0", "2"], "sizes that 16 does not divide": ["1"],
    }  # fmt: skip


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.LSTMCell])
def test_recurrent_layers_stay_out(layer):
    model = nn.Sequential(nn.Embedding(10, 16), layer(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    inside, outside = plan({"model": model})
    assert inside == ["2"] and "recurrent layers, which are single kernels without FP8" in outside
    ran = formats(model, torch.tensor([1, 2, 3]))
    assert ran["1"] == "bfloat16" and ran["2"] == "float8_e4m3fn" and ran["3"] == "bfloat16"


def test_several_networks_and_what_is_printed():
    models = {"generator": convnet(), "discriminator": nn.Linear(16, 16)}
    inside, outside = plan(models)
    assert inside == ["generator.3"] and outside["first and last layer"] == ["generator.6", "discriminator"]
    lines = sentences(inside, outside)
    assert lines[0] == "fp8: E4M3 forward and E5M2 gradients in generator.3; in BF16:"
    assert lines[1] == "  convolutions, which have no FP8 kernels: generator.0"
    assert "no layer of this network" in sentences([], outside)[0]
    many = sentences([str(n) for n in range(9)], {})
    assert many == ["fp8: E4M3 forward and E5M2 gradients in 0, 1, 2, 3 and 5 more; in BF16:"]
    assert plan({"model": nn.ReLU()}) == ([], {})
    Precision.load("fp8").prepare(nn.ReLU())


def test_nothing_changes_for_other_precisions():
    torch.manual_seed(0)
    model, x = convnet(), torch.randn(2, 3, 4, 4)
    with Precision.load("bf16").arithmetic():
        before = model(x)
    Precision.load("fp8").prepare(model)
    with Precision.load("bf16").arithmetic():
        assert torch.equal(model(x), before)
