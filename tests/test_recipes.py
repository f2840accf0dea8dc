"""Every recipe under every precision, found by glob: three steps, a finite FP32 loss, a truthful record."""

import itertools
import json
import math

import pytest
import torch
from tiny.runs import stopped_at_each_checkpoint
from torch.utils._pytree import tree_leaves

from mptrain import compose, files
from mptrain.config import Config, check
from mptrain.precision.modes import Precision
from mptrain.results import checkpoint
from mptrain.results.runs import find_runs
from mptrain.train import train

SMALL = [name for name in files.names("recipe") if not name.endswith("_paper")]
PRECISIONS = files.names("precision")
FP8_LAYERS = {"clip": 9, "alexnet": 2, "resnet": 0}


def config(recipe: str, precision: str, folder, **changes) -> Config:
    values = compose.baseline(recipe, precision)
    return check({**values, "out": str(folder), "tensorboard": False, "progress": False, "device": "cpu", **changes})


def test_there_are_recipes_and_precisions():
    assert {"resnet", "resnet50_paper"} <= set(files.names("recipe"))
    assert {
        "fp32",
        "tf32",
        "bf16",
        "fp16",
        "fp16_master",
        "fp16_nomaster",
        "fp16_acc16",
        "pseudo_fp16",
        "bf16_pure",
        "fp8",
    } <= set(PRECISIONS)


@pytest.mark.parametrize(("recipe", "precision"), list(itertools.product(SMALL, PRECISIONS)))
def test_three_steps(recipe, precision, tmp_path):
    settings = config(
        recipe, precision, tmp_path / "run", data="synthetic", steps=3, batch_size=4, log_every=1, warmup=1
    )
    summary = train(settings)
    assert summary["status"] == "finished"
    numbers = Precision.load(precision)
    assert summary["backend"] == numbers.backend("cpu")
    if numbers.compute == "float8":
        inside, outside = summary["fp8"]["layers"], summary["fp8"]["out"]
        assert len(inside) == FP8_LAYERS.get(recipe, len(inside))
        expected = {name for name, some in (("float8_e4m3fn", inside), ("bfloat16", outside)) if some}
        assert set(summary["dtypes"]["matmul"].split(" and ")) == expected
    else:
        assert summary["dtypes"]["matmul"] == numbers.compute
    assert summary["dtypes"]["loss"] == "float32"
    assert summary["dtypes"]["softmax"] in ("float32", "none ran")
    assert summary["data"]["kind"] == "synthetic"
    assert summary["steps"]["attempted"] == 3
    assert summary["steps"]["applied"] + summary["steps"]["skipped"] == 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [
        loss
        for line in lines
        if "loss" in line
        for loss in ([*line["loss"].values()] if isinstance(line["loss"], dict) else [line["loss"]])
    ]
    assert losses and all(math.isfinite(loss) for loss in losses)
    runs, excluded = find_runs([str(tmp_path)])
    assert len(runs) == 1 and not excluded


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SMALL)
def test_three_steps_with_a_scale_for_every_layer(recipe, tmp_path):
    settings = config(
        recipe, "fp16", tmp_path / "run", data="synthetic", steps=3, batch_size=4, log_every=1, warmup=1,
        scale="layerwise", layerwise={"every": 1},
    )  # fmt: skip
    summary = train(settings)
    assert summary["status"] == "finished" and summary["scale"] == "layerwise every=1"
    assert summary["steps"]["applied"] >= 1


@pytest.mark.parametrize("recipe", SMALL)
def test_recipe_says_what_and_never_how(recipe):
    text = files.config("recipe", recipe).read_text(encoding="utf-8")
    values = files.read_yaml(files.config("recipe", recipe))
    assert values["recipe"] == recipe
    assert not {"precision", "scale", "scaling"} & set(values)
    assert "Paper:" in text and f"mptrain +recipe={recipe}" in text


QUICK = {"language"}
LASTING = ("models", "optimizers", "average", "task", "random", "scaler", "steps")


@pytest.mark.parametrize("recipe", [r if r in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in SMALL])
def test_interrupted_it_ends_with_the_same_bits(recipe, tmp_path):
    """Everything a family draws, carries and averages goes on from a checkpoint in the middle of an epoch."""
    options = {"data": "synthetic", "steps": 4, "batch_size": 4, "log_every": 1, "warmup": 1, "ema": 0.9}
    train(config(recipe, "fp16", tmp_path / "whole", **options))
    cut = config(recipe, "fp16", tmp_path / "cut", **options, checkpoint_every=2)
    with pytest.raises(KeyboardInterrupt), stopped_at_each_checkpoint():
        train(cut)
    torch.manual_seed(1234)  # a new process knows nothing of the old one's generators
    train(cut)
    kept = []
    for name in ("whole", "cut"):
        state = checkpoint.load_latest(tmp_path / name / "checkpoints")[0]["run"]
        kept.append(tree_leaves([state[key] for key in LASTING]))
    assert len(kept[0]) == len(kept[1])
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*kept, strict=True))
    logs = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "cut")]
    assert logs[0] == logs[1]
