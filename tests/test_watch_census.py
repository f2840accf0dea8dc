"""The census against gradients worked out by hand, and what it recommends."""

import pytest
import torch
from torch import nn

from mptrain.watch.census import SCALES, Census, recommend, rows
from mptrain.watch.histogram import Histogram


def census_of(weight_gradient: torch.Tensor) -> Census:
    """Of one step of SGD on a layer whose weight gradient is given, and is its output's too (the input is one)."""
    layer = nn.Linear(1, len(weight_gradient), bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    census = Census()
    with census.taking({"model": layer}, [optimizer]):
        (layer(torch.ones(1, 1)) * weight_gradient).sum().backward()
        optimizer.step()
    return census


def test_counts_are_exact():
    census = census_of(torch.tensor([0.0, -0.0, 2.0**-26, -(2.0**-25) * 1.5, 1.0, 3.0]))
    for kind in ("activation gradient", "weight gradient"):
        h = census.whole(kind)
        assert (h.zero, dict(h.exponents)) == (2, {-26: 1, -25: 1, 0: 1, 1: 1})
    row = next(rows(census))
    assert (row["layer"], row["values"], row["zero"]) == ("(all)", 6, pytest.approx(1 / 3))
    assert row["flushed"]["2^0"] == 0.25 and row["flushed"]["2^1"] == 0
    assert row["overflowed"]["2^14"] == 0 and row["overflowed"]["2^15"] == 0.25 and row["overflowed"]["2^16"] == 0.5
    assert census.outputs["model output 1"] == 3


def test_updates_that_half_weights_would_lose():
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 1.0, 0.0, 1.0]])
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    census = Census()
    with census.taking({"model": layer}, [optimizer]):
        layer(torch.tensor([[2.0**-10, 2.0**-12, 2.0**-12, 0.0]])).sum().backward()
        optimizer.step()
    assert census.lost == [1, 2]  # of 1 / 2^-10 and 1 / 2^-12; zero is no weight, and the last has no gradient


def test_its_hooks_go_away():
    layer = nn.Linear(1, 1)
    census = Census()
    with census.taking({"model": layer}, []):
        pass
    layer(torch.ones(1, 1)).sum().backward()
    assert not census.histograms and not layer._forward_hooks


def test_batches_add_up():
    census = census_of(torch.tensor([1.0, 2.0])).whole("weight gradient")
    assert census + census == Histogram({0: 2, 1: 2}, 0)


@pytest.mark.parametrize(
    ("gradient", "precision", "scale"),
    [
        ([1e-2, 1.0], "fp16", "none"),
        ([2.0**-27, 2.0**-20], "fp16", "8192"),  # 2^2 to 2^24 are good
        ([2.0**-27, 2.0**0], "fp16", "256"),  # 2^2 to 2^13
        ([2.0**-43, 2.0**-20], "fp16", "262144"),  # from 2^18 on: the least of them, above what is customary
        ([2.0**-38, 2.0**8], "bf16", "none"),
    ],
)
def test_the_middle_of_the_good_scales_is_recommended(gradient, precision, scale):
    advice = recommend(census_of(torch.tensor(gradient)))
    assert (advice.precision, advice.scale) == (precision, scale), advice.reason


def test_layers_that_fit_apart_but_not_together_are_for_layerwise():
    census = Census()
    census.histograms["first", "activation gradient"] = Histogram({-45: 100}, 0)
    census.histograms["last", "activation gradient"] = Histogram({5: 100}, 0)
    advice = recommend(census)
    assert (advice.precision, advice.scale) == ("fp16", "layerwise") and "first" in advice.reason


def test_a_forward_pass_near_the_limit_needs_another_format():
    census = census_of(torch.tensor([1.0]))
    census.largest["deep"] = 20000.0
    advice = recommend(census)
    assert advice.precision == "bf16" and "deep reaches 2e+04" in advice.reason


def test_all_scales_up_to_2_24():
    assert SCALES[0] == 1 and SCALES[-1] == 2.0**24 and len(SCALES) == 25
