"""Sharded over several processes (FSDP2): what one computes, decided together, resumed by any number of them."""

import os
import signal

import pytest
import torch
from tiny.ranks import close, ranks, together, waiting_for
from tiny.runs import last_state, lines, settings, weights
from torch.utils._pytree import tree_map_only

from mptrain import compose
from mptrain.errors import UserError
from mptrain.results.record import Record
from mptrain.sharding import Shards
from mptrain.train import train

pytestmark = pytest.mark.usefixtures("tiny")
SHARD = {"shard": True}
RICH = {
    "task__norm": True,
    "task__depth": 2,
    "clip": 0.05,
    "ema": 0.9,
    "accumulate": 2,
    "eval__every": 4,
    "log_every": 1,
    "checkpoint_every": 5,
    "task__samples": 43,  # the last batch of an epoch is smaller
    "task__hidden": 15,  # and no parameter falls into equal parts
}
CASES = {
    "fp32": ("fp32", {}, 1e-5),
    "fp32, everything": ("fp32", RICH, 1e-4),
    "adam": ("bf16", {"optimizer": {"name": "adamw", "lr": 0.01}}, 2e-2),
    "fp16 that skips": ("fp16", {**RICH, "task__bad_sample": 3, "scaling__interval": 4}, 5e-3),
}
QUICK = "fp16 that skips"


@pytest.mark.parametrize("case", [c if c == QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_as_one_process(tmp_path, case):
    precision, options, tolerance = CASES[case]
    train(settings("tiny", precision, out=str(tmp_path / "alone"), steps=12, **options))
    together(
        settings("tiny", precision, out=str(tmp_path / "shared"), steps=12, parallel=SHARD, **options), 2, tmp_path
    )
    close(weights(tmp_path / "shared"), weights(tmp_path / "alone"), rtol=tolerance, atol=tolerance)
    one, many = lines(tmp_path / "alone"), lines(tmp_path / "shared")
    assert any(line.get("skipped") for line in one) == (case == QUICK)
    for mine, theirs in zip(one, many, strict=True):
        for key in ("step", "scale", "applied", "skipped"):
            assert mine.get(key) == theirs.get(key)
        if "eval" in mine:
            assert theirs["eval"]["loss"] == pytest.approx(mine["eval"]["loss"], rel=2 * tolerance)
    alone, shared = (last_state(tmp_path / name) for name in ("alone", "shared"))
    whole, part = (Record(tmp_path / name).read_summary()["memory"]["weights_mib"] for name in ("alone", "shared"))
    assert 0.4 * whole < part < 0.7 * whole
    assert shapes(shared) == shapes(alone) and Record(tmp_path / "shared").read_summary()["status"] == "finished"


def shapes(state):
    """Of everything that a checkpoint knows of the parameters."""
    kept = {key: state[key] for key in ("models", "optimizers", "average", "scaler")}
    return tree_map_only(torch.Tensor, lambda tensor: (tensor.shape, tensor.dtype), kept)


@pytest.mark.slow
def test_any_number_of_processes_goes_on_from_it(tmp_path):
    """Two that shard are stopped, three go on and lose one, one process alone ends it."""
    options = {**RICH, "task__norm": False, "optimizer": {"name": "adagrad", "lr": 0.05}}
    options |= {"checkpoint_every": 2, "steps": 40}
    train(settings(out=str(tmp_path / "alone"), **options))
    config = settings(out=str(tmp_path / "run"), task__sleep=0.05, parallel=SHARD, **options)
    steps = []
    for size, number in ((2, signal.SIGTERM), (3, signal.SIGKILL)):
        before = set(tmp_path.glob("run/checkpoints/*.pt"))
        processes = ranks(config, size, tmp_path)
        waiting_for(lambda before=before: set(tmp_path.glob("run/checkpoints/*.pt")) - before)
        os.kill(processes[1].pid, number)
        for process in processes:
            process.join(60)
        said = (tmp_path / "said0").read_text()
        assert ("stopped by signal 15" if number == signal.SIGTERM else "rank 0 lost another process") in said
        assert Record(tmp_path / "run").state() == "resumable"
        steps.append(last_state(tmp_path / "run")["steps"]["attempted"])
    assert 0 < steps[0] < steps[1] < 40
    train(settings(out=str(tmp_path / "run"), task__sleep=0.05, **options))
    close(weights(tmp_path / "run"), weights(tmp_path / "alone"), rtol=1e-3, atol=1e-4)
    assert [line["step"] for line in lines(tmp_path / "run")] == [line["step"] for line in lines(tmp_path / "alone")]


FAMILIES = {
    "language": ["task.tied=false", "task.sampled=20", "task.vocabulary=90", "task.layers=2"],
    "language ": ["task.tied=true", "task.vocabulary=90"],
    "translate": [],
    "clip": [],
    "resnet": [],
    "speech": [],
    "ssd": [],
}


def family(recipe, out, shard):
    changes = ["data=synthetic", "steps=3", "batch_size=4", "log_every=1", "device=cpu", "tensorboard=false"]
    return compose.config([f"+recipe={recipe.strip()}", *changes, *FAMILIES[recipe], f"out={out}", *shard])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FAMILIES)
def test_every_family_of_one_network(monkeypatch, tmp_path, recipe):
    """As the same number of processes compute it that do not shard, with the same dropout and sampled words."""
    monkeypatch.undo()  # the product's own recipes
    monkeypatch.chdir(tmp_path)
    together(family(recipe, tmp_path / "plain", []), 2, tmp_path)
    together(family(recipe, tmp_path / "shared", ["parallel.shard=true"]), 2, tmp_path)
    close(weights(tmp_path / "shared"), weights(tmp_path / "plain"), rtol=1e-2, atol=1e-3)
    first = lines(tmp_path / "plain")[0]["loss"]
    assert lines(tmp_path / "shared")[0]["loss"] == pytest.approx(first, rel=1e-3)


REFUSED = {
    "precision=fp16_master": "precision=fp16_master (parameters in float16)",
    "precision=bf16_pure": "precision=bf16_pure (parameters in bfloat16)",
    "precision=fp16 scale=layerwise": "scale=layerwise",
    "watch=true": "watch=true",
    "precision=fp16 count=true": "count=true",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_needs_whole_tensors_is_refused(line):
    with pytest.raises(UserError) as caught:
        compose.config(["+recipe=tiny", "parallel.shard=true", *line.split()])
    assert str(caught.value).startswith(f"parallel.shard=true does not go with {REFUSED[line]}: it shards FP32")
    assert "\n" not in str(caught.value)


def test_several_networks_are_refused():
    networks = {"first": torch.nn.Linear(1, 1), "second": torch.nn.Linear(1, 1)}
    with pytest.raises(UserError, match=r"this recipe trains 2 \(first, second\)"):
        Shards(0, 2).divide(networks, torch.device("cpu"))


def test_sharding_is_no_other_experiment(tmp_path):
    plain, shared = settings(), settings(parallel=SHARD)
    assert plain.folder() == shared.folder() and plain.comparable() == shared.comparable()
    train(settings(out=str(tmp_path / "run"), steps=1))
    assert train(settings(out=str(tmp_path / "run"), steps=1, parallel=SHARD))["status"] == "finished"
