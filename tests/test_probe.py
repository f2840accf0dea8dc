"""The verb: what it prints, what it stores, what it refuses."""

import csv
import json

import pytest
import torch
from torch import nn

from mptrain import compose
from mptrain.errors import UserError
from mptrain.precision.modes import Precision
from mptrain.precision.ran import RanOperations
from mptrain.probe import probe, tried_out
from mptrain.results.record import Record
from mptrain.train import Run

QUIET = ["data=synthetic", "steps=1", "device=cpu", "progress=false"]

NETWORK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.out = nn.Linear(28 * 28, classes, bias=False)

    def forward(self, x):
        return self.out(x.flatten(1).tanh())

def net(classes=10, **options):
    return Net(classes)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A network of the user's own: one layer of 7,840 weights after a tanh; returns the command line's words."""
    (tmp_path / "my_networks.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    out = f"out={tmp_path / 'probe'}"
    return ["+recipe=resnet", "task.model=my_networks:net", "batch_size=8", *QUIET, out]


def test_a_network_of_one_s_own(own, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert probe(own) == 0
    shown, folder = capsys.readouterr().out, tmp_path / "probe"
    stored = json.loads((folder / "probe.json").read_text())
    assert {row["layer"] for row in stored["census"]} == {"(all)", "out", "out.weight"}
    assert stored["steps"] == 1 and len(stored["census"][0]["flushed"]) == 25
    # the mean over 8 pictures: the largest gradient is that of the class that was given the least
    assert 8 <= stored["terms"]["model output 1"] < 12
    with (folder / "probe.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(stored["census"])
    assert float(table[0]["flushed_2^3"]) == stored["census"][0]["flushed"]["2^3"]

    assert stored["operations"]["fp16"] == {
        "tanh": "float32", "mm": "float16", "log_softmax": "float32", "nll_loss_forward": "float32"}  # fmt: skip
    assert {name: each["mm"] for name, each in stored["operations"].items()} == {
        "fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "pseudo_fp16": "float16",
        "fp16_acc16": "float16", "fp16_master": "float16", "fp16_nomaster": "float16", "bf16_pure": "bfloat16",
    } | {name: each["mm"] for name, each in stored["operations"].items() if name.startswith("fp8")}  # fmt: skip
    assert stored["formats"]["fp16"]["matmul"] == "float16" and stored["formats"]["fp32"]["norm"] == "none ran"

    kept, weights = stored["storage"], 7840
    parts = ("weights", "copies", "gradients", "optimizer")  # SGD with momentum keeps one number a weight
    assert [kept["fp32"][part] for part in parts] == [4 * weights, 0, 4 * weights, 4 * weights]
    assert [kept["fp16"][part] for part in parts] == [4 * weights, 0, 4 * weights, 4 * weights]
    assert [kept["fp16_master"][part] for part in parts] == [2 * weights, 4 * weights, 2 * weights, 4 * weights]
    assert [kept["bf16_pure"][part] for part in parts] == [2 * weights, 0, 2 * weights, 2 * weights]
    assert all(sum(each[part] for part in parts) <= each["peak"] for each in kept.values())

    assert shown.count("mptrain +recipe=resnet task.model=my_networks:net batch_size=8 data=synthetic") == 1
    assert f"precision={stored['recommended']['precision']}" in shown and "zero" in shown
    assert max(map(len, shown[: shown.index("written:")].splitlines())) <= 100
    assert "Which operation runs in which format" in (folder / "probe.md").read_text()


def test_trying_precisions_out_leaves_the_run_alone(own, tmp_path, monkeypatch):
    from mptrain import probe as module

    assert probe(own) == 0
    first = json.loads((tmp_path / "probe" / "probe.json").read_text())
    names = module.files.names
    monkeypatch.setattr(module.files, "names", lambda kind: ["fp32"] if kind == "precision" else names(kind))
    assert probe(own) == 0
    assert json.loads((tmp_path / "probe" / "probe.json").read_text())["census"] == first["census"]


def test_two_networks_and_batch_statistics(tmp_path, capsys):
    out = tmp_path / "probe"
    assert probe(["+recipe=gan", "batch_size=4", *QUIET, f"out={out}"]) == 0
    stored = json.loads((out / "probe.json").read_text())
    operations = stored["operations"]["fp16"]
    assert operations["batch_norm"] == operations["convolution"] == "float16"
    assert {"generator", "discriminator"} <= {row["layer"].split(".")[0] for row in stored["census"]}
    kept = stored["storage"]["fp32"]  # Adam keeps two numbers a weight, and the step of each parameter
    assert 2 * kept["weights"] < kept["optimizer"] < 2.01 * kept["weights"] and kept["gradients"] == kept["weights"]


@pytest.mark.parametrize("recipe", ["clip", "language"])
def test_tasks_that_name_their_network_step_on_the_copy_too(tmp_path, recipe):
    config = compose.config([f"+recipe={recipe}", "data=synthetic", "batch_size=2", "device=cpu"])
    run = Run(config, Record(tmp_path / recipe))
    model, batch = next(iter(run.models.values())), next(run.loader.windows())[0]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    kept = tried_out(run, Precision.load("fp16_master"), batch)["storage"]
    assert kept["gradients"] > 0 and kept["optimizer"] > 0 and kept["copies"] > kept["weights"]
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def test_operations_are_named_once_and_casts_are_none():
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()), torch.randn(3, 4)
    with RanOperations() as ran, Precision.load("fp16").arithmetic("cpu"):
        (layer(x).float().softmax(-1) + 1).sum()
    assert ran.table() == {
        "addmm": "float16", "batch_norm": "float16", "relu": "float16", "softmax": "float32", "add": "float32",
        "sum": "float32",
    }  # fmt: skip


def test_it_looks_at_fp32_only(tmp_path):
    with pytest.raises(UserError, match="leave out precision="):
        probe(["+recipe=resnet", "precision=fp16", f"out={tmp_path}"])
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made .File exists."):
        probe(["+recipe=resnet", f"out={tmp_path / 'file'}"])
