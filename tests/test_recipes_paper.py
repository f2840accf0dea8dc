"""Every recipe at the paper's size: one step of its full network on synthetic data of the real shapes.

Where parameters, gradients and optimizer state would not fit in 24 GiB, forward and backward run on the meta device,
which computes shapes and formats and holds no data.
"""

import math

import pytest
import torch

from mptrain import files, tasks
from mptrain.compose import baseline as compose
from mptrain.config import check
from mptrain.data.dataset import BatchKey, DataSpec
from mptrain.train import train

PAPER = [name for name in files.names("recipe") if name.endswith("_paper")]
ON_META = {"language_paper": 1.78e9, "clip_paper": 0.986e9}
"""Parameters of the networks that do not fit with their optimizer's state."""


def test_every_family_has_the_paper_beside_it():
    families = "alexnet vgg_d googlenet inception_v2 inception_v3 ssd faster_rcnn speech translate language gan clip"
    assert set(families.split()) <= set(files.names("recipe"))
    assert {f"{name}_paper" for name in families.split()} | {"resnet50_paper"} <= set(PAPER)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name for name in PAPER if name not in ON_META])
def test_one_step_at_full_size(recipe, tmp_path):
    values = compose(recipe, "fp32")
    values["eval"] = {**values["eval"], "batch_size": 2}
    changes = {"data": "synthetic", "data_dir": None, "steps": 1, "batch_size": 2, "accumulate": 1, "device": "cpu"}
    quiet = {"tensorboard": False, "progress": False, "out": str(tmp_path / "run"), "warmup": 0}
    summary = train(check({**values, **changes, **quiet}))
    assert summary["status"] == "finished"
    assert summary["steps"] == {**summary["steps"], "attempted": 1, "applied": 1, "skipped": 0}
    assert summary["dtypes"]["loss"] == "float32"


@pytest.mark.parametrize("recipe", list(ON_META))
def test_one_step_on_the_meta_device(recipe):
    values = compose(recipe, "fp32")
    options = {key: value for key, value in values["task"].items() if key != "name"}
    with torch.device("meta"):
        task = tasks.build(values["task"]["name"], DataSpec("synthetic"), **options)
    (model,) = task.models.values()
    assert math.isclose(sum(p.numel() for p in model.parameters()), ON_META[recipe], rel_tol=0.01)
    key = BatchKey(task.train_set.epoch(2, None)[0], (0, 0, 0), first=True, train=True)
    batch = _to_meta(task.train_set.__getitems__(key))
    with torch.device("meta"):
        for _, loss in task.losses(batch):
            loss.backward()
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def _to_meta(value):
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return type(value)(_to_meta(item) for item in value) if isinstance(value, (tuple, list)) else value
