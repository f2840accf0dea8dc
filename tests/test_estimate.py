"""Estimates against exact counts, against real steps, and against what is known of the paper's networks."""

import math

import pytest
import torch

from mptrain import compose
from mptrain.errors import UserError
from mptrain.estimate import Operations, Step, estimate, step
from mptrain.gpus import GPU
from mptrain.precision.modes import Precision
from mptrain.train import train

GIB = 2**30


def test_operations_of_a_product_are_counted_exactly():
    found = []
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    with Operations(found):
        (a @ b).t()
    assert found == [("float32", 2 * 3 * 5 * 7, 4 * (3 * 5 + 5 * 7 + 3 * 7))]


def test_roofline_takes_the_slower_of_peak_and_bandwidth():
    gpu = GPU("made up", {"float32": 10.0, "tf32": 40.0, "float16": 100.0}, 1e9, 2.0)
    found = Step(1, operations=[("float32", 100.0, 4.0), ("float32", 0.0, 6.0), ("float16", 100.0, 2.0)])
    assert found.seconds(gpu, tf32=False) == 10 + 3 + 1
    assert found.seconds(gpu, tf32=True) == 2.5 + 3 + 1


@pytest.mark.parametrize("recipe", ["resnet", "gan"])
def test_memory_is_that_of_a_real_step(recipe, tmp_path):
    settings = [f"+recipe={recipe}", "data=synthetic", "batch_size=16", "steps=3", "device=cpu", "progress=false"]
    config = compose.config([*settings, "tensorboard=false", "warmup=1", f"out={tmp_path / 'run'}"])
    measured = train(config)["memory"]["peak_mib"] * 2**20
    assert math.isclose(step(config, Precision.load("fp32")).peak, measured, rel_tol=0.02)


@pytest.mark.slow
def test_resnet50_needs_less_than_60_percent_in_16_bits():
    config = compose.config(["+recipe=resnet50_paper", "batch_size=32"])
    full, half = (step(config, Precision.load(name)) for name in ("fp32", "fp16"))
    assert full.parameters == pytest.approx(25.55e6, rel=0.005)
    assert 2.4 * GIB < full.peak < 3.0 * GIB
    assert 0.5 < half.peak / full.peak < 0.6
    assert half.memory["weights"] == full.memory["weights"] == 4 * full.parameters
    # 4.1 G multiply-adds a picture forward, twice that backward (but for the first layer's input)
    assert full.flops == half.flops == pytest.approx(32 * 3 * 2 * 4.1e9, rel=0.05)


@pytest.mark.slow
def test_big_lstm_with_its_optimizer():
    found = step(compose.config(["+recipe=language_paper"]), Precision.load("fp32"))
    assert found.parameters == pytest.approx(1.78e9, rel=0.01)
    assert found.memory["weights"] == 4 * found.parameters
    assert found.memory["optimizer"] >= 4 * found.parameters
    assert found.peak > 3 * 4 * found.parameters


def test_refusals_say_what_to_type():
    with pytest.raises(UserError, match="values decide shapes.*mptrain [+]recipe=ssd data=synthetic steps=3"):
        step(compose.config(["+recipe=ssd", "batch_size=2"]), Precision.load("fp32"))
    with pytest.raises(UserError, match="precision=fp16 has the same memory"):
        estimate(["+recipe=resnet", "precision=fp16_acc16"])


def test_the_table_names_gpus_and_what_is_left_out(capsys):
    assert estimate(["+recipe=translate", "batch_size=4", "precision=bf16"]) == 0
    printed = capsys.readouterr().out
    assert "left out: what the allocator keeps" in printed
    row = next(line for line in printed.splitlines() if "bf16" in line)
    assert row.replace("│", "|").split("|")[-5].strip() == "-"  # no BF16 on a V100
