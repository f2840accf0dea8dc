"""A watched run: the same bits as an unwatched one, rows that survive a kill, alarms in the record."""

import json

import pytest
import torch
import yaml

from mptrain import compose, files
from mptrain.cli import main
from mptrain.config import check
from mptrain.train import train
from mptrain.watch.store import read_part

QUICK = {"resnet", "language"}
SMALL = [name for name in files.names("recipe") if not name.endswith("_paper")]


def config(recipe, precision, folder, **changes):
    settings = {"out": str(folder), "tensorboard": False, "progress": False, "device": "cpu", **changes}
    return check({**compose.baseline(recipe, precision), **settings})


def test_on_the_command_line(capfd):
    assert main(["+recipe=resnet", "watch=true", "watch.every=5", "watch.layers=[a.*,fc]", "--cfg", "job"]) == 0
    watch = yaml.safe_load(capfd.readouterr().out)["watch"]
    assert watch == {"enabled": True, "every": 5, "layers": ["a.*", "fc"], "sample": 8192}
    assert main(["+recipe=resnet", "watch.evry=5"]) == 1
    assert "watch.every" in capfd.readouterr().err


def state(folder):
    path = max((folder / "checkpoints").glob("*.pt"))
    kept = torch.load(path, weights_only=True)["run"]
    return [v for key in ("models", "weights", "optimizers", "random", "scaler") for v in leaves(kept[key])]


def leaves(value):
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, (list, tuple)) else [value]


def same(a, b):
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def rows_of(folder):
    return [row for part in sorted((folder / "watch.parquet").glob("*.parquet")) for row in read_part(part)]


def compared(recipe, precision, folder, **changes):
    """The rows of three watched steps, which end as three unwatched ones do."""
    metrics = []
    for name, watch in (("plain", {}), ("watched", {"enabled": True, "every": 1})):
        run = config(recipe, precision, folder / name, data="synthetic", steps=3, batch_size=4, watch=watch, **changes)
        metrics.append(train(run)["metrics"])
    plain, watched = state(folder / "plain"), state(folder / "watched")
    assert len(plain) == len(watched) and all(map(same, plain, watched)) and metrics[0] == metrics[1]
    return rows_of(folder / "watched")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("recipe", [r if r in QUICK else pytest.param(r, marks=pytest.mark.slow) for r in SMALL])
def test_a_watched_run_ends_with_the_same_bits(recipe, precision, tmp_path):
    rows = compared(recipe, precision, tmp_path)
    assert {"input", "output", "grad_output", "weight", "grad_weight", "loss"} <= {row["kind"] for row in rows}
    assert ("products" in {row["name"] for row in rows}) == (precision == "fp16")
    summary = json.loads((tmp_path / "watched" / "summary.json").read_text())
    assert isinstance(summary["alarms"], list) and summary["watch"]
    assert "alarms" not in json.loads((tmp_path / "plain" / "summary.json").read_text())


@pytest.mark.parametrize("scale", ["none", "layerwise"])
def test_native_products_are_counted_by_a_shadow_that_changes_no_bit(scale, tmp_path):
    rows = compared("resnet", "bf16", tmp_path, scale=scale, accumulate=2)
    assert {row["step"] for row in rows if row["name"] == "products"}
    assert all(row["flushed"] == 0 for row in rows if row["name"] == "products")  # BF16 reaches as low as FP32
